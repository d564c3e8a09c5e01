// All runs as rows: the last sample, the state, how far it is. Rows are kept and brought up to date, so nothing jumps.

import { exported, get, steadily, thumb } from "./api.js";
import { fill, h, setText } from "./dom.js";
import { countText, durationText, numberText, percentText, rateText } from "./format.js";
import { ago, emptyState, errorState, progressBar, skeleton, sparkline, stateChip } from "./parts.js";
import { recall, remember } from "./prefs.js";

const REFRESH_MS = 1000;

/** Running ones first in the order they were started, so that they keep their places; then what changed last. */
function orderRuns(runs) {
  const rank = (run) => (run.state === "running" ? 0 : 1);
  const age = (run) => (run.state === "running" ? (run.started ?? run.changed) : run.changed) ?? 0;
  const sorted = [...runs].sort((a, b) => rank(a) - rank(b) || age(b) - age(a) || a.name.localeCompare(b.name));
  const ids = new Set(sorted.map((run) => run.id));
  const top = sorted.filter((run) => !run.parent || !ids.has(run.parent));
  const children = (id) => sorted.filter((run) => run.parent === id);
  return top.flatMap((run) => [run, ...children(run.id)]);
}

function matches(run, words) {
  const text = `${run.name} ${run.kind} ${run.state} ${run.title ?? ""} ${run.reason ?? ""}`.toLowerCase();
  return words.every((word) => text.includes(word));
}

function numbersOf(run) {
  const parts = [];
  if (run.loss !== null && run.loss !== undefined) parts.push(`loss ${numberText(run.loss)}`);
  if (run.failed > 0) parts.push(h("span", { class: "bad-text" }, `${countText(run.failed)} failed`));
  if (run.state === "running" && run.rate) parts.push(rateText(run.rate, run.unit));
  if (run.state === "running" && run.left_s !== null && run.left_s !== undefined) parts.push(`${durationText(run.left_s)} left`);
  return parts.flatMap((part, index) => (index === 0 ? [part] : [" · ", part]));
}

class RunRow {
  constructor(run) {
    this.picture = h("span", { class: "run-picture" });
    this.name = h("span", { class: "run-name" });
    this.title = h("span", { class: "run-title" });
    this.reason = h("span", { class: "run-reason" });
    this.state = h("span", { class: "run-state" });
    this.spark = h("span", { class: "run-spark" });
    this.far = h("span", { class: "run-far" });
    this.changed = h("span", { class: "run-changed" });
    const words = h("span", { class: "run-words" }, this.name, this.title, this.reason);
    this.link = h("a", { class: "run", href: `#/run/${encodeURIComponent(run.id)}`, dataset: { run: run.id } }, this.picture, words, this.state, this.spark, this.far, this.changed);
    this.node = h("li", null, this.link);
    this.version = null;
  }

  update(run) {
    if (this.version === run.version && this.runState === run.state) return;
    this.version = run.version;
    this.runState = run.state;
    this.link.dataset.state = run.state;
    this.node.className = run.parent ? "run-child" : "";
    setText(this.name, run.name);
    setText(this.title, [run.kind, run.title].filter(Boolean).join(" · "));
    setText(this.reason, run.reason ?? "");
    this.reason.hidden = !run.reason;
    fill(this.state, stateChip(run.state));
    fill(this.spark, run.spark?.length > 1 ? sparkline(run.spark, "Loss over steps") : null);
    this.showFar(run);
    fill(this.changed, ago(run.changed));
    this.showPicture(run);
  }

  showFar(run) {
    const far = run.planned > 0 ? `${countText(run.done)} of ${countText(run.planned)} ${run.unit}` : `${countText(run.done)} ${run.unit}`;
    fill(
      this.far,
      h("span", { class: "run-count" }, h("span", null, far), run.planned > 0 ? h("span", { class: "muted" }, percentText(run.done, run.planned)) : null),
      run.planned > 0 ? progressBar(run.done, run.planned, run.state, `${run.name}: done`) : null,
      h("span", { class: "run-numbers" }, numbersOf(run)),
    );
  }

