"""Laws of the kind of ledger: shared and exclusive commands never start one together."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from PIL import Image

from halation.errors import InputError
from halation.generation.ledger_setup import KIND_FILE, claim_ledger_kind, has_ledger
from support.commands import Started, finish, halation, started, until

NUM_ROWS = 12
ADVICE = ("was started with --cluster files", "was started without --cluster files")


def words(folder: Path, cluster: str, height: int, seconds: float = 0.0, **flags: object) -> list[str]:
    prompts = folder.parent / "prompts.txt"
    if not prompts.exists():
        prompts.write_text("".join(f"prompt {number}\n" for number in range(NUM_ROWS)))
    settings: dict[str, object] = {
        "prompts": prompts, "model_path": f"testcard:{seconds}", "output_dir": folder, "height": height, "width": 32,
        "batch_size": 2, "num_inference_steps": 2, "nproc": 1, "cluster": cluster, "progress": "none",
    }  # fmt: skip
    settings |= flags
    given = [word for name, value in settings.items() if value is not True for word in (f"--{name}", str(value))]
    return halation(["generate", *given, *(f"--{name}" for name, value in settings.items() if value is True)])


def assert_of_one_command(folder: Path, height: int) -> None:
    """Every image and its metadata are of that height."""
    rows = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
    assert len(rows) == NUM_ROWS
    assert {row["height"] for row in rows} == {height}
    for row in rows:
        with Image.open(folder / row["file_name"]) as image:
            assert image.size == (32, height)
    assert json.loads((folder / "config.json").read_text())["settings"]["height"] == height


def assert_one_wins(folder: Path, first: Started, second: Started) -> None:
    heights = {first: 40, second: 32}
    codes = {command: command.process.wait(120) for command in heights}
    assert sorted(codes.values()) == [0, 2], [command.said() for command in heights]
    winner, loser = sorted(codes, key=lambda command: codes[command])
    assert any(text in loser.said() for text in ADVICE), loser.said()
    assert_of_one_command(folder, heights[winner])
    assert has_ledger(folder, "sqlite") != has_ledger(folder, "files")


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(10))
def test_of_local_and_files_started_at_one_instant_one_is_refused(attempt: int, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    commands = [words(folder, "local", 40), words(folder, "files", 32)]
    if attempt % 2:  # the first one has a head start of milliseconds
        commands.reverse()
    with started(commands[0], tmp_path / "log0") as one, started(commands[1], tmp_path / "log1") as other:
        assert_one_wins(folder, *((other, one) if attempt % 2 else (one, other)))


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("wait_s", [1, 2])
def test_files_is_refused_while_a_ray_of_the_other_command_starts(wait_s: float, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    folder = tmp_path / "out"
    with started(words(folder, "ray", 40, 0.3), tmp_path / "log0") as ray:
        time.sleep(wait_s)  # Ray takes some seconds to start
        with started(words(folder, "files", 32, 0.3), tmp_path / "log1") as files:
            assert_one_wins(folder, ray, files)


def test_a_command_that_ends_without_a_ledger_gives_the_kind_back(tmp_path: Path) -> None:
    with claim_ledger_kind(tmp_path, "files") as kind:
        assert kind == "files"
        with claim_ledger_kind(tmp_path, "files") as second, claim_ledger_kind(tmp_path, "sqlite") as other:
            assert (second, other) == ("files", "files")
        assert (tmp_path / KIND_FILE).exists()
    assert not (tmp_path / KIND_FILE).exists()
    with claim_ledger_kind(tmp_path, "sqlite") as kind:
        assert kind == "sqlite"
        (tmp_path / "ledger.sqlite").touch()
    assert (tmp_path / KIND_FILE).read_text() == "sqlite"
    with claim_ledger_kind(tmp_path, "files") as kind:
        assert kind == "sqlite"


@pytest.mark.parametrize("content", ["", "files", "nonsense of another program"])
def test_a_kind_without_owner_and_ledger_binds_nobody(tmp_path: Path, content: str) -> None:
    (tmp_path / KIND_FILE).write_text(content)
    with claim_ledger_kind(tmp_path, "sqlite") as kind:
        assert kind == "sqlite"
        assert (tmp_path / KIND_FILE).read_text() == "sqlite"


@pytest.mark.slow
@pytest.mark.ranks
def test_a_ray_command_that_is_killed_before_its_ledger_leaves_the_folder_to_others(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    folder = tmp_path / "out"
    with started(words(folder, "ray", 40), tmp_path / "log0") as ray:
        until(lambda: (folder / KIND_FILE).exists(), command=ray)
        os.kill(ray.process.pid, signal.SIGKILL)
        ray.process.wait()
        assert not has_ledger(folder, "sqlite")
        assert (folder / KIND_FILE).read_text() == "sqlite"
    assert finish(words(folder, "files", 32), tmp_path / "log1") == 0, (tmp_path / "log1").read_text()
    assert_of_one_command(folder, 32)


@pytest.mark.ranks
def test_a_ray_command_that_finds_no_cluster_leaves_the_folder_to_others(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    folder = tmp_path / "out"
    assert finish(words(folder, "ray://127.0.0.1:9", 40), tmp_path / "log0") == 2
    assert "no Ray cluster to join" in (tmp_path / "log0").read_text()
    assert not (folder / KIND_FILE).exists()


@pytest.mark.slow
def test_a_folder_with_two_ledgers_of_an_older_version_resumes_as_advised(tmp_path: Path) -> None:
    """A folder with two ledgers of an older version resumes as the message advises."""
    folder, other = tmp_path / "out", tmp_path / "other"
    assert finish(words(folder, "local", 40), tmp_path / "log") == 0
    assert finish(words(other, "files", 32), tmp_path / "log") == 0
    shutil.copytree(other / "ledger", folder / "ledger")
    for path in sorted(other.glob("*.png"))[:5]:
        shutil.copy(path, folder)
    (folder / KIND_FILE).unlink(missing_ok=True)
    assert finish(words(folder, "files", 40), tmp_path / "log1") == 2
    assert "omit --cluster files" in (tmp_path / "log1").read_text()
    assert finish(words(folder, "local", 40), tmp_path / "log2") == 2
    said = (tmp_path / "log2").read_text()
    assert "two ledgers" in said
    assert "move ledger/ elsewhere and run this command with --verify" in said
    shutil.move(folder / "ledger", tmp_path / "elsewhere")
    assert finish(words(folder, "local", 40, verify=True), tmp_path / "log3") == 0, (tmp_path / "log3").read_text()
    assert_of_one_command(folder, 40)


def test_a_kind_that_cannot_be_read_is_refused_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halation.generation.ledger_setup.KIND_TIMEOUT_S", 0.2)
    (tmp_path / KIND_FILE).write_text("nonsense of another program")
    with (tmp_path / KIND_FILE).open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        with pytest.raises(InputError, match="sqlite or files"), claim_ledger_kind(tmp_path, "sqlite"):
            pass
    (tmp_path / KIND_FILE).unlink()
    (tmp_path / KIND_FILE).mkdir()
    with pytest.raises(InputError, match="is a folder"), claim_ledger_kind(tmp_path, "sqlite"):
        pass


def test_without_locks_the_first_command_decides_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with claim_ledger_kind(tmp_path, "files") as first, claim_ledger_kind(tmp_path, "sqlite") as second:
        assert (first, second) == ("files", "files")
