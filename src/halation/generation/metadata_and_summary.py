"""Writes metadata, failure lists and summary beside the images; checks the images.

The metadata depends on the specs alone, so that its bytes are the same for any number of workers. Values that depend on
workers or time are in the summary.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import stat
import struct
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

from halation.errors import PERMISSION_ERRNOS, RESOURCE_ERRNOS, InputError
from halation.generation.image_requests import ImageRequest
from halation.generation.ledger import ImageOutcome, Ledger, LedgerRow
from halation.images.png_codec import read_png, read_texts
from halation.input_files import RefusedFileError, file_sha256, open_regular_file, parse_json
from halation.runs.run_folder import open_atomic, read_json_with_digest, write_json_with_digest

METADATA_FILE = "metadata.jsonl"
SUMMARY_FILE = "summary.json"
FAILURES_FILE = "failed_prompts_gpu{worker}.txt"
FAILURES_HEADER = "# index\tid\tseed\tprompt\treason (text is escaped as inside a JSON string)\n"
MAX_REASONS = 100
MAX_THREADS = 8
MAX_FOREIGN_SHOWN = 5
FRAME_NAME = re.compile(r"frame_\d{4,}\.png")
_encoder = json.JSONEncoder(ensure_ascii=False)  # json.dumps would create one per line, for a million lines


def file_names(name: str, num_frames: int) -> list[str]:
    """Return the files of a result, relative to the folder: image, or video and frames."""
    if num_frames == 1:
        return [f"{name}.png"]
    return [f"{name}.mp4", *(frame_name(name, number) for number in range(num_frames))]


def frame_name(name: str, number: int) -> str:
    """Return the file name of one frame of a video, relative to the folder."""
    return f"{name}/frame_{number:04d}.png"


def combined_digest(files: Sequence[bytes]) -> str:
    """Return the SHA-256 that the ledger stores for a result.

    `files` are the contents of its files, in the order of `file_names`.
    """
    return _combine_digests([hashlib.sha256(file).hexdigest() for file in files])


def _combine_digests(digests: Sequence[str]) -> str:
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


def write_metadata(folder: Path, rows: Iterable[LedgerRow]) -> str:
    """Write metadata.jsonl in the format of `datasets` and return its SHA-256.

    The file has one line for each done row, by index.
    """
    last = -1
    digest = hashlib.sha256()
    with open_atomic(folder / METADATA_FILE, "metadata") as file:
        for row in rows:
            assert row.request.spec.index > last, "rows must be sorted by index"
            last = row.request.spec.index
            if row.state == "done":
                line = (_encoder.encode(_metadata_row(row)) + "\n").encode()
                digest.update(line)
                file.write(line)
    return digest.hexdigest()


def is_metadata_intact(folder: Path) -> bool:
    """Return True if metadata.jsonl matches its hash in the summary, or if either is missing."""
    try:
        expected = read_json_with_digest(folder / SUMMARY_FILE).get("metadata_sha256")
        return expected is None or file_sha256(folder / METADATA_FILE) == expected
    except FileNotFoundError:
        return True


def _metadata_row(row: LedgerRow) -> dict[str, Any]:
    spec = row.request.spec
    return {
        "file_name": file_names(row.request.name, spec.num_frames)[0],
        "image_id": spec.id,
        "index": spec.index,
        "prompt": spec.prompt,
        "negative_prompt": spec.negative_prompt,
        "seed": spec.seed,
        "width": spec.width,
        "height": spec.height,
        "num_frames": spec.num_frames,
        "steps": spec.steps,
        "guidance_scale": None if spec.guidance_scale is None else float(spec.guidance_scale),
        "sha256": row.sha256,
    }


def write_failures(folder: Path, workers: Sequence[str], rows: Iterable[LedgerRow]) -> None:
    """Write a list of failures, possibly empty, for each worker of this and earlier calls.

    A failure without a worker goes into the list of the first worker.
    """
    before, after = FAILURES_FILE.split("{worker}")
    earlier_workers = [path.name[len(before) : -len(after)] for path in folder.glob(FAILURES_FILE.format(worker="*"))]
    workers = list(dict.fromkeys([*workers, *sorted(earlier_workers)]))
    with contextlib.ExitStack() as stack:

        def open_list(worker: str) -> BinaryIO:
            path = folder / FAILURES_FILE.format(worker=worker)
            file = stack.enter_context(open_atomic(path, "failures"))
            file.write(FAILURES_HEADER.encode())
            return file

        lists = {worker: open_list(worker) for worker in workers}
        for row in rows:
            if row.state == "failed":
                worker = row.worker or (workers[0] if workers else "0")
                if worker not in lists:
                    lists[worker] = open_list(worker)
                spec = row.request.spec
                cells = (str(spec.index), _escape(spec.id), str(spec.seed), _escape(spec.prompt), _escape(row.reason))
                lists[worker].write(("\t".join(cells) + "\n").encode())


def _escape(text: str) -> str:
    return _encoder.encode(text)[1:-1]


@dataclass(frozen=True, kw_only=True)
class DamagedImage:
    """A file that does not match the ledger."""

    index: int
    file: str
    reason: str


def verify(folder: Path, rows: Iterable[LedgerRow], report: Callable[[int, int], None]) -> list[DamagedImage]:
    """Check the files of all done rows against the ledger; return the damaged ones by index.

    Sizes, hashes and embedded specs are compared. `report` is called on the calling thread with the number of results
    checked and the number damaged.
    """
    damages: list[DamagedImage] = []
    num_threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    futures: deque[Future[DamagedImage | None]] = deque()
    num_checked = 0

    def take_result() -> None:
        nonlocal num_checked
        damage = futures.popleft().result()
        num_checked += 1
        if damage is not None:
            damages.append(damage)
        report(num_checked, len(damages))

    with ThreadPoolExecutor(num_threads, thread_name_prefix="verify") as executor:
        for row in rows:
            if row.state == "done":
                futures.append(executor.submit(_find_damage, folder, row))
            if len(futures) >= 16 * num_threads:
                take_result()
        while futures:
            take_result()
    return sorted(damages, key=lambda damage: damage.index)


def _find_damage(folder: Path, row: LedgerRow) -> DamagedImage | None:
    """Return what is wrong with one result, or None.

    A disk or permission error raises instead, because the file itself may be good.
    """
    spec = row.request.spec
    files = file_names(row.request.name, spec.num_frames)
    num_bytes = 0
    for file in files:
        try:
            status = os.stat(folder / file)
        except FileNotFoundError:
            return DamagedImage(index=spec.index, file=file, reason="missing")
        except OSError as error:
            if error.errno in (*RESOURCE_ERRNOS, *PERMISSION_ERRNOS):
                raise
            return DamagedImage(index=spec.index, file=file, reason=f"cannot be read ({error.strerror or error})")
        if not stat.S_ISREG(status.st_mode):
            return DamagedImage(index=spec.index, file=file, reason="cannot be read (not a file)")
        if status.st_size == 0:
            return DamagedImage(index=spec.index, file=file, reason="cut short (empty)")
        num_bytes += status.st_size
    if num_bytes < row.num_bytes:
        reason = f"cut short ({num_bytes} of {row.num_bytes} bytes)"
    elif num_bytes > row.num_bytes:
        reason = f"changed ({num_bytes} bytes instead of {row.num_bytes})"
    elif _combine_digests([file_sha256(folder / file) for file in files]) != row.sha256:
        reason = "changed (its SHA-256 differs)"
    else:
        reason = "" if carries_spec(folder, row.request) else "its spec differs from its row in the ledger"
    return DamagedImage(index=spec.index, file=files[0], reason=reason) if reason else None


def carries_spec(folder: Path, request: ImageRequest) -> bool:
    """Return True if the PNG of a request, or each frame of its video, contains its spec."""
    pngs = [file for file in file_names(request.name, request.spec.num_frames) if file.endswith(".png")]
    return all(read_spec(folder / file) == request.spec.as_json() for file in pngs)


def read_spec(path: Path) -> dict[str, Any] | None:
    """Return the spec inside a PNG or None; raise OSError if the file cannot be read."""
    with open_regular_file(path) as file:
        data = file.read()
    try:
        spec = parse_json(read_texts(data)["halation"].encode())
    except (ValueError, KeyError, struct.error, zlib.error):
        return None
    return spec if isinstance(spec, dict) else None


def prove_outcome(folder: Path, request: ImageRequest) -> ImageOutcome | None:
    """Return the outcome that the image file itself proves, or None.

    The file must be a complete PNG with the request's spec in it.
    """
    if request.spec.num_frames != 1:
        return None
    path = folder / file_names(request.name, 1)[0]
    try:
        read_png(path)
        if not carries_spec(folder, request):
            return None
        data = path.read_bytes()
    except (InputError, OSError):
        return None
    return ImageOutcome(index=request.spec.index, state="done", sha256=combined_digest([data]), num_bytes=len(data))


def find_image_of_another_run(folder: Path, requests: Sequence[ImageRequest]) -> str:
    """Return the first file of these done rows if all their images carry other specs; else "".

    A single image may have been placed there by the user. If all of them differ, the ledger belongs to other images.
    """
    found = ""
    for request in requests:
        file = next(name for name in file_names(request.name, request.spec.num_frames) if name.endswith(".png"))
        try:
            spec = read_spec(folder / file)
        except OSError:
            return ""
        if spec is None or spec == request.spec.as_json():
            return ""
        found = found or file
    return found if len(requests) > 1 else ""


def find_missing(folder: Path, names: Iterable[tuple[int, str, int]]) -> list[int]:
    """Return the indices of done rows whose files are missing.

    `names` gives index, name and number of frames of each done row. Only the folder is listed; no file is opened or
    stat'ed. Comparing counts would not be enough: a killed call leaves images that are not recorded yet, and these
    would hide missing ones.
    """
    present = set(os.listdir(folder))
    return [
        index
        for index, name, num_frames in names
        # Images first, without a call: there may be a million of them.
        if (
            f"{name}.png" not in present
            if num_frames == 1
            else not present.issuperset(_folder_entries(name, num_frames))
        )
    ]


def find_foreign_images(folder: Path, ledger: Ledger) -> list[str]:
    """Return a few files that unfinished rows would overwrite but that carry other specs.

    The files of all done rows must exist.
    """
    foreign = (request for request, is_own in iter_unrecorded(folder, ledger) if not is_own)
    present = set(os.listdir(folder))
    return [
        next(name for name in _folder_entries(request.name, request.spec.num_frames) if name in present)
        for request in itertools.islice(foreign, MAX_FOREIGN_SHOWN)
    ]


def iter_unrecorded(folder: Path, ledger: Ledger) -> Iterator[tuple[ImageRequest, bool]]:
    """Yield the unfinished rows whose files exist, and whether these carry the row's spec.

    A killed call leaves images that are published but not recorded yet.
    """
    present = set(os.listdir(folder))
    has_videos = ledger.has_videos()
    if not has_videos and sum(name.endswith(".png") for name in present) == ledger.counts()["done"]:
        return  # only the images of done rows, of which there may be a million
    indices = [
        index
        for index, name, num_frames in ledger.unfinished_names()
        if not present.isdisjoint(_folder_entries(name, num_frames))
    ]
    for request in ledger.requests(indices):
        if request.spec.num_frames == 1 and (folder / f"{request.name}.png").is_dir():
            continue  # a folder is not overwritten: the image fails with that reason
        with contextlib.suppress(FileNotFoundError):  # another command that shares the folder may be replacing it
            yield request, _is_own_result(folder, request)


def _is_own_result(folder: Path, request: ImageRequest) -> bool:
    frames = folder / request.name
    if request.spec.num_frames == 1:
        files = [folder / f"{request.name}.png"]
    elif frames.is_dir() and not frames.is_symlink():
        files = list(frames.iterdir())
        if any(FRAME_NAME.fullmatch(file.name) is None for file in files):
            return False
    else:  # a video is published after its frames
        return False
    try:
        return all(read_spec(file) == request.spec.as_json() for file in files)
    except (IsADirectoryError, RefusedFileError):
        return False


def remove_result(folder: Path, name: str, num_frames: int) -> None:
    """Remove an image, or a video with its frames and nothing else, to generate it again."""
    for file in file_names(name, num_frames):
        with contextlib.suppress(OSError):  # generating it again reports the error
            (folder / file).unlink()
    if num_frames > 1:
        with contextlib.suppress(OSError):
            (folder / name).rmdir()


def _folder_entries(name: str, num_frames: int) -> tuple[str, ...]:
    """Return the top-level names of a result in the folder."""
    return (f"{name}.png",) if num_frames == 1 else (f"{name}.mp4", name)


@dataclass(frozen=True, kw_only=True)
class WorkerStats:
    """Counts and times of one worker in this call."""

    done: int = 0
    failed: int = 0
    seconds_painting: float = 0.0
    restarts: int = 0

    def __add__(self, other: WorkerStats) -> WorkerStats:
        """Add the stats of two workers with the same name, from two processes on one machine."""
        names = [each.name for each in fields(self)]
        return WorkerStats(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The counts of a run: the first four for the whole folder, the rest for this call."""

    planned: int
    done: int
    failed: int
    open: int
    drawn_now: int
    seconds: float
    workers: Mapping[str, WorkerStats] = field(default_factory=dict)
    retries: int = 0
    num_redone_batches: int = 0
    failures_by_reason: Mapping[str, int] = field(default_factory=dict)
    smaller_micro_batches: int = 0
    """Images of the folder generated with a smaller micro-batch than planned, after an out-of-memory error."""
    equality_classes: Mapping[str, str] = field(default_factory=dict)
    """E0, E1 or E2 for each setting that has one."""
    interrupted: bool = False
    metadata_sha256: str = ""


