// Samples as a matrix: rows are steps, columns are prompts. Only rows in sight exist, and new ones never move what one looks at.

import { thumb } from "./api.js";
import { fill, h, setStyle, setText } from "./dom.js";
import { countText, lossText } from "./format.js";
import { RowScroller } from "./grid.js";
import { ago } from "./parts.js";

const GAP_PX = 6;
const COMING_S = 900;
/** What samples are labelled with; the head of a run shows the loss of the last step, and curves have a smoothing of their own. */
export const MEAN_LOSS = "Mean loss when these were drawn: each step adds a tenth of its loss to nine tenths of the mean before it";

function hasPicture(cell) {
  return cell !== null && cell !== undefined && cell.key !== undefined;
}

/** The newest image of the teacher for each prompt (it does not change from step to step), or null where there is no teacher. */
export function teacherCells(detail) {
  if (!detail.variants.includes("teacher")) return null;
  return detail.prompts.map((_, index) => {
    const step = detail.steps.findLast((one) => hasPicture(one.cells.teacher?.[index]));
    return step ? step.cells.teacher[index] : null;
  });
}

class Cell {
  constructor(matrix, prompt) {
    this.matrix = matrix;
    this.image = h("img", { alt: "", decoding: "async", loading: "lazy", draggable: "false" });
    this.word = h("span", { class: "cell-word" });
    this.button = h("button", { class: "cell", type: "button", tabindex: -1, dataset: { prompt } }, this.image, this.word);
    this.node = h("div", { class: "matrix-cell", role: "gridcell", "aria-colindex": prompt + 2 }, this.button);
  }

  update(cell, label, pixelated, coming) {
    this.source = hasPicture(cell) ? thumb(this.matrix.run, cell, this.matrix.size * Math.min(2, window.devicePixelRatio)) : "";
    const failed = cell?.failed ?? "";
    const outside = hasPicture(cell) && this.source === "";
    setText(this.word, failed || (outside ? "not inside this page" : this.source !== "" ? "" : coming ? "drawing" : ""));
    this.image.hidden = this.source === "";
    this.button.dataset.kind = failed ? "failed" : this.source !== "" ? "picture" : coming ? "coming" : "none";
    this.button.classList.toggle("pixelated", pixelated);
    const spoken = failed ? `${label}: failed, ${failed}` : outside ? `${label}: not inside this page` : this.source !== "" ? label : coming ? `${label}: being drawn` : `${label}: not drawn`;
    this.button.setAttribute("aria-label", spoken);
    this.button.title = failed;
  }

  load() {
    if (this.source !== "" && this.image.getAttribute("src") !== this.source) this.image.src = this.source;
  }
}

class Row {
  constructor(matrix, step) {
    this.step = step;
    this.head = h("div", { class: "matrix-step", role: "rowheader", "aria-colindex": 1 });
    this.element = h("div", { class: "matrix-row", role: "row", dataset: { step } }, this.head);
    this.cells = [];
    this.matrix = matrix;
  }

  update(cells, head, label, coming = false) {
    const { prompts } = this.matrix.detail;
    while (this.cells.length < prompts.length) {
      const cell = new Cell(this.matrix, this.cells.length);
      this.cells.push(cell);
      this.element.append(cell.node);
    }
    fill(this.head, head);
    prompts.forEach((prompt, index) => this.cells[index].update(cells?.[index] ?? null, `${label}, ${prompt.prompt}`, this.matrix.isPixelated(prompt), coming));
  }

  load() {
    for (const cell of this.cells) cell.load();
  }
}

