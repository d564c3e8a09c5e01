// The page of a generation: how far it is, its images under a filter, its failures, its config and log.

import { Log, Settings } from "./about.js";
import { get, steadily, thumb } from "./api.js";
import { fill, h, isTyping, recall, remember, setText } from "./dom.js";
import { countText, durationText, numberText, percentText, pluralText, rateText, valueText, workerText } from "./format.js";
import { Grid } from "./grid.js";
import { ago, emptyState, fadeEdges, goneState, notify, stateChip } from "./parts.js";
import { PictureDialog } from "./picture.js";
import { addressOf, FilterBar, filterOf, isFiltered, isOfReason, NO_FILTER, RowPages } from "./rows.js";

const TOLD = ["num_inference_steps", "guidance_scale", "scheduler", "dtype", "negative_prompt", "cfg_truncation_step", "enable_half_frame", "compile"];
const MOST_WORKERS = 12;

/** One bar of three parts: done, failed, and the rest. */
function partsBar({ planned, done, failed }, label) {
  const part = (count, state) => (count > 0 ? h("span", { class: "parts-part", dataset: { state }, style: { width: `${((100 * count) / Math.max(1, planned)).toFixed(3)}%` } }) : null);
  return h(
    "div",
    { class: "parts", role: "progressbar", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": planned, "aria-valuenow": done + failed, "aria-valuetext": `${countText(done)} done, ${countText(failed)} failed, of ${countText(planned)}` },
    part(done, "done"),
    part(failed, "failed"),
  );
}

function countsOf({ counts, summary, rate, left_s: leftS }, onState) {
  const one = (state, count, word) => h("button", { class: "count", type: "button", dataset: { count: state }, title: `Show ${word} images`, onclick: () => onState(state) }, h("strong", { class: "number" }, countText(count)), ` ${word}`);
  const fact = (name, strong, word) => h("span", { class: "count", dataset: { count: name } }, h("strong", { class: "number" }, strong), word ? ` ${word}` : null);
  const running = summary.state === "running";
  return h(
    "div",
    { class: "counts" },
    fact("share", percentText(counts.done, counts.planned), `of ${countText(counts.planned)}`),
    one("done", counts.done, "done"),
    counts.failed > 0 ? one("failed", counts.failed, "failed") : null,
    counts.open > 0 ? one("open", counts.open, "open") : null,
    rate && running ? fact("rate", rateText(rate, "images")) : null,
    running && leftS !== null && leftS !== undefined ? fact("left", durationText(leftS), "left") : null,
  );
}

/** One unit for all workers, that of the fastest, so that they compare at a glance. */
function pacesOf(workers) {
  const fastest = Math.max(...workers.map((worker) => worker.per_s ?? 0));
  const [times, letter] = fastest >= 1 ? [1, "s"] : fastest >= 1 / 60 ? [60, "min"] : [3600, "h"];
  return (worker) => (worker.per_s ? `${numberText(worker.per_s * times, 3)} / ${letter}` : "–");
}

function workerRow(worker, most, pace, onWorker) {
  return h(
    "tr",
    { dataset: { worker: worker.name } },
    h("th", { scope: "row" }, h("button", { class: "link-button", type: "button", title: `Show the images of ${workerText(worker.name)}`, onclick: () => onWorker(String(worker.name)) }, workerText(worker.name))),
    h("td", { class: "worker-bar" }, partsBar({ planned: most, done: worker.done, failed: worker.failed }, `Images by ${workerText(worker.name)}`)),
    h("td", { class: "number" }, countText(worker.done)),
    h("td", { class: worker.failed > 0 ? "number bad-text" : "number muted" }, countText(worker.failed)),
    pace ? h("td", { class: worker.per_s ? "number" : "number muted" }, pace(worker)) : null,
  );
}

/** A table of workers; many are folded away behind their number. */
function workersOf(workers, onWorker, open) {
  if (workers.length === 0) return null;
  const most = Math.max(...workers.map((worker) => worker.done + worker.failed));
  // Only a running worker has a rate.
  const pace = workers.some((worker) => worker.per_s) ? pacesOf(workers) : null;
  const heads = [["Worker"], ["Share", "Images of each worker, against the one with most"], ["Done"], ["Failed"], ...(pace ? [["Rate", "Images in the last minute"]] : [])];
  const table = h(
    "table",
    { class: "workers", id: "workers" },
    h("caption", { class: "unseen" }, "Workers"),
    h("thead", null, h("tr", null, heads.map(([name, title]) => h("th", { scope: "col", title }, name)))),
    h("tbody", null, workers.map((worker) => workerRow(worker, most, pace, onWorker))),
  );
  if (workers.length <= MOST_WORKERS) return table;
  return h("details", { class: "workers-many", open }, h("summary", null, `${countText(workers.length)} workers`), table);
}

function settingsLine(detail, settings) {
  const sizes = (detail.size ?? []).slice(0, 3).map(([width, height, count]) => (detail.size.length > 1 ? `${width}×${height} (${countText(count)})` : `${width}×${height}`));
  const [low, high] = detail.seeds ?? [];
  const facts = [
    ["model", detail.model],
    ["size", sizes.join(", ")],
    ["seeds", low === undefined || low === null ? "" : low === high ? String(low) : `${low}–${high}`],
    ...TOLD.filter((name) => ![null, undefined, "", false].includes(settings?.[name])).map((name) => [name, valueText(settings[name])]),
  ];
  return h("dl", { class: "facts", id: "facts" }, facts.filter(([, value]) => value).map(([name, value]) => h("div", null, h("dt", null, name.replaceAll("_", " ")), h("dd", { title: value }, value))));
}

/** How long an ended generation took, and how fast its last call drew: [text, title] each. */
function tookTexts({ summary, counts, last_call: call }) {
  if (summary.state === "running") return [];
  const took = summary.seconds ? [[`took ${durationText(summary.seconds)}`, "The time of all its commands together, as they recorded it"]] : [];
  const rate = call?.images > 0 && call.seconds > 0 ? rateText(call.images / call.seconds, "images") : "";
  if (!rate) return took;
  const title = "Images of the last call by its time, with the loading of the model";
  return [...took, [call.images < counts.done ? `${rate} (${pluralText(call.images, "image")} in the last call)` : rate, title]];
}

/** The head of a generation's page; drawn again at every change. */
class ProgressHead {
  constructor({ onState, onWorker }) {
    this.onState = onState;
    this.onWorker = onWorker;
    this.settings = null;
    this.node = h("section", { class: "gen-head", id: "gen-head", "aria-label": "Progress" });
  }

  show(detail) {
    const { summary, counts } = detail;
    const open = this.node.querySelector(".workers-many")?.open ?? false;
    const focused = this.node.contains(document.activeElement) ? document.activeElement.textContent : null;
    this.node.dataset.state = summary.state;
    fill(
      this.node,
      h("div", { class: "run-heading" }, h("a", { class: "crumb", href: "#/" }, "Runs"), h("h1", { title: summary.name }, summary.name), stateChip(summary.state, summary.state === "running" ? 0 : counts.failed)),
      h("p", { class: "run-line" }, [summary.kind, summary.title].filter(Boolean).map((word) => h("span", null, word)), tookTexts(detail).map(([text, title]) => h("span", { title }, text)), h("span", null, "changed ", ago(summary.changed))),
      summary.reason ? h("p", { class: "gen-reason", dataset: { state: summary.state } }, summary.reason) : null,
      countsOf(detail, this.onState),
      partsBar(counts, "Images done"),
      workersOf(detail.workers ?? [], this.onWorker, open),
      settingsLine(detail, this.settings),
    );
    // Drawn again under somebody's finger: the focus goes to what says the same now.
    if (focused !== null) [...this.node.querySelectorAll("button, a, summary")].find((node) => node.textContent === focused)?.focus({ preventScroll: true });
  }
}

const LOOK_AGAIN_MS = 1000;
const GENERATION_TABS = [["pictures", "Images"], ["failures", "Failures"], ["config", "Config"], ["log", "Log"]];
const CELL_SIZES = { min: 56, max: 420, step: 4, usual: 148 };

/** What a cell shows of a row. */
function cellOf(run, row, size) {
  const name = row.id ?? String(row.index + 1);
  const words = { done: "", failed: `failed: ${row.reason ?? ""}`, open: "not drawn yet" }[row.state] ?? row.state;
  const url = row.state === "done" ? thumb(run, row, size * (window.devicePixelRatio || 1) * 0.9) : "";
  const absent = row.state === "done" && !url ? "not in this export" : "";
  return {
    key: `${row.key}:${row.v ?? ""}`,
    state: row.state,
    url,
    label: [`${row.index + 1}`, words, row.prompt, `seed ${row.seed}`].filter(Boolean).join(", "),
    title: `${row.prompt}\n${name}, seed ${row.seed}${row.reason ? `\n${row.reason}` : ""}`,
    caption: row.prompt,
    note: row.state === "failed" ? `failed\n${row.reason ?? ""}` : row.state === "open" ? countText(row.index + 1) : absent,
    badge: row.frames > 1 ? `${row.frames} frames` : "",
    pixelated: Math.max(row.w ?? 0, row.h ?? 0) <= 128 && (row.w ?? 0) < size,
  };
}

/** The tab that the last part of an address names, whatever filter follows it. */
function tabOf(text) {
  const asked = (text ?? "").split("?")[0];
  return GENERATION_TABS.some(([key]) => key === asked) ? asked : "pictures";
}

class GenerationView {
  constructor(main, route, detail) {
    this.main = main;
    this.run = route.id;
    this.detail = detail;
    this.filter = filterOf(location.hash);
    this.tab = null;
    this.head = new ProgressHead({ onState: (state) => this.goTo({ state }), onWorker: (worker) => this.goTo({ worker }) });
    this.tabs = fadeEdges(h("nav", { class: "tabs", "aria-label": "Parts of this run" }));
    this.panel = h("div", { class: "gen-panel" });
    fill(main, this.head.node, this.tabs, this.panel);
    this.lookAgain = steadily(() => this.look(), LOOK_AGAIN_MS);
    this.head.show(detail);
    this.openTab(route.tab);
    this.loadSettings();
    this.onKey = (event) => this.key(event);
    document.addEventListener("keydown", this.onKey);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event) || document.querySelector("dialog[open]")) return;
    if (event.key.startsWith("Arrow") && [document.body, this.main].includes(document.activeElement) && this.takeFocus()) event.preventDefault();
    const tab = GENERATION_TABS[Number(event.key) - 1];
    if (tab) location.hash = addressOf(this.run, tab[0], tab[0] === "pictures" ? this.filter : NO_FILTER);
  }

  async loadSettings() {
    try {
      const { settings } = await get(`/api/runs/${encodeURIComponent(this.run)}/config`);
      this.head.settings = settings;
      this.above(() => this.head.show(this.detail));
    } catch {
      return; // The head stands without its settings; the Config tab says what is wrong.
    }
  }

  /** Changes what is above the images without moving them. */
  above(change) {
    if (this.pictures) this.pictures.grid.keepBelow(change);
    else change();
  }

  routed(route) {
    const before = this.pictures ? this.filter : null;
    // The other tabs have no filter in their address: that of the images waits until one comes back to them.
    if (tabOf(route.tab) === "pictures") this.filter = filterOf(location.hash);
    this.openTab(route.tab);
    if (before && this.pictures && Object.keys(before).some((name) => before[name] !== this.filter[name])) this.pictures.take(this.filter);
  }

  goTo(part) {
    location.hash = addressOf(this.run, "pictures", { ...NO_FILTER, ...part });
  }

  openTab(text) {
    const name = tabOf(text);
    if (name !== this.tab) {
      this.leaveTab();
      this.tab = name;
      fill(this.panel);
      if (name === "pictures") this.pictures = new PicturesPart(this);
      else this.part = partOf(name, this);
    }
    this.showTabs();
  }

  showTabs() {
    const number = { failures: this.detail.counts.failed };
    fill(this.tabs, GENERATION_TABS.map(([key, text], index) => h("a", { id: `tab-${key}`, title: `${text} (${index + 1})`, href: addressOf(this.run, key, key === "pictures" ? this.filter : NO_FILTER), "aria-current": key === this.tab ? "page" : null }, text, number[key] > 0 ? h("span", { class: "tab-count" }, countText(number[key])) : null)));
  }

  leaveTab() {
    this.pictures?.close();
    this.pictures = null;
    this.part?.close?.();
    this.part = null;
  }

  changed(event) {
    if (event.id === this.run || event.id === "") this.lookAgain();
  }

  async look() {
    try {
      const detail = await get(`/api/runs/${encodeURIComponent(this.run)}`);
      if (this.gone) return;
      this.detail = detail;
    } catch (error) {
      if (error.status === 404 && !this.gone) this.vanish();
      return;
    }
    this.above(() => this.head.show(this.detail));
    const focused = this.tabs.contains(document.activeElement) ? document.activeElement.id : null;
    this.showTabs();
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
    this.pictures?.refresh();
    this.part?.refresh?.();
  }

  /** The run's folder went away: the page says so, and the next address mounts anew. */
  vanish() {
    this.unmount();
    this.routed = null;
    fill(this.main, goneState(this.detail.summary.name));
  }

  /** The focus goes to the image it was on last, as soon as there is one; whether there may be. */
  takeFocus() {
    if (!this.pictures) return false;
    this.pictures.takeFocus();
    return true;
  }

  unmount() {
    this.gone = true;
    this.lookAgain.stop();
    document.removeEventListener("keydown", this.onKey);
    this.leaveTab();
  }
}

