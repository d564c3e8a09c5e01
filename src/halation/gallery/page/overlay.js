// Other runs laid over the curves of one: a checklist to choose them, their numbers, and a legend that drops them again.

import { get, steadily } from "./api.js";
import { fill, h, setText } from "./dom.js";
import { notify } from "./parts.js";

const MOST_OTHERS = 5;
const OTHER_AGAIN_MS = 2000;

/** Runs that have curves and are not this one. */
export function otherTrainings(runs, self) {
  return runs.filter((run) => run.id !== self && ["train", "distill"].includes(run.kind)).sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
}

export class Overlay {
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
