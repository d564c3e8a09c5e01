// Which numbers may stand beside each other: those computed the same way, from as many images, against the same reference.

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
export function differenceText(first, other) {
  const names = differences(first.provenance, other.provenance, first.metric);
  const short = (value) => (typeof value === "string" && /^[0-9a-f]{32,}$/.test(value) ? `${value.slice(0, 8)}…` : String(value));
  return names.map((name) => `${name.replaceAll("_", " ")} ${short(other.provenance[name])} instead of ${short(first.provenance[name])}`).join(", ");
}

export function lowerIsBetter(score) {
  return ["lowest", "lower"].includes(score.better);
}

/** The better of two scores by their own direction; of two equals the first, which may be missing. */
export function betterOf(a, b) {
  if (a === null || a === undefined) return b;
  return (lowerIsBetter(a) ? b.value < a.value : b.value > a.value) ? b : a;
}