/** The grid with its filters. */
class PicturesPart {
  constructor(view) {
    this.view = view;
    this.bar = new FilterBar(view.filter, (filter) => this.pick(filter));
    const size = recall("cellSize", CELL_SIZES.usual);
    this.slider = h("input", { type: "range", id: "cell-size", min: CELL_SIZES.min, max: CELL_SIZES.max, step: CELL_SIZES.step, value: size, "aria-label": "Size of the images", oninput: () => this.resize() });
    this.bar.node.append(h("span", { class: "spacer" }), h("label", { class: "range" }, h("span", null, "Size"), this.slider));
    this.host = h("div", { id: "grid" });
    this.none = h("div", { id: "grid-none" });
    this.sticky = h("div", { class: "gen-sticky" }, this.bar.node);
    fill(view.panel, this.sticky, this.none, this.host);
    const [width, height] = view.detail.size?.[0] ?? [1, 1];
    this.grid = new Grid(this.host, {
      label: "Images",
      size,
      aspect: height / width || 1,
      inset: () => this.covered(),
      describe: (index) => this.describe(index),
      onLook: (first, last) => this.pages.need(first, last),
      onOpen: (index) => this.open(index),
    });
    this.start();
  }

  /** What of the window the bars at its top cover; on a narrow page the filters scroll away. */
  covered() {
    const filters = getComputedStyle(this.sticky).position === "sticky" ? this.sticky.offsetHeight : 0;
    return filters + document.getElementById("top").offsetHeight;
  }

