"""Laws of a generation on the page: it shows the ledger, live, without disturbing the run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.big_folders import generation_folder, images, prompt_of, settle

from halation.gallery.generation_rows import filter_by_words, parse_search_words
from halation.gallery.generation_runs import GenerationRun, RowQuery, shell_command
from halation.gallery.run_catalog import RunCatalog, make_run_id
from halation.generation.command import run as generate
from halation.generation.config import GenerateConfig
from halation.generation.ledger import LEDGER_FILE, ImageOutcome, Ledger
from halation.generation.read_only_ledger import SqliteLedgerReader
from halation.generation.shared_folder.shared_ledger import ProcessIdentity, SharedLedger
from halation.images.png_codec import read_png
from halation.runs import run_folder as runs


def opened(folder: Path) -> GenerationRun:
    run = GenerationRun(folder, "0123456789")
    run.refresh()
    return run


def refreshed(run: GenerationRun) -> bool:
    run._next_read = 0.0  # the rest it takes between two looks is another law's matter
    return run.refresh()


def found(run: GenerationRun, **query: Any) -> list[int]:
    answer = run.search(RowQuery(**query))
    assert answer["total"] >= len(answer["rows"])
    return [row["index"] for row in answer["rows"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 rows, 240 of them settled, every tenth of these failed."""
    return generation_folder(tmp_path_factory.mktemp("runs") / "gen", 300, num_done=240, failed_every=10, size=16)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- what is shown


def test_counts_workers_reasons_and_sizes_are_the_ledgers(folder: Path) -> None:
    run = opened(folder)
    summary = run.summary()
    assert (summary["planned"], summary["done"], summary["failed"]) == (300, 216, 24)
    assert (summary["unit"], summary["title"], summary["state"]) == ("images", "testcard, 16x16", "stopped")
    detail = run.detail()
    assert detail["counts"] == {"planned": 300, "open": 60, "done": 216, "failed": 24}
    assert [(worker["name"], worker["done"] + worker["failed"]) for worker in detail["workers"]] == [
        ("0", 120),
        ("1", 120),
    ]
    assert sum(worker["failed"] for worker in detail["workers"]) == 24
    assert sorted(number for _, number in detail["reasons"]) == [12, 12]
    assert (detail["seeds"], detail["size"], detail["video"]) == ([42, 341], [[16, 16, 300]], False)
    assert summary["last"] == {"key": "g238", "v": run.search(RowQuery(seed=280))["rows"][0]["v"]}
    json.dumps(detail)


def test_a_page_is_a_slice_of_the_rows_by_index(folder: Path) -> None:
    run = opened(folder)
    assert found(run, offset=250, limit=20) == list(range(250, 270))
    assert found(run, offset=290, limit=20) == list(range(290, 300))
    assert found(run, offset=1000) == []
    row = run.search(RowQuery(offset=9, limit=1))["rows"][0]
    assert row == {
        "key": "g9", "index": 9, "id": "000010", "prompt": prompt_of(9), "seed": 51, "state": "failed",
        "w": 16, "h": 16,
        "worker": "0", "reason": "RuntimeError: CUDA out of memory", "v": "", "frames": 1,
    }  # fmt: skip


