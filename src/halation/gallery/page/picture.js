// One image of a generation: full size, what decided it, how it went, and the command that draws it again.

import { exported, full, get, inside } from "./api.js";
import { fill, h, setText } from "./dom.js";
import { bytesText, countText, durationText, pluralText, valueText, workerText } from "./format.js";
import { announce, commandLine, notify, openDialog, stateChip } from "./parts.js";
import { openCompare } from "./viewer.js";

const SPEC_AFTER_MS = 90;
const MOST_COMPARED = 20;
const OUTCOME_WORDS = { num_bytes: "size of the file", micro_batch: "drawn together", epoch: "pass", sha256: "sha256", seconds: "time", attempts: "attempts", worker: "worker" };

/** Name and value pairs as rows; what is null is left out. */
function pairRows(values, words = {}) {
  const rows = Object.entries(values ?? {}).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h("table", { class: "table table-pairs" }, h("tbody", null, rows.map(([name, value]) => h("tr", { dataset: { name } }, h("th", { scope: "row" }, words[name] ?? name), h("td", null, valueText(value))))));
}

function outcomeRows(outcome) {
  const { state, reason, ...rest } = outcome ?? {};
  const shown = { ...rest };
  if (typeof rest.seconds === "number") shown.seconds = rest.seconds < 60 ? `${Number(rest.seconds.toPrecision(3))} s` : durationText(rest.seconds);
  if (typeof rest.num_bytes === "number") shown.num_bytes = bytesText(rest.num_bytes);
  return pairRows(shown, OUTCOME_WORDS);
}

/** The image of the same prompt and seed in another generation; undefined where it has none. */
async function sameImage(run, { prompt, seed }) {
  const query = new URLSearchParams({ q: prompt.slice(0, 300), seed, state: "done", limit: 200 });
  try {
    const { rows } = await get(`/api/runs/${encodeURIComponent(run)}/rows?${query}`);
    return rows.find((row) => row.state === "done" && row.prompt === prompt && row.seed === seed);
  } catch (error) {
    console.warn(error);
    return undefined;
  }
}

/** `pages` is the filtered list that ← and → move through. `onMove(index)` at every move, `onClose(index)` at the end. */
export class PictureDialog {
  constructor({ run, pages, at, onMove, onClose }) {
    Object.assign(this, { run, pages, at, onMove });
    this.zoomed = false;
    this.turn = 0;
    const made = openDialog("Image", { id: "picture", kind: "dialog-wide dialog-picture", onClose: () => {
      clearTimeout(this.timer);
      this.turn = -1;
      onClose(this.at);
    } });
    this.dialog = made.dialog;
    this.heading = made.heading;
    this.build(made.body);
    this.dialog.addEventListener("keydown", (event) => this.key(event));
    this.show(at);
  }