  describe(index) {
    const row = this.pages.row(index);
    return row ? cellOf(this.view.run, row, this.grid.layout.cellWidth) : null;
  }

  start() {
    this.pages?.close();
    this.started = false;
    this.host.setAttribute("aria-busy", "true");
    this.pages = new RowPages(this.view.run, this.view.filter, { onArrival: () => this.arrived(), onTrouble: (error) => this.trouble(error) });
    this.bar.setWorkers((this.view.detail.workers ?? []).map((worker) => String(worker.name)));
    this.bar.setCount(null, this.view.detail.counts.planned);
  }

  arrived() {
    const { total } = this.pages;
    this.bar.setCount(total, this.view.detail.counts.planned);
    this.host.removeAttribute("aria-busy");
    this.host.hidden = total === 0;
    fill(this.none, total === 0 ? this.emptyText() : null);
    if (this.started) {
      this.grid.setCount(total);
      this.grid.repaint();
      this.dialog?.refresh();
    } else this.grid.restart(total);
    this.started = true;
    if (this.focusWanted) this.takeFocus();
  }

  takeFocus() {
    this.focusWanted = !this.started;
    if (this.started && this.pages.total > 0 && [document.body, this.view.main].includes(document.activeElement)) this.grid.focusCell(this.grid.active);
  }

