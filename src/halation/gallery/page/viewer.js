// One image at full size in a dialog: a slider and arrow keys move along, neighbours are loaded ahead so that nothing flickers.

import { fill, h, isTyping, setText, showDialog, svg } from "./dom.js";

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

class Viewer {
  constructor(options) {
    this.options = { unit: "", ticks: [], keys: {}, actions: [], ...options };
    this.at = options.at;
    this.items = options.items;
    this.before = document.activeElement;
    this.decoded = new Decoded();
    this.direction = 1;
    this.build();
    document.body.append(this.dialog);
    showDialog(this.dialog);
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
    this.dialog.addEventListener("close", () => this.closed());
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

  closed() {
    this.dialog.remove();
    if (this.options.onClose) this.options.onClose(this.at);
    else if (this.before instanceof HTMLElement && this.before.isConnected) this.before.focus({ preventScroll: true });
  }
}

/**
 * Opens the dialog: {items: count, at, picture(i) -> {url, preview, label, caption, extra, failed, link, size}, onMove(i), onClose(i),
 * ticks: [i], keys: {key: (i) => ...}, actions: [{label, key, onPick(i)}], ahead(i) -> [url], unit}.
 * Returns the viewer: {show(), setItems(items, at, ticks), close(), at}. Without onClose the focus goes back to where it was.
 */
export function openViewer(options) {
  return new Viewer(options);
}
