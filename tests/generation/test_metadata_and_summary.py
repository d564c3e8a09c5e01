"""Metadata matches the ledger, loads with `datasets`, and damaged files are noticed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from halation.generation import metadata_and_summary
from halation.generation.image_requests import RequestDefaults, iter_requests
from halation.generation.ledger import ImageOutcome, Ledger, LedgerRow
from halation.generation.metadata_and_summary import RunSummary, WorkerStats
from halation.images.png_codec import encode_png, metadata_texts
from halation.prompt_files import PromptRow
from halation.runs import run_folder as runs
from halation.sample_specs import SampleSpec

DEFAULTS = RequestDefaults(
    seed_start=42, height=16, width=24, num_frames=1, steps=2, guidance_scale=7.5, negative_prompt="blurry"
)
PROMPTS = [
    "a street",
    'quotes " and, commas',
    "two\nlines\tand a tab",
    "null",
    "\u2028 emoji \U0001f600 \u05e9\u05dc\u05d5\u05dd",
    "NaN",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "pictures"
    path.mkdir()
    return path


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        yield ledger


OTHER_SPEC = SampleSpec(index=77, id="77", prompt="another", seed=1, height=16, width=24, steps=1, guidance_scale=1.0)


def image(number: int, spec: SampleSpec) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (16, 24, 3), dtype=np.uint8)
    return encode_png(pixels, metadata_texts(spec.as_json()))


def draw(
    folder: Path, ledger: Ledger, prompts: Sequence[str] = PROMPTS, ids: Sequence[str] = (), frames: int = 1
) -> None:
    """Plan the prompts and leave for each what a worker would leave."""
    rows = [
        PromptRow(prompt=prompt, line=line, image_id=ids[line - 1] if ids else None)
        for line, prompt in enumerate(prompts, 1)
    ]
    ledger.add_plan(iter_requests(rows, dataclasses.replace(DEFAULTS, num_frames=frames), "prompts.csv"), {})
    outcomes = []
    for row in list(ledger.rows()):
        index = row.request.spec.index
        files = metadata_and_summary.file_names(row.request.name, frames)
        blobs = [image(1000 * index + number, row.request.spec) for number in range(len(files))]
        for name, blob in zip(files, blobs, strict=True):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(blob)
        outcomes.append(
            ImageOutcome(
                index=index, state="done", sha256=metadata_and_summary.combined_digest(blobs),
                num_bytes=sum(map(len, blobs)), worker=str(index % 2)
            )
        )  # fmt: skip
    ledger.record(outcomes)


def fail(ledger: Ledger, prompts: Sequence[str], workers: Sequence[str], reason: str) -> None:
    rows = [PromptRow(prompt=prompt, line=line) for line, prompt in enumerate(prompts, 1)]
    ledger.add_plan(iter_requests(rows, DEFAULTS, "prompts.csv"), {})
    ledger.record(
        ImageOutcome(index=index, state="failed", worker=worker, reason=reason, attempts=2)
        for index, worker in enumerate(workers)
    )


def damages(folder: Path, ledger: Ledger) -> list[metadata_and_summary.DamagedImage]:
    return metadata_and_summary.verify(folder, ledger.rows(), lambda checked, damaged: None)


# -- metadata


def test_metadata_has_one_line_for_each_done_row_in_index_order(folder: Path, ledger: Ledger) -> None:
    """Metadata has a line for each done row in index order and nothing about workers or time."""
    draw(folder, ledger)
    ledger.mark_open([1])
    metadata_and_summary.write_metadata(folder, ledger.rows())
    lines = [json.loads(line) for line in (folder / "metadata.jsonl").read_bytes().split(b"\n")[:-1]]
    assert [line["index"] for line in lines] == [0, 2, 3, 4, 5]
    assert [line["prompt"] for line in lines] == [PROMPTS[index] for index in (0, 2, 3, 4, 5)]
    assert lines[1] == {
        "file_name": "000003_seed44.png",
        "image_id": "000003",
        "index": 2,
        "prompt": PROMPTS[2],
        "negative_prompt": "blurry",
        "seed": 44,
        "width": 24,
        "height": 16,
        "num_frames": 1,
        "steps": 2,
        "guidance_scale": 7.5,
        "sha256": hashlib.sha256((folder / "000003_seed44.png").read_bytes()).hexdigest(),
    }


def test_other_workers_and_times_leave_the_same_metadata_bytes(tmp_path: Path) -> None:
    written = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        with Ledger(folder / "ledger.sqlite") as ledger:
            draw(folder, ledger)
            ledger.mark_open(range(len(PROMPTS)))
            ledger.record(
                ImageOutcome(
                    index=index, state="done", sha256="ab", worker=str(number), seconds=number, attempts=number
                )
                for index in list(range(len(PROMPTS)))[:: 1 if number == 1 else -1]
            )
            metadata_and_summary.write_metadata(folder, ledger.rows())
        written.append((folder / "metadata.jsonl").read_bytes())
    assert written[0] == written[1]


LOAD = """
import json, sys
import datasets
datasets.disable_progress_bars()
loaded = datasets.load_dataset("imagefolder", data_dir=sys.argv[1], cache_dir=sys.argv[2], **json.loads(sys.argv[3]))
rows = [{**row, "image": row["image"].convert("RGB").getpixel((0, 0))} for split in loaded.values() for row in split]
print(json.dumps(rows))
"""


def loaded(folder: Path, cache: Path, **options: str) -> list[dict[str, object]]:
    """The folder read by `datasets` in a separate process: it fixes its cache folders at import."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOAD, folder, cache / "data", json.dumps(options)],
        env={**os.environ, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, object]] = json.loads(done.stdout)
    return rows