def test_filters_and_words_must_all_hold(folder: Path) -> None:
    run = opened(folder)
    rows = [(index, prompt_of(index)) for index in range(300)]
    assert found(run, state="open") == list(range(240, 300))
    assert found(run, state="failed") == list(range(9, 240, 10))
    assert found(run, seed=42 + 7) == [7]
    assert found(run, seed=-1) == found(run, seed=2**80) == []
    assert found(run, worker="1", limit=500) == [index for index in range(240) if index // 4 % 2]
    assert found(run, worker="9") == []
    words = [index for index, prompt in rows if "street" in prompt and "rain" in prompt]
    assert found(run, text="RAIN  Street", limit=500) == words
    assert found(run, text="000123") == [122]
    assert found(run, text="street", state="failed", limit=500) == [
        index for index in range(9, 240, 10) if "street" in prompt_of(index)
    ]
    assert found(run, text="street", limit=2) == found(run, text="street", limit=500)[:2]
    assert found(run, text=prompt_of(77) + " " + prompt_of(77)) == [77], "a whole prompt that was pasted"


def test_a_search_for_very_many_words_takes_no_longer_than_for_a_few() -> None:
    assert parse_search_words("a STREET street in the rain") == ["street", "rain", "the"], (
        "of the others each is part of one"
    )
    letters = " ".join("abcdefghijklmnopqrstuvwxyz" * 8)
    texts = [f"the quick brown fox jumps over the lazy dog {number}" for number in range(20_000)]
    began = time.process_time()
    assert len(filter_by_words(np.arange(20_000), texts, parse_search_words(letters))) == 20_000
    assert len(parse_search_words(letters)) == 16
    assert time.process_time() - began < 0.5


def test_a_list_of_runs_waits_for_none_of_them(folder: Path) -> None:
    run = GenerationRun(folder, make_run_id(folder))
    catalog = RunCatalog([folder.parent], {"generate": lambda *_: run})
    catalog.refresh()
    told: list[str] = []
    with run._lock:  # as a search has it, or the first reading of very many rows
        asking = threading.Thread(target=lambda: told.extend(each.summary()["name"] for each in catalog.entries()))
        asking.start()
        asking.join(5)
        assert told == ["gen"]


def test_text_of_any_kind_comes_through_as_it_is(tmp_path: Path) -> None:
    prompts = ["<script>alert(1)</script>", "Ä Ü ß ﬁn 猫 % _ ' \"", "a\u202eb", ""]
    run = opened(generation_folder(tmp_path / "gen", 5, prompts=prompts, size=8))
    assert [row["prompt"] for row in run.search(RowQuery())["rows"]] == [*prompts[:3], prompt_of(3), prompt_of(4)]
    assert found(run, text="ä Ü SS") == [1]
    assert found(run, text="%") == [1]
    assert found(run, text="<script>") == [0]


def test_only_keys_of_rows_with_a_image_in_the_folder_lead_to_a_file(folder: Path, tmp_path: Path) -> None:
    run = opened(folder)
    assert run.image("g5") == (folder / "000006_seed47.png").resolve()
    for key in ("g9", "g250", "g300", "g-1", "g5.png", "g٣", "../config.json", "g", "", "s5.1", "g" + "9" * 30):
        assert run.image(key) is None, key
    assert run.spec("g300") is None
    other = generation_folder(tmp_path / "gen", 4, size=8)
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"secret")
    (other / "000001_seed42.png").unlink()
    (other / "000002_seed43.png").unlink()
    (other / "000002_seed43.png").symlink_to(secret)
    with sqlite3.connect(other / LEDGER_FILE) as connection:
        connection.execute("UPDATE pictures SET name = '../secret' WHERE picture = 2")
    connection.close()
    run = opened(other)
    assert [run.image(f"g{index}") for index in range(3)] == [None] * 3
    assert run.image("g3") is not None


def test_a_image_comes_with_its_spec_and_its_outcome(folder: Path) -> None:
    answer = opened(folder).spec("g5")
    assert answer is not None
    assert answer["spec"] | {"prompt": ""} == {
        "index": 5, "id": "000006", "prompt": "", "negative_prompt": "", "seed": 47, "height": 16, "width": 16,
        "num_frames": 1, "steps": 20, "guidance_scale": 7.5,
    }  # fmt: skip
    assert (answer["outcome"]["state"], answer["outcome"]["worker"], answer["file"]) == (
        "done",
        "1",
        "000006_seed47.png",
    )
    assert len(answer["outcome"]["sha256"]) == 64


def test_the_log_and_the_config_are_shown_with_what_is_not_the_default(folder: Path) -> None:
    settings = opened(folder).config()["settings"]
    run = GenerationRun(folder, "x", {"generate": settings | {"model_path": "another"}})
    assert run.config()["settings"]["model_path"] == "testcard"
    assert run.config()["differs"] == ["model_path"]
    assert run.log(5)[-1].endswith("all images match the ledger")


# -- live


def requests_of(ledger: Ledger, indices: list[int]) -> list[Any]:
    return ledger.requests(indices)


