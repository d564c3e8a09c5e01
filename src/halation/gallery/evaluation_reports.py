"""The scores of all runs: evaluations in training, watches, and report files next to runs.

A score is listed once: a line of metrics.jsonl is skipped if the report of its step, which has more fields, exists.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import re
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halation.gallery.run_catalog import READ_ERRORS, RunCatalog, SafeRunEntry, make_run_id
from halation.gallery.run_file_reader import JsonlTailReader, as_dict, is_int64, is_number, read_json
from halation.images.plot import best_direction
from halation.runs.run_folder import METRICS_FILE

MAX_REPORT_BYTES = 8 << 20
MAX_CHILDREN = 200_000
LARGE_FOLDER = 2_000
"""A folder with more entries is read only when it has not changed for a while: images may be written to it."""
MAX_EXTREMES = 64
MAX_PATH_LENGTH = 4096
MTIME_SETTLE_S = 2.0
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
REPORT_KEYS = ("generated", "metrics", "versions")

log = logging.getLogger(__name__)

TRAINING_KINDS = ("train", "distill")
EVALUATION_FOLDER = "evaluation"
IMAGE_KEY = re.compile(r"e([0-9a-f]{10})\.([0-9]{1,4})")
PROVENANCE_KEYS = (
    *("extractor", "weights", "weights_sha256", "resize", "precision", "num_generated", "num_reference"),
    *("num_missing",),
    *("generated_hash", "reference_hash", "subsets", "subset_size", "nearest_k", "rank_deficient", "bootstrap"),
)
IDENTITY_KEYS = (
    *("weights_sha256", "resize", "precision", "num_generated", "num_reference"),
    *("generated_hash", "reference_hash"),
)
EXTREME_SIDES = ("nearest", "farthest")
EVALUATION_MARKER = b'"num_generated"'
METRIC_PREFIXES = {"kid": "kid", "fid": "fid", "fd": "fd", "inception score": "is", "clip score": "clip", "prompt ": ""}
"""Keys by the start of a metric's name; an empty key means the rest of the name."""
ScoreDict = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ReportFile:
    """A report file of `halation evaluate --output`, a watch or an evaluation in training."""

    id: str
    path: Path
    last_modified: float
    content: Mapping[str, Any] = field(repr=False)

    @property
    def metrics(self) -> dict[str, Mapping[str, Any]]:
        """Metrics with a numeric value, by key."""
        found = self.content["metrics"]
        return {
            str(key): about for key, about in found.items() if isinstance(about, dict) and is_number(about.get("value"))
        }

    @property
    def step(self) -> int | None:
        step = self.content.get("step")
        return step if is_int64(step) else None

    @property
    def generated(self) -> Mapping[str, Any]:
        return as_dict(self.content["generated"])

    def extremes(self, side: str) -> list[dict[str, Any]]:
        """Rows of `nearest` or `farthest` with an image name and a distance."""
        found = self.content.get("extremes")
        rows = found.get(side) if isinstance(found, dict) else None
        return [
            row
            for row in (rows if isinstance(rows, list) else [])
            if isinstance(row, dict) and isinstance(row.get("name"), str) and is_number(row.get("distance"))
        ][:MAX_EXTREMES]


@dataclass(kw_only=True)
class _ReportFolder:
    mtime_ns: int
    is_settled: bool
    num_names: int = 0
    reports: dict[str, tuple[tuple[int, int], ReportFile | None]] = field(default_factory=dict)
    """By name: size and mtime of the file, and its report; None for other JSON, which is not read again."""


