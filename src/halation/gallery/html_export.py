"""One run, or a few, as one page: the same modules as the live page, the answers they would ask for, and small pictures, all in a single file.

Full pictures are linked by the way from the page to them, so they open where the page lies beside its run.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import os
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from halation.errors import InputError
from halation.gallery.catalog import Catalog, Entry
from halation.gallery.metric_rows import evenly
from halation.gallery.page_bundle import bundle
from halation.gallery.run_files import NUM_LOG_LINES, finite
from halation.gallery.scores import SIDES, Scores
from halation.gallery.thumbnails import small
from halation.runs.folder import publish

PAGE = Path(__file__).with_name("page")
MARK = '<meta name="generator" content="halation gallery --export">\n'
"""By this a page is known for an export, which the next one may replace."""
MARK_WITHIN = 1024
NUM_FAILURES = 1_000
ROWS_A_LOOK = 1_000
THUMBNAIL_SIZE = 256
EXTREMES_SHARE = 4
"""The nearest and farthest pictures of evaluations take at most this part of all."""
MAX_PICTURE_BYTES = 24 << 20
"""Of all thumbnails together: a page that can still be mailed."""
STYLE_LINK = '<link rel="stylesheet" href="/static/style.css">\n'
SCRIPT_LINK = '<script type="module" src="/static/app.js"></script>\n'
NOTE_STYLE = "\n.left-out { max-width: 72ch; margin: 2rem auto; padding: 0 1rem; opacity: 0.75; font-size: 0.85rem; }\n"

Thumbnail = Callable[[Path], bytes | None]


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written."""

    path: Path
    num_bytes: int
    num_pictures: int
    left_out: tuple[str, ...]


@dataclass(kw_only=True)
class Content:
    """What the page is given: answers by address, thumbnails and links by `RUN/KEY`, and sentences on what is not there."""

    responses: dict[str, Any] = field(default_factory=dict)
    pictures: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def export(
    entries: Sequence[Entry],
    catalog: Catalog,
    scores: Scores,
    path: Path,
    num_pictures: int,
    thumbnail: Thumbnail = lambda path: small(path, THUMBNAIL_SIZE),
) -> Exported:
    """Write the page of some runs, which share the number of pictures; the catalog and the scores have been refreshed."""
    check_target(path)
    share, max_bytes = -(-num_pictures // len(entries)), MAX_PICTURE_BYTES // len(entries)
    content = together(
        entries, [gather(entry, catalog, scores, path, share, thumbnail, max_bytes) for entry in entries]
    )
    # a folder's name may be any bytes
    title = ", ".join(os.fsencode(entry.name).decode("utf-8", "replace") for entry in entries)
    data = page(title, content).encode()
    try:
        publish(path, data)
    except OSError as error:
        raise _unwritable(path, error) from error
    return Exported(
        path=path, num_bytes=len(data), num_pictures=len(content.pictures), left_out=tuple(content.left_out)
    )


def together(entries: Sequence[Entry], contents: Sequence[Content]) -> Content:
    """What several runs' pages are given as one: their lists are joined, and what is left out is said of whom."""
    if len(contents) == 1:
        return contents[0]
    whole = Content()
    for entry, content in zip(entries, contents, strict=True):
        whole.responses |= content.responses
        whole.pictures |= content.pictures
        whole.links |= content.links
        name = os.fsencode(entry.name).decode("utf-8", "replace")
        whole.left_out += [f"{name}: {sentence}" for sentence in content.left_out]
    for address, keys in (("/api/state", ("roots",)), ("/api/runs", ("runs",)), ("/api/scores", ("scores", "reports"))):
        lists = {key: [one for content in contents for one in content.responses[address][key]] for key in keys}
        whole.responses[address] = {**whole.responses[address], **{key: _once(lists[key]) for key in keys}}
    return whole


def _once(rows: Iterable[Any]) -> list[Any]:
    """What a run and one inside it both hold stands once."""
    kept: list[Any] = []
    for row in rows:
        if row not in kept:
            kept.append(row)
    return kept


def check_target(path: Path) -> None:
    """Refuse what cannot become a file, or is another one's, before anything is read."""
    if path.is_dir():
        raise InputError(f"--export {path} is a folder", "a file to write", "give a file name, such as run.html")
    if path.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"--export {path}", "a file ending in .html", f"give it that ending: {path}.html")
    if not path.parent.is_dir():
        raise InputError(
            f"--export {path}: there is no folder {path.parent}",
            "a file in a folder that is there",
            "make the folder first",
        )
    try:
        publish(path.with_name(f".{path.name}.probe"), b"")
        path.with_name(f".{path.name}.probe").unlink()
    except OSError as error:
        raise _unwritable(path, error) from error
    if os.path.lexists(path) and not _is_export(path):
        raise InputError(
            f"--export {path}: it is there, and is not a page that this command wrote",
            "a new file, or an earlier export",
            "choose another name, or remove it first",
        )


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(
        f"--export {path} cannot be written: {error.strerror or error}",
        "a place that can be, with some megabytes free",
        "choose another, or mend that",
    )