export class Matrix extends RowScroller {
  constructor(host, { run, onOpen, onPin, onFocus }) {
    const body = h("div", { class: "matrix-body", role: "rowgroup" });
    const scroller = h("div", { class: "matrix", id: "matrix", role: "grid", "aria-label": "Samples: rows are steps, columns are prompts" });
    super(body, { scroller, spareRows: 3, headRows: 1 });
    Object.assign(this, { run, onOpen, onPin, onFocus });
    this.columns = h("div", { class: "matrix-row matrix-columns", role: "row", "aria-rowindex": 1 });
    this.teacher = new Row(this, "teacher");
    this.teacher.element.classList.add("matrix-teacher");
    this.head = h("div", { class: "matrix-head", role: "rowgroup" }, this.columns, this.teacher.element);
    scroller.append(this.head, body);
    this.more = h("button", { class: "button matrix-more", id: "matrix-more", type: "button", hidden: true, onclick: () => this.toNewest() });
    fill(host, h("div", { class: "matrix-wrap" }, scroller, this.more));
    this.order = [];
    this.focused = null;
    this.numUnseen = 0;
    scroller.addEventListener("click", (event) => this.clicked(event));
    scroller.addEventListener("keydown", (event) => this.key(event));
    scroller.addEventListener("focusin", (event) => this.focusCame(event));
    this.observer = new ResizeObserver(() => {
      this.place();
      this.render();
    });
    this.observer.observe(scroller);
  }

  viewHeight() {
    return this.scroller.clientHeight - this.head.offsetHeight;
  }

  keyOf(number) {
    return this.order[number].step;
  }

  numberOf(step) {
    return this.indexOf.get(step);
  }

  focusedRow() {
    return this.focused ? this.indexOf.get(this.focused.step) : null;
  }

  isPixelated(prompt) {
    return prompt.size?.[0] > 0 && prompt.size[0] * 1.5 <= this.size;
  }

  /** Shows a run's steps: {variant, size (px), newestFirst, showTeacher}. What is in sight stays where it is. */
  update(detail, { variant, size, newestFirst, showTeacher }) {
    const anchor = this.anchor();
    const known = this.detail ? new Set(this.detail.steps.map(({ step }) => step)) : null;
    const fresh = known ? detail.steps.filter(({ step }) => !known.has(step)).map(({ step }) => step) : [];
    Object.assign(this, { detail, variant, size, newestFirst });
    this.order = newestFirst ? [...detail.steps].reverse() : detail.steps;
    this.indexOf = new Map(this.order.map(({ step }, index) => [step, index]));
    this.checkpoints = new Map((detail.checkpoints ?? []).map((one) => [one.step, one.kind ?? "checkpoint"]));
    this.showHead(showTeacher);
    this.measure();
    this.scroller.setAttribute("aria-rowcount", this.order.length + 1);
    this.scroller.setAttribute("aria-colcount", detail.prompts.length + 1);
    if (this.focused === null || !this.indexOf.has(this.focused.step)) this.focused = this.order.length ? { step: this.order[0].step, prompt: 0 } : null;
    this.keep(anchor);
    this.place();
    this.render();
    for (const row of this.rows.values()) this.paintRow(row);
    this.count(fresh);
  }

  measure() {
    const shapes = this.detail.prompts.map(({ size }) => (size?.[0] > 0 ? size[1] / size[0] : 1));
    const tallest = Math.min(1.8, Math.max(0.4, ...shapes));
    const height = Math.round(this.size * tallest);
    this.setRows(this.order.length, Math.max(height, 52) + GAP_PX);
    setStyle(this.scroller, { "--cell": `${this.size}px`, "--cell-height": `${Math.max(height, 52)}px`, "--columns": String(this.detail.prompts.length) });
  }

  showHead(showTeacher) {
    const heads = this.detail.prompts.map(({ prompt, seed }, index) =>
      h("div", { class: "matrix-prompt", role: "columnheader", tabindex: index === 0 ? 0 : -1, "aria-colindex": index + 2, title: `${prompt}\nseed ${seed}`, dataset: { prompt: index } }, h("span", null, prompt === "" ? "(empty prompt)" : prompt)),
    );
    const text = JSON.stringify(this.detail.prompts);
    if (this.headText !== text) fill(this.columns, h("div", { class: "matrix-step matrix-corner", role: "columnheader", "aria-colindex": 1 }, "step"), heads);
    this.headText = text;
    const cells = showTeacher ? teacherCells(this.detail) : null;
    this.teacher.element.hidden = cells === null;
    if (cells === null) return;
    this.teacher.update(cells, h("strong", null, "teacher"), "teacher");
    this.teacher.load();
  }

