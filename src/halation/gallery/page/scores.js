// Every number of every run: a table of runs and metrics with where each comes from, plots over checkpoints, and the images at both ends.

import { full, get, inside, steadily, thumb } from "./api.js";
import { fill, h, svg } from "./dom.js";
import { countText, numberText, pluralText, valueText } from "./format.js";
import { emptyState, errorState, fadeEdges, skeleton } from "./parts.js";
import { Plot } from "./plot.js";
import { Viewer } from "./viewer.js";

const DECIDING = ["extractor", "weights_sha256", "weights", "resize", "precision", "reference_hash", "reference", "num_generated", "num_reference", "subsets", "subset_size", "nearest_k"];
/** Means over images: more of them make such a number surer, not another one. */
const FREE_OF_COUNTS = ["kid", "clip", "agreement"];
const COUNTS = ["num_generated", "num_reference", "subsets", "subset_size"];
const NAMED_BY = { weights: "weights_sha256", reference: "reference_hash" };

/** The names in which two provenances are known to differ; what one of them does not say counts as the same. */
function differences(a, b, metric) {
  return DECIDING.filter((name) => {
    if (COUNTS.includes(name) && FREE_OF_COUNTS.includes(metric)) return false;
    const hash = NAMED_BY[name];
    if (hash && a?.[hash] && b?.[hash]) return false;
    const [mine, other] = [a?.[name], b?.[name]];
    if (mine === undefined || mine === null || other === undefined || other === null) return false;
    return JSON.stringify(mine) !== JSON.stringify(other);
  });
}

/** Lists of scores of one metric that compare with each other, the largest first. */
export function comparableGroups(scores) {
  const groups = [];
  for (const score of scores) {
    const group = groups.find(([first]) => differences(first.provenance, score.provenance, score.metric).length === 0);
    if (group) group.push(score);
    else groups.push([score]);
  }
  return groups.sort((a, b) => b.length - a.length);
}

/** A sentence on how a group differs from the first one: "resize tf instead of clean". */
function differenceText(first, other) {
  const names = differences(first.provenance, other.provenance, first.metric);
  const short = (value) => (typeof value === "string" && /^[0-9a-f]{32,}$/.test(value) ? `${value.slice(0, 8)}…` : String(value));
  return names.map((name) => `${name.replaceAll("_", " ")} ${short(other.provenance[name])} instead of ${short(first.provenance[name])}`).join(", ");
}

function lowerIsBetter(score) {
  return ["lowest", "lower"].includes(score.better);
}

/** The better of two scores by their own direction; of two equals the first, which may be missing. */
function betterOf(a, b) {
  if (a === null || a === undefined) return b;
  return (lowerIsBetter(a) ? b.value < a.value : b.value > a.value) ? b : a;
}

const SCORES_AGAIN_MS = 1500;
const NUM_LOOKS = 12;
const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";

function finite(score) {
  return typeof score.value === "number" && Number.isFinite(score.value);
}

/** Runs and metrics of a list of scores: what the table, the plots and the legend are drawn from. */
function arrangeScores(scores) {
  const runs = new Map();
  const metrics = new Map();
  for (const score of scores.filter(finite)) {
    const key = `${score.run}|${score.name}`;
    if (!runs.has(key)) runs.set(key, { key, id: score.run, name: score.name, look: (runs.size % NUM_LOOKS) + 1, cells: new Map() });
    const title = score.title ?? score.metric;
    if (!metrics.has(title)) metrics.set(title, { title, metric: score.metric, lower: lowerIsBetter(score), scores: [] });
    metrics.get(title).scores.push({ ...score, runKey: key });
    const cells = runs.get(key).cells;
    if (!cells.has(title)) cells.set(title, []);
    cells.get(title).push(score);
  }
  for (const run of runs.values()) for (const list of run.cells.values()) list.sort((a, b) => (a.step ?? Infinity) - (b.step ?? Infinity));
  return { runs: [...runs.values()], metrics: [...metrics.values()].map(groupMetric(runs)) };
}

