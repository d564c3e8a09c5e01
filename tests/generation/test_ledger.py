"""A ledger returns what was written, or reports flipped, emptied and foreign bytes."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from halation.errors import HalationError, InputError
from halation.evaluation.generated_folder import open_generated
from halation.generation import command as generate
from halation.generation.config import GenerateConfig
from halation.generation.image_requests import ImageRequest
from halation.generation.ledger import DIGEST_FILE, LEDGER_FILE, MAX_OUTCOMES_IN_LOG, ImageOutcome, Ledger, LedgerDamage
from halation.generation.metadata_and_summary import is_metadata_intact
from halation.sample_specs import SampleSpec

NUM_ROWS, NUM_DONE = 120, 80
SIZE = 16


def requests() -> list[ImageRequest]:
    return [
        ImageRequest(
            spec=SampleSpec(
                index=index, id=f"{index:06d}", prompt=f"prompt {index} é " * (1 + index % 5), seed=42 + index,
                height=SIZE * (1 + index % 2), width=SIZE, steps=20, guidance_scale=7.5,
            ),
            name=f"{index:06d}_seed{42 + index}",
        )
        for index in range(NUM_ROWS)
    ]  # fmt: skip


def outcome(index: int) -> ImageOutcome:
    if index % 7 == 0:
        return ImageOutcome(index=index, state="failed", worker="1", attempts=2, reason="out of memory")
    return ImageOutcome(
        index=index, state="done", sha256=f"{index:064x}", num_bytes=100 + index, worker="0", seconds=0.1 * index
    )


def fill(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.add_plan(requests(), {"plan": {"limit": 0}})
        ledger.record(outcome(index) for index in range(NUM_DONE))


def contents(ledger: Ledger) -> list[Any]:
    """Everything that a command learns from a ledger."""
    groups = [group.tolist() for group in ledger.groups()]
    return [list(ledger.rows()), ledger.counts(), groups, ledger.unfinished_indices().tolist(), ledger.examples()]


def written(folder: Path, num: int = 24, prompt: str = "prompt number {} of many", **settings: Any) -> GenerateConfig:
    """The settings of a generation in `folder / "out"`, whose prompts are written here."""
    prompts = folder / "prompts.txt"
    prompts.write_text("".join(f"{prompt.format(index)}\n" for index in range(num)))
    return GenerateConfig(
        prompts_csv=str(prompts), model_path="testcard", output_dir=folder / "out", height=SIZE, width=SIZE,
        batch_size=4, nproc=1, progress="none", **settings,
    )  # fmt: skip


def flip(path: Path, text: bytes, offset: int = 0, bit: int = 3) -> None:
    data = bytearray(path.read_bytes())
    position = data.index(text) + offset
    data[position] ^= 1 << bit
    path.write_bytes(data)


def images(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.png")}


# -- damage


@pytest.mark.parametrize("num_flips", [150, pytest.param(2000, marks=pytest.mark.slow)])
def test_no_flipped_bit_of_a_ledger_goes_unnoticed_or_matters(tmp_path: Path, num_flips: int) -> None:
    path = tmp_path / LEDGER_FILE
    fill(path)
    with Ledger(path) as ledger:
        truth = contents(ledger)
    whole = path.read_bytes()
    chance = random.Random(num_flips)
    num_noticed = 0
    for number in range(num_flips):
        folder = tmp_path / str(number)
        folder.mkdir()
        position, damaged = chance.randrange(8 * len(whole)), bytearray(whole)
        damaged[position // 8] ^= 1 << position % 8
        (folder / LEDGER_FILE).write_bytes(damaged)
        if number % 2:
            shutil.copy(tmp_path / DIGEST_FILE, folder)
        try:
            with Ledger(folder / LEDGER_FILE) as ledger:
                if ledger.find_damage():
                    num_noticed += 1
                else:
                    assert contents(ledger) == truth, f"byte {position // 8}, bit {position % 8}"
        except HalationError:
            num_noticed += 1
        shutil.rmtree(folder)
    assert num_noticed > num_flips / 3


def test_a_ledger_that_was_closed_is_known_by_its_digest_and_a_damaged_one_gets_none(tmp_path: Path) -> None:
    path = tmp_path / LEDGER_FILE
    fill(path)
    assert (tmp_path / DIGEST_FILE).exists()
    with Ledger(path) as ledger:
        assert ledger.find_damage() == LedgerDamage()
    flip(path, b"prompt 55 ", offset=1)
    for _ in range(2):
        with Ledger(path) as ledger:
            assert ledger.find_damage() == LedgerDamage(planned=(55,)), "it must not become the truth"


def test_a_killed_command_leaves_a_valid_ledger_and_damage_is_found(
    tmp_path: Path,
) -> None:
    """A killed command leaves a ledger that its digest proves, and damage is still found."""

    def copy_as_after_a_kill(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for path in tmp_path.glob("ledger.s*"):
            shutil.copy(path, folder)
        return folder / LEDGER_FILE

    with Ledger(tmp_path / LEDGER_FILE) as ledger:
        ledger.add_plan(requests(), {"plan": {"limit": 0}})
        ledger.record(outcome(index) for index in range(NUM_DONE))
        truth = contents(ledger)
        good, bad, cut = copy_as_after_a_kill("good"), copy_as_after_a_kill("bad"), copy_as_after_a_kill("cut")
    log = cut.with_name(cut.name + "-wal")
    assert log.stat().st_size > 0
    flip(bad, b"prompt 115 ", offset=1)
    flip(log, f"{8:064x}".encode())
    with Ledger(good) as ledger:
        assert ledger._is_intact
        assert contents(ledger) == truth
    with Ledger(bad) as ledger:
        assert ledger.find_damage() == LedgerDamage(planned=(115,))
    with Ledger(cut) as ledger:
        assert ledger.find_damage() == LedgerDamage()
        assert ledger.counts()["done"] == 0, "outcomes that cannot be trusted are open again"


def test_a_long_log_is_moved_into_the_file_and_the_digest_follows(tmp_path: Path) -> None:
    path = tmp_path / LEDGER_FILE
    with Ledger(path) as ledger:
        ledger.add_plan(requests(), {"plan": {"limit": 0}})
        first = (tmp_path / DIGEST_FILE).read_text()
        for number in range(-(-MAX_OUTCOMES_IN_LOG // NUM_ROWS)):
            ledger.record(ImageOutcome(index=i, state="failed", reason=f"x{number}") for i in range(NUM_ROWS))
        second = (tmp_path / DIGEST_FILE).read_text()
        assert second != first
        assert second.strip() == hashlib.sha256(path.read_bytes()).hexdigest()


READER = (
    "import sqlite3, sys; connection = sqlite3.connect(sys.argv[1]);"
    "print(connection.execute('SELECT COUNT(*) FROM pictures WHERE state = 1').fetchone()[0])"
)


def test_readers_that_come_and_go_see_every_outcome_and_leave_the_log_alone(tmp_path: Path) -> None:
    path = tmp_path / LEDGER_FILE
    with Ledger(path) as ledger:
        ledger.add_plan(requests(), {})
        for index in (1, 2, 3):
            ledger.record([outcome(index)])
            # A process of its own: SQLite's locks are those of a process.
            words = [sys.executable, "-c", READER, str(path)]
            assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == f"{index}\n"
    with Ledger(path) as ledger:
        assert ledger.counts()["done"] == 3


def test_a_ledger_that_is_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LEDGER_FILE)
    with pytest.raises(InputError, match="a named pipe"):
        Ledger(tmp_path / LEDGER_FILE)


def test_a_ledger_without_its_digest_is_checked_row_by_row(tmp_path: Path) -> None:
    path = tmp_path / LEDGER_FILE
    fill(path)
    (tmp_path / DIGEST_FILE).unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE pictures SET state = 1 WHERE picture = 100")
        connection.execute("UPDATE pictures SET seed = 7 WHERE picture = 3")
        connection.execute("DELETE FROM pictures WHERE picture IN (10, 119)")
    with Ledger(path) as ledger:
        assert ledger.find_damage() == LedgerDamage(planned=(3, 10, 119), outcomes=(10, 100, 119))


def test_rows_of_an_earlier_version_get_checksums_once(tmp_path: Path) -> None:
    path = tmp_path / LEDGER_FILE
    fill(path)
    (tmp_path / DIGEST_FILE).unlink()
    with sqlite3.connect(path) as connection:
        for column in ("plan_check", "outcome_check"):
            connection.execute(f"ALTER TABLE pictures DROP COLUMN {column}")
        connection.execute("PRAGMA user_version = 0")
        connection.execute("PRAGMA application_id = 0")
    with Ledger(path) as ledger:
        assert not ledger.find_damage()
        before = contents(ledger)
    flip(path, b"prompt 55 ", offset=1)
    with Ledger(path) as ledger:
        assert ledger.find_damage() == LedgerDamage(planned=(55,))
    assert before[1] == {"planned": NUM_ROWS, "open": 40, "done": 68, "failed": 12}


# -- repair


def test_damaged_rows_are_restored_from_the_prompt_list_and_the_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = written(tmp_path)
    folder = config.output_dir
    assert generate.run(config) == 0
    before, metadata = images(folder), (folder / "metadata.jsonl").read_bytes()
    stamps = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.png")}
    sha256 = json.loads(metadata.splitlines()[7])["sha256"].encode()
    flip(folder / LEDGER_FILE, b"prompt number 5 of", offset=7)
    flip(folder / LEDGER_FILE, sha256, offset=3, bit=0)
    assert generate.run(config) == 0
    assert "2 rows damaged (the first is row 6)" in capsys.readouterr().err
    assert (folder / "metadata.jsonl").read_bytes() == metadata
    assert images(folder) == before
    assert {path.name: path.stat().st_mtime_ns for path in folder.glob("*.png")} == stamps, "nothing was drawn again"


def test_a_damaged_outcome_whose_image_is_gone_is_drawn_again(tmp_path: Path) -> None:
    config = written(tmp_path)
    folder = config.output_dir
    assert generate.run(config) == 0
    before, metadata = images(folder), (folder / "metadata.jsonl").read_bytes()
    flip(folder / LEDGER_FILE, json.loads(metadata.splitlines()[7])["sha256"].encode(), offset=3, bit=0)
    (folder / json.loads(metadata.splitlines()[7])["file_name"]).unlink()
    assert generate.run(config) == 0
    assert images(folder) == before
    assert (folder / "metadata.jsonl").read_bytes() == metadata


def test_a_damaged_row_that_nothing_proves_stops_the_command_with_its_number(tmp_path: Path) -> None:
    config = written(tmp_path)
    assert generate.run(config) == 0
    before = images(config.output_dir)
    flip(config.output_dir / LEDGER_FILE, b"prompt number 5 of", offset=7)
    with pytest.raises(InputError, match=r"ledger.sqlite is damaged: row 6 is not as written"):
        generate.run(written(tmp_path, num=25))
    assert images(config.output_dir) == before


def test_verify_compares_the_spec_inside_an_image_with_its_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ledger knows the bytes of a wrong image: only the spec in them tells that they belong to another row."""
    config = written(tmp_path)
    folder = config.output_dir
    assert generate.run(config) == 0
    before = images(folder)
    rows = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
    shutil.copy(folder / rows[3]["file_name"], folder / rows[4]["file_name"])
    with Ledger(folder / LEDGER_FILE) as ledger:
        data = before[rows[3]["file_name"]]
        wrong = ImageOutcome(index=4, state="done", sha256=rows[3]["sha256"], num_bytes=len(data))
        ledger.restore_outcomes([wrong], [])
    assert generate.run(written(tmp_path, verify=True)) == 0
    assert f"{rows[4]['file_name']} is damaged: its spec differs" in capsys.readouterr().err
    assert images(folder) == before


