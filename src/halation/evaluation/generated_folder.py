"""Opens the images of --generated: checks them against the ledger and matches prompts."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from halation.csv_jsonl_reader import decode_blocks, json_rows, read_text_bytes
from halation.data.decode import SUFFIXES, UNSUPPORTED_SUFFIXES, left_out_message
from halation.errors import InputError, format_count
from halation.evaluation.image_sources import ImageFiles, find_image_files, read_stamps
from halation.generation.image_requests import RequestDefaults, iter_requests
from halation.generation.ledger import LEDGER_FILE, LEDGER_NAMES, Ledger
from halation.generation.metadata_and_summary import METADATA_FILE, SUMMARY_FILE, is_metadata_intact
from halation.prompt_files import PromptFile
from halation.runs.run_folder import read_json_with_digest

log = logging.getLogger(__name__)
NUM_SHOWN = 5
_SEED_SUFFIX = re.compile(r"_seed\d+\Z")


def open_generated(folder: Path, *, allow_missing: bool = False) -> ImageFiles:
    """Open an output folder of `halation generate`, or any other folder of images.

    A folder with a ledger must contain exactly the images of the ledger; with `allow_missing`, some may not exist.
    """
    if not folder.is_dir():
        found = f"{folder} is a file" if folder.exists() else f"there is no folder {folder}"
        raise InputError(f"--generated: {found}", "a folder of images", "check --generated")
    if (folder / LEDGER_FILE).is_file():
        with Ledger(folder / LEDGER_FILE) as ledger:
            _check_ledger(ledger, allow_missing)
            missing = [f"{name}.png" for _, name, _ in sorted(ledger.unfinished_names())]
            return _open_run(folder, _ledger_rows(ledger), missing, allow_missing)
    if (folder / LEDGER_NAMES["files"]).is_dir() and (folder / METADATA_FILE).is_file():
        rows, missing = _metadata_rows(folder, allow_missing)
        return _open_run(folder, rows, missing, allow_missing)
    return find_image_files(folder, "--generated")


def _check_ledger(ledger: Ledger, allow_missing: bool) -> None:
    """Raise if a ledger is damaged, empty or, without `allow_missing`, unfinished."""
    damage = ledger.find_damage()
    if damage:
        index = min(*damage.planned, *damage.outcomes, 2**62)
        raise InputError(
            f"--generated: {ledger.path} is damaged: row {index + 1} is not as written",
            "the ledger as Halation wrote it",
            "run the same `halation generate` again: it restores the row from the prompt list and the image",
        )
    if not ledger.num_planned:
        raise InputError(
            f"--generated: {ledger.path} has no images: it was emptied or replaced, or the run never started",
            "the ledger in which the images of this folder were recorded",
            f"restore it from a copy; or remove it, to score the images of {ledger.path.parent} without their prompts",
        )
    counts = ledger.counts()
    if counts["done"] < counts["planned"]:
        _check_missing(counts["planned"] - counts["done"], counts["planned"], counts["failed"], allow_missing)


def _ledger_rows(ledger: Ledger) -> Iterator[dict[str, Any]]:
    for row in ledger.done_rows():
        spec = row.request.spec
        yield {"name": row.request.name, "prompt": spec.prompt, "frames": spec.num_frames, "sha256": row.sha256}


def _metadata_rows(folder: Path, allow_missing: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the done rows of a folder that several processes shared, and the missing ones.

    The metadata lists the done images; the summary has the number of planned images. The missing ones are known by
    their row in the prompt list alone.
    """
    summary = read_json_with_digest(folder / SUMMARY_FILE) if (folder / SUMMARY_FILE).is_file() else {}
    if not is_metadata_intact(folder):
        raise InputError(
            f"--generated: {folder / METADATA_FILE} does not match its hash in summary.json",
            "both files from the same call of `halation generate`",
            "run the same `halation generate` again, which writes both files",
        )
    rows = list(json_rows(METADATA_FILE, decode_blocks(read_text_bytes(folder / METADATA_FILE))))
    planned = int(summary.get("planned", 0))
    if len(rows) < planned or not rows:
        _check_missing(planned - len(rows), planned, int(summary.get("failed", 0)), allow_missing)
    done = [
        {
            "name": Path(row.values["file_name"]).stem,
            "prompt": row.values["prompt"],
            "frames": row.values["num_frames"],
            "sha256": row.values["sha256"],
        }
        for row in rows
    ]
    indices = {row.values.get("index") for row in rows} if len(rows) < planned else set(range(planned))
    return done, [f"row {index + 1}" for index in range(planned) if index not in indices]


def _check_missing(missing: int, planned: int, failed: int, allow_missing: bool) -> None:
    """Raise for missing images unless they are allowed and at least one exists."""
    if allow_missing and missing < planned:
        return
    what = f"{missing} of {format_count(planned, 'image')} of that run {'is' if missing == 1 else 'are'} missing"
    raise InputError(
        f"--generated: {what} ({failed} failed)",
        "a run without missing images" if not allow_missing else "a run with at least one image",
        "run the same `halation generate` again until it ends with exit code 0"
        + ("" if allow_missing else ", or pass --allow_missing to score the others"),
    )