def _is_export(path: Path) -> bool:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # a pipe would never be opened
            return MARK.strip().encode() in file.read(MARK_WITHIN)
    except OSError:
        return False


def chosen_runs(catalog: Catalog) -> list[Entry]:
    """For each of the catalog's folders the one run in it."""
    return list({entry.id: entry for entry in (only_run(catalog, root) for root in catalog.roots)}.values())


def only_run(catalog: Catalog, root: Path) -> Entry:
    """The one run below a folder; what lies inside a run belongs to it."""
    entries = [entry for entry in catalog.entries() if entry.folder.is_relative_to(root)]
    tops = [
        entry
        for entry in entries
        if not any(entry is not other and entry.folder.is_relative_to(other.folder) for other in entries)
    ]
    if not tops:
        raise InputError(f"no run below {root}", "a run to export", "name the folder of a run")
    if len(tops) > 1:
        names = sorted(str(entry.folder) for entry in tops)
        shown = "\n".join(f"  {name}" for name in names[:20]) + (
            f"\n  and {len(names) - 20} more" if len(names) > 20 else ""
        )
        raise InputError(
            f"{len(tops)} runs below {root}:\n{shown}",
            "folders of one run each: a page holds those that were named",
            "name one of them, or each that the page is to hold",
        )
    return tops[0]


# -- what is in it


