// What narrows a list of images: words, state, worker, seed; all of it stands in the address, so a link opens the same view.

import { fill, h, setText } from "./dom.js";
import { countText, pluralText } from "./format.js";
import { segmented } from "./parts.js";
import { workerText } from "./progress.js";
import { NO_FILTER } from "./rows.js";

const TYPED_MS = 200;
const STATES = ["done", "failed", "open"];

/** The filter that an address like "#/run/ID/pictures?q=dog&state=failed" asks for. */
export function filterOf(hash) {
  const query = new URLSearchParams(hash.includes("?") ? hash.slice(hash.indexOf("?") + 1) : "");
  const filter = { ...NO_FILTER };
  for (const name of Object.keys(filter)) filter[name] = query.get(name) ?? "";
  if (!STATES.includes(filter.state)) filter.state = "";
  if (!/^-?\d+$/.test(filter.seed)) filter.seed = "";
  return filter;
}

/** The address of a view of a run: the same filter comes out of it again. */
export function addressOf(run, tab, filter) {
  const query = new URLSearchParams(Object.entries(filter).filter(([, value]) => value !== ""));
  const text = query.toString();
  return `#/run/${encodeURIComponent(run)}/${tab}${text ? `?${text}` : ""}`;
}

export function isFiltered(filter) {
  return Object.values(filter).some((value) => value !== "");
}

/** The bar of filters; `onPick(filter)` after a change, words and seeds when the typing pauses. */
export class FilterBar {
  constructor(filter, onPick) {
    this.filter = { ...filter };
    this.onPick = onPick;
    this.words = h("input", { class: "field field-search", id: "filter-words", type: "search", placeholder: "Search prompts and ids  ( / )", "aria-label": "Search prompts and ids", autocomplete: "off", spellcheck: "false", dataset: { search: "" }, oninput: () => this.typed() });
    this.states = segmented("State", [["", "All"], ["done", "Done"], ["failed", "Failed"], ["open", "Open"]], filter.state, (state) => this.pick({ state }));
    this.states.id = "filter-state";
    this.worker = h("select", { class: "field", id: "filter-worker", "aria-label": "Worker", onchange: () => this.pick({ worker: this.worker.value }) });
    this.seed = h("input", { class: "field field-seed", id: "filter-seed", type: "text", inputmode: "numeric", pattern: "[0-9]*", placeholder: "Seed", "aria-label": "Seed, a whole number", autocomplete: "off", oninput: () => this.typed() });
    this.reason = h("span", { class: "filter-reason chip", dataset: { state: "failed" } });
    this.clear = h("button", { class: "button button-quiet", type: "button", id: "filter-clear", onclick: () => this.reset() }, "Clear");
    this.count = h("output", { class: "muted small number", id: "filter-count", "aria-live": "polite" });
    this.node = h("div", { class: "toolbar filter-bar", role: "search" }, this.words, this.states, this.worker, this.seed, this.reason, this.clear, this.count);
    this.words.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.words.value === "") this.words.blur();
    });
    this.setWorkers([]);
    this.show();
  }

  /** The workers to choose from; the one chosen stays though it has gone. */
  setWorkers(names) {
    const all = [...new Set([...names, ...(this.filter.worker ? [this.filter.worker] : [])])];
    const key = all.join("\n");
    this.worker.hidden = all.length < 2 && this.filter.worker === "";
    if (key === this.workerKey) return;
    this.workerKey = key;
    fill(this.worker, h("option", { value: "" }, "All workers"), all.map((name) => h("option", { value: name }, workerText(name))));
    this.worker.value = this.filter.worker;
  }

  setCount(total, planned) {
    const text = total === null ? "…" : isFiltered(this.filter) || total !== planned ? `${countText(total)} of ${countText(planned)}` : pluralText(planned, "image");
    setText(this.count, text);
  }

  typed() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      const seed = this.seed.value.trim();
      const valid = /^(-?\d+)?$/.test(seed);
      this.seed.setAttribute("aria-invalid", String(!valid));
      this.pick({ q: this.words.value.trim(), seed: valid ? seed : this.filter.seed });
    }, TYPED_MS);
  }

  pick(part) {
    clearTimeout(this.timer);
    const next = { ...this.filter, ...part };
    if (next.state !== "failed") next.reason = "";
    if (Object.keys(next).every((name) => next[name] === this.filter[name])) return;
    this.filter = next;
    this.show();
    this.onPick(next);
  }

  reset() {
    this.words.focus();
    this.pick({ ...NO_FILTER });
  }

  /** Takes a filter from outside (the address, a click on a reason). */
  take(filter) {
    this.filter = { ...filter };
    this.show();
  }

  show() {
    const { q, state, worker, seed, reason } = this.filter;
    if (this.words.value.trim() !== q) this.words.value = q;
    if (this.seed.value.trim() !== seed) this.seed.value = seed;
    this.seed.removeAttribute("aria-invalid");
    this.states.choose(state);
    this.worker.value = worker;
    this.reason.hidden = reason === "";
    this.reason.title = reason;
    fill(this.reason, h("span", { class: "filter-reason-text" }, reason), h("button", { class: "filter-reason-drop", type: "button", "aria-label": "Any reason", onclick: () => this.pick({ reason: "" }) }, "✕"));
    this.clear.hidden = !isFiltered(this.filter);
  }

  close() {
    clearTimeout(this.timer);
  }
}