def _open_run(folder: Path, rows: Iterable[dict[str, Any]], missing: Sequence[str], allow_missing: bool) -> ImageFiles:
    names, prompts, digests = [], [], []
    for row in rows:
        if row["frames"] != 1:
            raise InputError(
                f"--generated: {row['name']} is a video of {format_count(row['frames'], 'frame')}",
                "a run of images",
                "generate with --num_frames 1",
            )
        names.append(f"{row['name']}.png")
        prompts.append(row["prompt"])
        digests.append(row["sha256"])
    listed = [name for name in os.listdir(folder) if not name.startswith(".")]
    present = {name for name in listed if name.lower().endswith(SUFFIXES)}
    left_out = sorted(name for name in listed if name.lower().endswith(UNSUPPORTED_SUFFIXES))
    if left_out:
        log.warning("--generated: %s", left_out_message(left_out))
    absent = set(names) - present
    if not allow_missing or absent >= set(names):
        action = "run `halation generate` again" + ("" if allow_missing else ", or pass --allow_missing")
        _raise_if_any(sorted(absent), folder, "in its ledger and not in the folder", action)
    unexpected = sorted(present - set(names) - {"grid.png"})
    _raise_if_any(unexpected, folder, "in the folder and not in its ledger", "move them elsewhere")
    kept = [index for index, name in enumerate(names) if name not in absent]
    if missing or absent:
        missing = [*missing, *sorted(absent)]
        log.warning(
            "--generated: %s of %s missing; scoring the others",
            len(missing),
            format_count(len(kept) + len(missing), "image"),
        )
    return ImageFiles(
        kind="run",
        folder=folder,
        names=tuple(names[index] for index in kept),
        stamps=read_stamps(folder, [names[index] for index in kept]),
        captions=tuple(prompts[index] for index in kept),
        digests=tuple(digests[index] for index in kept),
        num_left_out=len(left_out),
        missing=tuple(missing),
    )


def _raise_if_any(names: Sequence[str], folder: Path, problem: str, action: str) -> None:
    if names:
        shown = ", ".join(names[:NUM_SHOWN]) + (" ..." if len(names) > NUM_SHOWN else "")
        raise InputError(
            f"--generated: {format_count(len(names), 'image')} {problem} ({folder}): {shown}",
            "exactly the images that the run generated",
            action,
        )


def match_prompts(files: ImageFiles, prompts: str | Sequence[str], seed_start: int) -> ImageFiles:
    """Add captions from a prompt list, matched by file name.

    File names are `{id}_seed{seed}` or `{id}`; numeric ids may lack leading zeros.
    """
    prompt_file = PromptFile.from_values(prompts)
    texts: dict[str, str] = {}
    ids: dict[str, dict[str, str]] = {}
    defaults = RequestDefaults(
        seed_start=seed_start, height=1, width=1, num_frames=1, steps=1, guidance_scale=1.0, negative_prompt=""
    )
    rows = list(prompt_file.rows())
    # A list without ids counts from 000001. Bare numbers are not accepted then, or a folder that counts from 0 would
    # be matched off by one.
    has_ids = any(row.image_id is not None for row in rows)
    for request in iter_requests(rows, defaults, prompt_file.name):
        texts[request.name] = request.spec.prompt
        for name in _possible_names(request.spec.id) if has_ids else {request.spec.id}:
            ids.setdefault(name, {})[request.name] = request.spec.prompt
    ambiguous = _find_ambiguous(files.names, ids)
    captions, unmatched = [], []
    for name in files.names:
        caption = None if Path(name).stem in ambiguous else _find_caption(Path(name).stem, texts, ids)
        if caption is None:
            unmatched.append(name)
        captions.append(caption or "")
    if unmatched:
        shown = ", ".join(unmatched[:NUM_SHOWN]) + (" ..." if len(unmatched) > NUM_SHOWN else "")
        raise InputError(
            f"{len(unmatched)} of {format_count(len(files), 'image')} cannot be matched to one prompt of "
            f"{prompt_file.name}: {shown}",
            "file names {image_id}_seed{seed}.png or {image_id}.png with ids of the list "
            "(six digits from 000001 if it has none)",
            "give the prompt list of the images and, if an id has several prompts, "
            "the --seed_start they were generated with",
        )
    if files.captions is not None and files.kind == "run" and tuple(captions) != files.captions:
        index = next(i for i, (one, other) in enumerate(zip(captions, files.captions, strict=True)) if one != other)
        raise InputError(
            f"{files.names[index]} was generated for {files.captions[index][:60]!r}, "
            f"but {prompt_file.name} has {captions[index][:60]!r}",
            "the prompt list of the images",
            "omit --prompts: the run has its own prompts",
        )
    return replace(files, captions=tuple(captions))


def _possible_names(image_id: str) -> set[str]:
    """Return the file stems that an id may have: numbers with or without leading zeros."""
    return {image_id, image_id.lstrip("0")} if image_id.isdigit() else {image_id}


def _find_ambiguous(names: Sequence[str], ids: Mapping[str, Mapping[str, str]]) -> set[str]:
    """Return the images that cannot be matched because their id has several prompts.

    Their seeds are not the first ones of the list, so that they were generated with another --seed_start.
    """
    by_id: dict[str, set[str]] = {}
    for name in names:
        by_id.setdefault(_SEED_SUFFIX.sub("", Path(name).stem), set()).add(Path(name).stem)
    ambiguous: set[str] = set()
    for image_id, listed in ids.items():
        if len(set(listed.values())) > 1:
            present = by_id.get(image_id, set())
            if present != set(list(listed)[: len(present)]):
                ambiguous |= present
    return ambiguous


def _find_caption(stem: str, texts: Mapping[str, str], ids: Mapping[str, Mapping[str, str]]) -> str | None:
    if stem in texts:
        return texts[stem]
    for name in (stem, _SEED_SUFFIX.sub("", stem)):
        for key in sorted(
            _possible_names(name), key=len, reverse=True
        ):  # an id with leading zeros before the bare number
            found = set(ids.get(key, {}).values())
            if len(found) == 1:
                return next(iter(found))
    return None