def test_what_a_command_records_is_seen_while_it_has_the_ledger_open(tmp_path: Path) -> None:
    folder = generation_folder(tmp_path / "gen", 40, num_done=8, failed_every=0, size=8)
    run = opened(folder)
    run.detail()
    assert found(run, text="street", state="done", limit=500) == [0]
    files = images(8)
    with Ledger(folder / LEDGER_FILE) as ledger:
        settle(folder, ledger, requests_of(ledger, list(range(8, 20))), 10, ["a", "b"], files)
        version = run.version
        assert refreshed(run)
        assert run.version > version
        assert run.detail()["counts"] == {"planned": 40, "open": 20, "done": 18, "failed": 2}
        assert {worker["name"] for worker in run.detail()["workers"]} == {"0", "1", "a", "b"}
        assert found(run, text="street", state="done", limit=500) == [0, 10]
        assert found(run, worker="b", limit=500) == [12, 13, 14, 15]
        ledger.record([ImageOutcome(index=19, state="done", sha256="f" * 64, worker="c")])  # another try
        ledger.mark_open([0])
        refreshed(run)
        assert run.detail()["counts"] == {"planned": 40, "open": 21, "done": 18, "failed": 1}
        assert found(run, worker="c") == [19]
        assert found(run, state="open", limit=1) == [0]


def test_a_longer_plan_and_another_plan_are_seen(tmp_path: Path) -> None:
    folder = generation_folder(tmp_path / "gen", 6, num_done=2, size=8)
    longer = generation_folder(tmp_path / "longer", 9, num_done=0, size=8, prompts=["other"] * 9)
    run = opened(folder)
    assert found(run, text="number5") == [5]
    with Ledger(longer / LEDGER_FILE) as source:
        others = source.requests(list(range(9)))
    with Ledger(folder / LEDGER_FILE) as ledger:
        ledger.add_plan(others[6:], {"plan": 2}, changed=others[5:6])
        refreshed(run)
        assert run.detail()["counts"]["planned"] == 9
        assert found(run, text="number5") == []
        assert found(run, text="other") == [5, 6, 7, 8]
        ledger.add_plan(others[:3], {"plan": 3}, replaces=True)
        refreshed(run)
        assert run.summary()["planned"] == 3
        assert found(run) == [0, 1, 2]


def test_pace_and_time_left_are_of_the_last_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = generation_folder(tmp_path / "gen", 100, num_done=10, failed_every=0, size=8)
    runs.write_json_atomic(
        folder / ".owner.json", {"pid": os.getpid(), "host": os.uname().nodename, "command": "generate"}
    )
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    run = opened(folder)
    run.detail()
    assert (run.summary()["state"], run.summary()["rate"]) == ("running", None)
    with Ledger(folder / LEDGER_FILE) as ledger:
        for first, end, seconds in ((10, 20, 100.0), (20, 40, 5.0), (40, 80, 5.0)):
            settle(folder, ledger, requests_of(ledger, list(range(first, end))), 0, ["0"], images(8))
            now += seconds
            refreshed(run)
    assert run.summary()["done"] == 80
    assert run.summary()["rate"] == pytest.approx((80 - 20) / 10)
    assert run.summary()["left_s"] == pytest.approx(20 / 6)
    assert run.detail()["workers"][0]["per_s"] == pytest.approx(6)


def test_a_run_that_does_not_run_has_no_pace(folder: Path) -> None:
    run = opened(folder)
    assert (run.summary()["rate"], run.summary()["left_s"]) == (None, None)


# -- nobody notices


def test_reading_leaves_nothing_in_the_folder_and_changes_nothing(folder: Path) -> None:
    before = names(folder), (folder / LEDGER_FILE).read_bytes()
    run = opened(folder)
    run.detail()
    run.search(RowQuery(text="street"))
    assert (names(folder), (folder / LEDGER_FILE).read_bytes()) == before


