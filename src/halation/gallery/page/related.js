// Which run belongs to which: a watch to its training, a watch's images to the watch.

/** Parents by id: as the server says, or where it says nothing by the longest name that holds this one's. */
export function parentsOf(runs) {
  const byName = new Map(runs.map((run) => [run.name, run.id]));
  const ids = new Set(runs.map((run) => run.id));
  const above = (name) => {
    const cut = name.lastIndexOf("/");
    if (cut < 0) return null;
    return byName.get(name.slice(0, cut)) ?? above(name.slice(0, cut));
  };
  return new Map(runs.map((run) => [run.id, ids.has(run.parent) ? run.parent : above(run.name)]));
}

/** Whether a run is one of the image folders that a watch draws for every checkpoint: many, and rarely what one looks for. */
export function isWatchPictures(run, parent) {
  return run.kind === "generate" && parent?.kind === "watch";
}

/** Whether a name is that of a run or of something inside its folder. */
export function isOrInside(name, whole) {
  return name === whole || name.startsWith(`${whole}/`);
}

/** Running ones first in the order they were started, so that they keep their places; then what changed last. A run stands where the liveliest of its family would. */
export function orderRuns(runs) {
  const parents = parentsOf(runs);
  const children = new Map();
  for (const run of runs) children.set(parents.get(run.id), [...(children.get(parents.get(run.id)) ?? []), run]);
  const own = (run) => [run.state === "running" ? 0 : 1, -((run.state === "running" ? (run.started ?? run.changed) : run.changed) ?? 0)];
  const family = (run) => (children.get(run.id) ?? []).map(family).reduce((a, b) => (b[0] - a[0] || b[1] - a[1]) < 0 ? b : a, own(run));
  const keys = new Map(runs.map((run) => [run.id, family(run)]));
  const before = (a, b) => keys.get(a.id)[0] - keys.get(b.id)[0] || keys.get(a.id)[1] - keys.get(b.id)[1] || a.name.localeCompare(b.name);
  const byId = new Map(runs.map((run) => [run.id, run]));
  const walk = (run, depth) => [{ run, depth, parent: byId.get(parents.get(run.id)) ?? null }, ...(children.get(run.id) ?? []).sort(before).flatMap((child) => walk(child, depth + 1))];
  return (children.get(null) ?? []).sort(before).flatMap((run) => walk(run, 0));
}
