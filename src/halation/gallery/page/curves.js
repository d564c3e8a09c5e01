// Curves of a training run: one plot for every number it writes, checkpoints marked; pointing shows the samples of that step.

import { exported, get, steadily, thumb } from "./api.js";
import { fill, h, recall, remember, setText } from "./dom.js";
import { countText, lossText, numberText } from "./format.js";
import { MEAN_LOSS, teacherCells } from "./matrix.js";
import { emptyState, errorState, fadeEdges, notify, skeleton } from "./parts.js";
import { Plot } from "./plot.js";
import { isOrInside } from "./runs.js";
import { comparableGroups } from "./scores.js";

const MOST_OTHERS = 5;
const OTHER_AGAIN_MS = 2000;

/** Runs that have curves and are not this one. */
function otherTrainings(runs, self) {
  return runs.filter((run) => run.id !== self && ["train", "distill"].includes(run.kind)).sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
}

class Overlay {
  /** `onChange()` whenever what is to be drawn has changed; `onPick(ids)` when the reader chose others. */
  constructor(run, { onChange, onPick }) {
    Object.assign(this, { run, onChange, onPick });
    this.ids = [];
    this.data = new Map();
    this.names = new Map();
    this.search = h("input", { class: "field", id: "overlay-search", type: "search", placeholder: "Search runs", "aria-label": "Search runs to lay over", oninput: () => this.showList() });
    this.list = h("div", { class: "overlay-list", role: "group", "aria-label": "Runs to lay over" });
    this.summary = h("summary", { class: "button", id: "overlay" }, "Overlay");
    this.box = h("details", { class: "overlay", ontoggle: () => this.box.open && this.open() }, this.summary, h("div", { class: "overlay-box" }, this.search, this.list));
    this.box.addEventListener("keydown", (event) => this.key(event));
    this.away = (event) => this.box.contains(event.target) || (this.box.open = false);
    document.addEventListener("pointerdown", this.away);
    this.legend = h("div", { class: "overlay-legend", id: "overlay-legend", "aria-label": "Runs that are drawn", role: "group", hidden: true });
    this.again = steadily(() => this.loadAll(), OTHER_AGAIN_MS);
  }

  key(event) {
    if (event.key !== "Escape" || !this.box.open) return;
    this.box.open = false;
    this.summary.focus();
    event.stopPropagation();
  }

  async open() {
    if (this.runs === undefined) fill(this.list, h("span", { class: "muted small" }, "…"));
    await this.loadRuns();
    this.showList();
    // On a phone the keyboard would cover the list.
    if (!window.matchMedia("(pointer: coarse)").matches) this.search.focus({ preventScroll: true });
  }

  async loadRuns() {
    try {
      const { runs } = await get("/api/runs");
      this.all = runs;
      this.runs = otherTrainings(runs, this.run);
      for (const run of runs) this.names.set(run.id, run.name);
    } catch (error) {
      this.runs ??= [];
      console.warn(error);
    }
  }

  showList() {
    if (this.runs === undefined) return;
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = this.runs.filter((run) => words.every((word) => `${run.name} ${run.title ?? ""}`.toLowerCase().includes(word)));
    const full = this.ids.length >= MOST_OTHERS;
    const focused = this.list.contains(document.activeElement) ? document.activeElement.value : null;
    fill(this.list, shown.map((run) => h("label", { class: "check" }, h("input", { type: "checkbox", value: run.id, checked: this.ids.includes(run.id), disabled: full && !this.ids.includes(run.id), onchange: () => this.toggle(run.id) }), h("span", null, run.name, h("span", { class: "muted small" }, ` ${run.title ?? ""}`)))),
      shown.length === 0 ? h("span", { class: "muted small" }, this.runs.length === 0 ? "There is no other training here." : "No run matches.") : null,
      full ? h("span", { class: "muted small" }, `${MOST_OTHERS} at most`) : null);
    if (focused) [...this.list.querySelectorAll("input")].find((one) => one.value === focused)?.focus({ preventScroll: true });
  }