def gather(
    entry: Entry,
    catalog: Catalog,
    scores: Scores,
    path: Path,
    num_pictures: int,
    thumbnail: Thumbnail,
    max_bytes: int,
) -> Content:
    """Everything the page asks for of one run, with fewer pictures where they would be too many bytes."""
    kept: dict[Path, bytes | None] = {}

    def small_once(file: Path) -> bytes | None:
        if file not in kept:
            kept[file] = thumbnail(file)
        return kept[file]

    summary = entry.summary()
    about = f"/api/runs/{entry.id}"
    fixed = Content()
    fixed.responses["/api/state"] = {"version": version("halation"), "control": False, "roots": [summary["name"]]}
    fixed.responses["/api/runs"] = {"runs": [summary]}
    fixed.responses[f"{about}/log"] = {"lines": entry.log(NUM_LOG_LINES)}
    fixed.responses[f"{about}/config"] = entry.config()
    if hasattr(entry, "metrics"):
        fixed.responses[f"{about}/metrics"] = entry.metrics(0)
    told = scores.answer(only=[one.id for one in catalog.entries() if one.folder.is_relative_to(entry.folder)])
    fixed.responses["/api/scores"] = told
    detail = entry.detail()
    while True:
        content = Content(responses=dict(fixed.responses))
        shelf = _Shelf(content, path, small_once)
        left = num_pictures - _extremes(told["reports"], scores, content, shelf, num_pictures // EXTREMES_SHARE)
        if hasattr(entry, "search"):
            _generation(entry, detail, content, shelf, left)
        else:
            _training(entry, detail, content, shelf, left)
        if shelf.num_bytes <= max_bytes or num_pictures <= 1:
            return content
        num_pictures = num_pictures * 3 // 4


class _Shelf:
    """Puts pictures into a page: the small one inside, a link to the full one."""

    def __init__(self, content: Content, page: Path, thumbnail: Thumbnail) -> None:
        self.content = content
        self.folder = page.resolve().parent
        self.thumbnail = thumbnail
        self.num_bytes = 0

    def put(self, run: str, key: object, find: Callable[[str], Path | None]) -> bool:
        """Whether the page has this picture now."""
        name = f"{run}/{key}"
        if name in self.content.pictures:
            return True
        path = find(key) if isinstance(key, str) else None
        data = self.thumbnail(path) if path is not None else None
        if path is None or data is None:
            return False
        self.num_bytes += len(data)
        self.content.pictures[name] = f"data:image/webp;base64,{base64.b64encode(data).decode()}"
        way = Path(os.path.relpath(path.resolve(), self.folder)).as_posix()
        self.content.links[name] = urllib.parse.quote(os.fsencode(way))
        return True


def _training(entry: Entry, detail: Mapping[str, Any], content: Content, shelf: _Shelf, num_pictures: int) -> None:
    """All prompts of some steps, spread evenly: the first and the last are always among them."""
    steps: Sequence[Mapping[str, Any]] = detail.get("steps") or []
    most = max((len(set(_keys(step))) for step in steps), default=1)
    chosen = evenly(range(len(steps)), max(1, num_pictures // max(1, most)))
    left = num_pictures
    for index in chosen:
        for key in dict.fromkeys(_keys(steps[index])):
            if left > 0 and f"{entry.id}/{key}" not in content.pictures:
                left -= shelf.put(entry.id, key, entry.picture)
    content.responses[f"/api/runs/{entry.id}"] = {**detail, "steps": [steps[index] for index in chosen]}
    if len(chosen) < len(steps):
        content.left_out.append(f"samples of {len(chosen)} of {len(steps)} steps are on this page")


def _keys(step: Mapping[str, Any]) -> Iterable[str]:
    for cells in (step.get("cells") or {}).values():
        for cell in cells or []:
            if isinstance(cell, dict) and "key" in cell:
                yield cell["key"]


def _generation(entry: Any, detail: Mapping[str, Any], content: Content, shelf: _Shelf, num_pictures: int) -> None:
    """Some of the pictures that are done, spread evenly, with their specs; and what failed."""
    from halation.gallery.generation_runs import Query

    num_done = int(entry.search(Query(state="done", limit=0))["total"])
    rows: dict[int, dict[str, Any]] = {}
    wanted = evenly(range(num_done), num_pictures)
    for first in range(0, num_done, ROWS_A_LOOK) if wanted else ():
        mine = [index for index in wanted if first <= index < first + ROWS_A_LOOK]
        found = entry.search(Query(state="done", offset=first, limit=ROWS_A_LOOK))["rows"] if mine else []
        for row in (found[index - first] for index in mine if index - first < len(found)):
            rows[row["index"]] = row
    failed = entry.search(Query(state="failed", limit=NUM_FAILURES))
    for row in rows.values():
        shelf.put(entry.id, row["key"], entry.picture)
    rows |= {row["index"]: row for row in failed["rows"]}
    for row in rows.values():
        spec = entry.spec(row["key"])
        if spec is not None:
            content.responses[f"/api/runs/{entry.id}/spec/{row['key']}"] = spec
    content.responses[f"/api/runs/{entry.id}"] = dict(detail)
    listed = [rows[index] for index in sorted(rows)]
    content.responses[f"/api/runs/{entry.id}/rows"] = {"total": len(listed), "rows": listed}
    if len(wanted) < num_done:
        content.left_out.append(f"{len(wanted)} of {num_done} pictures are on this page")
    if len(failed["rows"]) < failed["total"]:
        content.left_out.append(f"{len(failed['rows'])} of {failed['total']} failures are listed")


def _extremes(reports: Sequence[Mapping[str, Any]], scores: Scores, content: Content, shelf: _Shelf, most: int) -> int:
    """Pictures nearest to and farthest from a reference, those of the latest reports first; how many were taken."""
    num = num_there = 0
    for report in sorted(reports, key=lambda report: -(report["step"] or 0)):
        id = report["run"] or report["id"]
        for row in (row for side in SIDES for row in report[side] if row["picture"] is not None):
            num_there += 1
            if num < most:
                num += shelf.put(id, row["picture"]["key"], functools.partial(scores.picture, id))
    if num < num_there:
        content.left_out.append(f"{num} of {num_there} nearest and farthest pictures are on this page")
    return num


# -- the file


def page(title: str, content: Content) -> str:
    """The shell with everything in it; scripts and styles run by their hashes, so nothing a run says can become one."""
    script = "\n" + bundle({path.name: path.read_text("utf-8") for path in PAGE.glob("*.js")})
    style = "\n" + (PAGE / "style.css").read_text("utf-8") + NOTE_STYLE
    assert "</style" not in style.lower()
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data: file: 'self'; "
        "base-uri 'none'; form-action 'none'"
    )
    given = {"responses": content.responses, "pictures": content.pictures, "links": content.links}
    embedded = f'<script type="application/json" id="embedded">{embeddable(given)}</script>\n'
    words = "; ".join([*content.left_out, "full pictures open where this page lies beside its run"])
    note = f'<p class="left-out" id="left-out">{html.escape(words[0].upper() + words[1:])}.</p>\n'
    shell = (PAGE / "index.html").read_text("utf-8")
    for old, new in (
        (
            '<meta charset="utf-8">\n',
            f'<meta charset="utf-8">\n{MARK}<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
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


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def embeddable(value: Any) -> str:
    """JSON in plain letters that no parser of pages can take for anything else; what is not finite is null."""
    text = json.dumps(finite(value), allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text
