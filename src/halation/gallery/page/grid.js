// A grid of up to a hundred thousand cells of one size of which only those in sight exist; it knows places and keys, not what a cell is about.

import { h, setText } from "./dom.js";

const GAP = 6;
const CAPTION_PX = 22;
const CAPTION_FROM_PX = 112;
const SPARE_ROWS = 2;
const SETTLED_MS = 140;
const FAST_PX_A_MS = 2.5;
const MOST_URLS_KEPT = 4000;
// Firefox lays out no element beyond 17.9 million px, Chromium none beyond 33.5; a taller grid is mapped onto this height.
export const MOST_HEIGHT_PX = 12e6;

/** How cells of about `size` px fill a width: whole columns, whole pixels. */
export function gridLayout(count, width, size, aspect) {
  const columns = Math.max(1, Math.floor((width + GAP) / (Math.min(size, width) + GAP)));
  const cellWidth = Math.max(16, Math.floor((width - GAP * (columns - 1)) / columns));
  const pictureHeight = Math.round(cellWidth * Math.min(1.6, Math.max(0.4, aspect)));
  const caption = cellWidth >= CAPTION_FROM_PX;
  const rowHeight = pictureHeight + (caption ? CAPTION_PX : 0) + GAP;
  const numRows = Math.ceil(count / columns);
  return { count, columns, cellWidth, pictureHeight, caption, rowHeight, numRows, height: numRows * rowHeight };
}

/**
 * Cells in rows, in the page's own scrolling. `describe(index)` says what a cell shows, or null while that is not known:
 * {key, state, url, label, caption, note, badge, pixelated}. `onLook(first, last)` when the scrolling has slowed, `onOpen(index)`.
 */
export class Grid {
  constructor(host, { label, describe, onLook, onOpen, inset, size = 128, aspect = 1 }) {
    Object.assign(this, { host, describe, onLook, onOpen, inset, size, aspect });
    this.layout = gridLayout(0, 1, size, aspect);
    this.canvas = h("div", { class: "grid-canvas", role: "presentation" });
    host.classList.add("grid");
    host.setAttribute("role", "grid");
    host.setAttribute("aria-label", label);
    host.append(this.canvas);
    this.rows = new Map();
    this.spare = [];
    this.urls = new Set();
    this.active = 0;
    this.top = 0;
    this.last = { y: 0, at: 0 };
    this.fast = false;
    this.frame = null;
    this.listen();
    this.place();
  }

  listen() {
    this.stopping = new AbortController();
    const { signal } = this.stopping;
    window.addEventListener("scroll", () => this.scrolled(), { passive: true, signal });
    window.addEventListener("resize", () => this.soon(), { signal });
    this.host.addEventListener("keydown", (event) => this.key(event), { signal });
    this.host.addEventListener("click", (event) => this.clicked(event), { signal });
    this.host.addEventListener("focusin", (event) => this.focused(event), { signal });
    this.observer = new ResizeObserver(() => this.resized());
    this.observer.observe(this.host);
  }

  close() {
    this.stopping.abort();
    this.observer.disconnect();
    cancelAnimationFrame(this.frame);
    clearTimeout(this.settling);
    this.closed = true;
  }

  /** Another number of cells: what is in sight stays where it is. */
  setCount(count) {
    if (count === this.layout.count) return;
    this.measure(count);
    this.active = Math.max(0, Math.min(this.active, count - 1));
    this.place();
    this.render();
  }

  setSize(size) {
    this.size = size;
    this.keepPlace(() => this.measure(this.layout.count));
  }

  setAspect(aspect) {
    if (Math.abs(aspect - this.aspect) < 0.01) return;
    this.aspect = aspect;
    this.keepPlace(() => this.measure(this.layout.count));
  }

  /** Another list: from its beginning, if that is above what is in sight. */
  restart(count) {
    this.active = 0;
    this.measure(count);
    if (this.actual() > -this.inset()) this.scrollTo(-this.inset());
    this.place();
    this.repaint();
  }

  resized() {
    if (this.host.clientWidth !== this.width) this.keepPlace(() => this.measure(this.layout.count));
  }

