// The page of a training run: what it is and how far, its samples with viewer and comparing, its curves, config and log.

import { Log, Settings } from "./about.js";
import { exported, full, get, inside, post, steadily, thumb } from "./api.js";
import { Curves } from "./curves.js";
import { fill, h, isTyping, recall, remember, setText } from "./dom.js";
import { agoText, countText, durationText, farText, lossText, percentText, pluralText, rateText, timeText } from "./format.js";
import { Matrix, teacherCells } from "./matrix.js";
import { ago, announce, confirmDialog, emptyState, fadeEdges, goneState, isTouch, notify, progressBar, segmented, stateChip } from "./parts.js";
import { openCompare, Viewer } from "./viewer.js";

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

class Samples {
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
    this.viewer = new Viewer({
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
    const facts = [`prompt ${prompt + 1} of ${this.detail.prompts.length}`, `seed ${about.seed}`, about.size ? `${about.size[0]} × ${about.size[1]}` : null, loss === null || loss === undefined ? null : `mean loss ${lossText(loss)}`, time ? `${timeText(time)} (${agoText(time)})` : null];
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
    notify(`Pinned ${this.labelOf(place)}. ${isTouch() ? "Pin" : "Press c on"} another one to compare.`);
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
    this.matrix.close();
    if (this.viewer) this.viewer.close();
  }
}

const TABS = [["samples", "Samples"], ["curves", "Curves"], ["config", "Config"], ["log", "Log"]];
const ACTIONS = [["sample", "Sample now"], ["save", "Save now"], ["stop", "Stop"]];
const ASKED = { sample: "Sample", save: "Save", stop: "Stop" };
const ARROWS = ["ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight"];
const QUICK_MS = 1000;
const LAST_LOSS = "The loss of the last step in metrics.jsonl: the mean over its batch on all ranks";

/** The head that every page of a run has: name, state, how far, how fast; `actions` are nodes on its right. Returns {node, update(summary)}. */
function runHead(summary) {
  const line = h("p", { class: "run-line" });
  const reason = h("p", { class: "run-why", id: "run-reason" });
  const chip = h("span");
  const bar = h("div", { class: "run-bar" });
  const actions = h("div", { class: "run-actions", id: "run-actions" });
  const node = h("header", { class: "run-head" }, h("div", { class: "run-heading" }, h("a", { class: "crumb", href: "#/" }, "Runs"), h("h1", { title: summary.name }, summary.name), chip, h("span", { class: "spacer" }), actions), line, reason, bar);
  function update(now) {
    fill(chip, stateChip(now.state));
    const far = `${farText(now.done, now.planned, now.unit)}${now.planned > 0 ? ` (${percentText(now.done, now.planned)})` : ""}`;
    const loss = now.loss === null || now.loss === undefined ? null : h("span", { title: LAST_LOSS }, `last loss ${lossText(now.loss)}`);
    const running = now.state === "running";
    const took = !running && now.seconds ? h("span", { title: "The time of all its commands together, as they recorded it" }, `took ${durationText(now.seconds)}`) : null;
    const failed = now.failed > 0 ? h("span", { class: "bad-text", title: "Samples of the newest step that could not be drawn" }, `${pluralText(now.failed, "sample")} failed`) : null;
    const words = [now.kind, now.title, far, loss, failed, running && now.rate ? rateText(now.rate, now.unit) : null, running && now.left_s !== null && now.left_s !== undefined ? `${durationText(now.left_s)} left` : null, took];
    fill(line, words.filter(Boolean).map((word) => (word instanceof Node ? word : h("span", null, word))), h("span", null, "changed ", ago(now.changed)));
    setText(reason, now.reason ?? "");
    reason.hidden = !now.reason;
    reason.dataset.state = now.state;
    fill(bar, now.planned > 0 ? progressBar(now.done, now.planned, now.state, "Done") : null);
  }
  update(summary);
  return { node, actions, update };
}

class TrainingView {
  constructor(main, route, detail) {
    this.id = detail.summary.id;
    this.main = main;
    this.asked = new Set();
    this.detail = detail;
    this.head = runHead(detail.summary);
    this.links = TABS.map(([tab, text], index) => h("a", { href: `#/run/${encodeURIComponent(this.id)}/${tab}`, id: `tab-${tab}`, dataset: { tab }, title: `${text} (${index + 1})` }, text));
    this.panels = new Map(TABS.map(([tab, text]) => [tab, h("section", { class: `panel-${tab}`, id: `panel-${tab}`, "aria-label": text, hidden: true })]));
    fill(main, h("div", { class: "training" }, this.head.node, fadeEdges(h("nav", { class: "tabs", "aria-label": "Parts of the run" }, this.links)), [...this.panels.values()]));
    this.parts = new Map();
    this.control = false;
    this.cost = 0;
    // A long run's detail is large: the slower it comes, the rarer it is asked for.
    this.refresh = steadily(() => this.load(), () => Math.max(QUICK_MS, this.cost * 10));
    this.onKey = (event) => this.key(event);
    document.addEventListener("keydown", this.onKey);
    this.routed(route);
    this.askControl();
  }

  async askControl() {
    if (exported) return;
    try {
      this.control = (await get("/api/state")).control === true;
    } catch (error) {
      console.warn(error);
    }
    this.showControl();
  }

