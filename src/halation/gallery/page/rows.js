// The rows of a generation under a filter: fetched by the page where they are looked at, kept for a while, and filtered here where no server can.

import { exported, get } from "./api.js";
import { fill, h, setText } from "./dom.js";
import { countText, pluralText, workerText } from "./format.js";
import { isTouch, segmented } from "./parts.js";

const ROWS_A_PAGE = 200;
const MOST_REQUESTS = 2;
const MOST_PAGES_KEPT = 80;
const MOST_GATHERED = 5000;
const RETRY_MS = 3000;

export const NO_FILTER = { q: "", state: "", worker: "", seed: "", reason: "" };

/** The part of a filter that a server can answer, as the words of a query. */
function rowQuery(filter) {
  const query = new URLSearchParams();
  for (const name of ["q", "state", "worker", "seed"]) {
    if (filter[name] !== "") query.set(name, filter[name]);
  }
  return query;
}

/** Whether a failure is of a group's reason: its first line counts, and in the group's … stands for anything. */
export function isOfReason(text, reason) {
  const line = (text ?? "").trim().split(/[\r\n]/)[0] || "no reason given";
  const parts = reason.split("…");
  if (parts.length === 1) return line === reason;
  const [first, last] = [parts[0], parts[parts.length - 1]];
  if (line.length < first.length + last.length || !line.startsWith(first) || !line.endsWith(last)) return false;
  const inner = line.slice(first.length, line.length - last.length);
  let from = 0;
  return parts.slice(1, -1).every((part) => {
    const found = inner.indexOf(part, from);
    from = found + part.length;
    return found >= 0;
  });
}

/** The rows that a filter lets through: the server's rule, for rows that are here already. */
function matchingRows(rows, filter) {
  const words = filter.q.toLowerCase().split(/\s+/).filter(Boolean);
  return rows.filter((row) => {
    if (filter.state !== "" && row.state !== filter.state) return false;
    if (filter.worker !== "" && String(row.worker ?? "") !== filter.worker) return false;
    if (filter.seed !== "" && String(row.seed) !== filter.seed) return false;
    if (filter.reason !== "" && !isOfReason(row.reason, filter.reason)) return false;
    if (words.length === 0) return true;
    const text = `${row.prompt}\n${row.id ?? ""}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
}

/** Rows by their place in the filtered list. `onArrival()` after anything came, `onTrouble(error)` when a request failed. */
export class RowPages {
  constructor(run, filter, { onArrival, onTrouble }) {
    this.base = `/api/runs/${encodeURIComponent(run)}/rows`;
    this.filter = filter;
    this.onArrival = onArrival;
    this.onTrouble = onTrouble;
    this.total = null;
    this.pages = new Map();
    this.requests = new Map();
    this.wanted = [0];
    this.pinned = null;
    this.waiting = [];
    this.age = 0;
    this.closed = false;
    this.gathered = null;
    // Reasons are not a filter of the server's, and an export has no server: then all rows come first and are filtered here.
    this.local = exported || filter.reason !== "";
    if (this.local) this.gather();
    else this.pump();
  }

  row(index) {
    if (this.local) return this.gathered?.[index];
    const held = this.pages.get(Math.floor(index / ROWS_A_PAGE));
    return held?.rows[index % ROWS_A_PAGE];
  }

  /** Says which places are looked at: their pages are fetched, requests for others are given up. */
  need(first, last) {
    const pages = [];
    for (let page = Math.floor(first / ROWS_A_PAGE); page <= Math.floor(last / ROWS_A_PAGE); page += 1) pages.push(page);
    this.wanted = pages;
    this.pump();
  }

  /** The row of one place, fetched where it is not here yet; undefined when another place was asked for meanwhile. */
  at(index) {
    const held = this.row(index);
    if (held || this.local) return Promise.resolve(held);
    this.release();
    this.pinned = Math.floor(index / ROWS_A_PAGE);
    return new Promise((resolve) => {
      this.waiting.push({ index, resolve });
      this.pump();
    });
  }

  release() {
    for (const { resolve } of this.waiting.splice(0)) resolve(undefined);
    this.pinned = null;
  }

  /** Everything here may be out of date: what is looked at is fetched again, and shown as it was until then. */
  refresh() {
    if (exported) return;
    this.age += 1;
    if (this.local) this.gather();
    else this.pump();
  }

  close() {
    this.closed = true;
    clearTimeout(this.retry);
    for (const request of this.requests.values()) request.abort();
    this.requests.clear();
    this.release();
  }

  pump() {
    if (this.closed || this.local) return;
    const wanted = this.pinned === null ? this.wanted : [this.pinned, ...this.wanted];
    for (const [page, request] of this.requests) {
      if (wanted.includes(page)) continue;
      this.requests.delete(page);
      request.abort();
    }
    for (const page of wanted) {
      if (this.requests.size >= MOST_REQUESTS) return;
      if (!this.requests.has(page) && this.pages.get(page)?.age !== this.age) this.request(page);
    }
  }

  async request(page) {
    const control = new AbortController();
    const age = this.age;
    this.requests.set(page, control);
    const query = rowQuery(this.filter);
    query.set("offset", page * ROWS_A_PAGE);
    query.set("limit", ROWS_A_PAGE);
    try {
      const answer = await get(`${this.base}?${query}`, { signal: control.signal });
      if (!control.signal.aborted) this.arrived(page, age, answer);
    } catch (error) {
      if (!control.signal.aborted) this.failed(page, error);
    }
  }

  arrived(page, age, { total, rows }) {
    this.requests.delete(page);
    this.total = total;
    this.pages.delete(page);
    this.pages.set(page, { rows, age });
    for (const old of this.pages.keys()) {
      if (this.pages.size <= MOST_PAGES_KEPT) break;
      this.pages.delete(old);
    }
    const here = this.waiting.filter(({ index }) => Math.floor(index / ROWS_A_PAGE) === page);
    this.waiting = this.waiting.filter((one) => !here.includes(one));
    if (this.pinned === page) this.pinned = null;
    for (const { index, resolve } of here) resolve(this.row(index));
    this.onArrival();
    this.pump();
  }

  failed(page, error) {
    this.onTrouble(error);
    // The slot stays taken until then, so that a server that is away is not asked in a loop.
    this.retry = setTimeout(() => {
      this.requests.delete(page);
      this.pump();
    }, RETRY_MS);
  }

  async gather() {
    const age = this.age;
    const query = rowQuery({ ...this.filter, state: this.filter.reason === "" ? this.filter.state : "failed" });
    query.set("limit", ROWS_A_PAGE);
    const rows = [];
    try {
      for (let total = Infinity; rows.length < Math.min(total, MOST_GATHERED); ) {
        query.set("offset", rows.length);
        const answer = await get(`${this.base}?${query}`);
        if (this.closed || age !== this.age) return;
        total = exported ? answer.rows.length : answer.total;
        if (answer.rows.length === 0) break;
        rows.push(...answer.rows);
      }
    } catch (error) {
      this.onTrouble(error);
      return;
    }
    this.gathered = matchingRows(rows, this.filter);
    this.total = this.gathered.length;
    this.onArrival();
  }
}

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
    this.words = h("input", { class: "field field-search", id: "filter-words", type: "search", placeholder: isTouch() ? "Search prompts and ids" : "Search prompts and ids  ( / )", "aria-label": "Search prompts and ids", autocomplete: "off", spellcheck: "false", dataset: { search: "" }, oninput: () => this.typed() });
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