  toggle(id) {
    const next = this.ids.includes(id) ? this.ids.filter((one) => one !== id) : [...this.ids, id].slice(0, MOST_OTHERS);
    this.set(next);
    this.onPick(next);
  }

  /** Lays these over, whatever was before: by the address, or by the list. */
  set(ids) {
    const wanted = [...new Set(ids)].filter((id) => id !== this.run).slice(0, MOST_OTHERS);
    if (wanted.join() === this.ids.join()) return;
    this.ids = wanted;
    for (const id of this.data.keys()) if (!wanted.includes(id)) this.data.delete(id);
    this.showList();
    this.showLegend();
    this.onChange();
    this.loadAll();
  }

  async loadAll() {
    if (this.ids.some((id) => !this.names.has(id))) await this.loadRuns();
    await Promise.all(this.ids.map((id) => this.load(id)));
    this.showLegend();
    this.onChange();
  }

  async load(id) {
    const known = this.data.get(id) ?? { rows: [], after: 0 };
    try {
      const more = await get(`/api/runs/${encodeURIComponent(id)}/metrics?after=${known.after}`);
      if (!this.ids.includes(id)) return;
      this.data.set(id, { rows: more.reset ? more.rows : known.rows.concat(more.rows), after: more.next });
    } catch (error) {
      if (error.status !== 404) console.warn(error);
      else if (this.ids.includes(id)) {
        notify("A run that was laid over is not here any more.");
        this.toggle(id);
      }
    }
  }

  /** A run changed: asked for again where it is one of these. */
  runChanged(id) {
    if (this.ids.includes(id)) this.again();
  }

  /** What is laid over: [{id, name, colour, rows}]. */
  get others() {
    return this.ids.map((id, index) => ({ id, name: this.names.get(id) ?? id, colour: index + 2, rows: this.data.get(id)?.rows ?? [] }));
  }

  showLegend() {
    this.legend.hidden = this.ids.length === 0;
    setText(this.summary, this.ids.length ? `Overlay (${this.ids.length})` : "Overlay");
    fill(this.legend, h("span", { class: "legend-item", dataset: { series: 1 } }, h("span", { class: "legend-line", "aria-hidden": "true" }), "this run"), this.others.map(({ id, name, colour }) =>
      h("span", { class: "legend-item", dataset: { series: colour, run: id } }, h("span", { class: "legend-line legend-dashed", "aria-hidden": "true" }), h("a", { href: `#/run/${encodeURIComponent(id)}/curves` }, name), h("button", { class: "link-button legend-drop", type: "button", "aria-label": `Take ${name} away`, title: "Take away", onclick: () => this.toggle(id) }, "✕"))));
  }

  close() {
    this.again.stop();
    document.removeEventListener("pointerdown", this.away);
  }
}

const NOT_CURVES = new Set(["step", "time_s", "time", "epoch"]);
const ABOUT = {
  loss: ["Loss", ""],
  heldout_loss: ["Validation loss", ""],
  lr: ["Learning rate", ""],
  grad_norm: ["Gradient norm", ""],
  pictures_per_s: ["Throughput", "images/s"],
  mfu: ["MFU", "of peak"],
  memory_gb: ["Memory", "GB"],
  data_s: ["Waiting for data", "s/step"],
};
const FIRST = Object.keys(ABOUT);
const MOST_ROWS = 20000;
const SCORES_MS = 4000;
const NEVER_SMOOTH = new Set(["lr", "memory_gb"]);

/** A running mean that forgets at `weight`, without the pull of its start. */
function smoothPoints(points, weight) {
  if (weight <= 0) return points;
  let [sum, norm] = [0, 0];
  return points.flatMap(([x, y]) => {
    if (!Number.isFinite(y)) return [];
    sum = sum * weight + y * (1 - weight);
    norm = norm * weight + (1 - weight);
    return [[x, sum / norm]];
  });
}

function curveNames(rows, told) {
  const names = new Set(told ?? []);
  for (const row of rows.length > 200 ? [...rows.slice(0, 100), ...rows.slice(-100)] : rows) {
    for (const [name, value] of Object.entries(row)) if (typeof value === "number") names.add(name);
  }
  const rank = (name) => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length);
  return [...names].filter((name) => !NOT_CURVES.has(name)).sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
}

