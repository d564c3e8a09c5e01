// One image at full size in a dialog: a slider and arrow keys move along, neighbours are loaded ahead so that nothing flickers.

import { fill, h, isTyping, recall, remember, setStyle, setText, showModal, svg } from "./dom.js";
import { countText } from "./format.js";
import { segmented } from "./parts.js";

const NUM_AHEAD = 3;
const CACHE_SIZE = 48;

/** Images that are loaded and decoded, so that putting one on the page takes no time; the oldest are forgotten. */
class Decoded {
  constructor() {
    this.images = new Map();
  }

  get(url) {
    let entry = this.images.get(url);
    if (!entry) {
      const image = new Image();
      entry = { image, ready: false };
      image.src = url;
      entry.done = image.decode().then(() => (entry.ready = true), () => (entry.ready = false));
    }
    this.images.delete(url);
    this.images.set(url, entry);
    while (this.images.size > CACHE_SIZE) this.images.delete(this.images.keys().next().value);
    return entry;
  }
}

/**
 * The dialog: {items: count, at, picture(i) -> {url, preview, label, caption, extra, failed, link, size}, onMove(i), onClose(i),
 * ticks: [i], keys: {key: (i) => ...}, actions: [{label, key, onPick(i)}], ahead(i) -> [url], unit}. Without onClose the focus goes
 * back to where it was.
 */
export class Viewer {
  constructor(options) {
    this.options = { unit: "", ticks: [], keys: {}, actions: [], ...options };
    this.at = options.at;
    this.items = options.items;
    this.decoded = new Decoded();
    this.direction = 1;
    this.build();
    showModal(this.dialog, () => {
      this.options.onClose?.(this.at);
      return !this.options.onClose;
    });
    this.slider.focus({ preventScroll: true });
    this.show();
  }

