// Builds elements from plain values (text nodes and attributes, never markup), and remembers what a reader has chosen.

const SVG = "http://www.w3.org/2000/svg";
const AS_PROPERTY = new Set(["value", "checked", "indeterminate", "selected", "muted", "scrollTop"]);

function setProp(element, name, value) {
  if (value === null || value === undefined || value === false) return;
  if (name === "class") element.setAttribute("class", value);
  else if (name === "dataset") Object.assign(element.dataset, value);
  else if (name === "style") setStyle(element, value);
  else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
  else if (AS_PROPERTY.has(name)) element[name] = value;
  else element.setAttribute(name, value === true ? "" : String(value));
}

/** Sets styles one by one (the page's policy forbids style attributes, not this); names with dashes are custom properties. */
export function setStyle(element, styles) {
  for (const [name, value] of Object.entries(styles)) {
    if (name.startsWith("--")) element.style.setProperty(name, value);
    else element.style[name] = value;
  }
}

/** Appends strings and numbers as text, nodes as they are, lists item by item; null, undefined and booleans are skipped. */
export function append(element, children) {
  for (const child of children) {
    if (child === null || child === undefined || typeof child === "boolean") continue;
    if (Array.isArray(child)) append(element, child);
    else element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

function build(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) setProp(element, name, value);
  return append(element, children);
}

/** An HTML element. props: {class, title, "aria-label", onclick, dataset: {}, style: {}, ...} or null. */
export function h(tag, props, ...children) {
  return build(document.createElement(tag), props, children);
}

/** An SVG element, the same way. */
export function svg(tag, props, ...children) {
  return build(document.createElementNS(SVG, tag), props, children);
}

/** Replaces all that is inside an element. */
export function fill(element, ...children) {
  element.replaceChildren();
  return append(element, children);
}

/** Writes text only where it differs, so that nothing is laid out again for nothing. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Whether a key press belongs to a field that is being typed in. */
export function isTyping(event) {
  const target = event.target;
  if (!(target instanceof Element)) return false;
  if (target.matches("textarea, select, [contenteditable]")) return true;
  return target.matches("input") && !["range", "checkbox", "radio", "button"].includes(target.type);
}

const openDialogs = [];
let numOwnSteps = 0;

/** Closes every dialog above the entry that the history is at: the browser sends one event for several steps back. */
function wentBack() {
  if (numOwnSteps > 0) numOwnSteps -= 1;
  else for (const dialog of openDialogs.slice(history.state?.dialog ?? 0).reverse()) dialog.close();
}

/**
 * Opens a dialog that the browser's way back closes, before it leaves the page: on a phone nobody looks for a button. When it is closed
 * it goes, and the focus goes back to where it was, unless `onClose()` returns false.
 */
export function showModal(dialog, onClose) {
  const before = document.activeElement;
  document.body.append(dialog);
  if (openDialogs.length === 0) window.addEventListener("popstate", wentBack);
  openDialogs.push(dialog);
  history.pushState({ dialog: openDialogs.length }, "");
  dialog.addEventListener("close", () => {
    dialog.remove();
    if (onClose?.() !== false && before instanceof HTMLElement && before.isConnected) before.focus({ preventScroll: true });
    const depth = openDialogs.indexOf(dialog) + 1;
    openDialogs.splice(depth - 1, 1);
    if (history.state?.dialog === depth) {
      numOwnSteps += 1;
      history.back();
    }
  }, { once: true });
  dialog.showModal();
}

const PREFIX = "halation.";

/** The value remembered under a name, or the fallback. */
export function recall(name, fallback) {
  try {
    const text = window.localStorage.getItem(PREFIX + name);
    return text === null ? fallback : JSON.parse(text);
  } catch {
    return fallback;
  }
}

/** Remembers a value; a browser that keeps nothing (private windows, files) is fine too. */
export function remember(name, value) {
  try {
    window.localStorage.setItem(PREFIX + name, JSON.stringify(value));
  } catch {
    return;
  }
}