class Figure {
  constructor(name, title, onHover) {
    this.title = h("h3", null, title);
    this.value = h("span", { class: "figure-value number" });
    this.host = h("div");
    this.node = h("section", { class: "figure", dataset: { metric: name }, "aria-label": title }, h("div", { class: "figure-head" }, this.title, this.value), this.host);
    this.onHover = onHover;
    this.plot = null;
  }

  show(options) {
    const last = options.series.find((series) => !series.faint && !series.dashed)?.points.at(-1);
    const word = options.series[0]?.faint ? "smoothed" : "last";
    this.value.title = word === "smoothed" ? "The end of the smoothed line; its smoothing is set above" : "The last value";
    fill(this.value, last ? [h("span", { class: "muted" }, `${word} `), `${numberText(last[1])}${last[2] ? ` ± ${numberText(last[2], 2)}` : ""}${options.unit ? ` ${options.unit}` : ""}`] : null);
    const whole = { label: this.title.textContent, onHover: this.onHover, ...options };
    if (this.plot) this.plot.update(whole);
    else this.plot = new Plot(this.host, whole);
  }
}

export class Curves {
  constructor(host, detail) {
    this.detail = detail;
    this.run = detail.summary.id;
    this.rows = [];
    this.after = 0;
    this.figures = new Map();
    this.smoothing = recall("curves.smoothing", 0.6);
    this.log = recall("curves.log", false);
    this.grid = h("div", { class: "figures", id: "curves" }, skeleton(4, "skeleton-plot"));
    this.scores = [];
    this.overlay = new Overlay(this.run, { onChange: () => this.show(), onPick: (ids) => this.picked(ids) });
    this.strip = h("div", { class: "strip", id: "strip", role: "group", "aria-label": "Samples of the step pointed at" });
    fill(host, this.bar(), this.overlay.legend, this.grid, this.strip);
    this.loaded = false;
    // One answer at a time: two that were asked for the same rows would draw them twice.
    this.ask = steadily(() => this.load(), 0);
    this.askScores = steadily(() => this.loadScores(), SCORES_MS);
  }

  bar() {
    const word = h("output", { class: "number" }, this.smoothing.toFixed(2));
    const slider = h("input", { type: "range", id: "smoothing", min: 0, max: 0.99, step: 0.01, value: this.smoothing, oninput: () => {
      this.smoothing = Number(slider.value);
      setText(word, this.smoothing.toFixed(2));
      remember("curves.smoothing", this.smoothing);
      this.show();
    } });
    const log = h("input", { type: "checkbox", id: "log-scale", checked: this.log, onchange: () => {
      this.log = log.checked;
      remember("curves.log", this.log);
      this.show();
    } });
    return h("div", { class: "toolbar", role: "group", "aria-label": "How curves are drawn" }, h("label", { class: "range" }, "Smoothing", slider, word), h("label", { class: "check" }, log, "Log scale"), exported ? null : this.overlay.box, h("span", { class: "muted small" }, h("span", { class: "checkpoint-mark", "aria-hidden": "true" }, "▲"), " checkpoint"));
  }

  refresh(detail) {
    this.detail = detail;
    this.ask();
    this.askScores();
  }

  /** The address says which runs lie over this one: "ID,ID". */
  routed(text) {
    this.overlay.set(text.split(",").filter(Boolean));
    this.onAddress?.(text ? `/${text}` : "");
  }

  picked(ids) {
    const rest = ids.length ? `/${ids.map(encodeURIComponent).join(",")}` : "";
    history.replaceState(history.state, "", `#/run/${encodeURIComponent(this.run)}/curves${rest}`);
    this.onAddress?.(rest);
  }

  runChanged(id) {
    this.overlay.runChanged(id);
    this.askScores();
  }

  /** Numbers that a watch or an evaluation found of this run, and of those laid over it, are kept with all scores. */
  async loadScores() {
    try {
      const { scores } = await get("/api/scores");
      this.scores = scores.filter((score) => score.step !== null && score.step !== undefined && Number.isFinite(score.value));
      this.show();
    } catch (error) {
      if (!exported) console.warn(error);
    }
  }

