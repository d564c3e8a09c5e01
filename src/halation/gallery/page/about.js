// What a run was told and what it says: its settings, its environment, what was changed on the way, and the end of its log.

import { exported, get } from "./api.js";
import { fill, h } from "./dom.js";
import { valueText } from "./format.js";
import { emptyState, errorState, isTouch, notify, skeleton } from "./parts.js";

/** {a: {b: 1}} as [["a.b", 1]]; lists stay values. */
function flatPairs(value, prefix = "") {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return [[prefix, value]];
  return Object.entries(value).flatMap(([name, inner]) => {
    const path = prefix ? `${prefix}.${name}` : name;
    const nested = inner !== null && typeof inner === "object" && !Array.isArray(inner) && Object.keys(inner).length > 0;
    return nested ? flatPairs(inner, path) : [[path, inner]];
  });
}

/** A list of texts (prompts) one below the other, anything else on one line. */
function linesOf(value) {
  const texts = Array.isArray(value) && value.length > 1 && value.every((one) => typeof one === "string");
  return texts ? value.map((one) => h("div", { class: "config-line" }, valueText(one))) : valueText(value);
}

function differsFrom(names, path) {
  return names.includes(path) || names.some((name) => path.startsWith(`${name}.`));
}

export class Settings {
  constructor(host, run) {
    this.run = run;
    this.search = h("input", { class: "field field-search", id: "config-search", type: "search", placeholder: isTouch() ? "Search settings" : "Search settings  ( / )", "aria-label": "Search settings", dataset: { search: "" }, oninput: () => this.show() });
    this.tables = h("div", { class: "config", id: "config" }, skeleton(8, "skeleton-line"));
    this.with = h("select", { class: "field", id: "config-with", "aria-label": "Compare with another run", onchange: () => this.pick(this.with.value) }, h("option", { value: "" }, "no other run"));
    this.withBox = h("label", { class: "range", hidden: true }, "Compare with", this.with);
    fill(host, h("div", { class: "toolbar" }, this.search, this.withBox), this.tables);
    this.config = null;
    this.other = null;
    if (!exported) this.loadRuns();
  }

  async loadRuns() {
    try {
      const { runs } = await get("/api/runs");
      const kind = runs.find((run) => run.id === this.run)?.kind;
      const family = ["train", "distill"].includes(kind) ? ["train", "distill"] : [kind];
      const others = runs.filter((run) => run.id !== this.run && family.includes(run.kind)).sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
      this.withBox.hidden = others.length === 0;
      this.with.append(...others.map((run) => h("option", { value: run.id }, run.name)));
      this.with.value = this.otherId ?? "";
    } catch (error) {
      console.warn(error);
    }
  }

  /** The address says with which run this one is compared. */
  routed(text) {
    if (text === (this.otherId ?? "")) return;
    this.with.value = text;
    this.onAddress?.(text ? `/${encodeURIComponent(text)}` : "");
    this.take(text);
  }

  pick(id) {
    const rest = id ? `/${encodeURIComponent(id)}` : "";
    history.replaceState(history.state, "", `${location.hash.split("/").slice(0, 3).join("/")}/config${rest}`);
    this.onAddress?.(rest);
    this.take(id);
  }

  async take(id) {
    this.otherId = id;
    this.other = null;
    try {
      const other = id ? await get(`/api/runs/${encodeURIComponent(id)}/config`) : null;
      if (this.otherId === id) this.other = other;
    } catch (error) {
      notify(`The settings of the other run cannot be read: ${error.message}`, "bad");
    }
    this.show();
  }

  /** Settings and facts that differ, both values side by side. */
  differences() {
    // What is fixed repeats some settings: those stand once.
    const all = ({ settings, fixed }) => new Map([...flatPairs(fixed ?? {}), ...flatPairs(settings ?? {})]);
    const [mine, theirs] = [all(this.config), all(this.other)];
    const paths = [...new Set([...mine.keys(), ...theirs.keys()])].filter((path) => valueText(mine.get(path)) !== valueText(theirs.get(path)));
    const name = this.with.selectedOptions[0]?.textContent ?? "the other";
    if (paths.length === 0) return h("p", { class: "muted", id: "config-same" }, `Every setting is the same as in ${name}.`);
    const cell = (map, path) => h("td", { class: "mono" }, map.has(path) ? linesOf(map.get(path)) : h("span", { class: "muted" }, "not there"));
    return h("section", { class: "config-part config-both", id: "config-differences", dataset: { part: "both" } }, h("h3", null, `Differs from ${name} (${paths.length})`),
      h("table", { class: "table" }, h("thead", null, h("tr", null, ["Setting", "This run", name].map((word) => h("th", { scope: "col" }, word)))), h("tbody", null, paths.map((path) => h("tr", { dataset: { differs: path } }, h("th", { scope: "row", class: "mono" }, path), cell(mine, path), cell(theirs, path))))));
  }

