// Two images against each other: a divider to drag, side by side, or blinking in one place.

import { append, fill, h, setStyle, showDialog } from "./dom.js";
import { countText } from "./format.js";
import { segmented } from "./parts.js";
import { recall, remember } from "./prefs.js";

const MODES = [["divider", "Divider"], ["side", "Side by side"], ["blink", "Blink"]];
const BLINK_MS = 700;

class Compare {
  constructor(host, { left, right }) {
    this.host = host;
    this.share = 50;
    this.images = [h("img", { class: "compare-left", draggable: "false" }), h("img", { class: "compare-right", draggable: "false" })];
    this.labels = [h("span", { class: "compare-label compare-label-left" }), h("span", { class: "compare-label compare-label-right" })];
    this.handle = h("div", { class: "compare-handle", id: "compare-handle", role: "slider", tabindex: 0, "aria-label": "Divider", "aria-valuemin": 0, "aria-valuemax": 100, "aria-orientation": "horizontal" });
    this.frame = h("div", { class: "compare-frame", id: "compare-frame" }, this.images, this.labels, this.handle);
    this.modes = segmented("Way of comparing", MODES, "divider", (mode) => this.setMode(mode));
    fill(host, h("div", { class: "compare-modes" }, this.modes), this.frame);
    host.classList.add("compare");
    for (const image of this.images) image.addEventListener("load", () => this.fit());
    this.frame.addEventListener("pointerdown", (event) => this.drag(event));
    this.frame.addEventListener("pointermove", (event) => this.frame.hasPointerCapture(event.pointerId) && this.point(event));
    this.handle.addEventListener("keydown", (event) => this.key(event));
    this.observer = new ResizeObserver(() => this.fit());
    this.observer.observe(host);
    this.update({ left, right });
    this.setMode(recall("compare.mode", "divider"));
    this.setShare(50);
  }

  update({ left, right }) {
    [left, right].forEach((side, index) => {
      if (this.images[index].getAttribute("src") !== side.url) this.images[index].src = side.url;
      this.images[index].alt = side.label;
      fill(this.labels[index], side.label);
    });
    this.handle.setAttribute("aria-label", `Divider between ${left.label} and ${right.label}`);
  }

  /** The frame takes the shape of the images, as large as the host lets it. */
  fit() {
    const image = this.images.find((one) => one.naturalWidth > 0);
    if (!image) return;
    const sides = this.mode === "side" ? 2 : 1;
    const ratio = (image.naturalWidth * sides) / image.naturalHeight;
    const [width, height] = [this.host.clientWidth, this.host.clientHeight - this.modes.offsetHeight - 14];
    const wide = Math.max(40, Math.min(width, height * ratio));
    setStyle(this.frame, { width: `${Math.floor(wide)}px`, height: `${Math.floor(wide / ratio)}px` });
    for (const one of this.images) one.classList.toggle("pixelated", one.naturalWidth * 2.5 <= wide / sides && one.naturalWidth <= 160);
  }

  setMode(mode) {
    this.mode = MODES.some(([name]) => name === mode) ? mode : "divider";
    remember("compare.mode", this.mode);
    this.modes.choose(this.mode);
    this.frame.dataset.mode = this.mode;
    this.handle.hidden = this.mode !== "divider";
    clearInterval(this.timer);
    this.frame.dataset.shown = "left";
    if (this.mode === "blink") this.timer = setInterval(() => (this.frame.dataset.shown = this.frame.dataset.shown === "left" ? "right" : "left"), BLINK_MS);
    this.fit();
  }

  setShare(share) {
    this.share = Math.min(100, Math.max(0, share));
    setStyle(this.frame, { "--share": `${this.share}%` });
    this.handle.setAttribute("aria-valuenow", Math.round(this.share));
  }

  drag(event) {
    if (this.mode !== "divider" || event.button !== 0) return;
    this.frame.setPointerCapture(event.pointerId);
    this.handle.focus({ preventScroll: true });
    this.point(event);
    event.preventDefault();
  }

