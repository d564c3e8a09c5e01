"""Every number of every run with where it comes from: evaluations in training, watched checkpoints, and reports that lie beside runs.

A number stands once: what metrics.jsonl says of a step is left out where the report of that step is there, which says more.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halation.gallery.catalog import DAMAGE, Catalog, Entry, id_of
from halation.gallery.reports import Report, Shelf, picture_of, place_of
from halation.gallery.run_files import Lines, is_count, is_number
from halation.images.plot import direction
from halation.runs.folder import METRICS_FILE

log = logging.getLogger(__name__)

TRAINED = ("train", "distill")
EVALUATION = "evaluation"
KEY = re.compile(r"e([0-9a-f]{10})\.([0-9]{1,4})")
ABOUT = (
    *("extractor", "weights", "weights_sha256", "resize", "precision", "num_generated", "num_reference"),
    *("generated_hash", "reference_hash", "subsets", "subset_size", "nearest_k", "rank_deficient", "bootstrap"),
)
SIDES = ("nearest", "farthest")
SIGN = b'"num_generated"'
KEYS_OF_NAMES = {"kid": "kid", "fid": "fid", "fd": "fd", "inception score": "is", "clip score": "clip", "prompt ": ""}
"""By how a name begins; empty: what follows."""

Score = dict[str, Any]


@dataclass(kw_only=True)
class _Curve:
    """The evaluation lines of one run's metrics.jsonl."""

    lines: Lines
    rows: list[dict[str, Any]] = field(default_factory=list)

    def look(self) -> bool:
        rewritten, found = self.lines.new()
        rows = [row for row in found if is_line(row)]
        if rewritten:
            changed = bool(self.rows or rows)
            self.rows = rows
            return changed
        self.rows += rows
        return bool(rows)


def is_line(row: Mapping[str, Any]) -> bool:
    """Whether a line of metrics.jsonl is a number of an evaluation; the held-out loss is a curve of the training, and is not."""
    return isinstance(row.get("metric"), str) and "num_generated" in row and is_number(row.get("value"))


class Scores:
    """The numbers of a catalog's runs. The thread that refreshes the catalog refreshes this after it, any thread asks."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.version = 0
        self._shelf = Shelf()
        self._curves: dict[str, _Curve] = {}
        self._reports: dict[str, Report] = {}
        self._lines: dict[str, list[dict[str, Any]]] = {}
        self._lock = threading.Lock()

    def refresh(self) -> bool:
        """Look at the disk, by stats alone where nothing changed; whether any number came, went or changed."""
        entries = self.catalog.entries()
        trained = {entry.id: entry for entry in entries if entry.kind in TRAINED}
        for id in self._curves.keys() - trained.keys():
            del self._curves[id]
        changed = self._shelf.look(self._folders(trained.values()))
        for id, entry in trained.items():
            curve = self._curves.setdefault(id, _Curve(lines=Lines(entry.folder / METRICS_FILE, having=SIGN)))
            changed |= curve.look()
        with self._lock:
            gone = self._lines.keys() != self._curves.keys()
            self._reports = {report.id: report for report in self._shelf.all()}
            self._lines = {id: list(curve.rows) for id, curve in self._curves.items()}
            self.version += changed or gone
        return changed or gone

    def _folders(self, trained: Iterable[Entry]) -> Iterator[Path]:
        seen = set()
        for folder in [*self.catalog.walked(), *(entry.folder / EVALUATION for entry in trained)]:
            if folder not in seen:
                seen.add(folder)
                yield folder

    # -- answers

    def answer(self, only: Collection[str] | None = None) -> dict[str, Any]:
        """What /api/scores answers; of some runs alone where their ids are given."""
        with self._lock:
            reports, lines = list(self._reports.values()), dict(self._lines)
        owners = {report.id: self._owner(report) for report in reports}
        found: dict[tuple[Any, ...], Score] = {}
        for report in sorted(reports, key=lambda report: report.changed):
            for score in _readable(self._scores_of(report, owners[report.id]), report.path):
                found[identity(score)] = score
        told = {(score["run"], score["step"], score["title"]) for score in found.values()}
        for id, rows in lines.items():
            entry = self.catalog.get(id)
            if entry is not None:
                for score in _readable(_scores_of_lines(entry, rows), entry.folder):
                    if (id, score["step"], score["title"]) not in told:
                        found[identity(score)] = score
        chosen = [score for score in found.values() if only is None or score["run"] in only]
        chosen.sort(key=lambda score: (score["name"], score["step"] is None, score["step"] or 0))
        shown = [self._shown(report, owners[report.id]) for report in reports]
        return {
            "scores": chosen,
            "reports": [one for one in shown if one and (only is None or one["run"] in only)],
        }

    def picture(self, id: str, key: str) -> Path | None:
        """The file of a key that a report gave out, asked for under the id of its run, or its own where it has none.

        Never one outside of the folders the catalog is of.
        """
        match = KEY.fullmatch(key)
        with self._lock:
            report = self._reports.get(match[1]) if match else None
        if match is None or report is None:
            return None
        owner = self._owner(report)
        if id not in (report.id, owner.id if owner else ""):
            return None
        rows = [row for side in SIDES for row in report.extremes(side)]
        place = place_of(report, self.catalog.roots)
        if place is None or int(match[2]) >= len(rows):
            return None
        return picture_of(place, rows[int(match[2])]["name"], self.catalog.roots)

    def _owner(self, report: Report) -> Entry | None:
        """The run that was scored: the training or the watch that wrote the report, or the generation whose pictures it is of."""
        folder = report.path.parent
        above = self.catalog.get(id_of(folder.parent))
        if above is not None and (above.kind == "watch" or (above.kind in TRAINED and folder.name == EVALUATION)):
            return above
        place = place_of(report, self.catalog.roots)
        return self.catalog.get(id_of(place)) if place is not None else None

    def _name(self, report: Report, owner: Entry | None) -> str:
        if owner is not None:
            return owner.name
        for root in self.catalog.roots:
            if report.path.is_relative_to(root):
                return str(report.path.relative_to(root).with_suffix(""))
        return report.path.stem

    def _scores_of(self, report: Report, owner: Entry | None) -> Iterator[Score]:
        told = set()
        reference = report.value.get("reference")
        general = {
            "reference": reference.get("path") if isinstance(reference, dict) else None,
            "versions": report.value["versions"],
            "computed_on": report.value.get("computed_on"),
            "report": report.path.name,
            "time": report.changed,
        }
        for metric, about in report.metrics.items():
            title = str(about.get("name") or metric)
            if title not in told:  # fid and fd may be the same number
                told.add(title)
                yield _score(
                    run=owner.id if owner else "",
                    name=self._name(report, owner),
                    step=report.step,
                    metric=metric,
                    title=title,
                    about=about,
                    provenance=general,
                )

    def _shown(self, report: Report, owner: Entry | None) -> dict[str, Any] | None:
        """A report's nearest and farthest pictures; None where it has none."""
        sides = {side: report.extremes(side) for side in SIDES}
        if not any(sides.values()):
            return None
        place = place_of(report, self.catalog.roots)
        rows: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        number = 0
        for side, found in sides.items():
            for row in found:
                path = picture_of(place, row["name"], self.catalog.roots) if place else None
                rows[side].append(
                    {
                        "picture": {"key": f"e{report.id}.{number}", "v": _stamp(path)} if path else None,
                        "label": str(row.get("caption") or row["name"]),
                        "distance": float(row["distance"]),
                    }
                )
                number += 1
        name = self._name(report, owner) + (f", step {report.step}" if report.step is not None else "")
        num = report.generated.get("num")
        about = {"id": report.id, "name": name, "run": owner.id if owner else "", "step": report.step}
        return {**about, "num": num if isinstance(num, int) else None, **rows}


