// All runs as rows: the last sample, the state, how far it is. Rows are kept and brought up to date, so nothing jumps.

import { exported, get, steadily, thumb } from "./api.js";
import { fill, h, recall, remember, setText } from "./dom.js";
import { countText, durationText, farText, lossText, percentText, pluralText, rateText } from "./format.js";
import { ago, emptyState, errorState, isTouch, progressBar, skeleton, sparkline, stateChip } from "./parts.js";

/** Parents by id: as the server says, or where it says nothing by the longest name that holds this one's. */
function parentsOf(runs) {
  const byName = new Map(runs.map((run) => [run.name, run.id]));
  const ids = new Set(runs.map((run) => run.id));
  const above = (name) => {
    const cut = name.lastIndexOf("/");
    if (cut < 0) return null;
    return byName.get(name.slice(0, cut)) ?? above(name.slice(0, cut));
  };
  return new Map(runs.map((run) => [run.id, ids.has(run.parent) ? run.parent : above(run.name)]));
}

/** Whether a run is one of the image folders that a watch draws for every checkpoint: many, and rarely what one looks for. */
function isWatchPictures(run, parent) {
  return run.kind === "generate" && parent?.kind === "watch";
}

/** Whether a name is that of a run or of something inside its folder. */
export function isOrInside(name, whole) {
  return name === whole || name.startsWith(`${whole}/`);
}

/** Running ones first in the order they were started, so that they keep their places; then what changed last. A run stands where the liveliest of its family would. */
function orderRuns(runs) {
  const parents = parentsOf(runs);
  const children = new Map();
  for (const run of runs) children.set(parents.get(run.id), [...(children.get(parents.get(run.id)) ?? []), run]);
  const own = (run) => [run.state === "running" ? 0 : 1, -((run.state === "running" ? (run.started ?? run.changed) : run.changed) ?? 0)];
  const family = (run) => (children.get(run.id) ?? []).map(family).reduce((a, b) => (b[0] - a[0] || b[1] - a[1]) < 0 ? b : a, own(run));
  const keys = new Map(runs.map((run) => [run.id, family(run)]));
  const before = (a, b) => keys.get(a.id)[0] - keys.get(b.id)[0] || keys.get(a.id)[1] - keys.get(b.id)[1] || a.name.localeCompare(b.name);
  const byId = new Map(runs.map((run) => [run.id, run]));
  const walk = (run, depth) => [{ run, depth, parent: byId.get(parents.get(run.id)) ?? null }, ...(children.get(run.id) ?? []).sort(before).flatMap((child) => walk(child, depth + 1))];
  return (children.get(null) ?? []).sort(before).flatMap((run) => walk(run, 0));
}

const REFRESH_MS = 1000;
const ROW = "a.run, button.run-fold";

function matches(run, words) {
  const text = `${run.name} ${run.kind} ${run.state} ${run.title ?? ""} ${run.reason ?? ""}`.toLowerCase();
  return words.every((word) => text.includes(word));
}