  measure(count) {
    this.width = this.host.clientWidth;
    const before = this.layout;
    this.layout = gridLayout(count, this.width, this.size, this.aspect);
    const { columns, numRows, height, cellWidth, pictureHeight, caption } = this.layout;
    this.mapped = Math.min(height, MOST_HEIGHT_PX);
    this.canvas.style.height = `${this.mapped}px`;
    this.host.style.setProperty("--pic", `${cellWidth}px`);
    this.host.style.setProperty("--pic-height", `${pictureHeight}px`);
    this.host.dataset.captions = caption ? "yes" : "no";
    this.host.setAttribute("aria-rowcount", numRows);
    this.host.setAttribute("aria-colcount", columns);
    if (before.columns === columns && before.rowHeight === this.layout.rowHeight) return;
    for (const row of this.rows.values()) row.element.remove();
    this.rows.clear();
    this.spare = [];
  }

  /** Changes something about the layout while the focused cell, or else the first in sight, keeps its place on the screen. */
  keepPlace(change) {
    const focusInside = this.host.contains(document.activeElement);
    const y = (index) => Math.floor(index / this.layout.columns) * this.layout.rowHeight - this.top;
    const inSight = (place) => place >= this.inset() - this.layout.rowHeight && place < window.innerHeight;
    const anchored = this.actual() > -this.inset() && this.layout.count > 0;
    const first = Math.max(0, Math.floor((this.top + this.inset()) / this.layout.rowHeight)) * this.layout.columns;
    const anchor = inSight(y(this.active)) ? this.active : first;
    const before = y(anchor);
    change();
    if (anchored) this.scrollTo(this.top + y(anchor) - before);
    this.place();
    this.render();
    if (focusInside) this.cellAt(this.active)?.element.focus({ preventScroll: true });
  }

  /** Changes what stands above the grid while what is in sight stays where it is. */
  keepBelow(change) {
    const before = this.host.getBoundingClientRect().top;
    change();
    const moved = this.host.getBoundingClientRect().top - before;
    if (moved !== 0 && before < 0) window.scrollBy(0, moved);
    this.last.y = this.actual();
  }

  actual() {
    return -this.host.getBoundingClientRect().top;
  }

  /** Where the top of the window is in the whole grid, by where it is in the mapped height. */
  wholeOf(actual) {
    const room = this.mapped - window.innerHeight;
    if (actual <= 0 || this.mapped === this.layout.height || room <= 0) return actual;
    if (actual >= room) return this.layout.height - window.innerHeight + (actual - room);
    return (actual / room) * (this.layout.height - window.innerHeight);
  }

  mappedOf(whole) {
    const room = this.mapped - window.innerHeight;
    const wholeRoom = this.layout.height - window.innerHeight;
    if (whole <= 0 || this.mapped === this.layout.height || room <= 0) return whole;
    if (whole >= wholeRoom) return room + (whole - wholeRoom);
    return (whole / wholeRoom) * room;
  }

  place() {
    const y = this.actual();
    this.top = this.wholeOf(y);
    this.last = { y, at: performance.now() };
  }

  scrollTo(whole) {
    const limit = Math.max(0, this.layout.height - window.innerHeight + GAP);
    const target = Math.min(whole, limit);
    const y = this.mappedOf(target);
    window.scrollTo(0, window.scrollY + y - this.actual());
    this.last = { y: this.actual(), at: performance.now() };
    this.top = this.mapped === this.layout.height ? this.last.y : target;
  }

  scrolled() {
    const now = performance.now();
    const y = this.actual();
    const moved = y - this.last.y;
    const edge = y <= 0 || y >= this.mapped - window.innerHeight;
    // On a mapped height a wheel's step moves by as many pixels as anywhere; only a dragged bar or an edge uses the map.
    if (this.mapped === this.layout.height || edge || Math.abs(moved) > 2 * window.innerHeight) this.top = this.wholeOf(y);
    else this.top += moved;
    this.fast = Math.abs(moved) / Math.max(1, now - this.last.at) > FAST_PX_A_MS && Math.abs(moved) > 40;
    this.last = { y, at: now };
    clearTimeout(this.settling);
    this.settling = setTimeout(() => this.settled(), SETTLED_MS);
    this.soon();
  }