  anchor() {
    if (this.order.length === 0) return null;
    if (this.mapped === this.height) this.place();
    const atEnd = this.top + this.viewHeight() >= this.height - 3;
    if (this.newestFirst ? this.top <= 2 : atEnd && this.top > 2) return { follow: true };
    const index = Math.min(this.order.length - 1, Math.floor(this.top / this.rowHeight));
    return { step: this.order[index].step, share: this.top / this.rowHeight - index };
  }

  keep(anchor) {
    if (anchor?.follow) this.scrollTo(this.newestFirst ? 0 : Infinity);
    else if (anchor && this.indexOf.has(anchor.step)) this.scrollTo(Math.round((this.indexOf.get(anchor.step) + anchor.share) * this.rowHeight));
  }

  count(fresh) {
    const away = this.newestFirst && this.top > this.rowHeight;
    this.showMore(away ? this.numUnseen + fresh.length : 0);
    for (const step of fresh) this.rows.get(step)?.element.classList.add("matrix-fresh");
  }

  showMore(numUnseen) {
    this.numUnseen = numUnseen;
    this.more.hidden = numUnseen === 0;
    setText(this.more, `↑ ${countText(numUnseen)} new`);
  }

  toNewest() {
    this.showMore(0);
    this.scrollTo(this.newestFirst ? 0 : Infinity);
  }

  /** Images wait while one flies past. */
  rendered() {
    if (this.numUnseen > 0 && this.top < this.rowHeight) this.showMore(0);
    if (!this.fast) for (const row of this.rows.values()) row.load();
  }

  /** Rows stand in the document in their order on screen, for readers that go by it. */
  takeRow(number) {
    const row = new Row(this, this.order[number].step);
    const after = [...this.rows.values()].filter((one) => this.indexOf.get(one.step) > number).sort((a, b) => this.indexOf.get(a.step) - this.indexOf.get(b.step))[0];
    this.canvas.insertBefore(row.element, after ? after.element : null);
    return row;
  }

  dropRow(row) {
    row.element.remove();
  }

  paintRow(row) {
    const data = this.order[row.number];
    row.update(data.cells[this.variant], this.headOf(data), `step ${data.step}`, this.isComing(data));
    if (!this.fast) row.load();
    this.markFocus(row);
  }

  /** Whether the images that a step lacks are being drawn now: the newest step of a run that goes on. */
  isComing({ step, time }) {
    if (this.detail.summary.state !== "running" || step !== this.detail.steps.at(-1).step) return false;
    return !time || Date.now() / 1000 - time < COMING_S;
  }

  headOf(data) {
    const { step, loss, time } = data;
    const cells = data.cells[this.variant] ?? [];
    const numDrawn = cells.filter(Boolean).length;
    if (this.isComing(data) && numDrawn < this.detail.prompts.length) return [h("strong", { class: "number" }, countText(step)), h("span", { class: "number" }, "drawing"), h("span", { class: "number" }, `${numDrawn} of ${this.detail.prompts.length}`)];
    const kind = this.checkpoints.get(step);
    return [
      h("strong", { class: "number" }, countText(step), kind ? h("span", { class: "checkpoint-mark", title: `checkpoint (${kind})`, role: "img", "aria-label": "checkpoint" }, "◆") : null),
      loss === null || loss === undefined ? null : h("span", { class: "number", title: MEAN_LOSS }, `mean ${lossText(loss)}`),
      time ? ago(time) : null,
    ];
  }

