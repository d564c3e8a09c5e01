// The page of a training run: what it is and how far, and its samples, curves, config and log.

import { exported, get, post, steadily } from "./api.js";
import { Log, Settings } from "./about.js";
import { Curves } from "./curves.js";
import { fill, h, isTyping, setText } from "./dom.js";
import { countText, durationText, farText, lossText, percentText, pluralText, rateText } from "./format.js";
import { ago, announce, confirmDialog, goneState, notify, progressBar, stateChip } from "./parts.js";
import { Samples } from "./samples.js";

const TABS = [["samples", "Samples"], ["curves", "Curves"], ["config", "Config"], ["log", "Log"]];
const ACTIONS = [["sample", "Sample now"], ["save", "Save now"], ["stop", "Stop"]];
const ASKED = { sample: "Sample", save: "Save", stop: "Stop" };
const ARROWS = ["ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight"];
const QUICK_MS = 1000;

/** The head that every page of a run has: name, state, how far, how fast; `actions` are nodes on its right. Returns {node, update(summary)}. */
export function runHead(summary) {
  const line = h("p", { class: "run-line" });
  const reason = h("p", { class: "run-why", id: "run-reason" });
  const chip = h("span");
  const bar = h("div", { class: "run-bar" });
  const actions = h("div", { class: "run-actions", id: "run-actions" });
  const node = h("header", { class: "run-head" }, h("div", { class: "run-heading" }, h("a", { class: "crumb", href: "#/" }, "Runs"), h("h1", { title: summary.name }, summary.name), chip, h("span", { class: "spacer" }), actions), line, reason, bar);
  function update(now) {
    fill(chip, stateChip(now.state));
    const far = `${farText(now.done, now.planned, now.unit)}${now.planned > 0 ? ` (${percentText(now.done, now.planned)})` : ""}`;
    const loss = now.loss === null || now.loss === undefined ? null : h("span", { title: "Mean over the last steps" }, `loss ${lossText(now.loss)}`);
    const running = now.state === "running";
    const took = !running && now.started && now.changed > now.started ? h("span", { title: "From its start to the last change; a run that was stopped and went on counts the time between" }, `took ${durationText(now.changed - now.started)}`) : null;
    const words = [now.kind, now.title, far, loss, running && now.rate ? rateText(now.rate, now.unit) : null, running && now.left_s !== null && now.left_s !== undefined ? `${durationText(now.left_s)} left` : null, took];
    fill(line, words.filter(Boolean).map((word) => (word instanceof Node ? word : h("span", null, word))), h("span", null, "changed ", ago(now.changed)));
    setText(reason, now.reason ?? "");
    reason.hidden = !now.reason;
    reason.dataset.state = now.state;
    fill(bar, now.planned > 0 ? progressBar(now.done, now.planned, now.state, "Done") : null);
  }
  update(summary);
  return { node, actions, update };
}

class TrainingView {
  constructor(main, route, detail) {
    this.id = detail.summary.id;
    this.main = main;
    this.asked = new Set();
    this.detail = detail;
    this.head = runHead(detail.summary);
    this.links = TABS.map(([tab, text], index) => h("a", { href: `#/run/${encodeURIComponent(this.id)}/${tab}`, id: `tab-${tab}`, dataset: { tab }, title: `${text} (${index + 1})` }, text));
    this.panels = new Map(TABS.map(([tab, text]) => [tab, h("section", { class: `panel-${tab}`, id: `panel-${tab}`, "aria-label": text, hidden: true })]));
    fill(main, h("div", { class: "training" }, this.head.node, h("nav", { class: "tabs", "aria-label": "Parts of the run" }, this.links), [...this.panels.values()]));
    this.parts = new Map();
    this.control = false;
    this.cost = 0;
    // A long run's detail is large: the slower it comes, the rarer it is asked for.
    this.refresh = steadily(() => this.load(), () => Math.max(QUICK_MS, this.cost * 10));
    this.onKey = (event) => this.key(event);
    document.addEventListener("keydown", this.onKey);
    this.routed(route);
    this.askControl();
  }

  async askControl() {
    if (exported) return;
    try {
      this.control = (await get("/api/state")).control === true;
    } catch (error) {
      console.warn(error);
    }
    this.showControl();
  }

  showControl() {
    const able = this.control && this.detail.summary.state === "running" && ["train", "distill"].includes(this.detail.summary.kind);
    if (able === this.shownControl) return;
    this.shownControl = able;
    fill(this.head.actions, able ? ACTIONS.map(([action, text]) => h("button", { class: action === "stop" ? "button button-danger" : "button", type: "button", dataset: { control: action }, onclick: () => this.ask(action) }, text)) : null);
  }

