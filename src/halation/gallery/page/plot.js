// Lines over steps as crisp SVG: axes with readable ticks, a crosshair that keyboard and pointer move, points with error bars.

import { append, fill, h, setStyle, svg } from "./dom.js";
import { countText, numberText, shortText } from "./format.js";

const MARGIN = { left: 44, right: 14, top: 10, bottom: 24 };
const TICK_FONT = "11px system-ui, sans-serif";
const LABEL_PX = 12;
const NUM_COLOURS = 6;

/** Round numbers that cover [low, high] with about `count` ticks. */
function linearTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((times) => times * power).find((size) => size >= rough * 0.999);
  const ticks = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index += 1) ticks.push(Number((index * step).toPrecision(12)));
  return ticks;
}

function logTicks(low, high, count) {
  const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const factors = last - first <= 2 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil((last - first) / count));
  const ticks = [];
  for (let power = first; power <= last; power += every) for (const factor of factors) ticks.push(factor * 10 ** power);
  const inside = ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
  return inside.length >= 2 ? inside : linearTicks(low, high, count).filter((tick) => tick > 0);
}

/** At most four points a pixel column (first, lowest, highest, last): looks the same, draws fast. */
function thinPoints(points, toX) {
  const kept = [];
  let column = null;
  let bucket = [];
  const flush = () => {
    if (bucket.length <= 4) kept.push(...bucket);
    else {
      const low = bucket.reduce((a, b) => (b[1] < a[1] ? b : a));
      const high = bucket.reduce((a, b) => (b[1] > a[1] ? b : a));
      const middle = low[0] <= high[0] ? [low, high] : [high, low];
      kept.push(bucket[0], ...middle, bucket[bucket.length - 1]);
    }
  };
  for (const point of points) {
    const at = Math.round(toX(point[0]));
    if (at !== column) {
      flush();
      bucket = [];
      column = at;
    }
    bucket.push(point);
  }
  flush();
  return kept;
}

function nearestIndex(points, x) {
  let [low, high] = [0, points.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle;
    else high = middle;
  }
  return Math.abs(points[low]?.[0] - x) <= Math.abs(points[high]?.[0] - x) ? low : high;
}

