// Small pieces that every view shows: chips, bars, times, empty places, notices.

import { append, fill, h, setText, showModal, svg } from "./dom.js";
import { agoText, countText, percentText, pluralText, timeText } from "./format.js";

/** A chip with the state's colour and its word; what ended with failures says how many. */
export function stateChip(state, failed = 0) {
  return h("span", { class: "chip", dataset: { state, partly: failed > 0 ? "failed" : "" }, title: failed > 0 ? `${pluralText(failed, "image")} failed` : null }, h("span", { class: "chip-dot", "aria-hidden": "true" }), failed > 0 ? `${state}, ${countText(failed)} failed` : state);
}

/** A thin bar of how much is done and how much failed; `label` is read aloud. */
export function progressBar(done, planned, state, label, failed = 0) {
  const share = (count) => `${(planned > 0 ? 100 * Math.min(1, count / planned) : 0).toFixed(2)}%`;
  const bar = [h("span", { class: "bar-fill", style: { width: share(done) } }), failed > 0 ? h("span", { class: "bar-fill bar-failed", style: { width: share(failed) } }) : null];
  return h(
    "span",
    { class: "bar", role: "progressbar", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": planned, "aria-valuenow": done,
      "aria-valuetext": percentText(done, planned), dataset: { state } },
    bar,
  );
}

/** How long ago, kept right by the page's clock (refreshTimes). */
export function ago(unix) {
  if (!unix) return h("span", { class: "ago" }, "–");
  return h("time", { class: "ago", datetime: new Date(unix * 1000).toISOString(), title: timeText(unix), dataset: { at: unix } }, agoText(unix));
}

/** Brings every `ago` on the page up to date. */
export function refreshTimes(root = document) {
  for (const node of root.querySelectorAll("time.ago[data-at]")) setText(node, agoText(Number(node.dataset.at)));
}

/** What stands where there is nothing yet: what this is, and what to type. */
export function emptyState(title, text, command) {
  return h(
    "div",
    { class: "empty" },
    h("span", { class: "empty-glow", "aria-hidden": "true" }),
    h("h2", null, title),
    text ? h("p", null, wholeWords(text)) : null,
    command ? commandLine(command) : null,
  );
}

/** What went wrong, and a button to try again. */
export function errorState(error, retry) {
  const expired = error.status === 401 || error.status === 403;
  const title = expired ? "This page's link is no longer valid" : error.status === 404 ? "Not here any more" : "This did not load";
  const text = expired
    ? "The gallery was started again, or the cookie was lost. Open the link that `halation gallery` printed."
    : error.message;
  return h(
    "div",
    { class: "empty", role: "alert" },
    h("h2", null, title),
    h("p", null, text),
    h("div", { class: "toolbar" }, error.status === 404 ? h("a", { class: "button", id: "all-runs", href: "#/" }, "All runs") : null, retry ? h("button", { class: "button", type: "button", onclick: retry }, "Try again") : null),
  );
}

/** What stands where a run stood whose folder went away while one looked. */
export function goneState(name) {
  return errorState({ status: 404, message: `The folder of ${name} was removed or renamed while this page was open.` }, () => window.location.reload());
}

/** Lines break at spaces only, never at the hyphens of a flag, a name or a path. */
function wholeWords(text) {
  return text.split(/( +)/).map((part) => (/[-/]/.test(part) ? h("span", { class: "whole" }, part) : part));
}

/** A command to type, with a button that copies it. */
export function commandLine(command) {
  const copy = h("button", { class: "button button-quiet", type: "button", "aria-label": "Copy the command", dataset: { action: "copy" }, onclick: () => copyText(command) }, "Copy");
  return h("div", { class: "command" }, h("code", { tabindex: 0 }, wholeWords(command)), copy);
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Plain http on another host has no clipboard object: the old way needs a field that is selected.
    const field = h("textarea", { class: "unseen", value: text, "aria-hidden": "true" });
    (document.querySelector("dialog[open]") ?? document.body).append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  notify("Copied");
}

/** A short notice at the bottom; kind is "", "good" or "bad". */
export function notify(text, kind = "") {
  const host = document.getElementById("toasts");
  const node = h("div", { class: "toast", dataset: { kind } }, text);
  // An open modal dialog makes the rest of the page inert and covers it: the notice goes up with it.
  if (typeof host.showPopover === "function") {
    host.popover = "manual";
    if (host.matches(":popover-open")) host.hidePopover();
    host.showPopover();
  }
  host.append(node);
  while (host.children.length > 3) host.firstChild.remove();
  setTimeout(() => node.remove(), kind === "bad" ? 8000 : 4000);
}