  build(body) {
    this.img = h("img", { class: "picture", alt: "", id: "picture-full" });
    this.img.addEventListener("load", () => this.sized());
    this.img.addEventListener("error", () => this.missing());
    this.none = h("div", { class: "stage-none" });
    this.note = h("p", { class: "stage-note", role: "status" });
    this.stage = h("div", { class: "stage", id: "picture-stage", dataset: { zoom: "fit" }, onclick: () => this.zoom() }, this.img, this.none);
    const step = (name, text, label, by) => h("button", { class: "button", type: "button", id: `picture-${name}`, "aria-label": label, title: label, onclick: () => this.show(this.at + by) }, text);
    this.before = step("before", "←", "The image before (←)", -1);
    this.after = step("after", "→", "The next image (→)", 1);
    this.position = h("span", { class: "muted small number", id: "picture-position" });
    this.zoomButton = h("button", { class: "button", type: "button", id: "picture-zoom", "aria-pressed": "false", title: "Actual pixels (z)", onclick: () => this.zoom() }, "1:1");
    this.compareButton = h("button", { class: "button", type: "button", id: "picture-compare", title: "Compare with the image of the same prompt and seed in another generation (c)", onclick: () => this.compare() }, "Compare");
    this.open = h("a", { class: "button", id: "picture-open", target: "_blank", rel: "noreferrer", title: "Open the file (o)" }, "Open");
    this.chip = h("span", { class: "picture-chip" });
    this.frame = h("input", { type: "range", id: "picture-frame", min: 0, step: 1, oninput: () => this.showFrame() });
    this.frameBox = h("label", { class: "range" }, "Frame", this.frame);
    const bar = h("div", { class: "stage-bar" }, this.before, this.after, this.position, h("span", { class: "spacer" }), this.frameBox, this.compareButton, this.zoomButton, this.open);
    this.prompt = h("p", { class: "picture-prompt", id: "picture-prompt" });
    this.reason = h("pre", { class: "picture-reason", id: "picture-reason" });
    this.more = h("div", { class: "picture-more" });
    this.unfold = h("button", { class: "link-button picture-unfold", type: "button", id: "picture-unfold", hidden: true, onclick: () => this.fold(this.prompt.classList.contains("folded")) });
    fill(body, h("div", { class: "picture-sides" }, h("div", { class: "picture-left" }, this.stage, this.note, bar), h("div", { class: "picture-right", tabindex: 0, role: "region", "aria-label": "About this image" }, this.chip, this.prompt, this.unfold, this.reason, this.more)));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target === this.frame) return;
    const next = { ArrowLeft: this.at - 1, ArrowRight: this.at + 1, Home: 0, End: this.pages.total - 1 }[event.key];
    if (next !== undefined) this.show(next);
    else if (event.key === "z") this.zoom();
    else if (event.key === "c" && !this.compareButton.hidden) this.compare();
    else if (event.key === "o" && !this.open.hidden) this.open.click();
    else return;
    event.preventDefault();
  }

  async show(index) {
    const at = Math.max(0, Math.min(this.pages.total - 1, index));
    if (at === this.at && this.row) return;
    this.at = at;
    const turn = ++this.turn;
    setText(this.position, `${countText(at + 1)} of ${countText(this.pages.total)}`);
    this.before.disabled = at === 0;
    this.after.disabled = at >= this.pages.total - 1;
    const row = await this.pages.at(at);
    if (turn !== this.turn || !row) return;
    this.onMove(at);
    this.showRow(row);
    clearTimeout(this.timer);
    // Holding an arrow key flips through images; only the one where it stops is asked about.
    this.timer = setTimeout(() => this.showSpec(row, turn), SPEC_AFTER_MS);
  }

  showRow(row) {
    this.row = row;
    const name = row.id ? `${row.id}` : `image ${countText(row.index + 1)}`;
    setText(this.heading, `${name}, seed ${row.seed}`);
    fill(this.chip, stateChip(row.state), row.frames > 1 ? h("span", { class: "tag" }, pluralText(row.frames, "frame")) : null, row.worker ? h("span", { class: "tag" }, workerText(row.worker)) : null);
    setText(this.prompt, row.prompt);
    this.fold(false);
    this.reason.hidden = !row.reason;
    setText(this.reason, row.reason ?? "");
    const done = row.state === "done";
    this.frame.max = (row.frames ?? 1) - 1;
    this.frame.value = 0;
    this.frameBox.hidden = !(done && row.frames > 1) || exported;
    const url = done ? full(this.run, row) : "";
    this.open.hidden = !url;
    this.zoomButton.hidden = this.compareButton.hidden = !url;
    this.img.hidden = !url;
    this.img.alt = row.prompt;
    this.stage.dataset.state = row.state;
    setText(this.note, "");
    setText(this.none, url ? "" : done ? "This image is not part of the exported page." : row.state === "failed" ? "It failed: there is no image." : "Not drawn yet.");
    if (url) {
      this.open.href = url;
      this.img.src = url;
    } else this.img.removeAttribute("src");
    announce(`${countText(this.at + 1)} of ${countText(this.pages.total)}: ${row.state}, ${row.prompt}`);
    this.preload(this.at + 1);
    this.preload(this.at - 1);
  }

  /** A long prompt shows its first lines; the rest on demand. */
  fold(open) {
    this.prompt.classList.toggle("folded", !open);
    this.unfold.hidden = !open && this.prompt.scrollHeight <= this.prompt.clientHeight + 2;
    setText(this.unfold, open ? "less" : "more");
    this.unfold.setAttribute("aria-expanded", String(open));
  }

  /** Another frame of a video. */
  showFrame() {
    const url = full(this.run, { ...this.row, key: `${this.row.key}.${this.frame.value}` });
    this.frame.setAttribute("aria-valuetext", `frame ${Number(this.frame.value) + 1} of ${this.row.frames}`);
    this.open.href = url;
    this.img.src = url;
  }

  preload(index) {
    const row = this.pages.row(index);
    if (row?.state === "done" && !exported) new Image().src = full(this.run, row);
  }

  async showSpec(row, turn) {
    if (this.shownKey !== row.key) fill(this.more, h("p", { class: "muted small" }, "…"));
    try {
      const about = await get(`/api/runs/${encodeURIComponent(this.run)}/spec/${encodeURIComponent(row.key)}`);
      if (turn !== this.turn) return;
      this.shownKey = row.key;
      this.fillMore(row, about);
    } catch (error) {
      if (turn !== this.turn) return;
      fill(this.more, exported ? pairRows({ seed: row.seed, width: row.w, height: row.h, worker: row.worker }) : h("p", { class: "muted" }, error.message));
    }
  }

  fillMore(row, { spec, outcome, file, command }) {
    const reason = outcome?.reason ?? row.reason ?? "";
    this.reason.hidden = !reason;
    setText(this.reason, reason);
    const { prompt, ...rest } = spec ?? {};
    fill(
      this.more,
      command ? [h("h3", null, "Draws it again"), h("div", { id: "picture-command" }, commandLine(command))] : null,
      h("h3", null, "Spec"),
      h("div", { id: "picture-spec" }, pairRows({ file, ...rest })),
      outcome && Object.keys(outcome).length > 1 ? [h("h3", null, "Outcome"), h("div", { id: "picture-outcome" }, outcomeRows(outcome))] : null,
    );
  }

  /** The image on the page has changed on disk: shown again where it is the one that is open. */
  refresh() {
    const row = this.pages.row(this.at);
    if (!row || row.key !== this.row?.key || (row.state === this.row.state && row.v === this.row.v)) return;
    this.showRow(row);
    this.showSpec(row, this.turn);
  }

  /** Compares this image with those that other generations drew of the same prompt and seed. */
  async compare() {
    const { row, turn } = this;
    const { runs } = await get("/api/runs").catch(() => ({ runs: [] }));
    const others = runs.filter((run) => run.kind === "generate" && run.id !== this.run).slice(0, MOST_COMPARED);
    const found = await Promise.all(others.map(async (run) => [run.id, await sameImage(run.id, row)]));
    if (turn !== this.turn || !this.dialog.open) return;
    const images = new Map([[this.run, row], ...found.filter(([id, same]) => same && full(id, same))]);
    if (images.size === 1) {
      notify("No other generation here has an image of this prompt and seed.");
      return;
    }
    const names = new Map(runs.map((run) => [run.id, run.name]));
    const [left, right] = [...images.keys()].map((variant) => ({ variant, step: 0 }));
    openCompare({
      prompt: row.prompt,
      sources: [...images.keys()],
      word: (id) => names.get(id) ?? id,
      steps: [0],
      left,
      right,
      side: ({ variant }) => ({ url: full(variant, images.get(variant)), label: names.get(variant) ?? variant }),
    });
  }

  zoom() {
    if (this.img.hidden) return;
    this.zoomed = !this.zoomed;
    this.stage.dataset.zoom = this.zoomed ? "actual" : "fit";
    this.zoomButton.setAttribute("aria-pressed", String(this.zoomed));
    this.sized();
  }

  sized() {
    const { naturalWidth, naturalHeight } = this.img;
    const scale = this.zoomed ? 1 / (window.devicePixelRatio || 1) : 1;
    this.img.style.width = this.zoomed ? `${naturalWidth * scale}px` : "";
    const enlarged = !this.zoomed && this.stage.clientWidth > naturalWidth * 1.5 && Math.max(naturalWidth, naturalHeight) <= 256;
    this.img.classList.toggle("pixelated", enlarged || this.zoomed);
  }

  missing() {
    const fallback = this.row ? inside(this.run, this.row) : "";
    if (fallback && this.img.src !== fallback) {
      this.img.src = fallback;
      this.open.hidden = true;
      setText(this.note, "The full image is not beside this page: this is the small one inside it.");
      return;
    }
    this.img.hidden = true;
    setText(this.none, "The file could not be shown: it was removed, or it is not a whole image.");
  }
}