  async refresh() {
    try {
      this.config = await get(`/api/runs/${encodeURIComponent(this.run)}/config`);
      this.show();
    } catch (error) {
      if (this.config === null) fill(this.tables, errorState(error, () => this.refresh()));
    }
  }

  show() {
    if (this.config === null) return; // a search typed before the settings have come is applied when they are shown
    const { settings, fixed, changes, differs } = this.config;
    const names = differs ?? [];
    const pairs = flatPairs(settings ?? {});
    const told = new Map(pairs);
    // What must not change repeats settings: here stand the facts beside them.
    const facts = flatPairs(fixed ?? {}).filter(([path, value]) => valueText(told.get(path)) !== valueText(value));
    const [own, rest] = [pairs.filter(([path]) => differsFrom(names, path)), pairs.filter(([path]) => !differsFrom(names, path))];
    const list = Array.isArray(changes) ? changes : Object.entries(changes ?? {}).map(([name, value]) => ({ [name]: value }));
    const tables = [
      this.other ? this.differences() : null,
      this.table(own.length ? "Not the default" : "", own, "differs"),
      this.table(own.length ? "As by default" : "Settings", rest, "settings"),
      this.table("Environment", facts, "fixed"),
      this.table("Changes on the way", list.flatMap((change, index) => flatPairs(change, typeof change === "object" ? "" : `change ${index + 1}`)), "changes"),
    ].filter(Boolean);
    fill(this.tables, tables.length ? tables : emptyState("Nothing matches", "Clear the search to see every setting."));
  }

  table(title, pairs, part) {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = pairs.filter(([path, value]) => words.every((word) => `${path} ${valueText(value)}`.toLowerCase().includes(word)));
    if (shown.length === 0 || title === "") return null;
    const rows = shown.map(([path, value]) => h("tr", { dataset: { setting: path } }, h("th", { scope: "row", class: "mono" }, path), h("td", { class: "mono" }, linesOf(value))));
    return h("section", { class: "config-part", dataset: { part } }, h("h3", null, `${title} (${shown.length})`), h("table", { class: "table" }, h("tbody", null, rows)));
  }
}

function kindOfLine(line) {
  if (/\b(ERROR|CRITICAL)\b|^Traceback |^[A-Za-z.]*(Error|Exception)\b/.test(line)) return "error";
  if (/\bWARNING\b/.test(line)) return "warning";
  return "";
}

export class Log {
  constructor(host, run) {
    this.run = run;
    this.box = h("div", { class: "log", id: "log", role: "log", tabindex: 0, "aria-label": "The end of the log" });
    fill(host, this.box);
    this.lines = null;
  }

  async refresh() {
    try {
      const { lines } = await get(`/api/runs/${encodeURIComponent(this.run)}/log`);
      this.show(lines);
    } catch (error) {
      if (this.lines === null) fill(this.box, errorState(error, () => this.refresh()));
    }
  }

  /** Follows the end, unless the reader scrolled up; then what is read stays where it is. */
  show(lines) {
    const text = lines.join("\n");
    if (this.text === text) return;
    const first = this.lines === null;
    const atEnd = first || this.box.scrollTop + this.box.clientHeight >= this.box.scrollHeight - 24;
    const fromEnd = this.box.scrollHeight - this.box.scrollTop;
    const added = first ? 0 : this.numNew(lines);
    this.lines = lines;
    this.text = text;
    if (lines.length === 0) fill(this.box, h("p", { class: "muted" }, "Nothing was logged yet."));
    else fill(this.box, lines.map((line) => h("div", { class: "log-line", dataset: { kind: kindOfLine(line) } }, line === "" ? " " : line)));
    const height = added > 0 ? [...this.box.children].slice(-added).reduce((sum, node) => sum + node.offsetHeight, 0) : 0;
    this.box.scrollTop = atEnd ? this.box.scrollHeight : this.box.scrollHeight - fromEnd - height;
  }

  numNew(lines) {
    const last = this.lines.at(-1);
    const at = last === undefined ? -1 : lines.lastIndexOf(last);
    return at < 0 ? 0 : lines.length - 1 - at;
  }
}
