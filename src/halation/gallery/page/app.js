// The shell: the bar at the top, which view the address asks for, the theme, the help, and the clock.

import { exported, get, onChange, onStatus } from "./api.js";
import { fill, h, isTyping, recall, remember, setText } from "./dom.js";
import { mountGeneration } from "./generation.js";
import { errorState, notify, openDialog, refreshTimes, skeleton } from "./parts.js";
import { mountRuns } from "./runs.js";
import { mountScores } from "./scores.js";
import { mountTraining } from "./training.js";

const THEMES = ["auto", "dark", "light"];
const CLOCK_MS = 10000;
const HELP = [
  ["Everywhere", [["?", "this help"], ["/", "search or filter"], ["g r", "all runs"], ["g s", "scores"], ["Esc", "close what is open"]]],
  ["Runs", [["↑ ↓", "move through the runs"], ["Enter", "open"]]],
  ["A training run", [["1 2 3 4", "samples, curves, config, log"], ["↑ ↓ ← →", "move through the samples"], ["Home End", "first and last step"], ["Enter", "look at it full size"], ["c", "pin for comparing; again on another one compares them"]]],
  ["An image", [["← →", "the step before and after"], ["↑ ↓", "the prompt above and below"], ["Home End", "first and last step"], ["c", "pin, or compare with what is pinned"], ["o", "open the file"]]],
  ["Comparing", [["← →", "move the divider"], ["s", "side by side"], ["d", "divider"], ["b", "blink"]]],
  ["A generation", [["↑ ↓ ← →", "move through the images"], ["Enter", "its spec, and the command that draws it again"], ["c", "compare with the same prompt and seed in another generation"]]],
];

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** What an address like "#/run/ID/curves" asks for: {name, id, tab}. */
function routeOf(hash) {
  const parts = hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(decoded);
  if (parts[0] === "run" && parts[1]) return { name: "run", id: parts[1], tab: parts[2] ?? "", rest: parts.slice(3) };
  if (parts[0] === "scores") return { name: "scores", id: "", tab: parts[1] ?? "", rest: parts.slice(2) };
  return { name: "runs", id: "", tab: "", rest: [] };
}

class App {
  constructor() {
    this.main = document.getElementById("main");
    this.view = null;
    this.route = null;
    this.turn = 0;
    this.onlyRun = null;
    this.goPressed = 0;
    this.byKeys = false;
  }

  async start() {
    this.theme(recall("theme", "auto"));
    this.buildTop();
    window.addEventListener("hashchange", () => this.go());
    document.addEventListener("keydown", (event) => this.key(event));
    document.addEventListener("keydown", () => (this.byKeys = true), true);
    document.addEventListener("pointerdown", () => (this.byKeys = false), true);
    document.getElementById("skip").addEventListener("click", (event) => {
      event.preventDefault();
      this.main.focus();
    });
    setInterval(() => refreshTimes(), CLOCK_MS);
    onChange((event) => this.changed(event));
    if (exported) await this.fitExport();
    this.go();
  }

  /** An exported page has no links to what it does not hold, and says at its top what it leaves out. */
  async fitExport() {
    const note = document.getElementById("left-out");
    if (note) this.main.before(note);
    const { runs } = await get("/api/runs");
    if (runs.length === 1) this.onlyRun = runs[0].id;
    this.links.runs.hidden = runs.length === 1;
    document.documentElement.dataset.only = runs.length === 1 ? "yes" : "no";
    try {
      const { scores, reports } = await get("/api/scores");
      this.links.scores.hidden = scores.length === 0 && reports.length === 0;
    } catch {
      this.links.scores.hidden = true;
    }
  }

