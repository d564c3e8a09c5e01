// Rows of which only those in sight exist, and a grid of up to a hundred thousand cells in such rows.

import { h, setText } from "./dom.js";

const GAP = 6;
const CAPTION_PX = 22;
const CAPTION_FROM_PX = 112;
const SETTLED_MS = 140;
const FAST_PX_A_MS = 2.5;
const MOST_URLS_KEPT = 4000;
// Firefox lays out no element beyond 17.9 million px, Chromium none beyond 33.5; what is taller is mapped onto this height.
const MOST_HEIGHT_PX = 12e6;

/**
 * Rows of one height in the scrolling of the page, or of an element (`scroller`). `spareRows` more than those in sight exist.
 * A row is {element, number, y}; what it shows is its subclass's: `takeRow(number)`, `paintRow(row)`, `dropRow(row)`, `keyOf(number)` and
 * `numberOf(key)` where rows keep their element when their number changes, `focusedRow()`, and `rendered(first, last)`.
 */
export class RowScroller {
  constructor(canvas, { scroller = null, spareRows, headRows = 0 }) {
    Object.assign(this, { canvas, scroller, spareRows, headRows });
    this.rows = new Map();
    this.rowHeight = 1;
    this.numRows = 0;
    this.mapped = 0;
    this.top = 0;
    this.last = { y: 0, at: 0 };
    this.fast = false;
    this.frame = null;
    this.stopping = new AbortController();
    const { signal } = this.stopping;
    (scroller ?? window).addEventListener("scroll", () => this.scrolled(), { passive: true, signal });
    window.addEventListener("resize", () => this.soon(), { signal });
  }

  close() {
    this.stopping.abort();
    this.observer?.disconnect();
    cancelAnimationFrame(this.frame);
    clearTimeout(this.settling);
    this.closed = true;
  }

  keyOf(number) {
    return number;
  }

  numberOf(key) {
    return key;
  }

  setRows(numRows, rowHeight) {
    Object.assign(this, { numRows, rowHeight });
    this.height = numRows * rowHeight;
    this.mapped = Math.min(this.height, MOST_HEIGHT_PX);
    this.canvas.style.height = `${this.mapped}px`;
  }

  /** Where the top of what is in sight is on the canvas. */
  actual() {
    return this.scroller ? this.scroller.scrollTop : -this.canvas.getBoundingClientRect().top;
  }

  viewHeight() {
    return window.innerHeight;
  }

  /** Where that is among all rows, by where it is in the mapped height. */
  wholeOf(actual) {
    const room = this.mapped - this.viewHeight();
    if (actual <= 0 || this.mapped === this.height || room <= 0) return actual;
    if (actual >= room) return this.height - this.viewHeight() + (actual - room);
    return (actual / room) * (this.height - this.viewHeight());
  }

  mappedOf(whole) {
    const room = this.mapped - this.viewHeight();
    const wholeRoom = this.height - this.viewHeight();
    if (whole <= 0 || this.mapped === this.height || room <= 0) return whole;
    if (whole >= wholeRoom) return room + (whole - wholeRoom);
    return (whole / wholeRoom) * room;
  }

  place() {
    const y = this.actual();
    this.top = this.wholeOf(y);
    this.last = { y, at: performance.now() };
  }

  scrollTo(whole) {
    const target = Math.min(whole, Math.max(0, this.height - this.viewHeight() + GAP));
    (this.scroller ?? window).scrollBy(0, this.mappedOf(target) - this.actual());
    this.last = { y: this.actual(), at: performance.now() };
    this.top = this.mapped === this.height ? this.last.y : target;
  }

