"""Export runs as one HTML file: the page, the API responses it requests, and thumbnails.

Full images are linked by relative paths, so they open as long as the page stays next to its run.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import os
import re
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from halation.errors import InputError, format_count
from halation.gallery.evaluation_reports import EXTREME_SIDES, ScoreIndex
from halation.gallery.generation_runs import RowQuery
from halation.gallery.run_catalog import RunCatalog, SafeRunEntry
from halation.gallery.run_file_reader import NUM_LOG_LINES, encode_json, select_evenly
from halation.gallery.thumbnails import make_thumbnail
from halation.runs.run_folder import write_atomic

ENTRY_MODULE = "app.js"
IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w-]+\.js)";\n', re.MULTILINE)
PAGE_FOLDER = Path(__file__).with_name("page")
EXPORT_MARKER = '<meta name="generator" content="halation gallery --export">\n'
"""Marks a page as an export, which another export may overwrite."""
MARKER_SEARCH_BYTES = 1024
MAX_FAILURES = 1_000
ROWS_PER_QUERY = 1_000
THUMBNAIL_SIZE = 256
EXTREMES_DIVISOR = 4
"""The nearest and farthest images of evaluations get at most 1/EXTREMES_DIVISOR of all images."""
MAX_IMAGE_BYTES = 24 << 20
"""Limit for all thumbnails together, so that the page can be sent by mail."""
STYLE_LINK = '<link rel="stylesheet" href="/static/style.css">\n'
SCRIPT_LINK = '<script type="module" src="/static/app.js"></script>\n'
NOTE_STYLE = "\n.left-out { max-width: 72ch; margin: 2rem auto; padding: 0 1rem; opacity: 0.75; font-size: 0.85rem; }\n"
ThumbnailFunction = Callable[[Path], bytes | None]


def bundle(modules: Mapping[str, str], name: str = ENTRY_MODULE, seen: set[str] | None = None) -> str:
    """Bundle the module `name` and its imports; `modules` are texts by file name.

    Each module follows those it imports, without its import lines and `export` keywords. A name that two modules
    declare becomes a syntax error.
    """
    seen = set() if seen is None else seen
    if name in seen:
        return ""
    seen.add(name)
    imported = "".join(bundle(modules, other, seen) for other in IMPORT.findall(modules[name]))
    text = re.sub(r"^export ", "", IMPORT.sub("", modules[name]), flags=re.MULTILINE)
    return f"{imported}// {name}\n{text.strip()}\n"


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """Result of an export."""

    path: Path
    num_bytes: int
    num_images: int
    left_out: tuple[str, ...]


@dataclass(kw_only=True)
class PageContent:
    """Data of the page: responses by address, thumbnails and links by `RUN/KEY`, omissions."""

    responses: dict[str, Any] = field(default_factory=dict)
    images: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def export(
    entries: Sequence[SafeRunEntry],
    catalog: RunCatalog,
    scores: ScoreIndex,
    path: Path,
    num_images: int,
    thumbnail: ThumbnailFunction = lambda path: make_thumbnail(path, THUMBNAIL_SIZE),
) -> ExportResult:
    """Write the page of some runs, which share the number of images equally.

    The catalog and the scores must have been refreshed.
    """
    check_export_path(path)
    share, max_bytes = -(-num_images // len(entries)), MAX_IMAGE_BYTES // len(entries)
    content = merge_contents(
        entries, [collect_content(entry, catalog, scores, path, share, thumbnail, max_bytes) for entry in entries]
    )
    # The name of a folder may contain any bytes.
    title = ", ".join(os.fsencode(entry.name).decode("utf-8", "replace") for entry in entries)
    data = render_page(title, content).encode()
    try:
        write_atomic(path, data)
    except OSError as error:
        raise _write_error(path, error) from error
    return ExportResult(
        path=path, num_bytes=len(data), num_images=len(content.images), left_out=tuple(content.left_out)
    )


def merge_contents(entries: Sequence[SafeRunEntry], contents: Sequence[PageContent]) -> PageContent:
    """Merge the contents of several runs: lists are joined, omissions are prefixed by the run."""
    if len(contents) == 1:
        return contents[0]
    merged = PageContent()
    for entry, content in zip(entries, contents, strict=True):
        merged.responses |= content.responses
        merged.images |= content.images
        merged.links |= content.links
        name = os.fsencode(entry.name).decode("utf-8", "replace")
        merged.left_out += [f"{name}: {sentence}" for sentence in content.left_out]
    for address, keys in (("/api/state", ("roots",)), ("/api/runs", ("runs",)), ("/api/scores", ("scores", "reports"))):
        for key in keys:
            rows: list[Any] = []
            for row in (row for content in contents for row in content.responses[address][key]):
                if row not in rows:  # a run and a run inside it may both have a row
                    rows.append(row)
            merged.responses[address] = {**merged.responses[address], key: rows}
    return merged


def check_export_path(path: Path) -> None:
    """Raise if the file cannot be written or is not an export, before anything is read."""
    if path.is_dir():
        raise InputError(f"--export {path} is a folder", "a file to write", "give a file name, such as run.html")
    if path.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"--export {path}", "a file ending in .html", f"give it that ending: {path}.html")
    if not path.parent.is_dir():
        raise InputError(
            f"--export {path}: there is no folder {path.parent}",
            "a file in an existing folder",
            "create the folder first",
        )
    try:
        write_atomic(path.with_name(f".{path.name}.probe"), b"")
        path.with_name(f".{path.name}.probe").unlink()
    except OSError as error:
        raise _write_error(path, error) from error
    if os.path.lexists(path) and not _is_export(path):
        raise InputError(
            f"--export {path}: the file exists and is not an export of this command",
            "a new file, or an earlier export",
            "choose another name, or remove it first",
        )


def _write_error(path: Path, error: OSError) -> InputError:
    return InputError(
        f"--export {path} cannot be written: {error.strerror or error}",
        "a writable folder with some megabytes free",
        "fix the cause, or choose another folder",
    )


def _is_export(path: Path) -> bool:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # opening a pipe would block
            return EXPORT_MARKER.strip().encode() in file.read(MARKER_SEARCH_BYTES)
    except OSError:
        return False


def select_runs(catalog: RunCatalog) -> list[SafeRunEntry]:
    """Return the one run in each of the catalog's roots; runs inside a run belong to it."""
    selected: dict[str, SafeRunEntry] = {}
    for root in catalog.roots:
        entries = [entry for entry in catalog.entries() if entry.folder.is_relative_to(root)]
        tops = [
            entry
            for entry in entries
            if not any(entry is not other and entry.folder.is_relative_to(other.folder) for other in entries)
        ]
        if not tops:
            raise InputError(f"no run below {root}", "a run to export", "give the folder of a run")
        if len(tops) > 1:
            names = sorted(f"  {entry.folder}" for entry in tops)
            shown = "\n".join(names[:20]) + (f"\n  and {len(names) - 20} more" if len(names) > 20 else "")
            raise InputError(
                f"{len(tops)} runs below {root}:\n{shown}",
                "folders with one run each",
                "give one of these folders, or all that the page should contain",
            )
        selected[tops[0].id] = tops[0]
    return list(selected.values())


