// The samples of a training run: the matrix with its controls, the viewer that walks through steps, and comparing.

import { full, inside, thumb } from "./api.js";
import { openCompare } from "./compare.js";
import { fill, h } from "./dom.js";
import { agoText, countText, lossText, timeText } from "./format.js";
import { Matrix, teacherCells } from "./matrix.js";
import { emptyState, notify, segmented } from "./parts.js";
import { recall, remember } from "./prefs.js";
import { openViewer } from "./viewer.js";

const SIZES = { min: 64, max: 320, step: 8 };
const HEAD_PX = 112;
const GUTTER_PX = 6;
const WORDS = { ema: "EMA", raw: "raw", teacher: "teacher" };

function wordOf(variant) {
  return WORDS[variant] ?? variant;
}

/** The size at which all columns are in sight, as far as images that small are worth looking at. */
function fittingSize(width, numColumns) {
  const each = (width - HEAD_PX) / Math.max(1, numColumns) - GUTTER_PX;
  return Math.min(192, Math.max(96, Math.floor(each / SIZES.step) * SIZES.step));
}

export class Samples {
  constructor(host, detail) {
    this.host = host;
    this.run = detail.summary.id;
    this.pinned = null;
    this.viewer = null;
    this.size = recall("matrix.size", null) ?? fittingSize(host.clientWidth || window.innerWidth, detail.prompts.length);
    this.newestFirst = recall("matrix.newest", true);
    this.teacher = recall("matrix.teacher", true);
    this.bar = h("div", { class: "toolbar", role: "group", "aria-label": "How samples are shown" });
    this.place = h("div", { class: "matrix-place" });
    this.nothing = h("div");
    fill(host, this.bar, this.place, this.nothing);
    this.matrix = new Matrix(this.place, { run: this.run, onOpen: (place) => this.open(place), onPin: (place) => this.pin({ ...place, variant: this.variant }), onFocus: null });
    this.update(detail);
  }

  get variants() {
    return this.detail.variants.filter((variant) => variant !== "teacher");
  }

  update(detail) {
    this.detail = detail;
    const wanted = recall("matrix.variant", "ema");
    this.variant = this.variants.includes(wanted) ? wanted : (this.variants[0] ?? "ema");
    this.steps = detail.steps.map(({ step }) => step);
    this.byStep = new Map(detail.steps.map((step) => [step.step, step]));
    this.teachers = teacherCells(detail);
    const none = detail.steps.length === 0;
    this.bar.hidden = this.place.hidden = none;
    fill(this.nothing, none ? this.emptyWords() : null);
    this.showBar();
    if (none) return;
    this.matrix.update(detail, { variant: this.variant, size: this.size, newestFirst: this.newestFirst, showTeacher: this.teacher });
    if (this.viewer) this.follow();
  }

  /** The viewer stays on its step; where a resumed run removed it, on the newest one there is. */
  follow() {
    if (!this.byStep.has(this.looking.step)) this.looking.step = this.steps.at(-1);
    this.looking.prompt = Math.min(this.looking.prompt, this.detail.prompts.length - 1);
    this.viewer.setItems(this.steps.length, this.steps.indexOf(this.looking.step), this.ticks());
  }

  emptyWords() {
    const running = this.detail.summary.state === "running";
    return running
      ? emptyState("No samples yet", "They appear here by themselves when the run draws its first ones. To ask for some now:", `halation ctl ${this.detail.summary.name} sample`)
      : emptyState("No samples", this.detail.summary.state === "failed" ? "It failed before it drew any. Its log says how far it came." : "This run drew none. A run draws at every checkpoint, unless it is told --sample False.");
  }

  showBar() {
    const shape = `${this.variants.join()}|${this.teachers !== null}`;
    if (this.barShape === shape) return;
    this.barShape = shape;
    const slider = h("input", { type: "range", id: "thumb-size", ...SIZES, value: this.size, oninput: () => this.choose("size", Number(slider.value)) });
    const variants = this.variants.length > 1 ? segmented("Weights", this.variants.map((one) => [one, wordOf(one)]), this.variant, (one) => this.choose("variant", one)) : null;
    const order = segmented("Order", [["new", "Newest first"], ["old", "Oldest first"]], this.newestFirst ? "new" : "old", (one) => this.choose("newest", one === "new"));
    order.id = "matrix-order";
    if (variants) variants.id = "matrix-variant";
    const teacher = this.teachers ? h("label", { class: "check" }, h("input", { type: "checkbox", id: "matrix-teacher", checked: this.teacher, onchange: (event) => this.choose("teacher", event.target.checked) }), "Teacher on top") : null;
    const comparing = h("button", { class: "button", id: "compare-button", type: "button", title: "Compare two steps, or student and teacher", onclick: () => this.compareFrom(null) }, "Compare");
    fill(this.bar, order, variants, teacher, h("label", { class: "range" }, "Size", slider), comparing);
  }

  choose(name, value) {
    remember(`matrix.${name}`, value);
    if (name === "size") this.size = value;
    if (name === "newest") this.newestFirst = value;
    if (name === "teacher") this.teacher = value;
    this.update(this.detail);
    if (name === "newest") this.matrix.toNewest();
  }

  cellOf({ step, prompt, variant }) {
    if (variant === "teacher" || step === "teacher") return this.teachers?.[prompt] ?? null;
    return this.byStep.get(step)?.cells[variant]?.[prompt] ?? null;
  }

