// Curves of a training run: one plot for every number it writes, checkpoints marked; pointing shows the samples of that step.

import { exported, get, steadily, thumb } from "./api.js";
import { comparableGroups } from "./comparable.js";
import { fill, h, setText } from "./dom.js";
import { countText, lossText, numberText } from "./format.js";
import { teacherCells } from "./matrix.js";
import { Overlay } from "./overlay.js";
import { emptyState, errorState, skeleton } from "./parts.js";
import { plot } from "./plot.js";
import { recall, remember } from "./prefs.js";
import { isOrInside } from "./related.js";

const NOT_CURVES = new Set(["step", "time_s", "time", "epoch"]);
const ABOUT = {
  loss: ["Loss", ""],
  heldout_loss: ["Held-out loss", ""],
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
export function smoothPoints(points, weight) {
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
    this.value.title = options.series[0]?.faint ? "The last value, smoothed" : "The last value";
    setText(this.value, last ? `${numberText(last[1])}${last[2] ? ` ± ${numberText(last[2], 2)}` : ""}${options.unit ? ` ${options.unit}` : ""}` : "");
    const whole = { label: this.title.textContent, onHover: this.onHover, ...options };
    if (this.plot) this.plot.update(whole);
    else this.plot = plot(this.host, whole);
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

  /** The samples of the sampled step nearest to x; without x, of the newest. */
  showStrip(x) {
    const { steps, variants, prompts } = this.detail;
    this.strip.hidden = steps.length === 0;
    if (steps.length === 0) return;
    const near = x === null ? steps.at(-1) : steps.reduce((a, b) => (Math.abs(b.step - x) < Math.abs(a.step - x) ? b : a));
    const wanted = recall("matrix.variant", "ema");
    const variant = variants.includes(wanted) ? wanted : variants[0];
    const name = `${near.step} ${variant} ${near.cells[variant]?.map((cell) => cell?.v).join()}`;
    if (this.stripName === name) return;
    this.stripName = name;
    this.fillStrip(near, near.cells[variant] ?? teacherCells(this.detail) ?? [], prompts);
  }

  fillStrip(near, cells, prompts) {
    if (!this.stripImages || this.stripImages.length !== prompts.length) {
      this.stripImages = prompts.map(({ prompt }) => h("img", { alt: prompt, title: prompt, width: 88, height: 88, decoding: "async" }));
      this.stripHead = h("a", { class: "strip-head number" });
      fill(this.strip, this.stripHead, h("div", { class: "strip-pictures" }, this.stripImages));
    }
    fill(this.stripHead, h("strong", null, `step ${countText(near.step)}`), near.loss === null || near.loss === undefined ? null : h("span", { class: "muted", title: "Mean over the last steps when these were drawn" }, `loss ${lossText(near.loss)}`));
    this.stripHead.href = `#/run/${encodeURIComponent(this.run)}/samples/${near.step}`;
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