def test_a_reader_in_the_middle_of_a_page_keeps_no_writer_waiting(tmp_path: Path) -> None:
    folder = generation_folder(tmp_path / "gen", 40, num_done=0, size=8)
    with Ledger(folder / LEDGER_FILE) as ledger:
        ledger.record([ImageOutcome(index=0, state="done")])
        tables = SqliteLedgerReader(folder / LEDGER_FILE)
        with tables.connect() as connection:
            connection.execute("BEGIN")
            count = "SELECT COUNT(*) FROM pictures WHERE state = 1"
            assert connection.execute(count).fetchone() == (1,)
            began = time.monotonic()
            ledger.record([ImageOutcome(index=1, state="done")])
            assert time.monotonic() - began < 2  # one that is blocked is asked again for 2.6 s, then ends
            assert connection.execute(count).fetchone() == (1,)
            with pytest.raises(sqlite3.OperationalError, match="readonly"):
                connection.execute("UPDATE pictures SET state = 0")
    assert opened(folder).summary()["done"] == 2


@pytest.mark.parametrize("in_transaction", [True, False])
def test_a_ledger_that_is_closed_while_somebody_reads_is_whole_in_its_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_transaction: bool
) -> None:
    monkeypatch.setattr("halation.generation.ledger.CLOSE_WAIT_MS", 50)
    folder = generation_folder(tmp_path / "gen", 40, num_done=0, size=8)
    ledger = Ledger(folder / LEDGER_FILE)
    ledger.record([ImageOutcome(index=index, state="failed") for index in range(30)])
    with SqliteLedgerReader(folder / LEDGER_FILE).connect() as connection:
        if in_transaction:
            connection.execute("BEGIN")
        assert connection.execute("SELECT COUNT(*) FROM pictures WHERE state = 2").fetchone() == (30,)
        ledger.close()
        alone = shutil.copy(folder / LEDGER_FILE, tmp_path / "alone.sqlite")
    with contextlib.closing(sqlite3.connect(f"file:{alone}?immutable=1", uri=True)) as copy:
        assert copy.execute("SELECT COUNT(*) FROM pictures WHERE state = 2").fetchone() == (30,)
    with Ledger(folder / LEDGER_FILE) as again:
        assert again.counts()["failed"] == 30
    assert [name for name in names(folder) if name.startswith(LEDGER_FILE)] == [LEDGER_FILE]


def test_a_reader_that_goes_while_a_ledger_is_being_closed_leaves_no_log(tmp_path: Path) -> None:
    folder = generation_folder(tmp_path / "gen", 40, num_done=0, size=8)
    ledger = Ledger(folder / LEDGER_FILE)
    ledger.record([ImageOutcome(index=0, state="failed")])
    reading = SqliteLedgerReader(folder / LEDGER_FILE).connect()
    reading.__enter__().execute("BEGIN")
    leaving = threading.Timer(0.1, reading.__exit__, (None, None, None))
    leaving.start()
    ledger.close()
    leaving.join()
    assert [name for name in names(folder) if name.startswith(LEDGER_FILE)] == [LEDGER_FILE]


@pytest.mark.parametrize(("blocked", "num_done"), [("ledger.sqlite-shm", 9), ("ledger.sqlite-wal", 8)])
def test_a_dead_commands_log_is_read_and_where_that_cannot_be_the_ledger_without_it(
    tmp_path: Path, blocked: str, num_done: int
) -> None:
    folder = generation_folder(tmp_path / "gen", 40, num_done=8, failed_every=0, size=8)
    copied = tmp_path / "copied"
    copied.mkdir()
    with Ledger(folder / LEDGER_FILE) as ledger:
        ledger.record([ImageOutcome(index=9, state="done")])
        for name in {"ledger.sqlite", "ledger.sqlite-wal"} - {blocked}:
            shutil.copy(folder / name, copied / name)
    # A folder stands where SQLite would make a file, which it cannot do either where nothing may be written.
    (copied / blocked).mkdir()
    before = names(copied)
    run = opened(copied)
    assert (run.detail()["counts"]["planned"], run.summary()["done"]) == (40, num_done)
    assert names(copied) == before


def test_a_damaged_ledger_or_none_is_an_empty_run_and_not_an_error(tmp_path: Path) -> None:
    folder = generation_folder(tmp_path / "gen", 10, size=8)
    (folder / LEDGER_FILE).write_bytes(b"SQLite format 3\0" + bytes(5000))
    for _ in range(2):
        run = opened(folder)
        assert run.summary()["planned"] == 0
        assert run.detail()["workers"] == []
        assert run.search(RowQuery(text="a")) == {"total": 0, "rows": []}
        assert run.image("g0") is None
        assert run.spec("g0") is None
        (folder / LEDGER_FILE).unlink(missing_ok=True)


