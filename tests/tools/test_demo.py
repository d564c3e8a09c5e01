"""The demo prints commands that can be typed, survives a kill, and finds changed bytes."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.big_folders import training_folder

from halation import cli
from halation.config import as_json, fixed_settings
from halation.distributed.stop_signals import StopSignals
from halation.errors import Interrupted
from halation.prompt_files import PromptFile
from halation.runs import run_folder as runs
from halation.runs.run_folder import RunFolder
from halation.tools import demo
from halation.tools.config import DemoConfig
from halation.tools.demo import Demo, num_images_done, run_command

NAME = "a run's folder"


def test_printed_commands_survive_a_shell_and_parse(tmp_path: Path) -> None:
    """Printed commands are unchanged by a shell and accepted by the command line."""
    config = DemoConfig(output_dir=tmp_path / NAME, n_steps=90, nproc=3, progress="none")
    it = Demo(config=config)
    for words, expected in (
        (it.train_command(), {"output_dir": it.training, "n_steps": 90, "nproc": 3, "image_size": (32, 32)}),
        (
            it.generate_command(it.images, 2),
            {"output_dir": it.images, "prompts_csv": str(it.prompts), "model_path": "streets-64", "nproc": 2},
        ),
        (it.evaluate_command(), {"generated": str(it.images), "allow_few": True, "output": it.scores}),
        (it.export_command(), {"dirs": (it.training, it.images), "export": it.page}),
        (["gallery", str(config.output_dir)], {"dirs": (config.output_dir,)}),
    ):
        typed = shlex.split(demo.format_command(words).replace("\\\n", " "))
        assert typed[1:] == words
        parsed = cli.parse(words[0], words[1:])
        assert {name: getattr(parsed, name) for name in expected} == expected


def test_the_program_is_called_by_a_name_that_a_shell_finds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    beside = Path(sys.executable).with_name("halation")
    monkeypatch.setenv("PATH", str(beside.parent))
    assert demo.program_name() == "halation"
    monkeypatch.setenv("PATH", str(tmp_path))
    found = shutil.which(demo.program_name())
    assert found is not None
    assert os.path.samefile(found, beside)


def test_the_prompts_are_thirty_two_captions_with_ids_of_their_own(tmp_path: Path) -> None:
    demo.write_prompts(tmp_path / "prompts.csv")
    rows = list(PromptFile.open(str(tmp_path / "prompts.csv")).rows())
    assert len(rows) == len({row.image_id for row in rows}) == demo.NUM_IMAGES
    assert rows[7].prompt == "A rural road with natural scenery and minimal traffic"
    assert all(row.prompt.startswith(("A ", "An ")) for row in rows)


def test_the_progress_of_a_training_is_one_image(tmp_path: Path) -> None:
    run = training_folder(tmp_path / "run", 2, 8, size=32)
    demo.draw_progress(RunFolder(run), tmp_path / "progress.png", "200 steps on 2 ranks")
    assert demo.read_png(tmp_path / "progress.png")[0].shape[1] > 8 * 32


def test_too_few_steps_for_a_image_of_the_progress_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["demo", "--output_dir", str(tmp_path / "run"), "--n_steps", "4"]) == 2
    assert "at least 8 steps" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def begun(folder: Path, n_steps: int) -> DemoConfig:
    """A demo whose training has saved, as far as its record tells."""
    config = DemoConfig(output_dir=folder, n_steps=n_steps)
    training = RunFolder(Demo(config=config).training)
    settings = cli.parse("train", Demo(config=config).train_command()[1:])
    training.folder.mkdir(parents=True)
    runs.create_or_resume_run(training, "train", as_json(settings), fixed_settings(settings), accept_changes=False)
    (training.folder / "checkpoints/step_0000001").mkdir(parents=True)
    (training.folder / "checkpoints/step_0000001/COMMIT.json").write_text("{}")
    assert training.has_checkpoints()
    return config


def test_another_number_of_steps_is_refused_in_the_demos_own_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = begun(tmp_path, 600)
    Demo(config=config).check_same_steps()
    for number in ("50", "900"):
        assert cli.main(["demo", "--output_dir", str(tmp_path), "--n_steps", number]) == 2
        said = capsys.readouterr().err
        assert f"--n_steps {number}, but {tmp_path} was started with --n_steps 600" in said
        assert "give --n_steps 600 to resume, or another --output_dir" in said


# -- equal or not


def images(folder: Path) -> Path:
    folder.mkdir()
    for number in range(demo.NUM_IMAGES):
        (folder / f"street_{number:02d}_seed{number}.png").write_bytes(b"image %d" % number)
    (folder / "metadata.jsonl").write_bytes(b"{}\n")
    (folder / "summary.json").write_text(folder.name)  # what depends on time and workers is not compared
    return folder


def test_folders_are_equal_by_their_bytes_and_whatever_differs_is_named(tmp_path: Path) -> None:
    one, other = images(tmp_path / "one"), images(tmp_path / "other")
    assert demo.compare_outputs(one, other) == (32, [])
    (other / "street_03_seed3.png").write_bytes(b"image 4")
    assert demo.compare_outputs(one, other) == (31, ["street_03_seed3.png"])
    (one / "street_03_seed3.png").unlink()
    (other / "metadata.jsonl").write_bytes(b"{} \n")
    assert demo.compare_outputs(one, other) == (31, ["street_03_seed3.png", "metadata.jsonl"])


def test_folders_that_lack_the_same_image_are_not_taken_for_whole(tmp_path: Path) -> None:
    one, other = images(tmp_path / "one"), images(tmp_path / "other")
    for folder in (one, other):
        (folder / "street_03_seed3.png").unlink()
    num_equal, different = demo.compare_outputs(one, other)
    assert num_equal == 31
    assert "31 images" in different[0]


# -- processes


@pytest.mark.slow
@pytest.mark.faults
def test_a_command_killed_in_the_middle_goes_on_and_ends_as_one_that_never_was(tmp_path: Path) -> None:
    config = DemoConfig(output_dir=tmp_path, progress="none")
    places = Demo(config=config)
    demo.write_prompts(places.prompts)

    def words(folder: Path, pace: str) -> list[str]:
        said = places.generate_command(folder, 2)
        said[said.index("--model_path") + 1] = pace
        return [*said, "--height", "32", "--width", "32"]

    with StopSignals(exit_on_second=False) as signals:
        # A quarter of a minute of drawing is left when the kill is due: no pause of a busy machine is that long.
        code, killed = run_command(
            words(places.images, "testcard:1"), signals, lambda: num_images_done(places.images) >= 1
        )
        assert (code, killed) == (-signal.SIGKILL, True)
        assert 1 <= num_images_done(places.images) < 32
        assert not (places.images / "metadata.jsonl").exists()
        for folder in (places.images, places.uninterrupted):
            assert run_command(words(folder, "testcard"), signals, lambda: False) == (0, False)
    assert demo.compare_outputs(places.images, places.uninterrupted) == (32, [])


def test_a_signal_is_handed_on_and_no_further_command_begins() -> None:
    with StopSignals(exit_on_second=False) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted, match="nothing is left running") as raised:
            run_command(["--version"], signals, lambda: False)
    assert raised.value.exit_code == 143


def started(folder: Path, *flags: str) -> subprocess.Popen[bytes]:
    """A demo in a session of its own, in which everything it starts stays."""
    words = ["demo", "--output_dir", str(folder), "--n_steps", "8", "--progress", "plain", *flags]
    log = folder.parent / "said.txt"
    with open(log, "wb") as file:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "halation.cli", *words], stdout=file, stderr=file, start_new_session=True
        )


def in_session(session: int) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except (OSError, NotADirectoryError):
            continue
        if fields[0] != "Z" and int(fields[3]) == session:
            found.append(int(folder.name))
    return found


def stopped(folder: Path, word: str, number: int, timeout_s: float) -> tuple[int, str]:
    """Send a signal to the process group of a demo after its first output; return exit code and output."""
    process = started(folder)
    said = folder.parent / "said.txt"
    deadline = time.monotonic() + timeout_s
    try:
        while word not in said.read_text():
            assert process.poll() is None, said.read_text()
            assert time.monotonic() < deadline, said.read_text()
            time.sleep(0.05)
        os.killpg(process.pid, number)
        code = process.wait(60)
    finally:
        left = in_session(process.pid)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        process.wait()
    assert left == [], said.read_text()
    return code, said.read_text()


@pytest.mark.faults
def test_control_c_while_the_training_starts_leaves_nothing_running(tmp_path: Path) -> None:
    code, said = stopped(tmp_path / NAME, "1/4", signal.SIGINT, 60)
    assert code == 130, said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(1800)
def test_signals_at_every_step_leave_nothing_running_and_the_demo_resumes(tmp_path: Path) -> None:
    """Signals at every step leave nothing running, and the same command completes the demo."""
    folder = tmp_path / NAME
    for word, number, expected in (
        ("step 1/8", signal.SIGINT, 130),
        ("worker 1: loading", signal.SIGTERM, 143),
        ("of 32 images, 0 failed", signal.SIGINT, 130),
        ("3/4", signal.SIGINT, 130),
    ):
        code, said = stopped(folder, word, number, 600)
        assert code == expected, said
        assert "Traceback" not in said
    assert started(folder).wait(600) == 0, (tmp_path / "said.txt").read_text()
    assert "32 of 32 images are equal" in (tmp_path / "said.txt").read_text()
    assert (folder / "gallery.html").exists()


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(1800)
def test_the_demo_runs_through_a_kill_and_a_second_call_is_quick(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The demo trains, draws through a kill, scores and writes a page.

    A second call is quick and notices a changed image.
    """
    config = DemoConfig(output_dir=tmp_path / NAME, n_steps=8, nproc=1, progress="none")
    places = Demo(config=config)
    words = ["demo", "--output_dir", str(config.output_dir), "--n_steps", "8", "--nproc", "1", "--progress", "none"]
    assert cli.main(words) == 0
    said = capfd.readouterr().out
    for step in (
        "1/4",
        "2/4",
        "3/4",
        "4/4",
        "Killed after ",
        "32 of 32 images are equal",
        "FD-streets",
        "prompt agreement",
    ):
        assert step in said, said
    for field in ("progress", "scores", "page"):
        assert str(getattr(places, field)) in said
    page = places.page.read_text()
    assert "data:image/webp" in page
    assert "KID-streets" in page
    assert "together" in said

    assert cli.main(words) == 0
    assert "32 of 32 images are there from an earlier call" in capfd.readouterr().out

    changed = next(places.uninterrupted.glob("street_05*.png"))
    changed.write_bytes(changed.read_bytes() + b"\0")
    assert cli.main(words) == 1
    assert changed.name in capfd.readouterr().err