  emptyText() {
    if (isFiltered(this.view.filter)) return emptyState("No image matches", "Fewer words, or another state, show more.");
    return emptyState("Nothing planned yet", "The images appear here as soon as the command has read its prompts.");
  }

  trouble(error) {
    setText(this.bar.count, error.message);
    if (error.status === 403) notify("The link is no longer valid: open the one that `halation gallery` printed.", "bad");
  }

  /** A filter from the bar: the address follows without a step back for each letter typed. */
  pick(filter) {
    this.view.filter = filter;
    history.replaceState(null, "", addressOf(this.view.run, "pictures", filter));
    this.view.showTabs();
    this.start();
  }

  take(filter) {
    this.bar.take(filter);
    this.start();
  }

  resize() {
    remember("cellSize", Number(this.slider.value));
    this.grid.setSize(Number(this.slider.value));
    this.grid.repaint();
  }

  refresh() {
    this.bar.setWorkers((this.view.detail.workers ?? []).map((worker) => String(worker.name)));
    const [width, height] = this.view.detail.size?.[0] ?? [1, 1];
    this.grid.setAspect(height / width || 1);
    this.pages.refresh();
  }

  open(index) {
    if (!this.pages.row(index) || this.dialog) return;
    this.dialog = new PictureDialog({
      run: this.view.run,
      pages: this.pages,
      at: index,
      onMove: (at) => {
        this.grid.active = at;
      },
      onClose: (at) => {
        this.dialog = null;
        // The dialog gives the focus back to where it came from; it belongs to the image that was looked at last.
        queueMicrotask(() => this.view.gone || this.grid.focusCell(at));
      },
    });
  }