  showControl() {
    const able = this.control && this.detail.summary.state === "running" && ["train", "distill"].includes(this.detail.summary.kind);
    if (able === this.shownControl) return;
    this.shownControl = able;
    fill(this.head.actions, able ? ACTIONS.map(([action, text]) => h("button", { class: action === "stop" ? "button button-danger" : "button", type: "button", dataset: { control: action }, onclick: () => this.ask(action) }, text)) : null);
  }

  async ask(action) {
    if (action === "stop" && !(await confirmDialog(`Stop ${this.detail.summary.name}?`, "It saves a checkpoint after its current step and ends. The same command goes on from there.", "Stop the run"))) return;
    try {
      await post(`/api/runs/${encodeURIComponent(this.id)}/control/${action}`);
      this.asked.add(action);
      notify(`${ASKED[action]}: asked; the run does it after its current step.`, "good");
    } catch (error) {
      notify(error.status === 409 ? `${ASKED[action]}: not asked, the run is not running any more.` : `${ASKED[action]}: not asked, ${error.message}`, "bad");
    }
  }

  routed(route) {
    this.tab = TABS.some(([tab]) => tab === route.tab) ? route.tab : "samples";
    for (const link of this.links) {
      if (link.dataset.tab === this.tab) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    for (const [tab, panel] of this.panels) panel.hidden = tab !== this.tab;
    if (!this.parts.has(this.tab)) this.parts.set(this.tab, this.make(this.tab));
    this.parts.get(this.tab).routed?.(route.rest[0] ?? "");
    this.refreshTab();
    const step = Number(route.rest[0]);
    if (this.tab === "samples" && route.rest[0] !== undefined && Number.isFinite(step)) this.parts.get("samples").matrix.focusPlace({ step, prompt: 0 });
  }

  make(tab) {
    const host = this.panels.get(tab);
    if (tab === "samples") return new Samples(host, this.detail);
    if (tab === "curves") return this.keepAddress("curves", new Curves(host, this.detail));
    return tab === "config" ? this.keepAddress("config", new Settings(host, this.id)) : new Log(host, this.id);
  }

  /** What a tab keeps in the address is there again when one comes back to it by its link. */
  keepAddress(tab, part) {
    part.onAddress = (rest) => (this.links.find((link) => link.dataset.tab === tab).href = `#/run/${encodeURIComponent(this.id)}/${tab}${rest}`);
    return part;
  }

  refreshTab() {
    const part = this.parts.get(this.tab);
    if (this.tab === "samples") {
      if (part.detail !== this.detail) part.update(this.detail);
    } else part.refresh(this.detail);
  }

  async load() {
    const began = performance.now();
    try {
      const before = this.detail;
      this.detail = await get(`/api/runs/${encodeURIComponent(this.id)}`);
      this.cost = performance.now() - began;
      this.tellNew(before);
      this.head.update(this.detail.summary);
      this.showControl();
      this.refreshTab();
    } catch (error) {
      if (error.status === 404) this.vanish();
      else console.warn(error);
    }
  }

  /** The run's folder went away: the page says so, and the next address mounts anew. */
  vanish() {
    this.unmount();
    this.routed = null;
    fill(this.main, goneState(this.detail.summary.name));
  }

  /** What was asked for by a button has come: said once. */
  tellTaken(before) {
    const newest = (list) => list?.at(-1)?.step ?? null;
    const [saved, drawn] = [newest(this.detail.checkpoints), newest(this.detail.steps)];
    if (saved !== newest(before.checkpoints) && this.asked.delete("save")) notify(`Save: done, a checkpoint of step ${countText(saved)}.`, "good");
    if (drawn !== newest(before.steps) && this.asked.delete("sample")) notify(`Sample: step ${countText(drawn)} is being drawn.`, "good");
  }

  tellNew(before) {
    this.tellTaken(before);
    const more = this.detail.steps.length - before.steps.length;
    if (more > 0) announce(`${pluralText(more, "new row")} of samples, up to step ${countText(this.detail.steps.at(-1).step)}`);
    if (this.detail.summary.state !== before.summary.state) announce(`The run is now ${this.detail.summary.state}`);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event) || document.querySelector("dialog[open]")) return;
    if (ARROWS.includes(event.key) && [document.body, this.main].includes(document.activeElement) && this.takeFocus()) event.preventDefault();
    const tab = TABS[Number(event.key) - 1];
    if (tab) location.hash = this.links.find((link) => link.dataset.tab === tab[0]).hash;
  }

  /** The focus goes to the sample it was on last; whether there is one. */
  takeFocus() {
    const matrix = this.parts.get("samples")?.matrix;
    if (this.tab !== "samples" || !matrix?.focused) return false;
    matrix.focusPlace(matrix.focused);
    return true;
  }

  changed(event) {
    // The list of runs changed too: this one may be what went.
    if (event.id === this.id || event.id === "") this.refresh();
    else this.parts.get("curves")?.runChanged(event.id);
  }

  unmount() {
    this.refresh.stop();
    document.removeEventListener("keydown", this.onKey);
    for (const part of this.parts.values()) part.unmount?.();
  }
}

/** Shows a training run (train, distill, sample). */
export function mountTraining(main, route, detail) {
  return new TrainingView(main, route, detail);
}
