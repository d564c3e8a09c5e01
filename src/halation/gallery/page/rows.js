// The rows of a generation under a filter: fetched by the page where they are looked at, kept for a while, and filtered here where no server can.

import { exported, get } from "./api.js";

export const ROWS_A_PAGE = 200;
const MOST_REQUESTS = 2;
const MOST_PAGES_KEPT = 80;
const MOST_GATHERED = 5000;
const RETRY_MS = 3000;

export const NO_FILTER = { q: "", state: "", worker: "", seed: "", reason: "" };

/** The part of a filter that a server can answer, as the words of a query. */
export function rowQuery(filter) {
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
export function matchingRows(rows, filter) {
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