  settled() {
    this.fast = false;
    const y = this.mappedOf(this.top);
    if (Math.abs(y - this.actual()) > 1 && this.actual() > 0) this.scrollTo(this.top);
    this.repaint();
  }

  soon() {
    if (this.frame === null) this.frame = requestAnimationFrame(() => this.render());
  }

  /** Shows again what may have changed, in the same places. */
  repaint() {
    for (const row of this.rows.values()) this.paintRow(row);
    this.soon();
  }

  range() {
    const { rowHeight, numRows, columns, count } = this.layout;
    const bound = (row) => Math.max(0, Math.min(numRows - 1, row));
    const first = bound(Math.floor(this.top / rowHeight));
    const last = bound(Math.floor((this.top + window.innerHeight) / rowHeight));
    return { first, last, firstIndex: first * columns, lastIndex: Math.min(count, (last + 1) * columns) - 1 };
  }

  render() {
    this.frame = null;
    if (this.closed) return;
    const { numRows, columns, count } = this.layout;
    const { first, last, firstIndex, lastIndex } = this.range();
    const wanted = new Set();
    for (let row = Math.max(0, first - SPARE_ROWS); row <= Math.min(numRows - 1, last + SPARE_ROWS); row += 1) wanted.add(row);
    // A cell with the focus stays in the page though it is out of sight, or the keys would go nowhere.
    if (count > 0 && this.host.contains(document.activeElement)) wanted.add(Math.floor(this.active / columns));
    for (const [number, row] of this.rows) {
      if (wanted.has(number)) continue;
      this.rows.delete(number);
      row.element.hidden = true;
      this.spare.push(row);
    }
    const shift = this.top - this.actual();
    for (const number of wanted) this.placeRow(number, shift);
    this.makeReachable(firstIndex, lastIndex);
    const spare = SPARE_ROWS * columns;
    if (!this.fast && count > 0) this.onLook(Math.max(0, firstIndex - spare), Math.min(count - 1, lastIndex + spare));
  }

  placeRow(number, shift) {
    let row = this.rows.get(number);
    if (!row) {
      row = this.spare.pop() ?? this.newRow();
      row.number = number;
      this.rows.set(number, row);
      row.element.hidden = false;
      row.element.setAttribute("aria-rowindex", number + 1);
      this.paintRow(row);
    }
    const y = Math.round(number * this.layout.rowHeight - shift);
    if (row.y !== y) row.element.style.transform = `translateY(${y}px)`;
    row.y = y;
  }

  newRow() {
    const cells = Array.from({ length: this.layout.columns }, (_, column) => newCell(column));
    const element = h("div", { class: "grid-row", role: "row" }, cells.map((cell) => cell.element));
    this.canvas.append(element);
    return { element, cells, number: -1, y: null };
  }

  paintRow(row) {
    for (const [column, cell] of row.cells.entries()) this.paint(cell, row.number * this.layout.columns + column);
  }

  paint(cell, index) {
    const there = index < this.layout.count;
    cell.element.hidden = !there;
    if (!there) return;
    if (cell.index !== index) {
      cell.index = index;
      cell.element.dataset.index = index;
      cell.element.tabIndex = -1;
    }
    const about = this.describe(index) ?? { key: "", state: "loading", label: `${index + 1}, loading`, caption: "", url: "" };
    const wait = about.url && this.fast && !this.urls.has(about.url);
    const url = wait ? "" : (about.url ?? "");
    const painted = `${about.key}|${about.state}|${url}|${about.note ?? ""}`;
    if (cell.painted === painted && cell.label === about.label) return;
    cell.painted = painted;
    cell.label = about.label;
    showCell(cell, about, url);
    if (url) this.keepUrl(url);
  }

  keepUrl(url) {
    if (this.urls.size > MOST_URLS_KEPT) this.urls.clear();
    this.urls.add(url);
  }