  async ask(action) {
    if (action === "stop" && !(await confirmDialog(`Stop ${this.detail.summary.name}?`, "It saves a checkpoint after its current step and ends. The same command goes on from there.", "Stop the run"))) return;
    try {
      await post(`/api/runs/${encodeURIComponent(this.id)}/control/${action}`);
      this.asked.add(action);
      notify(`${ASKED[action]}: asked; the run does it after its current step.`, "good");
    } catch (error) {
      notify(error.status === 409 ? `${ASKED[action]}: not asked, the run is not running any more.` : `${ASKED[action]}: not asked, ${error.message}`, "bad");
    }
  }

  routed(route) {
    this.tab = TABS.some(([tab]) => tab === route.tab) ? route.tab : "samples";
    for (const link of this.links) {
      if (link.dataset.tab === this.tab) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    for (const [tab, panel] of this.panels) panel.hidden = tab !== this.tab;
    if (!this.parts.has(this.tab)) this.parts.set(this.tab, this.make(this.tab));
    this.parts.get(this.tab).routed?.(route.rest[0] ?? "");
    this.refreshTab();
    const step = Number(route.rest[0]);
    if (this.tab === "samples" && route.rest[0] !== undefined && Number.isFinite(step)) this.parts.get("samples").matrix.focusPlace({ step, prompt: 0 });
  }

  make(tab) {
    const host = this.panels.get(tab);
    if (tab === "samples") return new Samples(host, this.detail);
    if (tab === "curves") return this.keepAddress("curves", new Curves(host, this.detail));
    return tab === "config" ? this.keepAddress("config", new Settings(host, this.id)) : new Log(host, this.id);
  }

  /** What a tab keeps in the address is there again when one comes back to it by its link. */
  keepAddress(tab, part) {
    part.onAddress = (rest) => (this.links.find((link) => link.dataset.tab === tab).href = `#/run/${encodeURIComponent(this.id)}/${tab}${rest}`);
    return part;
  }

  refreshTab() {
    const part = this.parts.get(this.tab);
    if (this.tab === "samples") {
      if (part.detail !== this.detail) part.update(this.detail);
    } else part.refresh(this.detail);
  }

  async load() {
    const began = performance.now();
    try {
      const before = this.detail;
      this.detail = await get(`/api/runs/${encodeURIComponent(this.id)}`);
      this.cost = performance.now() - began;
      this.tellNew(before);
      this.head.update(this.detail.summary);
      this.showControl();
      this.refreshTab();
    } catch (error) {
      if (error.status === 404) this.vanish();
      else console.warn(error);
    }
  }

  /** The run's folder went away: the page says so, and the next address mounts anew. */
  vanish() {
    this.unmount();
    this.routed = null;
    fill(this.main, goneState(this.detail.summary.name));
  }

  /** What was asked for by a button has come: said once. */
  tellTaken(before) {
    const newest = (list) => list?.at(-1)?.step ?? null;
    const [saved, drawn] = [newest(this.detail.checkpoints), newest(this.detail.steps)];
    if (saved !== newest(before.checkpoints) && this.asked.delete("save")) notify(`Save: done, a checkpoint of step ${countText(saved)}.`, "good");
    if (drawn !== newest(before.steps) && this.asked.delete("sample")) notify(`Sample: step ${countText(drawn)} is being drawn.`, "good");
  }

  tellNew(before) {
    this.tellTaken(before);
    const more = this.detail.steps.length - before.steps.length;
    if (more > 0) announce(`${pluralText(more, "new row")} of samples, up to step ${countText(this.detail.steps.at(-1).step)}`);
    if (this.detail.summary.state !== before.summary.state) announce(`The run is now ${this.detail.summary.state}`);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event) || document.querySelector("dialog[open]")) return;
    if (ARROWS.includes(event.key) && [document.body, this.main].includes(document.activeElement) && this.takeFocus()) event.preventDefault();
    const tab = TABS[Number(event.key) - 1];
    if (tab) location.hash = this.links.find((link) => link.dataset.tab === tab[0]).hash;
  }

  /** The focus goes to the sample it was on last; whether there is one. */
  takeFocus() {
    const matrix = this.parts.get("samples")?.matrix;
    if (this.tab !== "samples" || !matrix?.focused) return false;
    matrix.focusPlace(matrix.focused);
    return true;
  }

  changed(event) {
    // The list of runs changed too: this one may be what went.
    if (event.id === this.id || event.id === "") this.refresh();
    else this.parts.get("curves")?.runChanged(event.id);
  }

  unmount() {
    this.refresh.stop();
    document.removeEventListener("keydown", this.onKey);
    for (const part of this.parts.values()) part.unmount?.();
  }
}

/** Shows a training run (train, distill, sample). */
export function mountTraining(main, route, detail) {
  return new TrainingView(main, route, detail);
}