function numbersOf(run) {
  const parts = [];
  if (run.loss !== null && run.loss !== undefined) parts.push(h("span", { title: "The loss of the last step in metrics.jsonl" }, `last loss ${lossText(run.loss)}`));
  // The chip of a generation that ended says it.
  if (run.failed > 0 && (run.unit === "steps" || run.state === "running")) parts.push(h("span", { class: "bad-text" }, run.unit === "steps" ? `${pluralText(run.failed, "sample")} failed` : `${countText(run.failed)} failed`));
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
    this.shown = null;
  }

  update({ run, depth, parent }) {
    const shown = [run.version, run.state, run.name, depth, parent?.name].join("|");
    if (this.shown === shown) return;
    this.shown = shown;
    this.link.dataset.state = run.state;
    this.node.className = depth > 0 ? "run-child" : "";
    this.node.dataset.depth = Math.min(depth, 2);
    const known = parent && run.name.startsWith(`${parent.name}/`) ? parent.name.length + 1 : 0;
    fill(this.name, known ? h("span", { class: "run-within" }, run.name.slice(0, known)) : null, run.name.slice(known));
    setText(this.title, [run.kind, run.title].filter(Boolean).join(" · "));
    setText(this.reason, run.reason ?? "");
    this.reason.hidden = !run.reason;
    fill(this.state, stateChip(run.state, run.state === "running" || run.unit === "steps" ? 0 : run.failed));
    fill(this.spark, run.spark?.length > 1 ? sparkline(run.spark, "Loss over steps") : null);
    this.showFar(run);
    fill(this.changed, ago(run.changed));
    this.showPicture(run);
  }

  showFar(run) {
    const far = farText(run.done, run.planned, run.unit);
    fill(
      this.far,
      h("span", { class: "run-count" }, h("span", null, far), run.planned > 0 ? h("span", { class: "muted" }, percentText(run.done, run.planned)) : null),
      run.planned > 0 ? progressBar(run.done, run.planned, run.state, `${run.name}: done`, run.unit === "steps" ? 0 : run.failed) : null,
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
    this.main = main;
    this.focused = null;
    this.rows = new Map();
    this.folds = new Map();
    this.unfolded = new Set(recall("runs.unfolded", []));
    this.list = h("ul", { class: "runs", id: "runs", "aria-label": "Runs" });
    this.rest = h("div", null, skeleton(5));
    this.count = h("span", { class: "muted small", id: "runs-count", role: "status" });
    this.filter = h("input", { class: "field field-search", id: "runs-filter", type: "search", placeholder: isTouch() ? "Filter runs" : "Filter runs  ( / )", "aria-label": "Filter runs by words", value: recall("runs.filter", ""), dataset: { search: "" }, oninput: () => this.filtered() });
    fill(main, h("div", { class: "toolbar" }, h("h1", { class: "unseen" }, "Runs"), this.filter, this.count), this.list, this.rest);
    this.list.addEventListener("keydown", (event) => this.key(event));
    this.list.addEventListener("focusin", (event) => (this.focused = event.target));
    this.onKey = (event) => this.pageKey(event);
    document.addEventListener("keydown", this.onKey);
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
    const all = orderRuns(this.runs);
    const placed = all.filter(({ run }) => matches(run, words));
    for (const [id, row] of this.rows) if (!this.runs.some((run) => run.id === id)) this.forget(id, row);
    this.place(this.nodesOf(placed));
    const counted = (list) => list.filter(({ run, parent }) => !isWatchPictures(run, parent)).length;
    const [num, whole] = [counted(placed), counted(all)];
    const running = this.runs.filter((run) => run.state === "running").length;
    setText(this.count, `${num === whole ? "" : `${countText(num)} of `}${pluralText(whole, "run")}${running ? `, ${running} running` : ""}`);
    fill(this.rest, this.nothing(placed));
  }

  /** Rows in their order; the images of a watch stand behind one row that opens them. */
  nodesOf(placed) {
    const folds = new Map();
    for (const { run, parent } of placed) if (isWatchPictures(run, parent)) folds.set(parent.id, (folds.get(parent.id) ?? 0) + 1);
    const made = new Set();
    return placed.flatMap((one) => {
      if (!isWatchPictures(one.run, one.parent)) return [this.rowOf(one)];
      const { id } = one.parent;
      const head = made.has(id) ? [] : [this.foldOf(one.parent, folds.get(id), placed.some(({ run }) => run.id === id))];
      made.add(id);
      return this.unfolded.has(id) ? [...head, this.rowOf(one)] : head;
    });
  }

  foldOf(watch, count, below) {
    if (!this.folds.has(watch.id)) {
      const button = h("button", { class: "run-fold", type: "button", dataset: { fold: watch.id }, onclick: () => this.toggle(watch.id) });
      this.folds.set(watch.id, h("li", null, button));
    }
    const open = this.unfolded.has(watch.id);
    const button = this.folds.get(watch.id).firstChild;
    button.setAttribute("aria-expanded", String(open));
    button.title = `What ${watch.name} drew for its checkpoints`;
    setText(button, `${open ? "▾" : "▸"} ${pluralText(count, "generation")}${below ? "" : ` of ${watch.name}`}`);
    return this.folds.get(watch.id);
  }

  toggle(id) {
    if (!this.unfolded.delete(id)) this.unfolded.add(id);
    remember("runs.unfolded", [...this.unfolded]);
    this.show();
  }

  nothing(runs) {
    if (runs.length > 0) return null;
    if (this.runs.length > 0) return emptyState("No run matches", "Clear the filter to see all of them.");
    return emptyState("No runs here yet", "Runs show up by themselves as soon as one starts below these folders. To make one:", "halation demo --output_dir runs/demo");
  }

  rowOf(one) {
    let row = this.rows.get(one.run.id);
    if (!row) {
      row = new RunRow(one.run);
      this.rows.set(one.run.id, row);
    }
    row.update(one);
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
    const links = [...this.list.querySelectorAll(ROW)];
    const at = links.indexOf(document.activeElement);
    const next = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: links.length - 1 }[event.key];
    if (next === undefined) return;
    if (next < 0) this.filter.focus();
    else this.focusRow(Math.min(next, links.length - 1), event);
    event.preventDefault();
  }

  /** Arrow keys work before anything has the focus: they begin where it was last. */
  pageKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (!["ArrowDown", "ArrowUp"].includes(event.key) || ![document.body, this.main].includes(document.activeElement)) return;
    if (this.takeFocus()) event.preventDefault();
  }

  /** The focus goes to the run it was on last, or to the first; whether there is one. */
  takeFocus() {
    const link = this.focused?.isConnected ? this.focused : this.list.querySelector(ROW);
    link?.focus();
    return Boolean(link);
  }

  focusRow(index, event) {
    const link = this.list.querySelectorAll(event.currentTarget === this.filter ? "a.run" : ROW)[index];
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
    document.removeEventListener("keydown", this.onKey);
  }
}

/** Shows the list of runs. */
export function mountRuns(main) {
  const view = new RunsView(main);
  if (!exported) document.title = "Runs · Halation";
  return view;
}
