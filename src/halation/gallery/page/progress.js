// How a generation is getting on: counts, one bar by state, the workers, and what is being drawn with what.

import { fill, h } from "./dom.js";
import { countText, durationText, numberText, percentText, rateText, valueText } from "./format.js";
import { ago, stateChip } from "./parts.js";

const TOLD = ["num_inference_steps", "guidance_scale", "scheduler", "dtype", "negative_prompt", "cfg_truncation_step", "enable_half_frame", "compile"];
const MOST_WORKERS = 12;

/** A worker as people call it: a number alone says nothing. */
export function workerText(name) {
  return /^\d+$/.test(String(name)) ? `worker ${name}` : String(name);
}

/** One bar of three parts: done, failed, and the rest. */
export function partsBar({ planned, done, failed }, label) {
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
  const tried = worker.done + worker.failed;
  return h(
    "tr",
    { dataset: { worker: worker.name } },
    h("th", { scope: "row" }, h("button", { class: "link-button", type: "button", title: `Show the images of ${workerText(worker.name)}`, onclick: () => onWorker(String(worker.name)) }, workerText(worker.name))),
    h("td", { class: "worker-bar" }, partsBar({ planned: most, done: worker.done, failed: worker.failed }, `Images by ${workerText(worker.name)}`)),
    h("td", { class: "number" }, countText(worker.done)),
    h("td", { class: worker.failed > 0 ? "number bad-text" : "number muted" }, worker.failed > 0 ? `${countText(worker.failed)} failed` : tried > 0 ? "–" : ""),
    h("td", { class: worker.per_s ? "number" : "number muted", title: "Images drawn lately" }, pace(worker)),
  );
}

/** A table of workers; many are folded away behind their number. */
export function workersOf(workers, onWorker, open) {
  if (workers.length === 0) return null;
  const most = Math.max(...workers.map((worker) => worker.done + worker.failed));
  const pace = pacesOf(workers);
  const table = h(
    "table",
    { class: "workers", id: "workers" },
    h("caption", { class: "unseen" }, "Workers"),
    h("thead", { class: "unseen" }, h("tr", null, ["Worker", "Share", "Done", "Failed", "Rate"].map((name) => h("th", { scope: "col" }, name)))),
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

/** How long an ended generation took, and how fast that is. */
function tookText({ summary, counts }) {
  const tookS = summary.state !== "running" && summary.started ? summary.changed - summary.started : 0;
  return tookS > 0 ? `took ${durationText(tookS)}${counts.done > 1 ? `, ${rateText(counts.done / tookS, "images")}` : ""}` : "";
}

/** The head of a generation's page; drawn again at every change. */
export class ProgressHead {
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
      h("p", { class: "run-line" }, [summary.kind, summary.title, tookText(detail)].filter(Boolean).map((word) => h("span", null, word)), h("span", null, "changed ", ago(summary.changed))),
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