/** Says something to screen readers only. */
export function announce(text) {
  setText(document.getElementById("announce"), text);
}

/** A box that scrolls sideways fades out at each edge behind which there is more. Returns the box. */
export function fadeEdges(box) {
  const show = () => {
    const hidden = box.scrollWidth - box.clientWidth;
    box.dataset.more = [box.scrollLeft > 2 ? "before" : "", box.scrollLeft < hidden - 2 ? "after" : ""].filter(Boolean).join(" ");
  };
  box.classList.add("fades");
  box.addEventListener("scroll", show, { passive: true });
  const observer = new ResizeObserver(show);
  for (const node of [box, ...box.children]) observer.observe(node);
  return box;
}

/** Whether this is a device without a keyboard and a mouse. */
export function isTouch() {
  return window.matchMedia("(hover: none) and (pointer: coarse)").matches;
}

/** Grey shapes while something loads: `count` blocks of a class. */
export function skeleton(count, kind = "skeleton-row") {
  return h("div", { class: "skeletons", "aria-busy": "true", "aria-label": "Loading" }, Array.from({ length: count }, () => h("div", { class: `skeleton ${kind}` })));
}

/** A tiny line of [x, y] pairs. */
export function sparkline(points, label) {
  const [width, height] = [120, 28];
  const box = svg("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label });
  const clean = (points ?? []).filter(([x, y]) => Number.isFinite(x) && Number.isFinite(y));
  if (clean.length < 2) return box;
  const xs = clean.map(([x]) => x);
  const ys = clean.map(([, y]) => y);
  const [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const place = ([x, y]) => `${(((x - x0) / (x1 - x0 || 1)) * width).toFixed(1)},${(height - 2 - ((y - y0) / (y1 - y0 || 1)) * (height - 4)).toFixed(1)}`;
  return append(box, [svg("polyline", { points: clean.map(place).join(" "), "vector-effect": "non-scaling-stroke" })]);
}

/**
 * A row of choices of which one is on: options [[value, text]], `onPick(value)`. Arrow keys move, as in a group of radio buttons.
 * Returns the element; its `.choose(value)` sets it from outside.
 */
export function segmented(label, options, value, onPick) {
  const group = h("div", { class: "segmented", role: "radiogroup", "aria-label": label });
  const buttons = options.map(([key, text]) =>
    h("button", { type: "button", role: "radio", dataset: { value: key }, onclick: () => pick(key) }, text),
  );
  function choose(key) {
    for (const button of buttons) {
      const on = button.dataset.value === String(key);
      button.setAttribute("aria-checked", String(on));
      button.tabIndex = on ? 0 : -1;
    }
  }
  function pick(key) {
    choose(key);
    onPick(key);
  }
  group.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    const at = buttons.indexOf(document.activeElement);
    const next = (at + step + buttons.length) % buttons.length;
    buttons[next].focus();
    pick(options[next][0]);
  });
  append(group, buttons);
  choose(value);
  group.choose = choose;
  return group;
}

/** A modal dialog with a title and a close button; focus goes back to where it was. Returns {dialog, body, close}. */
export function openDialog(title, { id, kind = "", onClose } = {}) {
  const heading = h("h2", { id: `${id}-title` }, title);
  const body = h("div", { class: "dialog-body" });
  const dialog = h(
    "dialog",
    { class: `dialog ${kind}`, id, "aria-labelledby": `${id}-title` },
    h("div", { class: "dialog-head" }, heading, h("button", { class: "button button-quiet", type: "button", "aria-label": "Close", dataset: { action: "close" }, onclick: () => dialog.close() }, "✕")),
    body,
  );
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close();
  });
  showModal(dialog, onClose);
  return { dialog, body, heading, close: () => dialog.close() };
}

/** Asks once; resolves to true or false. */
export function confirmDialog(title, text, yes) {
  return new Promise((resolve) => {
    let answer = false;
    const { body, close } = openDialog(title, { id: "confirm", kind: "dialog-small", onClose: () => resolve(answer) });
    const decide = (value) => () => {
      answer = value;
      close();
    };
    fill(
      body,
      h("p", null, text),
      h(
        "div",
        { class: "dialog-actions" },
        h("button", { class: "button", type: "button", autofocus: true, dataset: { action: "no" }, onclick: decide(false) }, "Cancel"),
        h("button", { class: "button button-danger", type: "button", dataset: { action: "yes" }, onclick: decide(true) }, yes),
      ),
    );
  });
}