  showPicture(run) {
    const source = run.last?.key ? thumb(run.id, run.last, 128) : "";
    if (this.source === source) return;
    this.source = source;
    if (source === "") return fill(this.picture);
    const image = h("img", { src: source, alt: "", width: 64, height: 64, decoding: "async" });
    image.addEventListener("load", () => image.classList.toggle("pixelated", image.naturalWidth < 96), { once: true });
    return fill(this.picture, image);
  }
}

class RunsView {
  constructor(main) {
    this.rows = new Map();
    this.list = h("ul", { class: "runs", id: "runs", "aria-label": "Runs" });
    this.rest = h("div", null, skeleton(5));
    this.count = h("span", { class: "muted small", id: "runs-count", role: "status" });
    this.filter = h("input", { class: "field field-search", id: "runs-filter", type: "search", placeholder: "Filter runs  ( / )", "aria-label": "Filter runs by words", value: recall("runs.filter", ""), dataset: { search: "" }, oninput: () => this.filtered() });
    fill(main, h("div", { class: "toolbar" }, h("h1", { class: "unseen" }, "Runs"), this.filter, this.count), this.list, this.rest);
    this.list.addEventListener("keydown", (event) => this.key(event));
    this.filter.addEventListener("keydown", (event) => {
      if (event.key === "ArrowDown" || event.key === "Enter") this.focusRow(0, event);
    });
    this.runs = null;
    this.refresh = steadily(() => this.load(), REFRESH_MS);
    this.load();
  }

  async load() {
    try {
      this.runs = (await get("/api/runs")).runs;
      this.show();
    } catch (error) {
      if (this.runs === null) fill(this.rest, errorState(error, () => this.load()));
      else console.warn(error);
    }
  }

  filtered() {
    remember("runs.filter", this.filter.value);
    if (this.runs) this.show();
  }

  show() {
    const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const runs = orderRuns(this.runs).filter((run) => matches(run, words));
    const nodes = runs.map((run) => this.rowOf(run));
    for (const [id, row] of this.rows) if (!this.runs.some((run) => run.id === id)) this.forget(id, row);
    this.place(nodes);
    const running = this.runs.filter((run) => run.state === "running").length;
    setText(this.count, `${runs.length === this.runs.length ? countText(runs.length) : `${countText(runs.length)} of ${countText(this.runs.length)}`} runs${running ? `, ${running} running` : ""}`);
    fill(this.rest, this.nothing(runs));
  }

  nothing(runs) {
    if (runs.length > 0) return null;
    if (this.runs.length > 0) return emptyState("No run matches", "Clear the filter to see all of them.");
    return emptyState("No runs here yet", "Runs show up by themselves as soon as one starts below these folders. To make one:", "halation demo --output_dir runs/demo");
  }

  rowOf(run) {
    let row = this.rows.get(run.id);
    if (!row) {
      row = new RunRow(run);
      this.rows.set(run.id, row);
    }
    row.update(run);
    return row.node;
  }

  forget(id, row) {
    row.node.remove();
    this.rows.delete(id);
  }

  /** Puts the rows in order while moving as few as possible: a moved node loses focus. */
  place(nodes) {
    const wanted = new Set(nodes);
    for (const node of [...this.list.children]) if (!wanted.has(node)) node.remove();
    nodes.forEach((node, index) => {
      if (this.list.children[index] !== node) this.list.insertBefore(node, this.list.children[index] ?? null);
    });
  }

  key(event) {
    const links = [...this.list.querySelectorAll("a.run")];
    const at = links.indexOf(document.activeElement);
    const next = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: links.length - 1 }[event.key];
    if (next === undefined) return;
    if (next < 0) this.filter.focus();
    else this.focusRow(Math.min(next, links.length - 1), event);
    event.preventDefault();
  }

  focusRow(index, event) {
    const link = this.list.querySelectorAll("a.run")[index];
    if (!link) return;
    event.preventDefault();
    link.focus();
    if (event.key === "Enter") link.click();
  }

  changed() {
    this.refresh();
  }

  unmount() {
    this.refresh.stop();
  }
}

/** Shows the list of runs. */
export function mountRuns(main) {
  const view = new RunsView(main);
  if (!exported) document.title = "Runs · Halation";
  return view;
}