def identity(score: Score) -> tuple[Any, ...]:
    """What makes a number another one; the same number from two files is one."""
    about = score["provenance"]
    whose = score["run"] or about.get("generated_hash") or score["name"]
    how = (
        "weights_sha256",
        "resize",
        "precision",
        "num_generated",
        "num_reference",
        "generated_hash",
        "reference_hash",
    )
    return (whose, score["step"], score["title"], *(repr(about.get(key)) for key in how))


def _readable(scores: Iterable[Score], path: Path) -> Iterator[Score]:
    """Those of one file up to where it is damaged, which costs no other file anything."""
    try:
        yield from scores
    except DAMAGE:
        log.debug("%s is damaged", path, exc_info=True)


def _scores_of_lines(entry: Entry, rows: list[dict[str, Any]]) -> Iterator[Score]:
    latest = {(row["step"] if is_count(row.get("step")) else None, row["metric"]): row for row in rows}
    for (step, title), row in latest.items():
        yield _score(
            run=entry.id,
            name=entry.name,
            step=step,
            metric=key_of(title),
            title=title,
            about=row,
            provenance={},
        )


def key_of(title: str) -> str:
    """The key of a metric by the name it goes under: lines of metrics.jsonl have the name alone."""
    words = title.lower()
    for start, key in KEYS_OF_NAMES.items():
        if words.startswith(start):
            return key or words.removeprefix(start)
    return words.split(" (")[0]


def _score(
    *,
    run: str,
    name: str,
    step: int | None,
    metric: str,
    title: str,
    about: Mapping[str, Any],
    provenance: Mapping[str, Any],
) -> Score:
    interval = about.get("interval")
    pair = isinstance(interval, list) and len(interval) == 2 and all(map(is_number, interval))
    return {
        "run": run,
        "name": name,
        "step": step,
        "metric": metric,
        "title": title,
        "value": float(about["value"]),
        "std": about.get("std") if is_number(about.get("std")) else None,
        "interval": interval if pair else None,
        "better": direction(metric, about.get("better")),
        "few": bool(about.get("few")),
        "note": str(about.get("note") or ""),
        "provenance": {key: about[key] for key in ABOUT if key in about} | dict(provenance),
    }


def _stamp(path: Path) -> str:
    """Another word when the file is another one, so that a browser may keep it for ever."""
    try:
        stat = path.stat()
    except OSError:
        return ""
    return hashlib.blake2b(f"{stat.st_size}.{stat.st_mtime_ns}".encode(), digest_size=5).hexdigest()