class ReportScanner:
    """Reports in some folders; folders and files are reread when their mtime changes."""

    def __init__(self) -> None:
        self._folders: dict[Path, _ReportFolder] = {}

    def scan(self, folders: Iterable[Path]) -> bool:
        """Return True if any report was added, removed or changed."""
        before = {report.path: report for report in self.reports()}
        scanned = {}
        for folder in folders:
            found = self._scan_folder(folder)
            if found is not None:
                scanned[folder] = found
        self._folders = scanned
        return before != {report.path: report for report in self.reports()}

    def reports(self) -> list[ReportFile]:
        """All reports, ordered by path."""
        found = [report for folder in self._folders.values() for _, report in folder.reports.values() if report]
        return sorted(found, key=lambda report: report.path)

    def _scan_folder(self, folder: Path) -> _ReportFolder | None:
        known = self._folders.get(folder)
        try:
            mtime_ns = folder.stat().st_mtime_ns
            settled = time.time() - mtime_ns / 1e9 > MTIME_SETTLE_S
            if known is not None and (
                (known.mtime_ns == mtime_ns and known.is_settled) or (known.num_names > LARGE_FOLDER and not settled)
            ):
                return known
            current = _ReportFolder(mtime_ns=mtime_ns, is_settled=settled)
            with os.scandir(folder) as entries:
                for entry in itertools.islice(entries, MAX_CHILDREN):
                    current.num_names += 1
                    if entry.name.endswith(".json") and not entry.name.startswith(".") and entry.is_file():
                        stat = entry.stat()
                        size_and_mtime = (stat.st_size, stat.st_mtime_ns)
                        old = known.reports.get(entry.name) if known else None
                        current.reports[entry.name] = (
                            old
                            if old and old[0] == size_and_mtime
                            else (size_and_mtime, read_report(folder / entry.name))
                        )
        except OSError:
            return None
        return current


def read_report(path: Path) -> ReportFile | None:
    """Read a file if it is a report, which is decided by its content, not its name."""
    try:
        stat = path.stat()
        if stat.st_size > MAX_REPORT_BYTES:
            return None
        value = read_json(path)
    except (OSError, ValueError):
        return None
    if (
        not isinstance(value, dict)
        or not all(sign in value for sign in REPORT_KEYS)
        or not isinstance(value["metrics"], dict)
    ):
        return None
    id = hashlib.blake2b(os.fsencode(path.resolve()), digest_size=5).hexdigest()
    return ReportFile(id=id, path=path, last_modified=stat.st_mtime, content=value)


def find_image_folder(report: ReportFile, roots: Sequence[Path]) -> Path | None:
    """Find the folder of the scored images inside a root.

    The report has the path of the command line, which may be relative to an unknown folder or from another machine. The
    path is tried as it is; then ever shorter suffixes of it are tried next to the report and in the folders above.
    """
    path_text = report.generated.get("path")
    if not isinstance(path_text, str) or not path_text or "\0" in path_text or len(path_text) > MAX_PATH_LENGTH:
        return None
    path = Path(path_text)
    suffixes = [Path(*path.parts[start:]) for start in range(1 if path.is_absolute() else 0, len(path.parts))]
    inside = [above for above in report.path.parents if any(above.is_relative_to(root) for root in roots)]
    for candidate in [path, *(above / end for end in suffixes for above in inside)]:
        # os.path.isdir accepts any text: for a name of 300 letters it returns False and does not raise.
        if ".." not in candidate.parts and os.path.isdir(candidate) and _is_inside(candidate.resolve(), roots):
            return candidate.resolve()
    return None


def find_image(folder: Path, name: str, roots: Sequence[Path]) -> Path | None:
    """Resolve an image named in a report; None if it is no image file or outside of the roots."""
    if not name.lower().endswith(IMAGE_SUFFIXES) or "\0" in name:
        return None
    try:
        path = (folder / name).resolve()
        return path if path.is_file() and path.suffix.lower() in IMAGE_SUFFIXES and _is_inside(path, roots) else None
    except (OSError, RuntimeError, ValueError):
        return None


def _is_inside(path: Path, roots: Sequence[Path]) -> bool:
    return any(path.is_relative_to(root) for root in roots)


@dataclass(kw_only=True)
class _EvaluationRows:
    """The evaluation lines of one run's metrics.jsonl."""

    reader: JsonlTailReader
    rows: list[dict[str, Any]] = field(default_factory=list)

    def refresh(self) -> bool:
        rewritten, found = self.reader.read_new()
        rows = [row for row in found if is_evaluation_row(row)]
        if rewritten:
            changed = bool(self.rows or rows)
            self.rows = rows
            return changed
        self.rows += rows
        return bool(rows)


def is_evaluation_row(row: Mapping[str, Any]) -> bool:
    """Return True if a line of metrics.jsonl is an evaluation score, not a validation loss."""
    return isinstance(row.get("metric"), str) and "num_generated" in row and is_number(row.get("value"))