/** Letters tell apart what does not compare; the best last number of each group is known where a group has two runs. */
function groupMetric(runs) {
  return (metric) => {
    const groups = comparableGroups(metric.scores);
    const letters = new Map();
    groups.forEach((group, index) => group.forEach((score) => letters.set(`${score.runKey}|${score.step}|${score.value}`, index)));
    const groupOf = (key, score) => letters.get(`${key}|${score.step}|${score.value}`);
    const best = new Map();
    const members = new Map();
    for (const run of runs.values()) {
      const last = run.cells.get(metric.title)?.at(-1);
      if (!last) continue;
      const group = groupOf(run.key, last);
      members.set(group, (members.get(group) ?? 0) + 1);
      best.set(group, betterOf(best.get(group), last));
    }
    const isBest = (key, score) => members.get(groupOf(key, score)) > 1 && best.get(groupOf(key, score)).value === score.value;
    return { ...metric, groups, groupOf, isBest };
  };
}

function spreadText(score) {
  if (score.std !== null && score.std !== undefined) return `± ${numberText(score.std, 2)}`;
  if (score.interval) return `${numberText(score.interval[0], 3)} – ${numberText(score.interval[1], 3)}`;
  return "";
}

function stepText(step) {
  return step === null || step === undefined ? "" : `step ${countText(step)}`;
}

function scoreCell(run, metric) {
  const list = run.cells.get(metric.title);
  if (!list) return h("td", { class: "score-none" }, "–");
  const last = list.at(-1);
  const group = metric.groupOf(run.key, last);
  // The best of a run's own checkpoints, among those that compare with its last.
  const best = list.filter((score) => metric.groupOf(run.key, score) === group).reduce(betterOf, last);
  const winner = metric.isBest(run.key, last);
  return h(
    "td",
    { class: "score", dataset: { metric: metric.metric, best: winner ? "yes" : "no" } },
    h("span", { class: "score-line" },
      h("span", { class: "number" }, h("span", { class: "score-value" }, numberText(last.value)), last.few ? h("abbr", { class: "score-few", title: last.note || "few images: compares with numbers of the same count alone" }, "*") : null),
      spreadText(last) ? h("span", { class: "score-spread number" }, spreadText(last)) : null,
      metric.groups.length > 1 ? h("span", { class: "score-group", title: `Group ${LETTERS[group] ?? "?"}: numbers with other letters do not compare with this one` }, LETTERS[group] ?? "?") : null,
      winner ? h("span", { class: "score-best" }, "best") : null),
    h("span", { class: "score-step number" }, stepText(last.step), best !== last ? h("span", { class: "score-own" }, ` best ${numberText(best.value)} at ${countText(best.step)}`) : null),
  );
}

function provenanceRow(run, metrics, id) {
  const given = metrics.map((metric) => [metric, run.cells.get(metric.title)?.at(-1)]).filter(([, score]) => score);
  const names = [...new Set(given.flatMap(([, score]) => Object.keys(score.provenance ?? {})))];
  const valueOf = (score, name) => valueText(score.provenance?.[name]);
  const shared = names.filter((name) => given.every(([, score]) => valueOf(score, name) === valueOf(given[0][1], name)));
  const own = names.filter((name) => !shared.includes(name));
  const pair = (name, value) => [h("dt", null, name.replaceAll("_", " ")), h("dd", { class: "mono" }, value)];
  const notes = [...new Set(given.map(([, score]) => score.note).filter(Boolean))];
  return h(
    "tr",
    { class: "provenance", id },
    h("td", { colspan: metrics.length + 1 },
      h("div", { class: "provenance-box" },
        h("dl", { class: "pairs" }, shared.map((name) => pair(name, valueOf(given[0][1], name)))),
        own.length > 0 ? given.map(([metric, score]) => h("div", null, h("h3", null, metric.title), h("dl", { class: "pairs" }, own.filter((name) => score.provenance?.[name] !== undefined && score.provenance?.[name] !== null).map((name) => pair(name, valueOf(score, name)))))) : null,
        names.length === 0 ? h("p", { class: "muted" }, "Nothing was written about how these were computed.") : null),
      notes.map((note) => h("p", { class: "muted small" }, note))),
  );
}

class ScoreTable {
  constructor() {
    this.node = h("div", { class: "scores-table" });
    this.open = new Set();
    this.sort = null;
  }