def test_datasets_reads_the_folder_and_our_own_files_do_not_disturb_it(
    folder: Path, tmp_path: Path, ledger: Ledger
) -> None:
    draw(folder, ledger, ids=["007", "b", "c", "../d", "E", "1e5"])
    metadata_and_summary.write_metadata(folder, ledger.rows())
    metadata_and_summary.write_failures(folder, ["0", "1"], ledger.failed_rows())
    metadata_and_summary.write_summary(
        folder, RunSummary(planned=6, done=6, failed=0, open=0, drawn_now=6, seconds=1.0)
    )
    for name in (
        "config.json",
        ".lock",
        ".owner.json",
        "ledger.sqlite",
        "ledger.sqlite-wal",
        "ledger/0.jsonl",
        "logs/worker_0.log",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    rows = loaded(folder, tmp_path / "cache")
    assert [row["image_id"] for row in rows] == ["007", "b", "c", "../d", "E", "1e5"]
    assert [row["prompt"] for row in rows] == PROMPTS
    assert [row["seed"] for row in rows] == list(range(42, 48))
    first = [
        np.random.default_rng(1000 * index).integers(0, 256, (16, 24, 3), dtype=np.uint8)[0, 0] for index in range(6)
    ]
    assert [row["image"] for row in rows] == [pixel.tolist() for pixel in first]


def test_ids_that_name_splits_are_read_when_datasets_is_told_to_take_all_files(
    folder: Path, tmp_path: Path, ledger: Ledger
) -> None:
    ids = ["COCO_val2014_1", "test_2", "train_3"]
    draw(folder, ledger, PROMPTS[:3], ids=ids)
    metadata_and_summary.write_metadata(folder, ledger.rows())
    rows = loaded(folder, tmp_path / "cache", data_files="**")
    assert [(row["image_id"], row["prompt"]) for row in rows] == list(zip(ids, PROMPTS, strict=False))


def test_metadata_that_could_not_be_written_leaves_the_old_one_and_no_temporary_file(
    folder: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    draw(folder, ledger)
    (folder / "metadata.jsonl").write_text("old")
    names = sorted(os.listdir(folder))
    log = tmp_path / "faults.log"
    monkeypatch.setenv("HALATION_FAULT_LOG", str(log))
    for point in ("open", "write", "fsync", "rename"):
        monkeypatch.setenv("HALATION_FAULT", f"metadata.{point}:1+:ENOSPC")
        with pytest.raises(OSError, match="No space left"):
            metadata_and_summary.write_metadata(folder, ledger.rows())
        assert (folder / "metadata.jsonl").read_text() == "old"
        assert sorted(os.listdir(folder)) == names
        assert f"metadata.{point}:" in log.read_text()


# -- failures


def test_each_worker_has_a_list_of_its_failures_empty_where_it_had_none(folder: Path, ledger: Ledger) -> None:
    fail(ledger, PROMPTS[:3], ["0", "3", "0"], 'RuntimeError: "x"\nline\ttwo')
    metadata_and_summary.write_failures(folder, ["0", "2", "3"], ledger.failed_rows())
    assert sorted(os.listdir(folder)) == [f"failed_prompts_gpu{worker}.txt" for worker in (0, 2, 3)]
    header, *lines = (folder / "failed_prompts_gpu0.txt").read_text().split("\n")[:-1]
    assert header.startswith("# index\tid\tseed\tprompt\treason")
    cells = [line.split("\t") for line in lines]
    assert [[index, image_id, seed] for index, image_id, seed, _, _ in cells] == [
        ["0", "000001", "42"],
        ["2", "000003", "44"],
    ]
    assert [json.loads(f'"{prompt}"') for _, _, _, prompt, _ in cells] == [PROMPTS[0], PROMPTS[2]]
    assert json.loads(f'"{cells[0][4]}"') == 'RuntimeError: "x"\nline\ttwo'
    assert (folder / "failed_prompts_gpu2.txt").read_text() == header + "\n"
    assert len((folder / "failed_prompts_gpu3.txt").read_text().splitlines()) == 2


def test_the_failure_list_of_a_gone_worker_stays_until_nothing_is_missing(folder: Path, ledger: Ledger) -> None:
    """The failure list of a gone worker stays until none of its rows is missing."""
    fail(ledger, PROMPTS[:2], ["5", "1"], "out of memory")
    metadata_and_summary.write_failures(folder, ["1", "5"], ledger.failed_rows())
    metadata_and_summary.write_failures(folder, ["0"], ledger.failed_rows())
    names = [f"failed_prompts_gpu{worker}.txt" for worker in (0, 1, 5)]
    assert sorted(os.listdir(folder)) == names
    assert [len((folder / name).read_text().splitlines()) for name in names] == [1, 2, 2]
    ledger.record([ImageOutcome(index=0, state="done", sha256="ab", num_bytes=1, worker="0")])
    metadata_and_summary.write_failures(folder, [], ledger.failed_rows())
    assert sorted(os.listdir(folder)) == names
    assert [len((folder / name).read_text().splitlines()) for name in names] == [1, 2, 1]


def test_a_failure_without_a_worker_is_listed_with_the_first(folder: Path, ledger: Ledger) -> None:
    fail(ledger, PROMPTS[:1], [""], "nobody came back with it")
    metadata_and_summary.write_failures(folder, ["4", "2"], ledger.failed_rows())
    assert "nobody came back with it" in (folder / "failed_prompts_gpu4.txt").read_text()


# -- damaged and missing files


def cut(num_bytes: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:-num_bytes]


DAMAGED: list[tuple[Callable[[bytes], bytes], str]] = [
    (cut(1), "cut short"),
    (cut(12), "cut short"),
    (cut(20), "cut short"),
    (lambda data: data[: len(data) // 2], "cut short"),
    (lambda data: b"", "cut short (empty)"),
    (lambda data: data[:99] + bytes([data[99] ^ 4]) + data[100:], "changed (its SHA-256"),
    (lambda data: data + b"\0", "changed"),
    (lambda data: image(77, OTHER_SPEC), ""),
]


@pytest.mark.parametrize(("damage", "why"), DAMAGED)
def test_a_damaged_image_is_found_and_named(
    folder: Path, ledger: Ledger, damage: Callable[[bytes], bytes], why: str
) -> None:
    draw(folder, ledger)
    assert damages(folder, ledger) == []
    path = folder / "000004_seed45.png"
    path.write_bytes(damage(path.read_bytes()))
    (found,) = damages(folder, ledger)
    assert (found.index, found.file) == (3, "000004_seed45.png")
    assert found.reason.startswith(why)


def test_every_flipped_bit_is_found(folder: Path, ledger: Ledger) -> None:
    draw(folder, ledger, PROMPTS[:1])
    path = folder / "000001_seed42.png"
    whole = path.read_bytes()
    for bit in np.random.default_rng(0).choice(8 * len(whole), 200, replace=False):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(flipped)
        assert [found.reason for found in damages(folder, ledger)] == ["changed (its SHA-256 differs)"]
    path.write_bytes(whole)
    assert damages(folder, ledger) == []


def test_missing_and_unreadable_images_are_distinguished_by_index(folder: Path, ledger: Ledger) -> None:
    """Missing and unreadable images are distinguished by index; only done rows are checked."""
    draw(folder, ledger)
    ledger.mark_open([2])
    for name in ("000001_seed42.png", "000003_seed44.png", "000006_seed47.png"):
        (folder / name).unlink()
    (folder / "000006_seed47.png").mkdir()
    told: list[tuple[int, int]] = []
    found = metadata_and_summary.verify(folder, ledger.rows(), lambda checked, damaged: told.append((checked, damaged)))
    assert [(damage.index, damage.reason) for damage in found] == [(0, "missing"), (5, "cannot be read (not a file)")]
    assert [checked for checked, _ in told] == [1, 2, 3, 4, 5]
    assert told[-1][1] == 2


def test_a_video_is_its_file_and_every_frame(folder: Path, ledger: Ledger) -> None:
    draw(folder, ledger, PROMPTS[:2], frames=3)
    name = "000002_seed43"
    files = metadata_and_summary.file_names(name, 3)
    assert files == [f"{name}.mp4", *(f"{name}/frame_000{number}.png" for number in range(3))]
    row = list(ledger.rows())[1]
    inner = "\n".join(hashlib.sha256((folder / file).read_bytes()).hexdigest() for file in files)
    assert row.sha256 == hashlib.sha256(inner.encode()).hexdigest()
    assert damages(folder, ledger) == []
    for file in files:
        whole = (folder / file).read_bytes()
        (folder / file).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert [(found.index, found.reason.split(" (")[0]) for found in damages(folder, ledger)] == [(1, "changed")]
        (folder / file).unlink()
        assert damages(folder, ledger) == [metadata_and_summary.DamagedImage(index=1, file=file, reason="missing")]
        (folder / file).write_bytes(whole)
    first, second = (folder / file for file in files[1:3])
    swapped = first.read_bytes(), second.read_bytes()
    second.write_bytes(swapped[0])
    first.write_bytes(swapped[1])
    assert [found.index for found in damages(folder, ledger)] == [1], "the order of the frames is part of the video"


def test_missing_names_what_is_gone_whatever_else_lies_there(folder: Path, ledger: Ledger) -> None:
    draw(folder, ledger)
    (folder / "metadata.jsonl").touch()
    (folder / ".000001_seed42.png.host-1.tmp").touch()
    assert metadata_and_summary.find_missing(folder, ledger.done_names()) == []
    for name in ("000002_seed43.png", "000005_seed46.png"):
        (folder / name).unlink()
    assert metadata_and_summary.find_missing(folder, ledger.done_names()) == [1, 4]
    for name in ("stray.png", "000007_seed48.png"):
        (folder / name).touch()
    assert metadata_and_summary.find_missing(folder, ledger.done_names()) == [1, 4], (
        "others in their place are not them"
    )


def test_a_video_whose_frames_are_gone_is_missing(folder: Path, ledger: Ledger) -> None:
    draw(folder, ledger, PROMPTS[:2], frames=2)
    assert metadata_and_summary.find_missing(folder, ledger.done_names()) == []
    (folder / "000001_seed42.mp4").unlink()
    assert metadata_and_summary.find_missing(folder, ledger.done_names()) == [0]


@pytest.mark.slow
def test_a_look_at_700_000_images_takes_seconds(folder: Path) -> None:
    source = folder / "000001_seed42.png"
    source.touch()
    for index in range(1, 700_000):
        if index % 60_000 == 0:  # a file has room for so many names only
            source = folder / f"{index + 1:06d}_seed{index + 42}.png"
            source.touch()
        else:
            os.link(source, folder / f"{index + 1:06d}_seed{index + 42}.png")
    names = [(index, f"{index + 1:06d}_seed{index + 42}", 1) for index in range(700_000)]
    started = time.perf_counter()
    assert metadata_and_summary.find_missing(folder, names) == []
    assert time.perf_counter() - started < 8.0  # 0.7 s on a quiet machine; a look at each file takes minutes


def test_a_row_out_of_order_is_our_own_mistake(folder: Path, ledger: Ledger) -> None:
    draw(folder, ledger)
    backwards: list[LedgerRow] = list(ledger.rows())[::-1]
    with pytest.raises(AssertionError, match="by index"):
        metadata_and_summary.write_metadata(folder, backwards)
    assert not (folder / "metadata.jsonl").exists()


# -- the summary


def test_the_summary_says_how_fast_how_busy_and_what_failed(folder: Path, ledger: Ledger) -> None:
    fail(ledger, PROMPTS, ["0", "0", "1", "0", "1", "1"], "out of memory\nat layer 3")
    tally = RunSummary(
        planned=10,
        done=4,
        failed=6,
        open=0,
        drawn_now=8,
        seconds=4.0,
        workers={"GPU 0": WorkerStats(done=3, failed=3, seconds_painting=3.0, restarts=1), "GPU 1": WorkerStats()},
        retries=6,
        num_redone_batches=1,
        failures_by_reason=metadata_and_summary.count_reasons(ledger.failed_rows()),
        smaller_micro_batches=2,
        equality_classes={"compile": "E1"},
        interrupted=True,
    )
    metadata_and_summary.write_summary(folder, tally)
    written = json.loads((folder / "summary.json").read_text())
    assert runs.json_digest(written) == written.pop("digest")
    assert written == metadata_and_summary.summary_json(tally)
    assert (written["planned"], written["done"], written["failed"], written["open"]) == (10, 4, 6, 0)
    assert written["pictures_per_s"] == 2.0
    assert written["workers"]["GPU 0"] == {
        "done": 3,
        "failed": 3,
        "seconds_painting": 3.0,
        "busy_share": 0.75,
        "restarts": 1,
    }
    assert written["failures_by_reason"] == {"out of memory": 6}
    assert written["interrupted"] is True
    assert (written["retries"], written["redone_sheets"], written["smaller_micro_batches"]) == (6, 1, 2)
    assert written["equality_classes"] == {"compile": "E1"}


def test_a_call_that_drew_nothing_has_a_summary_too() -> None:
    assert (
        metadata_and_summary.summary_json(RunSummary(planned=0, done=0, failed=0, open=0, drawn_now=0, seconds=0.0))[
            "pictures_per_s"
        ]
        == 0.0
    )


def test_reasons_are_counted_by_their_first_line_and_beyond_a_hundred_together(tmp_path: Path, ledger: Ledger) -> None:
    rows = [PromptRow(prompt="a street", line=line) for line in range(1, 106)]
    ledger.add_plan(iter_requests(rows, DEFAULTS, "prompts.csv"), {})
    reasons = ["", "", *(f"reason {number:03d}\nmore" for number in range(103))]
    ledger.record(ImageOutcome(index=index, state="failed", reason=reason) for index, reason in enumerate(reasons))
    counted = metadata_and_summary.count_reasons(ledger.failed_rows())
    assert next(iter(counted.items())) == ("no reason given", 2)
    assert len(counted) == 101
    assert counted["other reasons"] == 4
    assert sum(counted.values()) == 105