# -- ledgers that are not this folder's


@pytest.mark.parametrize("other", [{}, {"num_inference_steps": 3}])
def test_an_emptied_ledger_beside_images_is_an_error_and_no_new_run(tmp_path: Path, other: dict[str, Any]) -> None:
    config = written(tmp_path)
    folder = config.output_dir
    assert generate.run(config) == 0
    before = images(folder)
    (folder / LEDGER_FILE).write_bytes(b"")
    with pytest.raises(InputError, match="has no images: it was emptied or replaced"):
        generate.run(written(tmp_path, **other))
    assert images(folder) == before


def test_a_ledger_of_a_run_that_has_drawn_nothing_does_not_pass_for_one_that_has(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    config, other = written(tmp_path), written(tmp_path / "other", num_inference_steps=3)
    assert generate.run(config) == 0 == generate.run(other)
    before = images(config.output_dir)
    with Ledger(other.output_dir / LEDGER_FILE) as ledger:
        ledger.restore_outcomes([], range(24))
    shutil.copy(other.output_dir / LEDGER_FILE, config.output_dir)
    with pytest.raises(InputError, match="does not carry the spec of that image"):
        generate.run(written(tmp_path, num_inference_steps=3))
    assert images(config.output_dir) == before


def test_an_image_of_somebody_else_is_not_written_over(tmp_path: Path) -> None:
    config = written(tmp_path)
    assert generate.run(config) == 0
    precious = config.output_dir / "000025_seed66.png"
    precious.write_bytes(b"precious")
    with pytest.raises(InputError, match=r"000025_seed66\.png exists but is not an image of this run"):
        generate.run(written(tmp_path, num=30))
    assert precious.read_bytes() == b"precious"


def test_a_database_of_another_program_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    config = written(tmp_path)
    config.output_dir.mkdir()
    path = config.output_dir / LEDGER_FILE
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE bookmarks(url TEXT)")
    before = path.read_bytes()
    with pytest.raises(InputError, match=r"a database of another program \(tables: bookmarks\)"):
        generate.run(config)
    assert path.read_bytes() == before


def test_a_first_call_that_was_killed_before_it_planned_binds_nobody(tmp_path: Path) -> None:
    config = written(tmp_path)
    config.output_dir.mkdir()
    (config.output_dir / LEDGER_FILE).write_bytes(b"")
    assert generate.run(config) == 0


def test_evaluation_names_the_damaged_row_of_a_ledger(
    tmp_path: Path,
) -> None:
    """Evaluation names the damaged row and does not advise to draw over an emptied ledger."""
    config = written(tmp_path)
    folder = config.output_dir
    assert generate.run(config) == 0
    assert len(open_generated(folder).names) == 24
    whole = (folder / LEDGER_FILE).read_bytes()
    flip(folder / LEDGER_FILE, b"prompt number 5 of", offset=7)
    with pytest.raises(InputError, match=r"ledger\.sqlite is damaged: row 6 is not as written"):
        open_generated(folder)
    (folder / LEDGER_FILE).write_bytes(b"")
    with pytest.raises(InputError, match="has no images: it was emptied or replaced"):
        open_generated(folder)
    (folder / LEDGER_FILE).write_bytes(whole)
    assert len(open_generated(folder).names) == 24


# -- images that a killed call published and did not record


def kill_before_recording(config: GenerateConfig) -> None:
    """Leave the folder as a kill between publishing and recording does."""
    generate.run(config)
    with Ledger(config.output_dir / LEDGER_FILE) as ledger:
        ledger.mark_open(range(24))
    (config.output_dir / DIGEST_FILE).unlink()


def test_unrecorded_images_bind_the_settings_and_survive_a_refused_command(tmp_path: Path) -> None:
    """Unrecorded images bind the settings like recorded ones; a refused command keeps them."""
    kill_before_recording(written(tmp_path))
    folder = tmp_path / "out"
    before = images(folder)
    for changes in ({"num_inference_steps": 3}, {"num_samples": 99}, {"num_samples": 4}):
        with pytest.raises(InputError):
            generate.run(written(tmp_path, **changes))
        assert images(folder) == before
    with pytest.raises(InputError, match="changed since the images in this folder were generated"):
        generate.run(written(tmp_path, prompt="another prompt {}"))
    assert images(folder) == before
    assert generate.run(written(tmp_path)) == 0
    assert images(folder) == before


def test_unrecorded_images_are_drawn_again_under_settings_that_were_accepted(tmp_path: Path) -> None:
    kill_before_recording(written(tmp_path))
    other = written(tmp_path, num_inference_steps=3, seed_start=100, accept_changes=True)
    assert generate.run(other) == 0
    rows = [json.loads(line) for line in (other.output_dir / "metadata.jsonl").read_text().splitlines()]
    assert {row["steps"] for row in rows} == {3}
    assert images(other.output_dir).keys() == {row["file_name"] for row in rows}, (
        "no image of the settings before stays"
    )
    assert generate.run(replace(other, verify=True)) == 0


def test_a_refused_plan_leaves_the_one_that_was_there(tmp_path: Path) -> None:
    config = written(tmp_path)
    generate.run(config)
    with Ledger(config.output_dir / LEDGER_FILE) as ledger:
        ledger.mark_open(range(24))
    for path in images(config.output_dir):
        (config.output_dir / path).unlink()
    with pytest.raises(InputError, match="at most as many samples as prompts"):
        generate.run(written(tmp_path, num_samples=99))
    assert generate.run(written(tmp_path)) == 0
    assert len(images(config.output_dir)) == 24


def video_config(folder: Path, **changes: Any) -> GenerateConfig:
    return written(folder, num=3, num_frames=2, **changes)


@pytest.mark.parametrize("lost", ["000001_seed42/frame_0000.png", "000001_seed42", "000001_seed42.mp4"])
def test_a_video_of_which_a_part_is_gone_is_drawn_again(tmp_path: Path, lost: str) -> None:
    config = video_config(tmp_path)
    assert generate.run(config) == 0
    folder = config.output_dir
    before = {path: path.read_bytes() for path in folder.rglob("*_seed*") if path.is_file()}
    before |= {path: path.read_bytes() for path in folder.glob("*_seed*/*")}
    path = folder / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert generate.run(replace(config, verify=True)) == 0
    assert {path: path.read_bytes() for path in before} == before


def test_a_folder_under_the_name_of_a_video_is_not_removed(tmp_path: Path) -> None:
    config = video_config(tmp_path, num_samples=2)
    assert generate.run(config) == 0
    notes = config.output_dir / "000003_seed44" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("thesis")
    with pytest.raises(InputError, match="000003_seed44 exists but is not an image of this run"):
        generate.run(replace(config, num_samples=3))
    assert notes.read_text() == "thesis"


@pytest.mark.parametrize("changes", [{"num_inference_steps": 3}, {"seed_start": 500}])
def test_a_damaged_row_of_earlier_settings_is_restored_as_its_image_says(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = written(tmp_path, num_samples=3)
    generate.run(config)
    assert generate.run(written(tmp_path, accept_changes=True, **changes)) == 0
    folder = config.output_dir
    before, metadata = images(folder), (folder / "metadata.jsonl").read_bytes()
    flip(folder / LEDGER_FILE, b"prompt number 1 of", offset=7)
    assert generate.run(written(tmp_path, accept_changes=True, **changes)) == 0
    assert (folder / "metadata.jsonl").read_bytes() == metadata
    assert images(folder) == before


def test_the_ledger_of_another_run_is_refused_beside_images_of_the_same_names(tmp_path: Path) -> None:
    config = written(tmp_path)
    generate.run(config)
    (tmp_path / "other").mkdir()
    other = written(tmp_path / "other", prompt="a river {}")
    generate.run(other)
    before = images(config.output_dir)
    for name in (LEDGER_FILE, DIGEST_FILE):
        shutil.copy(other.output_dir / name, config.output_dir / name)
    with pytest.raises(InputError, match=r"ledger\.sqlite is the ledger of another run"):
        generate.run(replace(other, output_dir=config.output_dir))
    assert images(config.output_dir) == before


def test_verify_does_not_remove_what_the_disk_refuses_to_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = written(tmp_path)
    generate.run(config)
    before = images(config.output_dir)
    real_open = os.open

    def refuse(path: Any, *words: Any, **options: Any) -> Any:
        if str(path).endswith("000003_seed44.png"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real_open(path, *words, **options)

    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(PermissionError):
        generate.run(replace(config, verify=True))
    monkeypatch.undo()
    assert images(config.output_dir) == before


def test_a_damaged_image_found_by_verify_is_not_foreign_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged image that --verify found is not taken for a foreign one after a kill."""
    config = written(tmp_path)
    generate.run(config)
    expected = images(config.output_dir)
    path = config.output_dir / "000003_seed44.png"
    path.write_bytes(path.read_bytes().replace(b"prompt number", b"prompt mumber"))
    monkeypatch.setenv("HALATION_FAULT", "ledger.record:1:raise")
    with contextlib.suppress(Exception):
        generate.run(replace(config, verify=True))
    monkeypatch.delenv("HALATION_FAULT")
    assert generate.run(config) == 0
    assert images(config.output_dir) == expected


# -- what stands beside the ledger


def test_the_summary_says_which_metadata_belongs_to_it(tmp_path: Path) -> None:
    config = written(tmp_path)
    generate.run(config)
    assert is_metadata_intact(config.output_dir)
    metadata = config.output_dir / "metadata.jsonl"
    expected = metadata.read_bytes()
    flip(metadata, b"prompt number 5 of", offset=7)
    assert not is_metadata_intact(config.output_dir)
    generate.run(config)
    assert metadata.read_bytes() == expected
    assert is_metadata_intact(config.output_dir)


def test_evaluate_refuses_damaged_metadata_of_a_folder_that_several_commands_share(tmp_path: Path) -> None:
    config = written(tmp_path, cluster="files")
    generate.run(config)
    assert len(open_generated(config.output_dir).names) == 24
    flip(config.output_dir / "metadata.jsonl", b"prompt number 5 of", offset=7)
    with pytest.raises(InputError, match=r"metadata\.jsonl does not match its hash in summary"):
        open_generated(config.output_dir)