class ScoreIndex:
    """The scores of a catalog's runs.

    `refresh` is called by the thread that refreshes the catalog, the other methods by any thread.
    """

    def __init__(self, catalog: RunCatalog) -> None:
        self.catalog = catalog
        self.version = 0
        self._report_scanner = ReportScanner()
        self._evaluations: dict[str, _EvaluationRows] = {}
        self._reports: dict[str, ReportFile] = {}
        self._evaluation_rows: dict[str, list[dict[str, Any]]] = {}
        self._lock = threading.Lock()

    def refresh(self) -> bool:
        """Read the disk (only stats if nothing changed); return True if any score changed."""
        entries = self.catalog.entries()
        training_runs = {entry.id: entry for entry in entries if entry.kind in TRAINING_KINDS}
        for id in self._evaluations.keys() - training_runs.keys():
            del self._evaluations[id]
        changed = self._report_scanner.scan(self._report_folders(training_runs.values()))
        for id, entry in training_runs.items():
            evaluation = self._evaluations.setdefault(
                id, _EvaluationRows(reader=JsonlTailReader(entry.folder / METRICS_FILE, must_contain=EVALUATION_MARKER))
            )
            changed |= evaluation.refresh()
        with self._lock:
            gone = self._evaluation_rows.keys() != self._evaluations.keys()
            self._reports = {report.id: report for report in self._report_scanner.reports()}
            self._evaluation_rows = {id: list(curve.rows) for id, curve in self._evaluations.items()}
            self.version += changed or gone
        return changed or gone

    def _report_folders(self, training_runs: Iterable[SafeRunEntry]) -> Iterator[Path]:
        seen = set()
        for folder in [*self.catalog.scanned_folders(), *(entry.folder / EVALUATION_FOLDER for entry in training_runs)]:
            if folder not in seen:
                seen.add(folder)
                yield folder

    # -- responses

    def build_response(self, run_ids: Collection[str] | None = None) -> dict[str, Any]:
        """Response of /api/scores, for all runs or those in `run_ids`."""
        with self._lock:
            reports, lines = list(self._reports.values()), dict(self._evaluation_rows)
        owners = {report.id: self._find_run(report) for report in reports}
        found: dict[tuple[Any, ...], ScoreDict] = {}
        for report in sorted(reports, key=lambda report: report.last_modified):
            for score in _skip_damaged(self._report_scores(report, owners[report.id]), report.path):
                found[score_identity(score)] = score
        reported = {(score["run"], score["step"], score["title"]) for score in found.values()}
        for id, rows in lines.items():
            entry = self.catalog.get(id)
            if entry is not None:
                for score in _skip_damaged(_row_scores(entry, rows), entry.folder):
                    if (id, score["step"], score["title"]) not in reported:
                        found[score_identity(score)] = score
        chosen = [score for score in found.values() if run_ids is None or score["run"] in run_ids]
        chosen.sort(key=lambda score: (score["name"], score["step"] is None, score["step"] or 0))
        extremes = [self._report_extremes(report, owners[report.id]) for report in reports]
        return {
            "scores": chosen,
            "reports": [extreme for extreme in extremes if extreme and (run_ids is None or extreme["run"] in run_ids)],
        }

    def image(self, id: str, key: str) -> Path | None:
        """File of an image key of a report; never one outside of the catalog's roots.

        `id` is that of the report's run, or of the report if it belongs to no run.
        """
        match = IMAGE_KEY.fullmatch(key)
        with self._lock:
            report = self._reports.get(match[1]) if match else None
        if match is None or report is None:
            return None
        owner = self._find_run(report)
        if id not in (report.id, owner.id if owner else ""):
            return None
        rows = [row for side in EXTREME_SIDES for row in report.extremes(side)]
        folder = find_image_folder(report, self.catalog.roots)
        if folder is None or int(match[2]) >= len(rows):
            return None
        return find_image(folder, rows[int(match[2])]["name"], self.catalog.roots)

    def _find_run(self, report: ReportFile) -> SafeRunEntry | None:
        """The scored run: the training or watch that wrote the report, or the run of its images."""
        folder = report.path.parent
        above = self.catalog.get(make_run_id(folder.parent))
        if above is not None and (
            above.kind == "watch" or (above.kind in TRAINING_KINDS and folder.name == EVALUATION_FOLDER)
        ):
            return above
        image_folder = find_image_folder(report, self.catalog.roots)
        return self.catalog.get(make_run_id(image_folder)) if image_folder is not None else None

    def _report_name(self, report: ReportFile, owner: SafeRunEntry | None) -> str:
        if owner is not None:
            return owner.name
        for root in self.catalog.roots:
            if report.path.is_relative_to(root):
                return str(report.path.relative_to(root).with_suffix(""))
        return report.path.stem

    def _report_scores(self, report: ReportFile, owner: SafeRunEntry | None) -> Iterator[ScoreDict]:
        seen_titles = set()
        reference = report.content.get("reference")
        provenance = {
            "reference": reference.get("path") if isinstance(reference, dict) else None,
            "versions": report.content["versions"],
            "computed_on": report.content.get("computed_on"),
            "report": report.path.name,
            "time": report.last_modified,
        }
        for metric, about in report.metrics.items():
            title = str(about.get("name") or metric)
            if title not in seen_titles:  # fid and fd may be the same number
                seen_titles.add(title)
                yield _build_score(
                    run=owner.id if owner else "",
                    name=self._report_name(report, owner),
                    step=report.step,
                    metric=metric,
                    title=title,
                    about=about,
                    provenance=provenance,
                )

    def _report_extremes(self, report: ReportFile, owner: SafeRunEntry | None) -> dict[str, Any] | None:
        """A report's nearest and farthest images; None if it has none."""
        sides = {side: report.extremes(side) for side in EXTREME_SIDES}
        if not any(sides.values()):
            return None
        folder = find_image_folder(report, self.catalog.roots)
        rows: dict[str, list[dict[str, Any]]] = {side: [] for side in EXTREME_SIDES}
        number = 0
        for side, found in sides.items():
            for row in found:
                path = find_image(folder, row["name"], self.catalog.roots) if folder else None
                rows[side].append(
                    {
                        "picture": {"key": f"e{report.id}.{number}", "v": _file_version(path)} if path else None,
                        "label": str(row.get("caption") or row["name"]),
                        "distance": float(row["distance"]),
                    }
                )
                number += 1
        name = self._report_name(report, owner) + (f", step {report.step}" if report.step is not None else "")
        num = report.generated.get("num")
        about = {"id": report.id, "name": name, "run": owner.id if owner else "", "step": report.step}
        return {**about, "num": num if isinstance(num, int) else None, **rows}