  point(event) {
    const box = this.frame.getBoundingClientRect();
    this.setShare(((event.clientX - box.left) / box.width) * 100);
  }

  key(event) {
    const by = event.shiftKey ? 10 : 2;
    const next = { ArrowLeft: this.share - by, ArrowRight: this.share + by, ArrowDown: this.share - by, ArrowUp: this.share + by, PageUp: this.share + 20, PageDown: this.share - 20, Home: 0, End: 100 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    this.setShare(next);
  }

  destroy() {
    clearInterval(this.timer);
    this.observer.disconnect();
  }
}

/** Compares {left: {url, label}, right: {url, label}} inside host; returns {update({left, right}), setMode(mode), destroy()}. */
export function compare(host, sides) {
  return new Compare(host, sides);
}

function sidePicker(name, { sources, steps, word }, at, onPick) {
  const state = { ...at };
  const source = h("select", { class: "field", "aria-label": `${name}: which`, dataset: { side: name } }, sources.map((one) => h("option", { value: one, selected: one === at.variant }, word(one))));
  const slider = h("input", { type: "range", min: 0, max: Math.max(0, steps.length - 1), step: 1, value: Math.max(0, steps.indexOf(at.step)), "aria-label": `${name}: step`, dataset: { side: name } });
  const said = h("output", { class: "number small" });
  const tell = () => {
    state.variant = source.value;
    state.step = steps[Number(slider.value)];
    said.textContent = `step ${countText(state.step)}`;
    slider.setAttribute("aria-valuetext", said.textContent);
    const fixed = state.variant === "teacher";
    slider.hidden = said.hidden = fixed;
    onPick({ ...state });
  };
  source.addEventListener("change", tell);
  slider.addEventListener("input", tell);
  return { node: h("div", { class: "compare-picker" }, h("span", { class: "small muted" }, name), source, slider, said), tell };
}

/**
 * The dialog in which any two of a run's samples are compared: {prompt, sources: [variant], word(variant), steps: [step], left, right: {step, variant},
 * side({step, variant}) -> {url, label}}. `s`, `d` and `b` choose the way.
 */
export function openCompare(options) {
  const before = document.activeElement;
  const host = h("div", { class: "compare-host" });
  const chosen = { left: options.left, right: options.right };
  let view = null;
  const show = () => {
    const sides = { left: options.side(chosen.left), right: options.side(chosen.right) };
    if (view) view.update(sides);
    else view = compare(host, sides);
  };
  const pickers = ["left", "right"].map((name) => sidePicker(name, options, chosen[name], (at) => {
    chosen[name] = at;
    if (view) show();
  }));
  const dialog = h("dialog", { class: "viewer", id: "compare", "aria-labelledby": "compare-title" },
    h("div", { class: "viewer-head" }, h("h2", { class: "viewer-title", id: "compare-title", title: options.prompt }, "Compare"), h("span", { class: "compare-prompt muted", title: options.prompt }, options.prompt), h("span", { class: "spacer" }), h("button", { class: "button button-quiet", type: "button", "aria-label": "Close", dataset: { action: "close" }, onclick: () => dialog.close() }, "✕")),
    h("div", { class: "viewer-main" }, host),
    h("div", { class: "viewer-foot compare-foot" }, pickers.map((picker) => picker.node)));
  dialog.addEventListener("keydown", (event) => {
    const mode = { s: "side", d: "divider", b: "blink" }[event.key];
    if (!mode || event.ctrlKey || event.metaKey || event.altKey) return;
    view.setMode(mode);
    if (mode === "divider") host.querySelector("[role=slider]").focus();
  });
  dialog.addEventListener("close", () => {
    view.destroy();
    dialog.remove();
    if (before instanceof HTMLElement && before.isConnected) before.focus({ preventScroll: true });
  });
  append(document.body, [dialog]);
  showDialog(dialog);
  for (const picker of pickers) picker.tell();
  show();
  host.querySelector("[role=slider]:not([hidden])")?.focus({ preventScroll: true });
  return { dialog, close: () => dialog.close() };
}