# -- content


def collect_content(
    entry: SafeRunEntry,
    catalog: RunCatalog,
    scores: ScoreIndex,
    path: Path,
    num_images: int,
    thumbnail: ThumbnailFunction,
    max_bytes: int,
) -> PageContent:
    """Collect responses and images of one run; fewer images if they exceed `max_bytes`."""
    cache: dict[Path, bytes | None] = {}

    def cached_thumbnail(file: Path) -> bytes | None:
        if file not in cache:
            cache[file] = thumbnail(file)
        return cache[file]

    summary = entry.summary()
    address = f"/api/runs/{entry.id}"
    fixed = PageContent()
    fixed.responses["/api/state"] = {"version": version("halation"), "control": False, "roots": [summary["name"]]}
    fixed.responses["/api/runs"] = {"runs": [summary]}
    fixed.responses[f"{address}/log"] = {"lines": entry.log(NUM_LOG_LINES)}
    fixed.responses[f"{address}/config"] = entry.config()
    if hasattr(entry, "metrics"):
        fixed.responses[f"{address}/metrics"] = entry.metrics(0)
    score_response = scores.build_response(
        run_ids=[one.id for one in catalog.entries() if one.folder.is_relative_to(entry.folder)]
    )
    fixed.responses["/api/scores"] = score_response
    detail = entry.detail()
    while True:
        content = PageContent(responses=dict(fixed.responses))
        embedder = _ImageEmbedder(content, path, cached_thumbnail)
        num_left = num_images - _add_extremes(
            score_response["reports"], scores, content, embedder, num_images // EXTREMES_DIVISOR
        )
        if hasattr(entry, "search"):
            _add_generation(entry, detail, content, embedder, num_left)
        else:
            _add_training(entry, detail, content, embedder, num_left)
        if embedder.num_bytes <= max_bytes or num_images <= 1:
            return content
        num_images = num_images * 3 // 4