  show(arranged) {
    this.arranged = arranged;
    const { metrics } = arranged;
    const focus = this.node.contains(document.activeElement) ? document.activeElement.id : null;
    fill(
      this.node,
      fadeEdges(h("div", { class: "scores-scroll", tabindex: 0, role: "region", "aria-label": "Scores, can be scrolled sideways" },
        h("table", { class: "table scores", id: "scores" },
          h("caption", { class: "unseen" }, "The last number of each run and metric"),
          h("thead", null, h("tr", null, h("th", { scope: "col" }, "Run"), metrics.map((metric, index) => this.headOf(metric, index)))),
          h("tbody", null, this.sorted().map((run) => this.rowsOf(run)))))),
      this.notes(),
    );
    if (focus) document.getElementById(focus)?.focus({ preventScroll: true });
  }

  headOf(metric, index) {
    const on = this.sort === metric.title;
    const better = metric.lower ? "lower is better" : "higher is better";
    return h("th", { scope: "col", "aria-sort": on ? (metric.lower ? "ascending" : "descending") : null }, h("button", { class: "link-button score-head", type: "button", id: `score-head-${index}`, title: `${better}; click to sort`, onclick: () => this.sortBy(metric.title) }, metric.title, h("span", { class: "score-arrow", role: "img", "aria-label": better }, metric.lower ? "↓" : "↑"), on ? h("span", { "aria-hidden": "true" }, "•") : null));
  }

  sortBy(title) {
    this.sort = this.sort === title ? null : title;
    this.show(this.arranged);
  }

  sorted() {
    const { runs, metrics } = this.arranged;
    const metric = metrics.find((one) => one.title === this.sort);
    if (!metric) return runs;
    const value = (run) => {
      const last = run.cells.get(metric.title)?.at(-1);
      return last ? (metric.lower ? last.value : -last.value) : Infinity;
    };
    return [...runs].sort((a, b) => (value(a) === value(b) ? 0 : value(a) - value(b)));
  }

  rowsOf(run) {
    const { metrics, runs } = this.arranged;
    const open = this.open.has(run.key);
    const id = `provenance-${runs.indexOf(run)}`;
    const toggle = h("button", { class: "link-button score-open", type: "button", id: `${id}-open`, "aria-expanded": String(open), "aria-controls": open ? id : null, title: "Where these numbers come from", onclick: () => this.toggle(run.key) }, h("span", { "aria-hidden": "true" }, open ? "▾" : "▸"), h("span", { class: "unseen" }, `Where the numbers of ${run.name} come from`));
    const name = run.id ? h("a", { href: `#/run/${encodeURIComponent(run.id)}` }, run.name) : h("span", null, run.name);
    return [
      h("tr", { dataset: { run: run.id || run.name } }, h("th", { scope: "row" }, h("span", { class: "score-run" }, toggle, seriesSwatch(run.look), name)), metrics.map((metric) => scoreCell(run, metric))),
      open ? provenanceRow(run, metrics, id) : null,
    ];
  }

  toggle(key) {
    if (!this.open.delete(key)) this.open.add(key);
    this.show(this.arranged);
  }

  notes() {
    const { metrics } = this.arranged;
    const mixed = metrics.filter((metric) => metric.groups.length > 1);
    const few = metrics.some((metric) => metric.scores.some((score) => score.few));
    if (mixed.length === 0 && !few) return null;
    return h(
      "div",
      { class: "score-notes", id: "score-notes" },
      mixed.length > 0 ? h("p", { class: "score-warning" }, h("strong", null, "Not all of these compare. "), "Numbers of one metric with different letters were not computed the same way; the best is marked within a letter.") : null,
      h("ul", null, notesOf(mixed).map(({ letter, text, titles }) => h("li", null, h("span", { class: "score-group" }, letter), ` ${titles.join(", ")}: ${text}`))),
      few ? h("p", { class: "muted" }, "* from few images: such a number compares only with numbers of the same count.") : null,
    );
  }
}

/** What sets groups apart, each difference once with the metrics it holds for. */
function notesOf(mixed) {
  const notes = new Map();
  for (const metric of mixed) {
    metric.groups.slice(1).forEach((group, index) => {
      const [letter, text] = [LETTERS[index + 1] ?? "?", differenceText(metric.groups[0][0], group[0])];
      const note = notes.get(letter + text) ?? { letter, text, titles: [] };
      note.titles.push(metric.title);
      notes.set(letter + text, note);
    });
  }
  return [...notes.values()];
}