def score_identity(score: ScoreDict) -> tuple[Any, ...]:
    """Key that identifies a score, so that the same score from two files is listed once."""
    about = score["provenance"]
    source = score["run"] or about.get("generated_hash") or score["name"]
    return (source, score["step"], score["title"], *(repr(about.get(key)) for key in IDENTITY_KEYS))


def _skip_damaged(scores: Iterable[ScoreDict], path: Path) -> Iterator[ScoreDict]:
    """Yield the scores of one file up to the first error, which does not affect other files."""
    try:
        yield from scores
    except READ_ERRORS:
        log.debug("%s is damaged", path, exc_info=True)


def _row_scores(entry: SafeRunEntry, rows: list[dict[str, Any]]) -> Iterator[ScoreDict]:
    latest = {(row["step"] if is_int64(row.get("step")) else None, row["metric"]): row for row in rows}
    for (step, title), row in latest.items():
        yield _build_score(
            run=entry.id,
            name=entry.name,
            step=step,
            metric=metric_key(title),
            title=title,
            about=row,
            provenance={},
        )


def metric_key(title: str) -> str:
    """Key of a metric from its name; lines of metrics.jsonl have only the name."""
    words = title.lower()
    for start, key in METRIC_PREFIXES.items():
        if words.startswith(start):
            return key or words.removeprefix(start)
    return words.split(" (")[0]


def _build_score(
    *,
    run: str,
    name: str,
    step: int | None,
    metric: str,
    title: str,
    about: Mapping[str, Any],
    provenance: Mapping[str, Any],
) -> ScoreDict:
    interval = about.get("interval")
    is_pair = isinstance(interval, list) and len(interval) == 2 and all(map(is_number, interval))
    return {
        "run": run,
        "name": name,
        "step": step,
        "metric": metric,
        "title": title,
        "value": float(about["value"]),
        "std": about.get("std") if is_number(about.get("std")) else None,
        "interval": interval if is_pair else None,
        "better": best_direction(metric, about.get("better")),
        "few": bool(about.get("few")),
        "note": str(about.get("note") or ""),
        "provenance": {key: about[key] for key in PROVENANCE_KEYS if key in about} | dict(provenance),
    }


def _file_version(path: Path) -> str:
    """Version string that changes with the file, so that browsers can cache it forever."""
    try:
        stat = path.stat()
    except OSError:
        return ""
    return hashlib.blake2b(f"{stat.st_size}.{stat.st_mtime_ns}".encode(), digest_size=5).hexdigest()