  urlOf(cell) {
    return cell?.key ? full(this.run, cell) : "";
  }

  labelOf({ step, variant }) {
    if (variant === "teacher") return "teacher";
    return this.detail.variants.length > 1 ? `step ${countText(step)}, ${wordOf(variant)}` : `step ${countText(step)}`;
  }

  /** Opens the viewer on a cell; on the teacher's row, compares it with the newest step instead. */
  open(place) {
    if (place.step === "teacher") {
      const newest = { step: this.steps.at(-1), prompt: place.prompt, variant: this.variant };
      this.compare({ ...newest, variant: "teacher" }, newest);
      return;
    }
    this.looking = { ...place };
    this.viewer = openViewer({
      items: this.steps.length,
      at: this.steps.indexOf(place.step),
      unit: "Step",
      ticks: this.ticks(),
      picture: (index) => this.itemOf(this.steps[index]),
      ahead: (index) => [-1, 1].map((by) => this.urlOf(this.cellOf({ step: this.steps[index], prompt: this.looking.prompt + by, variant: this.variant }))),
      onMove: (index) => (this.looking.step = this.steps[index]),
      onClose: () => this.viewerClosed(),
      keys: { ArrowUp: () => this.turnPrompt(-1), ArrowDown: () => this.turnPrompt(1), c: () => this.pin(this.lookedAt()), v: () => this.turnVariant() },
      actions: [{ label: "Pin", key: "c", onPick: () => this.pin(this.lookedAt()) }, { label: "Compare", onPick: () => this.compareFrom(this.lookedAt()) }],
    });
  }

  ticks() {
    const checkpoints = new Set((this.detail.checkpoints ?? []).map(({ step }) => step));
    return this.steps.flatMap((step, index) => (checkpoints.has(step) ? [index] : []));
  }

  lookedAt() {
    return { ...this.looking, variant: this.variant };
  }

  itemOf(step) {
    const prompt = this.looking.prompt;
    const cell = this.cellOf({ step, prompt, variant: this.variant });
    const { loss, time } = this.byStep.get(step);
    const about = this.detail.prompts[prompt];
    const url = this.urlOf(cell);
    const facts = [`prompt ${prompt + 1} of ${this.detail.prompts.length}`, `seed ${about.seed}`, about.size ? `${about.size[0]} × ${about.size[1]}` : null, loss === null || loss === undefined ? null : `loss ${lossText(loss)}`, time ? `${timeText(time)} (${agoText(time)})` : null];
    return {
      url,
      preview: url ? inside(this.run, cell) || thumb(this.run, cell, this.matrix.size * Math.min(2, window.devicePixelRatio)) : "",
      label: this.labelOf({ step, variant: this.variant }),
      caption: about.prompt,
      extra: h("span", { class: "muted small number" }, facts.filter(Boolean).join("  ·  ")),
      failed: cell?.failed ? `Failed: ${cell.failed}` : url ? null : "Not drawn at this step.",
      size: about.size,
    };
  }

  turnPrompt(by) {
    const count = this.detail.prompts.length;
    this.looking.prompt = (this.looking.prompt + by + count) % count;
    this.viewer.show();
  }

  turnVariant() {
    if (this.variants.length < 2) return;
    this.variant = this.variants[(this.variants.indexOf(this.variant) + 1) % this.variants.length];
    remember("matrix.variant", this.variant);
    this.viewer.show();
  }

  viewerClosed() {
    this.viewer = null;
    this.barShape = null;
    this.update(this.detail);
    if (!this.comparing) this.matrix.focusPlace(this.looking);
  }

  /** The first pin is remembered, a second one on another image compares the two. */
  pin(place) {
    if (this.pinned && (this.pinned.step !== place.step || this.pinned.prompt !== place.prompt || this.pinned.variant !== place.variant)) {
      const first = this.pinned;
      this.pinned = null;
      this.compare(first, place);
      return;
    }
    this.pinned = place;
    notify(`Pinned ${this.labelOf(place)}. Press c on another one to compare.`);
  }

  compareFrom(place) {
    const right = place ?? { ...(this.matrix.focused ?? { step: this.steps.at(-1), prompt: 0 }), variant: this.variant };
    const other = this.variants.find((one) => one !== right.variant);
    const left = this.pinned ?? (this.teachers?.[right.prompt] ? { ...right, variant: "teacher" } : other ? { ...right, variant: other } : { ...right, step: this.steps[0] === right.step ? this.steps.at(-1) : this.steps[0] });
    this.pinned = null;
    this.compare(left, right);
  }

  compare(left, right) {
    const sides = { left: left.prompt, right: right.prompt };
    openCompare({
      prompt: this.detail.prompts[right.prompt].prompt,
      sources: this.detail.variants.filter((one) => one !== "teacher" || this.teachers),
      word: wordOf,
      steps: this.steps,
      left,
      right,
      side: (at) => {
        const prompt = at.prompt ?? sides.right;
        const cell = this.cellOf({ ...at, prompt });
        const missing = cell?.failed ? " (failed)" : cell ? "" : " (not drawn)";
        return { url: this.urlOf(cell), label: this.labelOf(at) + missing };
      },
    });
  }

  unmount() {
    this.matrix.destroy();
    if (this.viewer) this.viewer.close();
  }
}