/** A short piece of a run's line: its colour and its dashes. */
function seriesSwatch(look) {
  return svg("svg", { class: "swatch", dataset: { look }, viewBox: "0 0 26 10", width: 26, height: 10, "aria-hidden": "true" }, svg("line", { x1: 1, x2: 25, y1: 5, y2: 5 }));
}

class ScorePlots {
  constructor() {
    this.hidden = new Set();
    this.plots = [];
    this.legend = h("div", { class: "score-legend", role: "group", "aria-label": "Runs in the plots" });
    this.grid = h("div", { class: "score-plots", id: "score-plots" });
    this.node = h("section", null, h("h2", null, "Over checkpoints"), this.legend, this.grid);
  }

  show({ runs, metrics }) {
    this.given = { runs, metrics };
    const drawn = metrics.filter((metric) => runs.some((run) => new Set((run.cells.get(metric.title) ?? []).map((score) => score.step)).size > 1));
    const inPlots = runs.filter((run) => drawn.some((metric) => run.cells.get(metric.title)?.some((score) => score.step !== null)));
    this.node.hidden = drawn.length === 0;
    const focus = this.legend.contains(document.activeElement) ? document.activeElement.id : null;
    fill(this.legend, inPlots.length > 1 ? inPlots.map((run) => h("button", { class: "score-key", type: "button", id: `score-key-${run.look}`, "aria-pressed": String(!this.hidden.has(run.key)), onclick: () => this.toggle(run.key) }, seriesSwatch(run.look), run.name)) : null);
    if (focus) document.getElementById(focus)?.focus({ preventScroll: true });
    this.arrange(drawn, inPlots);
    drawn.forEach((metric, index) => this.plots[index].plot.update(this.options(metric, inPlots)));
  }

  arrange(drawn, runs) {
    const titles = drawn.map((metric) => metric.title).join("\n");
    if (titles === this.titles) return;
    this.titles = titles;
    this.close();
    this.plots = drawn.map((metric) => {
      const host = h("div", { class: "score-plot", dataset: { metric: metric.metric } });
      const plotted = new Set(runs.flatMap((run) => (run.cells.get(metric.title) ?? []).filter((score) => score.step !== null).map((score) => metric.groupOf(run.key, score))));
      const note = plotted.size > 1 ? h("span", { class: "score-mixed", title: "Lines with other letters were computed in another way" }, "not all comparable") : null;
      this.grid.append(h("figure", { class: "panel score-figure" }, h("figcaption", null, h("strong", null, metric.title), h("span", { class: "muted small" }, metric.lower ? " ↓ lower is better" : " ↑ higher is better"), note), host));
      return { plot: new Plot(host, { series: [], label: metric.title }) };
    });
  }

  options(metric, runs) {
    const series = runs.filter((run) => !this.hidden.has(run.key)).flatMap((run) => {
      const stepped = (run.cells.get(metric.title) ?? []).filter((score) => score.step !== null && score.step !== undefined);
      const groups = [...new Set(stepped.map((score) => metric.groupOf(run.key, score)))];
      return groups.map((group) => ({
        name: metric.groups.length > 1 ? `${run.name} (${LETTERS[group] ?? "?"})` : run.name,
        colour: run.look,
        dots: true,
        points: stepped.filter((score) => metric.groupOf(run.key, score) === group).map((score) => [score.step, score.value, score.std ?? 0]),
      }));
    });
    return { series, label: metric.title, xName: "step" };
  }

  toggle(key) {
    if (!this.hidden.delete(key)) this.hidden.add(key);
    this.show(this.given);
  }

  close() {
    for (const one of this.plots) one.plot.destroy();
    this.plots = [];
    fill(this.grid);
  }
}

function extremeStrip(report, side, title) {
  const run = report.run || report.id;
  const all = report[side] ?? [];
  if (all.length === 0) return null;
  const open = (at) => new Viewer({
    items: all.length,
    at,
    unit: "image",
    picture: (index) => {
      const { picture, label, distance } = all[index];
      return { url: picture ? full(run, picture) : "", preview: picture ? inside(run, picture) || null : null, label: `${title.toLowerCase()} ${index + 1} of ${all.length}, distance ${numberText(distance)}`, caption: label };
    },
  });
  return h(
    "div",
    { class: "extreme-strip", dataset: { side } },
    h("h3", null, title),
    fadeEdges(h("ol", { class: "extreme-list" }, all.map(({ picture, label, distance }, index) =>
      h("li", null, h("button", { class: "extreme-one", type: "button", title: label, "aria-label": `${title} ${index + 1}: distance ${numberText(distance)}, ${label}`, onclick: () => open(index) },
        picture ? h("img", { class: "picture", src: thumb(run, picture, 128), alt: "", loading: "lazy", decoding: "async", onload: (event) => event.target.classList.toggle("pixelated", event.target.naturalWidth <= 96) }) : h("span", { class: "extreme-none" }, "not here"),
        h("span", { class: "extreme-distance number" }, numberText(distance, 3)),
        h("span", { class: "extreme-label" }, label)))))),
  );
}