  /** Every score with a step, each from one place: {title, metric, better, sources: [{name, colour, dashed, points}]}. */
  scoreFigures() {
    const figures = new Map();
    const add = (score, title, source) => {
      if (!figures.has(title)) figures.set(title, { title, metric: score.metric, better: score.better, sources: new Map() });
      const { sources } = figures.get(title);
      if (!sources.has(source.name)) sources.set(source.name, { ...source, points: [] });
      const { points } = sources.get(source.name);
      if (!points.some(([step]) => step === score.step)) points.push([score.step, score.value, score.std ?? undefined]);
    };
    const { name: own } = this.detail.summary;
    for (const score of this.detail.scores ?? []) if (score.step !== null) add(score, score.name ?? score.metric, { name: "this run", colour: 1 });
    for (const score of this.scores.filter(({ name }) => isOrInside(name, own))) {
      add(score, score.title ?? score.metric, score.name === own ? { name: "this run", colour: 1 } : { name: score.name.slice(own.length + 1), colour: 1 });
    }
    const others = this.overlay.others;
    for (const score of this.scores) {
      const other = others.find(({ name }) => isOrInside(score.name, name));
      if (!other || !figures.has(score.title ?? score.metric)) continue;
      const mine = this.scores.find((one) => isOrInside(one.name, own) && one.title === score.title);
      const alike = !mine || comparableGroups([mine, score]).length === 1;
      add(score, score.title ?? score.metric, { name: alike ? score.name : `${score.name} (not comparable)`, colour: other.colour, dashed: true });
    }
    return figures;
  }

  async load() {
    try {
      const more = await get(`/api/runs/${encodeURIComponent(this.run)}/metrics?after=${this.after}`);
      this.rows = more.reset ? more.rows : this.rows.concat(more.rows);
      if (this.rows.length > MOST_ROWS) this.rows = this.rows.filter((_, index) => index % 2 === 0 || index === this.rows.length - 1);
      this.after = more.next;
      this.loaded = true;
      this.show();
    } catch (error) {
      if (!this.loaded) fill(this.grid, errorState(error, () => this.refresh(this.detail)));
      else console.warn(error);
    }
  }

  show() {
    if (!this.loaded) return;
    const names = curveNames(this.rows, []);
    const scores = this.scoreFigures();
    const wanted = [...names.map((name) => `m.${name}`), ...[...scores.keys()].map((name) => `s.${name}`)];
    if (wanted.length === 0) {
      fill(this.grid, emptyState("No numbers yet", "The run writes its first line of metrics after its first steps."));
      this.figures.clear();
      return;
    }
    if (wanted.join() !== [...this.figures.keys()].join()) this.makeFigures(names, scores);
    const marks = (this.detail.checkpoints ?? []).map(({ step, kind }) => ({ x: step, label: `checkpoint at step ${countText(step)}${kind ? ` (${kind})` : ""}` }));
    const xRange = this.rangeOf(scores);
    for (const name of names) this.figures.get(`m.${name}`).show({ ...this.seriesOf(name), marks, log: this.log, xRange });
    for (const [name, figure] of scores) this.figures.get(`s.${name}`).show({ ...this.scoreSeries(figure), marks, log: this.log, xRange });
    this.showStrip(this.pointed ?? null);
  }

  /** One range of steps for all plots, so that one can look from one to the next. */
  rangeOf(scores) {
    const firstLast = (rows) => (rows.length > 0 ? [rows[0].step, rows.at(-1).step] : []);
    const scored = [...scores.values()].flatMap(({ sources }) => [...sources.values()].flatMap(({ points }) => points.map(([step]) => step)));
    const xs = [...firstLast(this.rows), ...this.overlay.others.flatMap(({ rows }) => firstLast(rows)), ...scored];
    return this.rows.length > 1 ? [Math.min(...xs), Math.max(...xs)] : undefined;
  }