  close() {
    this.bar.close();
    this.pages.close();
    this.dialog?.dialog.close();
    this.grid.close();
  }
}

const MOST_FAILED_ROWS = 200;
const ROWS_A_REASON = 10;

/** Reasons with how many failed of each, and which images those are; a click shows them. */
class FailuresPart {
  constructor(view) {
    this.view = view;
    this.rows = [];
    this.refresh();
  }

  /** The first failed rows: an export has no server that filters, and answers with all it holds. */
  async loadRows() {
    const { failed } = this.view.detail.counts;
    if (this.loadedFor === failed) return;
    this.loadedFor = failed;
    try {
      const { rows } = await get(`/api/runs/${encodeURIComponent(this.view.run)}/rows?state=failed&limit=${MOST_FAILED_ROWS}`);
      if (this.view.part !== this) return;
      this.rows = rows.filter((row) => row.state === "failed");
      this.refresh();
    } catch (error) {
      this.loadedFor = null;
      console.warn(error);
    }
  }

  rowsOf(reason, count, show) {
    const shown = this.rows.filter((row) => isOfReason(row.reason, reason)).slice(0, ROWS_A_REASON);
    if (shown.length === 0) return null;
    const rows = shown.map((row) => h("tr", { dataset: { row: row.index } }, h("th", { scope: "row", class: "mono" }, row.id ?? countText(row.index + 1)), h("td", null, row.prompt), h("td", { class: "number" }, String(row.seed))));
    const heads = ["Id", "Prompt", "Seed"].map((name) => h("th", { scope: "col" }, name));
    return [
      h("table", { class: "table failed-rows" }, h("thead", null, h("tr", null, heads)), h("tbody", null, rows)),
      count > shown.length ? h("button", { class: "link-button failed-more", type: "button", onclick: () => show(reason) }, `and ${countText(count - shown.length)} more`) : null,
    ];
  }

  refresh() {
    const { reasons, counts } = this.view.detail;
    if (!counts.failed) {
      fill(this.view.panel, emptyState("No failures", counts.open > 0 ? "Nothing has failed so far." : "Every image was drawn."));
      return;
    }
    this.loadRows();
    const show = (reason) => this.view.goTo({ state: "failed", reason });
    const focused = this.view.panel.contains(document.activeElement) ? document.activeElement.dataset.reason : undefined;
    const told = reasons.reduce((sum, [, count]) => sum + count, 0);
    fill(
      this.view.panel,
      h("p", { class: "muted failures-say" }, `${pluralText(counts.failed, "image")} failed, for ${pluralText(reasons.length, "reason")}. The same command again draws what is missing.`),
      h("ul", { class: "reasons", id: "reasons" }, reasons.map(([reason, count]) =>
        h("li", null, h("button", { class: "reason", type: "button", dataset: { reason }, onclick: () => show(reason) }, h("strong", { class: "number" }, countText(count)), h("span", { class: "reason-text mono" }, reason || "no reason was written"), h("span", { class: "reason-bar", "aria-hidden": "true", style: { width: `${((100 * count) / Math.max(1, told)).toFixed(1)}%` } })), this.rowsOf(reason, count, show)),
      )),
    );
    if (focused !== undefined) [...this.view.panel.querySelectorAll("[data-reason]")].find((node) => node.dataset.reason === focused)?.focus({ preventScroll: true });
  }
}

function partOf(name, view) {
  if (name === "failures") return new FailuresPart(view);
  const part = name === "config" ? new Settings(view.panel, view.run) : new Log(view.panel, view.run);
  part.refresh();
  return part;
}

/** Fills main with a generation's page. */
export function mountGeneration(main, route, detail) {
  return new GenerationView(main, route, detail);
}
