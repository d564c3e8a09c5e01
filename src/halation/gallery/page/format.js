// Numbers, times and counts as people read them.

const NONE = "–";

function known(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/** 12,345 */
export function countText(value) {
  return known(value) ? Math.round(value).toLocaleString("en-US") : NONE;
}

/** 0.0123, 1.23e-5, 12,346: about `digits` significant digits. */
export function numberText(value, digits = 4) {
  if (value === null || value === undefined) return NONE;
  if (typeof value !== "number") return String(value);
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size < 1e-3 || size >= 1e9) return value.toExponential(Math.max(0, digits - 2)).replace("e+", "e").replace("-", "−");
  if (Number.isInteger(value) || size >= 10 ** (digits - 1)) return Math.round(value).toLocaleString("en-US").replace("-", "−");
  return value.toPrecision(digits).replace("-", "−");
}

/** 950, 1k, 12.5k, 3M: short, for axes and narrow places. */
export function shortText(value) {
  if (!known(value)) return NONE;
  const size = Math.abs(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e").replaceAll("-", "−");
  for (const [unit, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= unit) return `${Number((value / unit).toPrecision(4))}${letter}`.replace("-", "−");
  }
  return String(Number(value.toPrecision(6))).replace("-", "−");
}

/** 12 s, 4 min 05 s, 3 h 20 min, 2 d 4 h */
export function durationText(seconds) {
  if (!known(seconds)) return NONE;
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  const minutes = Math.round(whole / 60);
  if (minutes < 60) return `${minutes} min`;
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
  const hours = Math.round(whole / 3600);
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** just now, 40 s ago, 5 min ago, 3 h ago, 2 d ago */
export function agoText(unix, nowMs = Date.now()) {
  if (!known(unix)) return NONE;
  const seconds = Math.max(0, nowMs / 1000 - unix);
  if (seconds < 10) return "just now";
  if (seconds < 60) return `${Math.floor(seconds / 10) * 10} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 48 * 3600) return `${Math.floor(seconds / 3600)} h ago`;
  return `${Math.floor(seconds / 86400)} d ago`;
}

/** 2026-11-16 01:02:03, where the reader is. */
export function timeText(unix) {
  if (!known(unix)) return NONE;
  const at = new Date(unix * 1000);
  const two = (number) => String(number).padStart(2, "0");
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

/** 3.2 images/s, 12 steps/min, 5 steps/h: the unit in which the number is at least one. */
export function rateText(perSecond, unit) {
  if (!known(perSecond) || perSecond <= 0) return NONE;
  const scales = [[1, "s"], [60, "min"], [3600, "h"]];
  const [times, letter] = scales.find(([scale]) => perSecond * scale >= 1) ?? scales[2];
  return `${Number((perSecond * times).toPrecision(3)).toLocaleString("en-US")} ${unit}/${letter}`;
}

/** 42 % (one digit after the point below 10 and above 99, so that slow runs are seen to move) */
export function percentText(part, whole) {
  if (!known(part) || !known(whole) || whole <= 0) return NONE;
  const percent = Math.min(100, (100 * part) / whole);
  const digits = percent > 0 && (percent < 10 || (percent > 99 && percent < 100)) ? 1 : 0;
  return `${(Math.floor(percent * 10 ** digits) / 10 ** digits).toFixed(digits)} %`;
}

/** 1 step, 12 steps */
export function pluralText(count, word) {
  return `${countText(count)} ${word}${count === 1 ? "" : "s"}`;
}

/** 1 of 1 step, 3 of 8 images, 12 steps: `unit` is the word for many. */
export function farText(done, planned, unit) {
  const count = planned > 0 ? planned : done;
  const word = count === 1 ? String(unit).replace(/s$/, "") : unit;
  return planned > 0 ? `${countText(done)} of ${countText(planned)} ${word}` : `${countText(done)} ${word}`;
}

/** A loss; a run from before it was kept says 0, which no loss is. */
export function lossText(loss) {
  return loss === 0 ? NONE : numberText(loss);
}

/** 12.3 MiB */
export function bytesText(bytes) {
  if (!known(bytes)) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let number = bytes;
  let unit = 0;
  while (number >= 1024 && unit < units.length - 1) {
    number /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? number : number.toFixed(1)} ${units[unit]}`;
}

/** Any value of a config as one line of text. */
export function valueText(value) {
  if (value === null || value === undefined) return NONE;
  if (typeof value === "string") return value === "" ? "“”" : value;
  if (typeof value === "object") return JSON.stringify(value);
  return String(value);
}

/** A worker as people call it: a number alone says nothing. */
export function workerText(name) {
  return /^\d+$/.test(String(name)) ? `worker ${name}` : String(name);
}
