"""A folder lost, replaced or filled during a command: one message, and a rerun resumes."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support import run_readers
from support.commands import PROMPTS, Started, finish, generate, halation, started, train, undisturbed_generation, until

pytestmark = pytest.mark.faults

LIMIT_S = 10.0
AS_OWNER = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
"""Root writes into read-only folders; without this capability it does not."""


def remove(folder: Path) -> None:
    """Also while files are being added to it: under another name nobody finds it."""
    trash = folder.with_name("trash")
    os.rename(folder, trash)
    shutil.rmtree(trash)


def move(folder: Path) -> None:
    os.rename(folder, folder.with_name("moved"))


def replace(folder: Path) -> None:
    move(folder)
    folder.mkdir()


def put_back(folder: Path) -> None:
    if folder.exists():
        folder.rmdir()
    os.rename(folder.with_name("moved"), folder)


def assert_ends_with_one_message(command: Started, expected: str) -> None:
    """Within ten seconds, exit code 1, no traceback, and the reason once."""
    began = time.monotonic()
    code = command.process.wait(60)
    assert time.monotonic() - began < LIMIT_S
    said = command.said()
    assert code == 1, said
    assert "Traceback" not in said
    assert said.count("run the same command again") == 1, said
    assert said.splitlines()[-1].startswith("halation: "), said
    assert expected in said.splitlines()[-1], said
    command.until_gone(5)


def num_images(folder: Path) -> int:
    return len(list(folder.glob("*.png")))


def slow_generation(folder: Path, **settings: object) -> list[str]:
    return generate(folder, **{"model_path": "testcard:0.4", "batch_size": 2, **settings})  # type: ignore[arg-type]


def assert_generated(folder: Path) -> None:
    assert run_readers.generation_problems(folder, PROMPTS.count("\n")) == []
    assert run_readers.images_and_metadata(folder) == undisturbed_generation(PROMPTS, 4), (
        "other bytes than without a disturbance"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lose", "expected"),
    [
        (move, "out is gone: it was removed or moved"),
        (replace, "out was replaced while this command wrote to it"),
    ],
)
def test_a_generation_whose_folder_is_moved_goes_on_when_it_is_back(
    tmp_path: Path, lose: Callable[[Path], None], expected: str
) -> None:
    words = slow_generation(tmp_path)
    with started(words, tmp_path / "log") as command:
        until(lambda: num_images(tmp_path / "out") >= 4, command=command)
        lose(tmp_path / "out")
        assert_ends_with_one_message(command, expected)
    assert "giving up on image" not in command.said(), "no image is to blame"
    assert not (tmp_path / "out").exists() or os.listdir(tmp_path / "out") == []
    put_back(tmp_path / "out")
    before = num_images(tmp_path / "out")
    assert 4 <= before < PROMPTS.count("\n")
    assert finish(words, tmp_path / "second") == 0, (tmp_path / "second").read_text()
    assert f"{PROMPTS.count(chr(10)) - before} generated now" in (tmp_path / "second").read_text()
    assert_generated(tmp_path / "out")


def test_a_generation_whose_folder_is_removed_ends_and_makes_no_new_one(tmp_path: Path) -> None:
    with started(slow_generation(tmp_path), tmp_path / "log") as command:
        until(lambda: num_images(tmp_path / "out") >= 4, command=command)
        remove(tmp_path / "out")
        assert_ends_with_one_message(command, "out is gone")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_generation_whose_ledger_is_removed_ends(tmp_path: Path) -> None:
    """SQLite goes on writing to a file that nobody can open any more."""
    with started(slow_generation(tmp_path, model_path="testcard:2"), tmp_path / "log") as command:
        until(lambda: num_images(tmp_path / "out") >= 2, command=command)
        (tmp_path / "out" / "ledger.sqlite").unlink()
        assert_ends_with_one_message(command, "ledger.sqlite is gone")


@pytest.mark.slow
def test_a_folder_lost_during_a_long_batch_ends_the_command_before_the_batch(tmp_path: Path) -> None:
    """A folder lost during a long batch ends the command before the batch ends."""
    with started(slow_generation(tmp_path, model_path="testcard:60"), tmp_path / "log") as command:
        until(lambda: (tmp_path / "out" / "ledger.sqlite").exists(), command=command)
        until(lambda: "loading" in command.said(), command=command)
        remove(tmp_path / "out")
        assert_ends_with_one_message(command, "is gone")


@pytest.fixture
def as_owner(tmp_path: Path) -> tuple[str, ...]:
    """Words before a command that make it obey permissions, also where tests run as root."""
    if os.geteuid():
        return ()
    folder = tmp_path / "probe"
    folder.mkdir(mode=0o555)
    if not shutil.which("setpriv") or not subprocess.run([*AS_OWNER, "touch", folder / "file"], check=False).returncode:
        pytest.skip("root cannot give up its right to write everywhere here")
    return AS_OWNER


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["local", "files"])
def test_a_generation_whose_folder_becomes_read_only_goes_on_when_it_is_writable(
    tmp_path: Path, as_owner: tuple[str, ...], cluster: str
) -> None:
    words = [*as_owner, *slow_generation(tmp_path, cluster=cluster, lease_s=2)]
    folder = tmp_path / "out"
    with started(words, tmp_path / "log") as command:
        until(lambda: num_images(folder) >= 4, command=command)
        folder.chmod(0o555)
        try:
            assert_ends_with_one_message(command, "out is no longer writable: Permission denied")
        finally:
            folder.chmod(0o755)
    assert "giving up on image" not in command.said()
    assert finish(words, tmp_path / "second") == 0, (tmp_path / "second").read_text()
    assert run_readers.image_digests(folder) == undisturbed_generation(PROMPTS, 4)[0]


# -- several commands on one folder


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["out", "out/ledger"])
def test_commands_that_share_a_folder_end_when_it_is_moved_and_go_on_when_it_is_back(tmp_path: Path, lost: str) -> None:
    words = slow_generation(tmp_path, cluster="files", nproc=1, lease_s=2)
    with started(words, tmp_path / "log") as first, started(words, tmp_path / "log2") as second:
        until(lambda: num_images(tmp_path / "out") >= 4, command=first)
        os.rename(tmp_path / lost, tmp_path / "moved")
        for command in (first, second):
            assert_ends_with_one_message(command, f"{lost} is gone")
    assert not (tmp_path / lost).exists()
    os.rename(tmp_path / "moved", tmp_path / lost)
    assert finish(words, tmp_path / "third") == 0, (tmp_path / "third").read_text()
    assert run_readers.image_digests(tmp_path / "out") == undisturbed_generation(PROMPTS, 4)[0]
    assert run_readers.metadata_rows(tmp_path / "out")


@pytest.mark.slow
def test_leases_that_are_removed_while_commands_share_a_folder_are_made_again(tmp_path: Path) -> None:
    words = slow_generation(tmp_path, cluster="files", nproc=1, lease_s=2)
    leases = tmp_path / "out" / "ledger" / "leases"
    with started(words, tmp_path / "log") as first, started(words, tmp_path / "log2") as second:
        until(lambda: num_images(tmp_path / "out") >= 4, command=first)
        os.rename(leases, tmp_path / "leases")
        for command in (first, second):
            assert command.process.wait(60) == 0, command.said()
            assert "Traceback" not in command.said()
    assert run_readers.image_digests(tmp_path / "out") == undisturbed_generation(PROMPTS, 4)[0]
    assert list(leases.iterdir()) == []


# -- training


def long_training(folder: Path, nproc: int, **settings: object) -> list[str]:
    return halation(train(folder, nproc=nproc, n_steps=100_000, ckpt_every=20, keep_last=2, **settings))


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("lose", [move, replace])
def test_a_training_resumes_from_its_checkpoint_when_a_moved_folder_is_back(
    tmp_path: Path, lose: Callable[[Path], None], nproc: int
) -> None:
    """A training whose folder was moved resumes from its checkpoint when the folder is back."""
    run = tmp_path / "run"
    with started(long_training(run, nproc, max_restarts=1), tmp_path / "log") as command:
        until(lambda: (run / "checkpoints" / "step_0000040").exists(), command=command)
        lose(run)
        assert_ends_with_one_message(command, str(run))
    left = sorted(os.listdir(run)) if run.exists() else []
    assert set(left) <= {"metrics.jsonl"}, "at most a line of the moment before it was noticed"
    shutil.rmtree(run, ignore_errors=True)
    put_back(run)
    newest = max(run_readers.valid_checkpoints(run / "checkpoints"))
    words = halation(train(run, nproc=nproc, n_steps=newest + 2, ckpt_every=20, keep_last=2))
    assert finish(words, tmp_path / "second") == 0, (tmp_path / "second").read_text()
    assert f"resuming from step {newest}" in (run / "logs" / "train.log").read_text()
    assert run_readers.leftovers(run) == []


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_training_whose_folder_is_removed_ends_and_makes_no_new_one(tmp_path: Path, nproc: int) -> None:
    run = tmp_path / "run"
    with started(long_training(run, nproc, sample=True, max_restarts=1), tmp_path / "log") as command:
        until(lambda: (run / "checkpoints" / "step_0000040").exists(), command=command)
        remove(run)
        assert_ends_with_one_message(command, f"{run} is gone")
    assert not run.exists()


@pytest.mark.slow
@pytest.mark.ranks
def test_a_training_whose_folder_becomes_read_only_goes_on_when_it_is_writable(
    tmp_path: Path, as_owner: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    with started([*as_owner, *long_training(run, 2)], tmp_path / "log") as command:
        until(lambda: (run / "checkpoints" / "step_0000040").exists(), command=command)
        run.chmod(0o555)
        try:
            assert_ends_with_one_message(command, f"{run} is no longer writable: Permission denied")
        finally:
            run.chmod(0o755)
    newest = max(run_readers.valid_checkpoints(run / "checkpoints"))
    words = halation(train(run, n_steps=newest + 2, ckpt_every=20, keep_last=2))
    assert finish(words, tmp_path / "second") == 0, (tmp_path / "second").read_text()


# -- the other commands


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    words = halation(train(folder / "run", nproc=1, n_steps=2, ckpt_every=2))
    assert finish(words, folder / "log") == 0, (folder / "log").read_text()
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
def test_samples_whose_folder_is_removed_are_not_drawn_on(tmp_path: Path, trained: Path, nproc: int) -> None:
    out, prompts = tmp_path / "out", [f"prompt {number}" for number in range(60)]
    words = ["sample", "--checkpoint", str(trained), "--output_dir", str(out), "--nproc", str(nproc)]
    with started(halation([*words, "--sample_steps", "200", "--prompts", *prompts]), tmp_path / "log") as command:
        until(lambda: (out / "sample_00.png").exists(), command=command)
        remove(out)
        assert_ends_with_one_message(command, f"{out} is gone")
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
def test_an_evaluation_whose_folder_of_features_is_moved_goes_on_when_it_is_back(
    tmp_path: Path, trained: Path, nproc: int
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "prompts.txt").write_text("".join(f"prompt {number}\n" for number in range(32)))
    words = ["evaluate", "--model_path", str(trained), "--prompts", str(tmp_path / "prompts.txt")]
    words += ["--reference", "streets", "--num_reference", "64", "--metrics", "fd", "--allow_few"]
    words += ["--num_inference_steps", "10", "--model_batch_size", "4", "--nproc", str(nproc)]
    words += ["--cache_dir", str(out / "cache"), "--output", str(out / "report.json")]
    with started(halation(words), tmp_path / "log") as command:
        until(lambda: list(out.glob("cache/*/*/*")), command=command)
        move(out)
        assert_ends_with_one_message(command, "is gone: it was removed or moved")
    assert not out.exists()
    put_back(out)
    assert finish(halation(words), tmp_path / "second") == 0, (tmp_path / "second").read_text()
    assert (out / "report.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["step_0000002/generate.log", "step_0000002/evaluation.json"])
def test_a_watch_whose_folder_is_moved_goes_on_when_it_is_back(tmp_path: Path, trained: Path, moment: str) -> None:
    """While it draws, and while it waits for the next checkpoint."""
    out = tmp_path / "out"
    words = ["watch", str(trained), "--output_dir", str(out), "--num_samples", "32", "--num_inference_steps", "5"]
    words += ["--num_reference", "64", "--metrics", "fd", "--allow_few", "--progress", "plain"]
    with started(halation(words), tmp_path / "log") as command:
        until(lambda: (out / moment).exists(), command=command)
        move(out)
        assert_ends_with_one_message(command, f"{out} is gone")
    assert not out.exists()
    put_back(out)
    assert finish(halation([*words, "--once"]), tmp_path / "second") == 0, (tmp_path / "second").read_text()
    assert (out / "step_0000002" / "evaluation.json").exists()


# -- leftovers


@pytest.mark.slow
def test_what_killed_evaluations_leave_among_temporary_files_is_removed_by_the_next(
    tmp_path: Path,
) -> None:
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    images = tmp_path / "out"
    assert finish(generate(tmp_path, height=32, width=32), tmp_path / "log") == 0
    words = ["evaluate", "--generated", str(images), "--reference", "streets", "--num_reference", "64"]
    words += ["--metrics", "fd", "--allow_few", "--nproc", "1", "--cache_dir", str(tmp_path / "cache")]
    environment = {"TMPDIR": str(scratch)}
    with started(halation(words), tmp_path / "log", environment=environment) as command:
        until(lambda: list(scratch.glob("halation_report_*")), command=command)
        command.kill_all()
    assert list(scratch.glob("halation_report_*")), "killed, it could not remove its own"
    assert finish(halation(words), tmp_path / "second", environment=environment) == 0
    assert list(scratch.glob("halation_*")) == []