# -- folders that commands share


def test_a_shared_folder_is_shown_while_it_is_drawn_and_after(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.csv"
    prompts.write_text("image_id,prompt\n" + "".join(f'n/{number},"a cat, {number}"\n' for number in range(12)))
    folder = tmp_path / "out"
    config = GenerateConfig(
        prompts_csv=str(prompts), model_path="testcard", output_dir=folder, height=16, width=24, nproc=1,
        cluster="files",
        progress="none",
    )  # fmt: skip
    assert generate(config) == 0
    (folder / "metadata.jsonl").rename(tmp_path / "metadata.jsonl")  # as it is until somebody ends
    run = opened(folder)
    assert run.detail()["counts"] == {"planned": 12, "open": 0, "done": 12, "failed": 0}
    assert run.summary()["state"] == "finished"
    assert [worker["done"] for worker in run.detail()["workers"]] == [12]
    assert found(run, text="cat 7") == [7]
    assert (run.detail()["size"], run.detail()["seeds"]) == ([[24, 16, 12]], [42, 53])
    path = run.image("g7")
    assert path is not None
    assert json.loads(read_png(path)[1]["halation"])["index"] == 7
    pages = run.search(RowQuery())
    (tmp_path / "metadata.jsonl").rename(folder / "metadata.jsonl")
    assert opened(folder).search(RowQuery()) == pages
    assert not refreshed(run)


def test_outcomes_that_others_append_to_a_shared_folder_are_seen(tmp_path: Path) -> None:
    folder = generation_folder(tmp_path / "gen", 6, num_done=0, size=8)
    with Ledger(folder / LEDGER_FILE) as ledger:
        requests = ledger.requests(list(range(6)))
    for path in folder.glob("ledger.sqlite*"):
        path.unlink()
    (folder / "ledger" / "leases").mkdir(parents=True)
    shared = SharedLedger(folder / "ledger", ProcessIdentity(host="h"))
    shared.add_plan(requests, {})
    shared.agree_on_plan()
    run = opened(folder)
    assert run.detail()["counts"] == {"planned": 6, "open": 6, "done": 0, "failed": 0}
    shutil.copy(folder / "logs" / ".distinct" / "3.png", folder / "000004_seed45.png")  # the text of it says index 3
    shared.record(
        [
            ImageOutcome(index=3, state="done", worker="h-0"),
            ImageOutcome(index=4, state="failed", reason="no", worker="h-1"),
        ]
    )
    assert refreshed(run)
    assert run.detail()["counts"] == {"planned": 6, "open": 4, "done": 1, "failed": 1}
    assert found(run, text=prompt_of(3)) == [3]
    assert run.image("g3") == (folder / "000004_seed45.png").resolve()
    shared.close()


# -- again


@pytest.mark.slow
@pytest.mark.parametrize("num_frames", [1, 3])
def test_the_command_draws_the_very_same_pixels(tmp_path: Path, num_frames: int) -> None:
    prompts = tmp_path / "prompts.jsonl"
    nasty = 'it\'s a "test" $HOME `id` \\n 100% 猫 \u202e !x'
    rows = [{"prompt": f"number {number}", "seed": 7 * number} for number in range(5)]
    rows += [{"id": "a/b", "prompt": nasty, "negative_prompt": "-- no", "width": 40, "steps": 3, "guidance_scale": 2.5}]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = tmp_path / "out"
    config = GenerateConfig(
        prompts_csv=str(prompts), model_path="testcard", output_dir=folder, height=16, width=24, nproc=1, batch_size=3,
        num_frames=num_frames, progress="none",
    )  # fmt: skip
    assert generate(config) == 0
    run = opened(folder)
    for key in ("g4", "g5"):
        answer = run.spec(key)
        assert answer is not None
        place = tmp_path / key
        place.mkdir()
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", "-c", answer["command"]], cwd=place, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        again = opened(place / "outputs" / "again")
        drawn, first = again.image("g0"), run.image(key)
        assert drawn is not None
        assert first is not None
        (pixels, text), (expected, said) = read_png(drawn), read_png(first)
        assert np.array_equal(pixels, expected)
        assert drawn.name == first.name
        assert json.loads(text["halation"]) | {"index": 0} == json.loads(said["halation"]) | {"index": 0}
        if num_frames > 1:
            assert again.detail()["video"]
            frames = [again.image(f"g0.{number}") for number in range(num_frames)]
            assert [frame and frame.name for frame in frames] == [f"frame_{n:04d}.png" for n in range(num_frames)]
        assert again.image(f"g0.{num_frames}") is None


def test_the_command_has_the_settings_of_the_images_own_time() -> None:
    record = {
        "settings": {"model_path": "m", "batch_size": 8, "compile": True, "pipeline_args": ["a=1", "b=x y"]},
        "fixed": {"png coder": "zlib", "micro batch": 2},
        "changes": [{"time": "", "changed": ["batch_size: 4 -> 8", "compile: false -> true", 'model: "1" -> "2"']}],
    }
    spec = {
        "id": "1", "prompt": "p", "negative_prompt": "", "seed": 1, "width": 8, "height": 8, "steps": 2,
        "guidance_scale": 1.0,
    }  # fmt: skip
    now, before = shell_command(record, spec, 0, 1), shell_command(record, spec, 1, 0)
    assert "--batch_size 8" in now
    assert "--compile True" in now
    assert "--pipeline_args a=1 'b=x y'" in now
    assert "--micro_batch 2" in now
    assert "--batch_size 4" in before
    assert "--compile" not in before
    assert "--micro_batch 1" in before


def test_the_command_shows_no_character_that_would_hide_what_it_is() -> None:
    spec = {
        "id": "1", "prompt": "a\u202eb\u200b\x1b[2J", "negative_prompt": "", "seed": 1, "width": 8,
        "height": 8, "steps": 2,
        "guidance_scale": 1.0,
    }  # fmt: skip
    assert shell_command({}, spec, 0, 0).isprintable()


# -- size


def test_a_catalog_makes_it_an_entry(folder: Path) -> None:
    catalog = RunCatalog([folder.parent], {"generate": GenerationRun})
    catalog.refresh()
    (entry,) = catalog.entries()
    assert (entry.name, entry.summary()["planned"]) == ("gen", 300)


@pytest.mark.slow
def test_a_hundred_thousand_rows_open_in_a_second_and_search_in_a_tenth(tmp_path: Path) -> None:
    """A hundred thousand rows open in less than a second and are searched in a tenth of one."""
    folder = generation_folder(tmp_path / "gen", 100_000, size=8)
    began = time.process_time()
    run = opened(folder)
    run.detail()
    run.search(RowQuery())
    assert time.process_time() - began < 1.0
    run.refresh()
    began = time.process_time()
    assert len(found(run, text="street rain")) == 200
    assert time.process_time() - began < 0.1
    began = time.process_time()
    for _ in range(20):
        run.refresh()
    assert (time.process_time() - began) / 20 < 0.002


def test_the_rate_of_an_ended_generation_is_that_of_its_last_call(tmp_path: Path) -> None:
    folder = generation_folder(tmp_path / "run", 20, size=16, failed_every=0)
    summary = {"planned": 20, "done": 20, "failed": 0, "open": 0, "drawn_now": 20, "seconds": 10.0}
    runs.write_json_with_digest(folder / "summary.json", summary)
    run = opened(folder)
    assert run.detail()["last_call"] == {"images": 20, "seconds": 10.0}
    assert run.summary()["seconds"] == 10.0, "the only call of a run from before calls recorded their times"
    runs.write_json_with_digest(folder / "summary.json", {**summary, "drawn_now": 1, "seconds": 2.0})
    assert refreshed(run)
    assert run.detail()["last_call"] == {"images": 1, "seconds": 2.0}
    assert run.summary()["seconds"] is None, "that of the calls before is not known"
    runs.write_json_atomic(folder / "ended.json", {"state": "finished", "reason": "", "seconds": 3.0, "time_s": 14.5})
    assert refreshed(run)
    assert run.summary()["seconds"] == 14.5