/** Of few images the nearest are the farthest too: two strips of the same ones say nothing. */
function sameEnds({ nearest, farthest }) {
  const keys = (side) => (side ?? []).map(({ label, distance }) => `${label} ${distance}`).sort().join("\n");
  return (nearest ?? []).length > 1 && keys(nearest) === keys(farthest);
}

/** The newest report of each run open, those before it folded: they are looked at to compare, not to read through. */
function reportSections(reports, opened) {
  const byRun = new Map();
  for (const report of reports) {
    const key = report.run || report.id;
    byRun.set(key, [...(byRun.get(key) ?? []), report]);
  }
  return [...byRun].map(([key, list]) => {
    const ordered = [...list].sort((a, b) => (a.step ?? 0) - (b.step ?? 0));
    const made = ordered.map(reportSection).filter(Boolean).reverse();
    if (made.length < 2) return made;
    const fold = h("details", { class: "extremes-fold", dataset: { reports: key }, open: opened.has(key), ontoggle: () => (fold.open ? opened.add(key) : opened.delete(key)) }, h("summary", null, `${pluralText(made.length - 1, "earlier report")} of ${list.at(-1).name.replace(/, step.*/, "")}`), made.slice(1));
    return [made[0], fold];
  });
}

function reportSection(report) {
  if (sameEnds(report)) return null;
  const sides = [extremeStrip(report, "nearest", "Nearest to the reference"), extremeStrip(report, "farthest", "Farthest from it")];
  if (!sides.some(Boolean)) return null;
  const name = report.run ? h("a", { href: `#/run/${encodeURIComponent(report.run)}` }, report.name) : report.name;
  return h("section", { class: "panel extremes", dataset: { report: report.id } }, h("h2", null, name, report.num ? h("span", { class: "muted small" }, `  ${pluralText(report.num, "image")}`) : null), sides);
}

class ScoresView {
  constructor(main) {
    this.main = main;
    this.table = new ScoreTable();
    this.plots = new ScorePlots();
    this.openedReports = new Set();
    this.extremes = h("div", { class: "extremes-all", id: "extremes" });
    this.again = steadily(() => this.load(), SCORES_AGAIN_MS);
    document.title = "Scores · Halation";
    fill(main, h("h1", null, "Scores"), skeleton(4));
    this.load();
  }

  async load() {
    try {
      const answer = await get("/api/scores");
      if (!this.gone) this.show(answer);
    } catch (error) {
      if (!this.gone && !this.shown) fill(this.main, errorState(error, () => this.load()));
    }
  }

  show(answer) {
    const text = JSON.stringify(answer);
    if (text === this.shown) return;
    const first = this.shown === undefined;
    this.shown = text;
    const arranged = arrangeScores(answer.scores);
    if (arranged.runs.length === 0) {
      fill(this.main, h("h1", null, "Scores"), emptyState("No scores yet", "Numbers appear here when a training evaluates itself (--eval_every), a watch scores its checkpoints, or an evaluation writes its report below these folders.", "halation evaluate --generated RUN --reference streets --output RUN/scores.json"));
      this.empty = true;
      return;
    }
    if (first || this.empty) fill(this.main, h("h1", null, "Scores"), this.table.node, this.plots.node, this.extremes);
    this.empty = false;
    this.table.show(arranged);
    this.plots.show(arranged);
    const strips = JSON.stringify(answer.reports);
    if (strips !== this.strips) fill(this.extremes, reportSections(answer.reports, this.openedReports));
    this.strips = strips;
  }

  changed() {
    this.again();
  }

  unmount() {
    this.gone = true;
    this.again.stop();
    this.plots.close();
  }
}

/** Fills main with the page of all scores. */
export function mountScores(main) {
  return new ScoresView(main);
}