  cellAt(index) {
    const row = this.rows.get(Math.floor(index / this.layout.columns));
    return row?.cells[index % this.layout.columns];
  }

  /** Exactly one cell can be tabbed to: the active one, or the first in sight where that is elsewhere. */
  makeReachable(firstIndex, lastIndex) {
    const index = this.cellAt(this.active) ? this.active : Math.min(Math.max(this.active, firstIndex), lastIndex);
    const next = this.cellAt(index);
    if (this.reachable && this.reachable !== next) this.reachable.element.tabIndex = -1;
    if (next) next.element.tabIndex = 0;
    this.reachable = next;
  }

  focused(event) {
    const element = event.target.closest("[data-index]");
    if (element) this.active = Number(element.dataset.index);
  }

  clicked(event) {
    const element = event.target.closest("[data-index]");
    if (!element) return;
    this.active = Number(element.dataset.index);
    this.onOpen(this.active);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !event.target.closest("[data-index]")) return;
    const { columns, rowHeight, count } = this.layout;
    const screen = Math.max(1, Math.floor((window.innerHeight - this.inset()) / rowHeight)) * columns;
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, PageUp: -screen, PageDown: screen, Home: -count, End: count };
    if (event.key === "Enter" || event.key === " ") this.onOpen(this.active);
    else if (event.key in steps) this.moveBy(steps[event.key]);
    else return;
    event.preventDefault();
  }

  moveBy(step) {
    const { count, columns } = this.layout;
    let next = this.active + step;
    // Up and down stay in their column until there is no row left, as in a table.
    if (Math.abs(step) >= columns && Math.abs(step) < count && (next < 0 || next >= count)) {
      const column = this.active % columns;
      next = next < 0 ? column : Math.floor((count - 1) / columns) * columns + column;
      if (next >= count) next = Math.max(this.active, next - columns);
    }
    this.focusCell(Math.max(0, Math.min(count - 1, next)));
  }

  /** Brings a cell into sight and gives it the focus. */
  focusCell(index) {
    if (this.layout.count === 0) return;
    this.active = Math.min(index, this.layout.count - 1);
    const { columns, rowHeight } = this.layout;
    const y = Math.floor(this.active / columns) * rowHeight;
    if (y < this.top + this.inset()) this.scrollTo(y - this.inset() - GAP);
    else if (y + rowHeight > this.top + window.innerHeight) this.scrollTo(y + rowHeight - window.innerHeight + GAP);
    this.render();
    // The row may not be rendered yet where the focus comes from outside the grid and the place was far.
    this.cellAt(this.active)?.element.focus({ preventScroll: true });
    this.makeReachable(this.active, this.active);
  }
}

function newCell(column) {
  const img = h("img", { alt: "", decoding: "async", draggable: "false" });
  img.addEventListener("load", () => img.classList.add("here"));
  img.addEventListener("error", () => img.classList.remove("here"));
  const note = h("span", { class: "pic-note" });
  const badge = h("span", { class: "pic-badge" });
  const caption = h("span", { class: "pic-caption" });
  const element = h("div", { class: "pic", role: "gridcell", "aria-colindex": column + 1, tabindex: -1 }, h("span", { class: "pic-picture" }, img, note, badge), caption);
  return { element, img, note, badge, caption, index: -1, painted: null, label: null };
}

function showCell(cell, about, url) {
  cell.element.dataset.state = about.state;
  cell.element.setAttribute("aria-label", about.label);
  cell.element.title = about.title ?? "";
  setText(cell.caption, about.caption ?? "");
  setText(cell.note, about.note ?? "");
  setText(cell.badge, about.badge ?? "");
  cell.badge.hidden = !about.badge;
  cell.img.classList.toggle("pixelated", Boolean(about.pixelated));
  if (cell.img.getAttribute("src") === url) return;
  // What a recycled cell showed before is somebody else's image: it goes before the new one has come.
  cell.img.classList.remove("here");
  if (url) cell.img.src = url;
  else cell.img.removeAttribute("src");
}