  build() {
    const button = (label, key, text, onclick) => h("button", { class: "button button-quiet", type: "button", title: `${label} (${key})`, "aria-label": label, dataset: { action: label.toLowerCase().replaceAll(" ", "-") }, onclick }, text);
    this.title = h("h2", { class: "viewer-title", id: "viewer-title", role: "status" });
    this.caption = h("p", { class: "viewer-caption", id: "viewer-caption", tabindex: 0 });
    this.extra = h("div", { class: "viewer-extra" });
    this.stage = h("div", { class: "viewer-stage", id: "viewer-stage" });
    this.note = h("p", { class: "viewer-note", hidden: true });
    this.link = h("a", { class: "button button-quiet", id: "viewer-open", target: "_blank", rel: "noopener", title: "Open the file (o)", "aria-label": "Open the file" }, "Open");
    this.slider = h("input", { type: "range", id: "viewer-slider", class: "viewer-slider", min: 0, step: 1, "aria-label": this.options.unit || "Image", oninput: () => this.move(Number(this.slider.value)) });
    this.ticks = svg("svg", { class: "viewer-ticks", preserveAspectRatio: "none", "aria-hidden": "true" });
    const extras = this.options.actions.map(({ label, key, onPick }) => h("button", { class: "button", type: "button", title: key ? `${label} (${key})` : label, dataset: { action: label.toLowerCase().replaceAll(" ", "-") }, onclick: () => onPick(this.at) }, label, key ? h("kbd", { "aria-hidden": "true" }, key) : null));
    this.dialog = h(
      "dialog",
      { class: "viewer", id: "viewer", "aria-labelledby": "viewer-title" },
      h("div", { class: "viewer-head" }, this.title, h("span", { class: "spacer" }), extras, this.link, button("Close", "Esc", "✕", () => this.close())),
      h("div", { class: "viewer-main" }, this.stage, this.note),
      h("div", { class: "viewer-foot" },
        h("div", { class: "viewer-slide" }, button("Before", "←", "←", () => this.step(-1)), h("div", { class: "viewer-track" }, this.slider, this.ticks), button("After", "→", "→", () => this.step(1))),
        this.caption, this.extra),
    );
    this.dialog.addEventListener("keydown", (event) => this.key(event));
    let startX = null;
    this.stage.addEventListener("pointerdown", (event) => (startX = event.clientX));
    this.stage.addEventListener("pointerup", (event) => {
      const dx = startX === null ? 0 : event.clientX - startX;
      startX = null;
      if (Math.abs(dx) > 40) this.step(dx > 0 ? -1 : 1);
    });
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event)) return;
    const moves = { ArrowLeft: this.at - 1, ArrowRight: this.at + 1, Home: 0, End: this.items - 1, PageUp: this.at - 10, PageDown: this.at + 10 };
    const action = this.options.keys[event.key];
    if (event.key in moves) this.move(Math.min(this.items - 1, Math.max(0, moves[event.key])));
    else if (action) action(this.at);
    else if (event.key === "o" && this.link.href && !this.link.hidden) this.link.click();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  step(by) {
    this.move(Math.min(this.items - 1, Math.max(0, this.at + by)));
  }

  move(to) {
    if (to === this.at) return;
    this.direction = to > this.at ? 1 : -1;
    this.at = to;
    this.show();
    if (this.options.onMove) this.options.onMove(to);
  }

  /** New images came while looking: the one on show stays on show. */
  setItems(items, at, ticks) {
    this.items = items;
    this.at = at;
    if (ticks) this.options.ticks = ticks;
    this.show();
  }

  show() {
    const item = this.options.picture(this.at);
    this.slider.max = this.items - 1;
    this.slider.value = this.at;
    this.slider.setAttribute("aria-valuetext", item.label);
    this.slider.closest(".viewer-slide").hidden = this.items < 2;
    setText(this.title, item.label);
    setText(this.caption, item.caption ?? "");
    this.caption.title = item.caption ?? "";
    fill(this.extra, item.extra ?? null);
    this.drawTicks();
    this.showPicture(item);
    this.lookAhead();
  }

  drawTicks() {
    const last = Math.max(1, this.items - 1);
    this.ticks.setAttribute("viewBox", `0 0 ${last} 1`);
    const all = this.items <= 80 ? Array.from({ length: this.items }, (_, index) => index) : [];
    const line = (kind) => (index) => svg("line", { class: kind, x1: index, x2: index, y1: 0, y2: 1, "vector-effect": "non-scaling-stroke" });
    fill(this.ticks, all.map(line("tick")), this.options.ticks.map(line("tick-mark")));
  }

  async showPicture(item) {
    const wanted = item.url ?? "";
    this.wanted = wanted;
    this.note.hidden = wanted !== "";
    this.stage.hidden = wanted === "";
    setText(this.note, item.failed ?? (wanted === "" ? "Not drawn here." : ""));
    this.note.dataset.kind = item.failed ? "bad" : "";
    if (wanted === "") {
      this.link.removeAttribute("href");
      return;
    }
    this.link.href = item.link ?? wanted;
    this.link.hidden = false;
    const entry = this.decoded.get(wanted);
    if (!entry.ready && item.preview) await this.present(this.decoded.get(item.preview), wanted, item);
    await this.present(entry, wanted, item);
    if (entry.ready || this.wanted !== wanted) return;
    this.link.hidden = true;
    this.note.hidden = false;
    setText(this.note, item.preview ? "The full image is not there: this is the small one." : "This image could not be loaded.");
    this.note.dataset.kind = item.preview ? "small" : "bad";
  }

  /** Puts a decoded image on the stage, if it is still the one that is wanted; the one before stays until then. */
  async present(entry, wanted, item) {
    if (!entry.ready) await entry.done;
    if (!entry.ready || this.wanted !== wanted) return;
    const image = entry.image;
    image.alt = `${item.label}. ${item.caption ?? ""}`;
    image.className = "viewer-picture";
    this.stage.dataset.url = image.src;
    if (this.stage.firstChild !== image) this.stage.replaceChildren(image);
    const size = item.size ?? [image.naturalWidth, image.naturalHeight];
    image.classList.toggle("pixelated", size[0] > 0 && size[0] * 2.5 <= this.stage.clientWidth && Math.max(...size) <= 160);
  }

  lookAhead() {
    for (let distance = 1; distance <= NUM_AHEAD; distance += 1) {
      for (const at of [this.at + distance * this.direction, distance === 1 ? this.at - this.direction : -1]) {
        const url = at >= 0 && at < this.items ? this.options.picture(at).url : "";
        if (url) this.decoded.get(url);
      }
    }
    for (const url of this.options.ahead?.(this.at) ?? []) if (url) this.decoded.get(url);
  }

  close() {
    this.dialog.close();
  }
}

const MODES = [["divider", "Divider"], ["side", "Side by side"], ["blink", "Blink"]];
const BLINK_MS = 700;

/** Compares {left: {url, label}, right: {url, label}} inside host. */
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
    const fixed = state.variant === "teacher" || steps.length < 2;
    slider.hidden = said.hidden = fixed;
    onPick({ ...state });
  };
  source.addEventListener("change", tell);
  slider.addEventListener("input", tell);
  return { node: h("div", { class: "compare-picker" }, h("span", { class: "small muted" }, name), source, slider, said), tell };
}

/**
 * The dialog in which any two images of one prompt are compared, of steps or of runs: {prompt, sources: [variant], word(variant), steps: [step], left, right: {step, variant},
 * side({step, variant}) -> {url, label}}. `s`, `d` and `b` choose the way.
 */
export function openCompare(options) {
  const host = h("div", { class: "compare-host" });
  const chosen = { left: options.left, right: options.right };
  let view = null;
  const show = () => {
    const sides = { left: options.side(chosen.left), right: options.side(chosen.right) };
    if (view) view.update(sides);
    else view = new Compare(host, sides);
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
  showModal(dialog, () => view.destroy());
  for (const picker of pickers) picker.tell();
  show();
  host.querySelector("[role=slider]:not([hidden])")?.focus({ preventScroll: true });
  return { dialog, close: () => dialog.close() };
}