  makeFigures(names, scores) {
    for (const figure of this.figures.values()) figure.plot?.destroy();
    this.figures.clear();
    const hover = (x) => this.hover(x);
    for (const name of names) this.figures.set(`m.${name}`, new Figure(name, ABOUT[name]?.[0] ?? name, hover));
    for (const [name, { metric }] of scores) this.figures.set(`s.${name}`, new Figure(metric, ABOUT[metric]?.[0] ?? name, hover));
    fill(this.grid, [...this.figures.values()].map((figure) => figure.node));
  }

  seriesOf(name) {
    const pointsOf = (rows) => rows.filter((row) => typeof row[name] === "number").map((row) => [row.step, row[name]]);
    const points = pointsOf(this.rows);
    const title = ABOUT[name]?.[0] ?? name;
    const unit = ABOUT[name]?.[1] ?? "";
    const smooth = (given) => (NEVER_SMOOTH.has(name) || given.length < 8 ? given : smoothPoints(given, this.smoothing));
    const others = this.overlay.others.map((other) => ({ name: other.name, points: smooth(pointsOf(other.rows)), colour: other.colour, dashed: true }));
    const self = { name: others.length ? "this run" : title, colour: 1 };
    const raw = this.smoothing > 0 && smooth(points) !== points ? [{ ...self, points, faint: true }] : [];
    return { series: [...raw, { ...self, points: smooth(points) }, ...others], unit, legend: false };
  }

  scoreSeries({ title, better, sources }) {
    const series = [...sources.values()].map((source) => ({ ...source, dots: true, points: [...source.points].sort((a, b) => a[0] - b[0]) }));
    return { series, unit: "", label: `${title}${better ? `, ${better} is best` : ""}` };
  }

  hover(x) {
    this.pointed = x;
    for (const figure of this.figures.values()) if (figure.plot && figure.plot.at !== x) figure.plot.setCursor(x);
    if (x !== null) this.showStrip(x);
  }

  /** The samples of the newest step up to x, never of a later one; without x, of the newest. */
  showStrip(x) {
    const { steps, variants, prompts } = this.detail;
    this.strip.hidden = steps.length === 0;
    if (steps.length === 0) return;
    const near = steps.findLast(({ step }) => x === null || step <= x) ?? { step: null, cells: {} };
    const wanted = recall("matrix.variant", "ema");
    const variant = variants.includes(wanted) ? wanted : variants[0];
    const name = `${near.step ?? x} ${variant} ${near.cells[variant]?.map((cell) => cell?.v).join()}`;
    if (this.stripName === name) return;
    this.stripName = name;
    this.fillStrip(near, near.step === null ? [] : (near.cells[variant] ?? teacherCells(this.detail) ?? []), prompts);
  }

  fillStrip(near, cells, prompts) {
    if (!this.stripImages || this.stripImages.length !== prompts.length) {
      this.stripImages = prompts.map(({ prompt }) => h("img", { alt: prompt, title: prompt, width: 88, height: 88, decoding: "async" }));
      this.stripHead = h("a", { class: "strip-head number" });
      fill(this.strip, this.stripHead, fadeEdges(h("div", { class: "strip-pictures" }, this.stripImages)));
    }
    const loss = near.loss === null || near.loss === undefined ? null : h("span", { class: "muted", title: MEAN_LOSS }, `mean loss ${lossText(near.loss)}`);
    fill(this.stripHead, h("strong", null, near.step === null ? "no samples yet" : `step ${countText(near.step)}`), loss);
    this.stripHead.href = `#/run/${encodeURIComponent(this.run)}/samples/${near.step ?? ""}`;
    prompts.forEach(({ size }, index) => {
      const cell = cells[index];
      const image = this.stripImages[index];
      image.classList.toggle("pixelated", size?.[0] > 0 && size[0] < 64);
      const source = cell?.key ? thumb(this.run, cell, 128) : "";
      image.style.visibility = source ? "visible" : "hidden";
      if (source) image.src = source;
      else image.removeAttribute("src");
    });
  }

  unmount() {
    this.ask.stop();
    this.askScores.stop();
    this.overlay.close();
    for (const figure of this.figures.values()) figure.plot?.destroy();
  }
}