  markFocus(row) {
    row.cells.forEach((cell, prompt) => (cell.button.tabIndex = this.focused && row.step === this.focused.step && prompt === this.focused.prompt ? 0 : -1));
  }

  placeOf(target) {
    const button = target instanceof Element ? target.closest("button.cell") : null;
    if (!button) return null;
    const step = button.closest(".matrix-row").dataset.step;
    return { step: step === "teacher" ? "teacher" : Number(step), prompt: Number(button.dataset.prompt) };
  }

  clicked(event) {
    const place = this.placeOf(event.target);
    if (place) this.onOpen(place);
  }

  focusCame(event) {
    const place = this.placeOf(event.target);
    if (!place || place.step === "teacher") return;
    const before = this.focused && this.rows.get(this.focused.step);
    this.focused = place;
    if (before) this.markFocus(before);
    this.markFocus(this.rows.get(place.step));
    if (this.onFocus) this.onFocus(place);
  }

  /** Along the prompts with the arrow keys (one stop for Tab, however many there are), and down into the samples. */
  headKey(event, head) {
    const next = { ArrowLeft: head.previousElementSibling, ArrowRight: head.nextElementSibling }[event.key];
    if (next?.matches(".matrix-prompt")) {
      head.tabIndex = -1;
      next.tabIndex = 0;
      next.focus({ preventScroll: true });
      this.intoSight(next);
    } else if (event.key === "ArrowDown" && this.order.length > 0) this.focus(Math.ceil(this.top / this.rowHeight), Number(head.dataset.prompt));
    else return;
    event.preventDefault();
  }

  key(event) {
    if (event.target.matches(".matrix-prompt")) {
      this.headKey(event, event.target);
      return;
    }
    const place = this.placeOf(event.target);
    if (!place || place.step === "teacher" || event.ctrlKey || event.metaKey || event.altKey) return;
    const index = this.indexOf.get(place.step);
    const page = Math.max(1, Math.floor(this.scroller.clientHeight / this.rowHeight) - 1);
    const moves = { ArrowUp: [index - 1, place.prompt], ArrowDown: [index + 1, place.prompt], ArrowLeft: [index, place.prompt - 1], ArrowRight: [index, place.prompt + 1],
      PageUp: [index - page, place.prompt], PageDown: [index + page, place.prompt], Home: [0, place.prompt], End: [this.order.length - 1, place.prompt] };
    if (event.key === "c") this.onPin(place);
    else if (event.key in moves) this.focus(...moves[event.key]);
    else return;
    event.preventDefault();
  }

  /** Moves the focus to a row and a column, in sight and below the sticky heads. */
  focus(index, prompt) {
    const row = Math.min(this.order.length - 1, Math.max(0, index));
    this.focused = { step: this.order[row].step, prompt: Math.min(this.detail.prompts.length - 1, Math.max(0, prompt)) };
    const top = row * this.rowHeight;
    if (top < this.top) this.scrollTo(top);
    else if (top + this.rowHeight > this.top + this.viewHeight()) this.scrollTo(top + this.rowHeight - this.viewHeight());
    this.render();
    const button = this.rows.get(this.focused.step).cells[this.focused.prompt].button;
    button.focus({ preventScroll: true });
    this.intoSight(button.parentElement);
  }

  intoSight(cell) {
    const head = this.columns.firstChild.offsetWidth;
    const [left, right] = [cell.offsetLeft, cell.offsetLeft + cell.offsetWidth];
    if (left - head < this.scroller.scrollLeft) this.scroller.scrollLeft = left - head;
    else if (right > this.scroller.scrollLeft + this.scroller.clientWidth) this.scroller.scrollLeft = right - this.scroller.clientWidth;
  }

  /** Focus on a step and prompt (after the viewer was closed there). */
  focusPlace({ step, prompt }) {
    if (this.indexOf.has(step)) this.focus(this.indexOf.get(step), prompt);
  }
}