function extent(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

/** The range of all but the wildest hundredth on either side: a spike would flatten the line that matters. */
function mostOf(points) {
  const sorted = points.map(([, y]) => y).sort((a, b) => a - b);
  const cut = Math.floor(sorted.length / 100);
  return [sorted[cut], sorted[sorted.length - 1 - cut]];
}

/** How wide a text is drawn, a little more than less: the fonts of a canvas and of the page may differ by a hair. */
function textWidth(text) {
  textWidth.context ??= document.createElement("canvas").getContext("2d");
  if (textWidth.context === null) return text.length * 7;
  textWidth.context.font = TICK_FONT;
  return Math.ceil(textWidth.context.measureText(text).width * 1.08);
}

/**
 * Draws into host: {series: [{name, points: [[x, y, spread?]], faint, dots, dashed, colour}], legend: false for none, marks: [{x, label}],
 * onHover(x | null), log, unit, label, xName}.
 */
export class Plot {
  constructor(host, options) {
    this.host = host;
    this.picture = svg("svg", { class: "plot-picture", tabindex: 0, role: "img" });
    this.tip = h("div", { class: "plot-tip", hidden: true, role: "status" });
    this.legend = h("div", { class: "plot-legend" });
    fill(host, this.legend, h("div", { class: "plot-frame" }, this.picture, this.tip));
    host.classList.add("plot");
    this.picture.addEventListener("pointermove", (event) => this.pointed(event));
    this.picture.addEventListener("pointerdown", (event) => this.pointed(event));
    // A finger that is lifted leaves as well: what it pointed at stays until the next tap elsewhere.
    this.picture.addEventListener("pointerleave", (event) => event.pointerType === "touch" || this.hover(null));
    this.picture.addEventListener("blur", () => this.hover(null));
    this.picture.addEventListener("keydown", (event) => this.key(event));
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.picture.parentElement);
    this.update(options);
  }

  update(options) {
    this.options = { marks: [], log: false, unit: "", xName: "step", label: "", ...options };
    this.all = this.options.series.map((series, index) => ({
      colour: (index % NUM_COLOURS) + 1,
      ...series,
      points: series.points.filter(([x, y]) => Number.isFinite(x) && Number.isFinite(y) && (!this.options.log || y > 0)),
    }));
    this.main = this.all.filter((series) => !series.faint && series.points.length > 0);
    this.dataXs = [...new Set(this.main.flatMap((series) => series.points.map(([x]) => x)))].sort((a, b) => a - b);
    this.draw();
  }

  scales() {
    const shown = this.all.filter((series) => series.points.length > 0);
    const [x0, x1] = this.options.xRange ?? extent(shown.flatMap((series) => series.points.map(([x]) => x)));
    let [y0, y1] = extent(shown.flatMap((series) => (series.faint ? mostOf(series.points) : series.points.flatMap(([, y, spread]) => (spread ? [y - spread, y + spread] : [y])))));
    const log = this.options.log && y0 > 0;
    if (log) [y0, y1] = y0 === y1 ? [y0 / 2, y1 * 2] : [y0 / 1.08, y1 * 1.08];
    else {
      // A constant that was smoothed differs from itself in its last digits.
      const pad = (y1 - y0 > Math.abs(y1) * 1e-9 ? (y1 - y0) * 0.06 : 0) || Math.abs(y1) * 0.05 || 1;
      // What is never negative has an axis that is not either; zero alone stands at its foot.
      if (y0 === 0 && y1 === 0) y1 = 1;
      else [y0, y1] = [y0 >= 0 ? Math.max(0, y0 - pad) : y0 - pad, y1 + pad];
    }
    this.ticks = log ? logTicks(y0, y1, 5) : linearTicks(y0, y1, Math.max(2, Math.floor(this.height / 48)));
    this.left = Math.max(MARGIN.left, LABEL_PX + Math.max(...this.ticks.map((tick) => textWidth(shortText(tick)))));
    const inner = { width: this.width - this.left - MARGIN.right, height: this.height - MARGIN.top - MARGIN.bottom };
    const place = log ? Math.log : (value) => value;
    this.toX = (x) => this.left + ((x - x0) / (x1 - x0 || 1)) * inner.width;
    this.toY = (y) => MARGIN.top + inner.height * (1 - (place(y) - place(y0)) / (place(y1) - place(y0)));
    this.fromX = (pixel) => x0 + ((pixel - this.left) / inner.width) * (x1 - x0);
    return { x0, x1 };
  }

  draw() {
    this.width = this.picture.parentElement.clientWidth;
    this.height = this.picture.parentElement.clientHeight;
    if (this.width < 60 || this.height < 40) return;
    this.picture.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.picture.setAttribute("aria-label", this.description());
    fill(this.legend, this.main.length > 1 && this.options.legend !== false ? this.main.map((series) => h("span", { class: "legend-item", dataset: { series: series.colour } }, h("span", { class: "legend-line", "aria-hidden": "true" }), series.name)) : null);
    if (this.dataXs.length === 0) {
      fill(this.picture, svg("text", { class: "plot-none", x: this.width / 2, y: this.height / 2 }, "no points yet"));
      return;
    }
    const range = this.scales();
    this.cursor = svg("g", { class: "plot-cursor" });
    const clip = `clip-${(Plot.count = (Plot.count ?? 0) + 1)}`;
    const lines = svg("g", { "clip-path": `url(#${clip})` }, this.all.map((series) => this.lineOf(series)));
    const box = svg("clipPath", { id: clip }, svg("rect", { x: this.left - 3, y: MARGIN.top - 4, width: this.width - this.left - MARGIN.right + 6, height: this.height - MARGIN.top - MARGIN.bottom + 8 }));
    fill(this.picture, svg("defs", null, box), this.axes(range), this.marks(range), lines, this.cursor);
    if (this.at !== undefined && this.at !== null) this.setCursor(this.at);
  }

  description() {
    const last = this.main[0]?.points.at(-1);
    const text = `${this.options.label || this.main[0]?.name || "Plot"} over ${this.options.xName}s`;
    return last ? `${text}; last ${numberText(last[1])}${this.options.unit ? ` ${this.options.unit}` : ""} at ${this.options.xName} ${countText(last[0])}. Arrow keys read the values.` : text;
  }

  axes({ x0, x1 }) {
    const group = svg("g", { class: "plot-axes", "aria-hidden": "true" });
    const [right, bottom] = [this.width - MARGIN.right, this.height - MARGIN.bottom];
    for (const tick of this.ticks) {
      const y = Math.round(this.toY(tick)) + 0.5;
      append(group, [svg("line", { class: "plot-grid", x1: this.left, x2: right, y1: y, y2: y }), svg("text", { class: "plot-y", x: this.left - 8, y: y + 4 }, shortText(tick))]);
    }
    for (const tick of linearTicks(x0, x1, Math.max(2, Math.floor(this.width / 110)))) {
      append(group, [svg("text", { class: "plot-x", x: this.toX(tick), y: bottom + 16 }, shortText(tick))]);
    }
    append(group, [svg("line", { class: "plot-base", x1: this.left, x2: right, y1: bottom + 0.5, y2: bottom + 0.5 })]);
    return group;
  }

  marks({ x0, x1 }) {
    const bottom = this.height - MARGIN.bottom;
    const inside = this.options.marks.filter(({ x }) => x >= x0 && x <= x1);
    const dense = inside.length * 12 > this.width;
    const shape = (x) => (dense ? `M${this.toX(x).toFixed(1)},${bottom} v-4` : `M${this.toX(x).toFixed(1)},${bottom - 5} l3,5 h-6 z`);
    return svg("g", { class: "plot-marks" }, inside.map(({ x, label }) => svg("path", { d: shape(x), dataset: { mark: x } }, svg("title", null, label))));
  }

  lineOf(series) {
    const group = svg("g", { class: `plot-series${series.faint ? " plot-faint" : ""}${series.dashed ? " plot-dashed" : ""}`, dataset: { series: series.colour } });
    const path = thinPoints(series.points, this.toX).map(([x, y]) => `${this.toX(x).toFixed(1)},${this.toY(y).toFixed(1)}`).join(" ");
    append(group, [svg("polyline", { points: path })]);
    if (series.dots || series.points.length === 1) append(group, series.points.map((point) => this.dotOf(point)));
    return group;
  }

  dotOf([x, y, spread]) {
    const [cx, cy] = [this.toX(x), this.toY(y)];
    const low = spread ? this.toY(this.options.log ? Math.max(y - spread, y / 1e3) : y - spread) : cy;
    const bar = spread ? svg("path", { class: "plot-error", d: `M${cx},${this.toY(y + spread)} V${low} M${cx - 3},${this.toY(y + spread)} h6 M${cx - 3},${low} h6` }) : null;
    return svg("g", null, bar, svg("circle", { cx, cy, r: 3 }));
  }

  pointed(event) {
    if (this.dataXs.length === 0 || !this.fromX) return;
    const box = this.picture.getBoundingClientRect();
    const x = this.fromX(((event.clientX - box.left) / box.width) * this.width);
    const pairs = this.dataXs.map((value) => [value]);
    this.hover(this.dataXs[nearestIndex(pairs, x)]);
  }

  key(event) {
    const size = this.dataXs.length;
    if (size === 0) return;
    const now = this.at === null || this.at === undefined ? size - 1 : nearestIndex(this.dataXs.map((x) => [x]), this.at);
    const jump = Math.max(1, Math.round(size / 100));
    const next = { ArrowLeft: now - jump, ArrowRight: now + jump, PageUp: now - jump * 10, PageDown: now + jump * 10, Home: 0, End: size - 1 }[event.key];
    if (event.key === "Escape") this.hover(null);
    if (next === undefined) return;
    event.preventDefault();
    this.hover(this.dataXs[Math.min(size - 1, Math.max(0, next))]);
  }

  hover(x) {
    this.setCursor(x, true);
    if (this.options.onHover) this.options.onHover(x);
  }

  /** Shows the crosshair at x (null hides it); the tip only where the reader points, so that linked plots stay quiet. */
  setCursor(x, withTip = false) {
    this.at = x;
    if (!this.cursor) return;
    fill(this.cursor);
    this.tip.hidden = true;
    if (x === null || this.dataXs.length === 0) return;
    // A run that ended before x, or began after it, has nothing to say there.
    const slack = this.dataXs.length > 1 ? (this.dataXs.at(-1) - this.dataXs[0]) / 50 : 0;
    const reaches = ({ points }) => this.main.length === 1 || (x >= points[0][0] - slack && x <= points.at(-1)[0] + slack);
    const found = this.main.filter(reaches).map((series) => [series, series.points[nearestIndex(series.points, x)]]);
    if (found.length === 0) return;
    const px = this.toX(found.length === 1 ? found[0][1][0] : x);
    append(this.cursor, [svg("line", { x1: px, x2: px, y1: MARGIN.top, y2: this.height - MARGIN.bottom }), found.map(([series, [sx, sy]]) => svg("circle", { cx: this.toX(sx), cy: this.toY(sy), r: 3.5, dataset: { series: series.colour } }))]);
    if (withTip) this.showTip(px, found.length === 1 ? found[0][1][0] : x, found);
  }

  showTip(px, x, found) {
    fill(
      this.tip,
      h("span", { class: "muted" }, `${this.options.xName} ${countText(x)}`),
      found.map(([series, [, y, spread]]) => h("span", { class: "tip-row", dataset: { series: series.colour } }, this.main.length > 1 ? h("span", { class: "legend-line", "aria-hidden": "true" }) : null, this.main.length > 1 ? `${series.name} ` : null, h("strong", null, `${numberText(y)}${spread ? ` ± ${numberText(spread, 2)}` : ""}${this.options.unit ? ` ${this.options.unit}` : ""}`), this.rawText(series, x))),
    );
    this.tip.hidden = false;
    const left = px + this.tip.offsetWidth + 14 > this.width ? px - this.tip.offsetWidth - 10 : px + 10;
    setStyle(this.tip, { left: `${Math.max(0, left)}px` });
  }

  /** What a smoothed line was made from at x. */
  rawText(series, x) {
    const raw = this.all.find((other) => other.faint && other.colour === series.colour && other.points.length > 0);
    return raw ? h("span", { class: "muted" }, ` raw ${numberText(raw.points[nearestIndex(raw.points, x)][1])}`) : null;
  }

  destroy() {
    this.observer.disconnect();
  }
}