  scrolled() {
    const now = performance.now();
    const y = this.actual();
    const moved = y - this.last.y;
    const edge = y <= 0 || y >= this.mapped - this.viewHeight();
    // On a mapped height a wheel's step moves by as many pixels as anywhere; only a dragged bar or an edge uses the map.
    if (this.mapped === this.height || edge || Math.abs(moved) > 2 * this.viewHeight()) this.top = this.wholeOf(y);
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

  /** Makes the rows in sight (and the one with the focus, or the keys would go nowhere), drops the others. */
  render() {
    this.frame = null;
    if (this.closed) return;
    const bound = (row) => Math.max(0, Math.min(this.numRows - 1, row));
    const first = bound(Math.floor(this.top / this.rowHeight));
    const last = bound(Math.floor((this.top + this.viewHeight()) / this.rowHeight));
    const wanted = new Set();
    for (let row = Math.max(0, first - this.spareRows); row <= Math.min(this.numRows - 1, last + this.spareRows); row += 1) wanted.add(row);
    const focused = this.numRows > 0 ? this.focusedRow() : null;
    if (focused !== null) wanted.add(focused);
    for (const [key, row] of this.rows) {
      if (wanted.has(this.numberOf(key))) continue;
      this.rows.delete(key);
      this.dropRow(row);
    }
    const shift = this.top - this.actual();
    for (const number of wanted) this.placeRow(number, shift);
    this.rendered(first, last);
  }

  placeRow(number, shift) {
    const key = this.keyOf(number);
    const known = this.rows.get(key);
    const row = known ?? this.takeRow(number);
    if (row.number !== number) row.element.setAttribute("aria-rowindex", number + 1 + this.headRows);
    row.number = number;
    if (!known) {
      this.rows.set(key, row);
      this.paintRow(row);
    }
    const y = Math.round(number * this.rowHeight - shift);
    if (row.y !== y) row.element.style.transform = `translateY(${y}px)`;
    row.y = y;
  }
}

/** How cells of about `size` px fill a width: whole columns, whole pixels. */
function gridLayout(count, width, size, aspect) {
  const columns = Math.max(1, Math.floor((width + GAP) / (Math.min(size, width) + GAP)));
  const cellWidth = Math.max(16, Math.floor((width - GAP * (columns - 1)) / columns));
  const pictureHeight = Math.round(cellWidth * Math.min(1.6, Math.max(0.4, aspect)));
  const caption = cellWidth >= CAPTION_FROM_PX;
  return { count, columns, cellWidth, pictureHeight, caption, rowHeight: pictureHeight + (caption ? CAPTION_PX : 0) + GAP };
}

/**
 * Cells in rows, in the page's own scrolling. `describe(index)` says what a cell shows, or null while that is not known:
 * {key, state, url, label, caption, note, badge, pixelated}. `onLook(first, last)` when the scrolling has slowed, `onOpen(index)`.
 */
export class Grid extends RowScroller {
  constructor(host, { label, describe, onLook, onOpen, inset, size = 128, aspect = 1 }) {
    const canvas = h("div", { class: "grid-canvas", role: "presentation" });
    super(canvas, { spareRows: 2 });
    Object.assign(this, { host, describe, onLook, onOpen, inset, size, aspect });
    this.layout = gridLayout(0, 1, size, aspect);
    host.classList.add("grid");
    host.setAttribute("role", "grid");
    host.setAttribute("aria-label", label);
    host.append(canvas);
    this.spare = [];
    this.urls = new Set();
    this.active = 0;
    const { signal } = this.stopping;
    host.addEventListener("keydown", (event) => this.key(event), { signal });
    host.addEventListener("click", (event) => this.clicked(event), { signal });
    host.addEventListener("focusin", (event) => this.focused(event), { signal });
    this.observer = new ResizeObserver(() => host.clientWidth === this.width || this.keepPlace(() => this.measure(this.layout.count)));
    this.observer.observe(host);
    this.place();
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

  measure(count) {
    this.width = this.host.clientWidth;
    const before = this.layout;
    this.layout = gridLayout(count, this.width, this.size, this.aspect);
    const { columns, rowHeight, cellWidth, pictureHeight, caption } = this.layout;
    this.setRows(Math.ceil(count / columns), rowHeight);
    this.host.style.setProperty("--pic", `${cellWidth}px`);
    this.host.style.setProperty("--pic-height", `${pictureHeight}px`);
    this.host.dataset.captions = caption ? "yes" : "no";
    this.host.setAttribute("aria-rowcount", this.numRows);
    this.host.setAttribute("aria-colcount", columns);
    if (before.columns === columns && before.rowHeight === rowHeight) return;
    for (const row of this.rows.values()) row.element.remove();
    this.rows.clear();
    this.spare = [];
  }

  /** Changes something about the layout while the focused cell, or else the first in sight, keeps its place on the screen. */
  keepPlace(change) {
    const focusInside = this.host.contains(document.activeElement);
    const y = (index) => Math.floor(index / this.layout.columns) * this.rowHeight - this.top;
    const inSight = (place) => place >= this.inset() - this.rowHeight && place < window.innerHeight;
    const anchored = this.actual() > -this.inset() && this.layout.count > 0;
    const first = Math.max(0, Math.floor((this.top + this.inset()) / this.rowHeight)) * this.layout.columns;
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

  /** The first and last index of rows. */
  indices(firstRow, lastRow) {
    const { columns, count } = this.layout;
    return [Math.max(0, firstRow) * columns, Math.min(count, (lastRow + 1) * columns) - 1];
  }

  focusedRow() {
    return this.host.contains(document.activeElement) ? Math.floor(this.active / this.layout.columns) : null;
  }

  rendered(first, last) {
    this.makeReachable(...this.indices(first, last));
    if (!this.fast && this.layout.count > 0) this.onLook(...this.indices(first - this.spareRows, last + this.spareRows));
  }

  takeRow() {
    const row = this.spare.pop();
    if (row) {
      row.element.hidden = false;
      return row;
    }
    const cells = Array.from({ length: this.layout.columns }, (_, column) => newCell(column));
    const element = h("div", { class: "grid-row", role: "row" }, cells.map((cell) => cell.element));
    this.canvas.append(element);
    return { element, cells, number: -1, y: null };
  }

  dropRow(row) {
    row.element.hidden = true;
    this.spare.push(row);
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
    if (!url) return;
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
    const { columns, count } = this.layout;
    const screen = Math.max(1, Math.floor((window.innerHeight - this.inset()) / this.rowHeight)) * columns;
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
    const y = Math.floor(this.active / this.layout.columns) * this.rowHeight;
    if (y < this.top + this.inset()) this.scrollTo(y - this.inset() - GAP);
    else if (y + this.rowHeight > this.top + window.innerHeight) this.scrollTo(y + this.rowHeight - window.innerHeight + GAP);
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