  theme(choice) {
    this.themeChoice = THEMES.includes(choice) ? choice : "auto";
    if (this.themeChoice === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = this.themeChoice;
    remember("theme", this.themeChoice);
    if (this.themeButton) this.labelTheme();
  }

  labelTheme() {
    setText(this.themeButton, { auto: "◐", dark: "●", light: "○" }[this.themeChoice]);
    const label = `Theme: ${this.themeChoice === "auto" ? "as the system" : this.themeChoice}`;
    this.themeButton.title = label;
    this.themeButton.setAttribute("aria-label", label);
  }

  buildTop() {
    const dot = h("span", { class: "connection", id: "connection", role: "status" }, h("span", { class: "connection-dot", "aria-hidden": "true" }), h("span", { class: "connection-word" }));
    this.links = {
      runs: h("a", { href: "#/", id: "nav-runs" }, "Runs"),
      scores: h("a", { href: "#/scores", id: "nav-scores" }, "Scores"),
    };
    this.themeButton = h("button", { class: "button button-quiet button-icon", id: "theme", type: "button", onclick: () => this.theme(THEMES[(THEMES.indexOf(this.themeChoice) + 1) % THEMES.length]) });
    const help = h("button", { class: "button button-quiet button-icon", id: "help-button", type: "button", title: "Keyboard help (?)", "aria-label": "Keyboard help", onclick: () => openHelp() }, "?");
    fill(
      document.getElementById("top"),
      h("a", { class: "brand", href: "#/", "aria-label": "Halation, all runs" }, h("span", { class: "brand-light", "aria-hidden": "true" }), h("span", { class: "brand-word" }, "halation")),
      h("nav", { class: "nav", "aria-label": "Pages" }, this.links.runs, this.links.scores),
      h("span", { class: "spacer" }),
      dot,
      this.themeButton,
      help,
    );
    this.labelTheme();
    onStatus((status) => showStatus(dot, status));
  }

  changed(event) {
    if (!this.view) return;
    const mine = event.id === "*" ? { ...event, id: this.route.id } : event;
    this.view.changed(mine);
  }

  async go() {
    for (const dialog of document.querySelectorAll("dialog[open]")) dialog.close();
    const route = routeOf(location.hash);
    if (this.onlyRun && route.name === "runs") Object.assign(route, { name: "run", id: this.onlyRun });
    for (const [name, link] of Object.entries(this.links)) {
      if (name === route.name || (name === "runs" && route.name === "run")) link.setAttribute("aria-current", name === route.name ? "page" : "true");
      else link.removeAttribute("aria-current");
    }
    if (this.view && this.route.name === route.name && this.route.id === route.id && this.view.routed) {
      this.route = route;
      this.view.routed(route);
      return;
    }
    await this.mount(route);
  }

  async mount(route) {
    const turn = ++this.turn;
    if (this.view) this.view.unmount();
    this.view = null;
    this.route = route;
    document.title = "Halation";
    fill(this.main, skeleton(6));
    this.main.dataset.view = route.name;
    window.scrollTo(0, 0);
    try {
      const make = await this.maker(route);
      if (turn !== this.turn) return;
      fill(this.main);
      this.view = make();
      if (this.byKeys && [document.body, this.main].includes(document.activeElement)) this.view.takeFocus?.();
    } catch (error) {
      if (turn !== this.turn) return;
      console.warn(error);
      fill(this.main, errorState(error, () => this.mount(route)));
    }
  }

  async maker(route) {
    if (route.name === "runs") return () => mountRuns(this.main, route);
    if (route.name === "scores") return () => mountScores(this.main, route);
    const detail = await get(`/api/runs/${encodeURIComponent(route.id)}`);
    document.title = `${detail.summary.name} · Halation`;
    this.main.dataset.view = detail.counts ? "generation" : "training";
    const mountRun = detail.counts ? mountGeneration : mountTraining;
    return () => mountRun(this.main, route, detail);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event)) return;
    if (document.querySelector("dialog[open]")) return;
    if (event.key === "?") openHelp();
    else if (event.key === "/") this.focusSearch(event);
    else if (event.key === "g") this.goPressed = performance.now();
    else if (performance.now() - this.goPressed < 1500 && event.key === "r") location.hash = "#/";
    else if (performance.now() - this.goPressed < 1500 && event.key === "s") location.hash = "#/scores";
  }

  focusSearch(event) {
    const field = [...this.main.querySelectorAll("[data-search]")].find((node) => node.offsetParent !== null);
    if (!field) return;
    event.preventDefault();
    field.focus();
    field.select();
  }
}

function showStatus(node, status) {
  const words = { locked: "open the new link", exported: "exported" };
  const titles = { exported: "A page written by `halation gallery --export`: it does not change", locked: "The gallery was started anew: open the link it printed then" };
  node.dataset.status = status;
  node.title = titles[status] ?? `The connection to the gallery: ${status}`;
  setText(node.lastElementChild, words[status] ?? status);
  if (status === "locked") notify(`${titles.locked}. What stands here is no longer brought up to date.`, "bad");
}

/** The table of keys. */
function openHelp() {
  const { body } = openDialog("Keys", { id: "help" });
  fill(
    body,
    h("div", { class: "help" }, HELP.map(([title, keys]) =>
      h("section", null, h("h3", null, title), h("dl", null, keys.map(([key, text]) => [h("dt", null, key.split(" ").map((one) => h("kbd", null, one))), h("dd", null, text)]))),
    )),
  );
}

function start() {
  new App().start();
}

start();