class _ImageEmbedder:
    """Embeds thumbnails in a page, with links to the full images."""

    def __init__(self, content: PageContent, page: Path, thumbnail: ThumbnailFunction) -> None:
        self.content = content
        self.folder = page.resolve().parent
        self.thumbnail = thumbnail
        self.num_bytes = 0

    def embed(self, run: str, key: object, find_path: Callable[[str], Path | None]) -> bool:
        """Embed an image; return True if the page has it."""
        name = f"{run}/{key}"
        if name in self.content.images:
            return True
        path = find_path(key) if isinstance(key, str) else None
        data = self.thumbnail(path) if path is not None else None
        if path is None or data is None:
            return False
        self.num_bytes += len(data)
        self.content.images[name] = f"data:image/webp;base64,{base64.b64encode(data).decode()}"
        relative_path = Path(os.path.relpath(path.resolve(), self.folder)).as_posix()
        self.content.links[name] = urllib.parse.quote(os.fsencode(relative_path))
        return True


def _add_training(
    entry: SafeRunEntry, detail: Mapping[str, Any], content: PageContent, embedder: _ImageEmbedder, num_images: int
) -> None:
    """Add all prompts of evenly spread steps, always with the first and the last one."""
    steps: Sequence[Mapping[str, Any]] = detail.get("steps") or []
    max_keys = max((len(set(_image_keys(step))) for step in steps), default=1)
    chosen = select_evenly(range(len(steps)), max(1, num_images // max(1, max_keys)))
    num_left = num_images
    for index in chosen:
        for key in dict.fromkeys(_image_keys(steps[index])):
            if num_left > 0 and f"{entry.id}/{key}" not in content.images:
                num_left -= embedder.embed(entry.id, key, entry.image)
    content.responses[f"/api/runs/{entry.id}"] = {**detail, "steps": [steps[index] for index in chosen]}
    if len(chosen) < len(steps):
        content.left_out.append(f"samples of {len(chosen)} of {format_count(len(steps), 'step')} are on this page")


def _image_keys(step: Mapping[str, Any]) -> Iterable[str]:
    for cells in (step.get("cells") or {}).values():
        for cell in cells or []:
            if isinstance(cell, dict) and "key" in cell:
                yield cell["key"]


def _add_generation(
    entry: Any, detail: Mapping[str, Any], content: PageContent, embedder: _ImageEmbedder, num_images: int
) -> None:
    """Add evenly spread images with their specs, and the failures."""
    num_done = int(entry.search(RowQuery(state="done", limit=0))["total"])
    rows: dict[int, dict[str, Any]] = {}
    wanted = select_evenly(range(num_done), num_images)
    for first in range(0, num_done, ROWS_PER_QUERY) if wanted else ():
        page_indices = [index for index in wanted if first <= index < first + ROWS_PER_QUERY]
        found = entry.search(RowQuery(state="done", offset=first, limit=ROWS_PER_QUERY))["rows"] if page_indices else []
        for row in (found[index - first] for index in page_indices if index - first < len(found)):
            rows[row["index"]] = row
    failed = entry.search(RowQuery(state="failed", limit=MAX_FAILURES))
    for row in rows.values():
        embedder.embed(entry.id, row["key"], entry.image)
    rows |= {row["index"]: row for row in failed["rows"]}
    for row in rows.values():
        spec = entry.spec(row["key"])
        if spec is not None:
            content.responses[f"/api/runs/{entry.id}/spec/{row['key']}"] = spec
    content.responses[f"/api/runs/{entry.id}"] = dict(detail)
    listed = [rows[index] for index in sorted(rows)]
    content.responses[f"/api/runs/{entry.id}/rows"] = {"total": len(listed), "rows": listed}
    if len(wanted) < num_done:
        content.left_out.append(f"{len(wanted)} of {num_done} images are on this page")
    if len(failed["rows"]) < failed["total"]:
        content.left_out.append(f"{len(failed['rows'])} of {failed['total']} failures are listed")


def _add_extremes(
    reports: Sequence[Mapping[str, Any]],
    scores: ScoreIndex,
    content: PageContent,
    embedder: _ImageEmbedder,
    max_images: int,
) -> int:
    """Add nearest and farthest images, the latest reports first; return the number added."""
    num_added = num_available = 0
    for report in sorted(reports, key=lambda report: -(report["step"] or 0)):
        id = report["run"] or report["id"]
        for row in (row for side in EXTREME_SIDES for row in report[side] if row["picture"] is not None):
            num_available += 1
            if num_added < max_images:
                num_added += embedder.embed(id, row["picture"]["key"], functools.partial(scores.image, id))
    if num_added < num_available:
        content.left_out.append(f"{num_added} of {num_available} nearest and farthest images are on this page")
    return num_added


# -- the file


def render_page(title: str, content: PageContent) -> str:
    """Render the HTML. Scripts and styles are allowed by hash, so a run's data cannot execute."""
    script = "\n" + bundle({path.name: path.read_text("utf-8") for path in PAGE_FOLDER.glob("*.js")})
    style = "\n" + (PAGE_FOLDER / "style.css").read_text("utf-8") + NOTE_STYLE
    assert "</style" not in style.lower()
    assert "</script" not in script.lower()
    policy = (
        f"default-src 'none'; script-src '{_csp_hash(script)}'; style-src '{_csp_hash(style)}'; "
        "img-src data: file: 'self'; base-uri 'none'; form-action 'none'"
    )
    page_data = {"responses": content.responses, "pictures": content.images, "links": content.links}
    embedded = f'<script type="application/json" id="embedded">{encode_json(page_data, escaped="<>&")}</script>\n'
    # A sentence about one of several runs begins with the name of its folder, whose letters stay as they are.
    is_single = len(content.responses["/api/runs"]["runs"]) == 1
    sentences = [text[0].upper() + text[1:] if is_single else text for text in content.left_out]
    sentences.append("Full images open where this page lies beside its run")
    note = f'<p class="left-out" id="left-out">{html.escape(" ".join(f"{text}." for text in sentences))}</p>\n'
    shell = (PAGE_FOLDER / "index.html").read_text("utf-8")
    for old, new in (
        (
            '<meta charset="utf-8">\n',
            f'<meta charset="utf-8">\n{EXPORT_MARKER}<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
        ),
        ("<title>Halation</title>", f"<title>{html.escape(title)} · Halation</title>"),
        (STYLE_LINK, f"<style>{style}</style>\n"),
        (SCRIPT_LINK, ""),
        ("</body>", f'{note}{embedded}<script type="module">{script}</script>\n</body>'),
    ):
        before, found, after = shell.partition(old)
        assert found, f"index.html has no {old!r}"
        shell = before + new + after
    return shell


def _csp_hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