def count_reasons(failures: Iterable[LedgerRow]) -> dict[str, int]:
    """Return how many rows failed for each reason (its first line), most frequent first.

    Reasons beyond the first hundred are counted together.
    """
    counts = Counter((row.reason.strip().splitlines() or ["no reason given"])[0] for row in failures)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    rest = sum(num for _, num in ordered[MAX_REASONS:])
    return dict(ordered[:MAX_REASONS]) | ({"other reasons": rest} if rest else {})


def summary_json(summary: RunSummary) -> dict[str, Any]:
    """Return the content of summary.json."""
    return {
        "planned": summary.planned,
        "done": summary.done,
        "failed": summary.failed,
        "open": summary.open,
        "interrupted": summary.interrupted,
        "drawn_now": summary.drawn_now,
        "seconds": round(summary.seconds, 3),
        "pictures_per_s": _ratio(summary.drawn_now, summary.seconds),
        "workers": {
            label: {
                "done": worker.done,
                "failed": worker.failed,
                "seconds_painting": round(worker.seconds_painting, 3),
                "busy_share": _ratio(worker.seconds_painting, summary.seconds),
                "restarts": worker.restarts,
            }
            for label, worker in summary.workers.items()
        },
        "retries": summary.retries,
        "redone_sheets": summary.num_redone_batches,
        "failures_by_reason": dict(summary.failures_by_reason),
        "smaller_micro_batches": summary.smaller_micro_batches,
        "equality_classes": dict(summary.equality_classes),
        "metadata_sha256": summary.metadata_sha256,
    }


def _ratio(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole > 0 else 0.0


def is_summary_current(folder: Path, summary: RunSummary) -> bool:
    """Return True if the existing summary describes the same images.

    It is then kept, because a call that generated nothing has no times to write.
    """
    try:
        written = read_json_with_digest(folder / SUMMARY_FILE)
        names = ("planned", "done", "failed", "open")
        has_same_metadata = written.get("metadata_sha256") in (None, summary.metadata_sha256)  # None: earlier versions
        return has_same_metadata and all(written[name] == getattr(summary, name) for name in names)
    except (OSError, InputError, KeyError, TypeError):
        return False


def write_summary(folder: Path, summary: RunSummary) -> None:
    write_json_with_digest(folder / SUMMARY_FILE, summary_json(summary))
