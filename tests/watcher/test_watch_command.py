"""A watch scores every checkpoint once, survives faults, and keeps the best one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halation import cli
from halation.data.streets import Streets
from halation.distributed.stop_signals import StopSignals
from halation.errors import InputError
from halation.images.png_codec import encode_png, read_png
from halation.progress import WatchProgress
from halation.runs import run_folder as runs
from halation.runs.lock import FolderMonitor
from halation.watcher.command import load_prompts, resolve_config
from halation.watcher.config import WatchConfig
from halation.watcher.watch_loop import CheckpointWatcher
from support import commands

SMALL = ["--num_samples", "6", "--num_reference", "32", "--num_inference_steps", "2", "--nproc", "1"]
INCEPTION, STREETS = ["--extractor", "inception"], ["--extractor", "streets"]
FEW = [*SMALL, "--allow_few", "--metrics", "fd", "agreement"]


def watch(*words: object) -> subprocess.CompletedProcess[str]:
    command = [commands.HALATION, "watch", *map(str, words)]
    environment = dict(os.environ) | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def drawn(folder: Path) -> dict[str, int]:
    """Images with the time they were written."""
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*_seed*.png"))}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training of six steps with three checkpoints."""
    folder = tmp_path_factory.mktemp("watched")
    words = commands.halation(commands.train(folder / "run", nproc=1, validation_images=0))
    assert commands.finish(words, folder / "log") == 0, (folder / "log").read_text()
    return folder / "run"


@pytest.fixture(scope="module")
def scored(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run with two checkpoints, and the watch of it."""
    run = tmp_path_factory.mktemp("scored") / "run"
    shutil.copytree(trained, run)
    shutil.rmtree(run / "checkpoints/step_0000004")
    return {"run": run, "call": watch(run, "--once", *FEW)}


def test_each_whole_checkpoint_has_images_a_grid_and_numbers(scored: dict[str, Any]) -> None:
    folder = scored["run"] / "watch"
    for step in (2, 6):
        place = folder / f"step_{step:07d}"
        assert len(drawn(place / "pictures")) == 6
        assert read_png(place / "grid.png")[0].shape[1] == 12 + 4 * 140
        evaluation = json.loads((place / "evaluation.json").read_text())
        assert (evaluation["step"], evaluation["checkpoint"]) == (step, f"step_{step:07d}")
        assert evaluation["reference"]["num"] == 32
    assert [(row["step"], row["metric"], row["name"]) for row in rows(folder)] == [
        (step, metric, name)
        for step in (2, 6)
        for metric, name in (("fd", "FD-streets"), ("agreement", "prompt agreement"))
    ]
    assert read_png(folder / "metrics.png")[0].size
    assert scored["call"].returncode == 0
    said = scored["call"].stderr
    assert "2 checkpoints waiting; scoring the oldest first" in said
    assert "step 2: FD-streets" in said
    assert "step 6: FD-streets" in said


def test_the_images_are_of_the_captions_of_held_out_scenes(scored: dict[str, Any]) -> None:
    from halation.data.streets import caption, scene

    lines = (scored["run"] / "watch/step_0000002/pictures/metadata.jsonl").read_text().splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == [caption(scene("heldout", k)) for k in range(6)]


def test_the_best_checkpoint_is_kept_by_links_and_survives_rotation(scored: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(scored["run"], run)
    values = {row["checkpoint"]: row["value"] for row in rows(run / "watch") if row["metric"] == "fd"}
    best = min(values, key=lambda name: values[name])
    assert (run / "watch/best").read_text() == f"{best}\n"
    original = scored["run"] / "checkpoints" / best
    assert (scored["run"] / "watch/best_checkpoint/ema.safetensors").samefile(original / "ema.safetensors")
    before = content(original)
    shutil.rmtree(run / "checkpoints")
    again = watch(run, "--once", *FEW)
    assert again.returncode == 0, again.stderr
    assert "checkpoints scored; the best by fd is" in again.stderr
    assert content(run / "watch/best_checkpoint") == before


def test_nothing_is_left_of_pins_and_features_of_images(scored: dict[str, Any]) -> None:
    folder = scored["run"] / "watch"
    assert list((folder / ".pinned").iterdir()) == []
    assert len(list((folder / "features").iterdir())) == 2, "the reference and the first images"
    assert not [path for path in folder.rglob(".*") if path.name.endswith((".tmp", ".removing", ".incoming"))]


def test_a_second_call_scores_nothing_again_and_may_change_images_and_best(
    scored: dict[str, Any], tmp_path: Path
) -> None:
    """A second call scores nothing again and may choose other images and another best metric."""
    run = tmp_path / "run"
    shutil.copytree(scored["run"], run)
    folder = run / "watch"
    evaluations = {path: path.stat().st_mtime_ns for path in folder.glob("*/evaluation.json")}
    (folder / "metrics.jsonl").unlink()
    (folder / "best").unlink()
    words = [run, "--once", *FEW, "--images", "best", "--best_by", "agreement", "--progress", "json"]
    done = watch(*words)
    assert done.returncode == 0, done.stderr
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*/evaluation.json")} == evaluations
    values = {row["step"]: row["value"] for row in rows(folder) if row["metric"] == "agreement"}
    best = min(values, key=lambda step: (-values[step], step))
    assert (folder / "best").read_text() == f"step_{best:07d}\n"
    assert [path.parent.name for path in folder.glob("*/pictures")] == [f"step_{best:07d}"]
    assert len(list(folder.glob("*/grid.png"))) == 2
    assert watch(*words[:-4], "--pictures", "none").returncode == 0
    assert not list(folder.glob("*/pictures"))


def test_settings_that_make_numbers_incomparable_are_refused_with_a_diff(
    scored: dict[str, Any], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red car\n" * 6)
    words = [word if word != "2" else "3" for word in FEW]
    done = watch(scored["run"], "--once", *words, "--prompts", prompts, "--seed_start", 7)
    assert done.returncode == 2
    for line in ("num_inference_steps: 2 -> 3", "seed_start: 42 -> 7", "  prompts: "):
        assert line in done.stderr
    assert "--accept_changes" in done.stderr


def test_a_best_by_that_no_evaluation_has_is_refused(scored: dict[str, Any]) -> None:
    words = [word for word in FEW if word not in ("fd", "agreement", "--metrics")]
    done = watch(scored["run"], "--once", *words, "--best_by", "kid", "--metrics", "fd", "agreement")
    assert done.returncode == 2
    assert "--best_by kid" in done.stderr


def drawing(run: Path) -> Callable[[], bool]:
    return (run / "watch/step_0000006/pictures/ledger.sqlite").exists


@pytest.fixture
def last_alone(trained: Path, tmp_path: Path) -> Path:
    """The run with its last checkpoint only."""
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    for step in (2, 4):
        shutil.rmtree(run / f"checkpoints/step_{step:07d}")
    return run


@pytest.mark.ranks
@pytest.mark.slow
def test_killed_or_stopped_while_drawing_it_leaves_no_process_behind(last_alone: Path, tmp_path: Path) -> None:
    words = commands.halation(["watch", str(last_alone), *FEW])
    with commands.started(words, tmp_path / "log") as command:
        commands.until(drawing(last_alone), command=command)
        assert len(command.alive()) > 1
        command.process.kill()
        command.process.wait()
        command.until_gone(10)
    shutil.rmtree(last_alone / "watch/step_0000006")
    with commands.started(words, tmp_path / "log") as command:
        commands.until(drawing(last_alone), command=command)
        command.process.send_signal(signal.SIGINT)
        assert command.process.wait(60) == 130
        assert command.alive() == {}
    assert "the same command" in command.said()


@pytest.mark.ranks
@pytest.mark.slow
def test_a_checkpoint_that_is_removed_while_it_is_scored_is_scored_to_the_end(last_alone: Path, tmp_path: Path) -> None:
    words = commands.halation(["watch", str(last_alone), *FEW])
    with commands.started(words, tmp_path / "log") as command:
        commands.until(drawing(last_alone), command=command)
        shutil.rmtree(last_alone / "checkpoints/step_0000006")
        command.process.kill()
        command.until_gone(10)
    done = watch(last_alone, "--once", *FEW)
    assert done.returncode == 0, done.stderr
    assert {row["step"] for row in rows(last_alone / "watch")} == {6}
    assert (last_alone / "watch/best_checkpoint/ema.safetensors").exists()


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_checkpoint_whose_turn_came_is_not_called_skipped_when_it_is_removed(
    last_alone: Path, tmp_path: Path, is_damaged: bool
) -> None:
    checkpoint = last_alone / "checkpoints/step_0000006"
    if is_damaged:
        data = (checkpoint / "ema.safetensors").read_bytes()
        (checkpoint / "ema.safetensors").write_bytes(data[:-1] + b"?")
    words = commands.halation(["watch", str(last_alone), *FEW])
    with commands.started(words, tmp_path / "log") as command:
        commands.until((last_alone / "watch/.pinned/step_0000006/COMMIT.json").exists, command=command)
        shutil.rmtree(checkpoint)
        last_words = "failed, skipping it" if is_damaged else "step 6: FD-streets"
        commands.until(lambda: last_words in command.said(), 120, command)
        command.process.terminate()
        assert command.process.wait(60) == 143
    assert "stopped with 0 checkpoints waiting" in command.said()
    assert "removed" not in command.said()


@pytest.mark.slow
def test_a_damaged_checkpoint_is_tried_twice_and_named_and_the_next_one_is_scored(
    trained: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    shutil.rmtree(run / "checkpoints/step_0000002")
    damaged = run / "checkpoints/step_0000004/ema.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    done = watch(run, "--once", *FEW)
    assert done.returncode == 1
    assert done.stderr.count("step 4: drawing failed") == 2
    assert "without a score: step_0000004" in done.stderr
    (facts,) = runs.read_json_with_digest(run / "watch/failed.json").values()
    assert (facts["step"], facts["tries"], facts["while"], facts["exit_code"]) == (4, 2, "drawing", 2)
    assert "SHA-256" in facts["reason"]
    assert {row["step"] for row in rows(run / "watch")} == {6}


@pytest.mark.ranks
@pytest.mark.slow
def test_a_checkpoint_with_failed_images_is_scored_if_allowed(
    last_alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its score is marked, and the exit code is 1; without the flag the checkpoint fails."""
    monkeypatch.setenv("HALATION_FAULT", "paint.000002:1+:raise")
    refused = watch(last_alone, "--once", *FEW)
    assert refused.returncode == 1, refused.stderr
    assert "step 6: drawing failed, retrying once:\n1 of 6 images failed; with --allow_missing" in refused.stderr
    assert not (last_alone / "watch/metrics.jsonl").exists()
    allowed = watch(last_alone, "--once", *FEW, "--allow_missing")
    assert allowed.returncode == 1, allowed.stderr
    assert ", without 1 missing image" in allowed.stderr
    assert {row["num_missing"] for row in rows(last_alone / "watch")} == {1}
    evaluation = json.loads((last_alone / "watch/step_0000006/evaluation.json").read_text())
    assert (evaluation["generated"]["num"], evaluation["generated"]["missing"]) == (5, ["000002_seed43.png"])


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--reference", "streets", *SMALL], "6 generated images and 32 reference images"),
        (["--reference", "streets", *SMALL, "--metrics", "fid", "--weights", "gone.pth", *INCEPTION], "gone.pth"),
        pytest.param(["--reference", "streets", "--prompts", "one.txt"], "1 generated image", marks=pytest.mark.slow),
        pytest.param(["--reference", "empty", "--prompts", "one.txt", *STREETS], "no images", marks=pytest.mark.slow),
    ],
)
def test_what_would_be_refused_of_every_checkpoint_is_refused_before_one_is_there(
    words: list[object], found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("models", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "one.txt").write_text("a red car\n")
    done = watch("models", *words)
    assert done.returncode == 2, done.stderr
    assert found in done.stderr
    assert "Traceback" not in done.stderr
    assert "waiting for checkpoints" not in done.stderr


@pytest.mark.slow
def test_a_refused_evaluation_ends_the_watch_and_images_are_not_drawn_again(last_alone: Path, tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    for index in range(6):
        pixels = Streets(32, 32).train(index).pixels
        (real / f"{index}.png").write_bytes(encode_png(pixels, {}))
    damaged = real / "3.png"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:100])
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red car\na rainy street\nthree trees\n")
    words = [last_alone, "--once", "--reference", real, "--prompts", prompts, "--num_inference_steps", "2"]
    words += ["--nproc", "1", "--extractor", "streets", "--metrics", "fd", "--allow_few"]
    first = watch(*words)
    assert first.returncode == 2
    assert "3.png" in first.stderr
    assert "Traceback" not in first.stderr
    before = drawn(last_alone / "watch")
    assert len(before) == 3
    damaged.write_bytes(whole)
    second = watch(*words)
    assert second.returncode == 0, second.stderr
    assert drawn(last_alone / "watch") == before


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_any_time_the_same_command_ends_with_the_same_numbers(trained: Path, tmp_path: Path) -> None:
    words = [*FEW, "--poll_s", "0.2", "--pictures", "none"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for run in (whole, killed):
        shutil.copytree(trained, run)
    assert watch(whole, "--once", *words).returncode == 0
    for wait_s in (1.0, 4.0, 7.0, 9.0, 11.0, 14.0):
        with commands.started(commands.halation(["watch", str(killed), *words]), tmp_path / "log") as command:
            time.sleep(wait_s)
            command.process.kill()
            command.until_gone(10)
    done = watch(killed, "--once", *words)
    assert done.returncode == 0, done.stderr
    assert (killed / "watch/metrics.jsonl").read_bytes() == (whole / "watch/metrics.jsonl").read_bytes()
    assert (killed / "watch/metrics.png").read_bytes() != b""
    assert (killed / "watch/best").read_text() == (whole / "watch/best").read_text()
    assert content(killed / "watch/best_checkpoint") == content(whole / "watch/best_checkpoint")
    leftovers = [path for path in (killed / "watch").rglob(".*") if path.is_dir() and path.name.endswith(".tmp")]
    assert leftovers == []


@pytest.mark.ranks
@pytest.mark.slow
def test_it_follows_a_training_that_rotates_its_checkpoints(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = commands.train(run, nproc=1, n_steps=200, ckpt_every=50, keep_last=1, validation_images=0)
    run.mkdir()
    watched = ["watch", str(run), "--reference", "streets", "--poll_s", "0.2", *FEW]
    with commands.started(commands.halation(watched), tmp_path / "watch.log") as command:
        assert commands.finish(commands.halation(words), tmp_path / "train.log") == 0
        commands.until(lambda: "step 200: FD-streets" in command.said(), 120, command)
        command.process.terminate()
        assert command.process.wait(60) == 143
    steps = {row["step"] for row in rows(run / "watch")}
    assert 200 in steps
    skipped = command.said().count("before it was scored; skipping it")
    assert len(steps) + skipped <= 4
    best = (run / "watch/best").read_text().strip()
    assert json.loads((run / "watch/best_checkpoint/COMMIT.json").read_text())["step"] == int(
        best.removeprefix("step_")
    )


@pytest.mark.slow
def test_pipelines_of_any_trainer_are_scored_as_their_numbers_say(tmp_path: Path) -> None:
    from support import tiny_models

    source = tiny_models.built("stable_diffusion")
    for name in ("checkpoint-1000", "checkpoint-90", "half-5"):
        shutil.copytree(source, tmp_path / "models" / name)
    weights = next((tmp_path / "models/half-5").rglob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    prompts = tmp_path / "prompts.csv"
    prompts.write_text("image_id,prompt\n" + "".join(f"p{k},a red car number {k}\n" for k in range(4)))
    words = ["--prompts", prompts, "--reference", "streets", "--num_reference", "32", "--num_inference_steps", "2"]
    words += ["--height", "64", "--width", "64", "--metrics", "fd", "--allow_few", "--nproc", "1", "--settle_s", "0.2"]
    done = watch(tmp_path / "models", "--once", *words)
    assert done.returncode == 1
    assert "half-5 is incomplete" in done.stderr
    out = tmp_path / "models/watch"
    found = rows(out)
    assert [(row["step"], row["checkpoint"]) for row in found] == [(90, "checkpoint-90"), (1000, "checkpoint-1000")]
    assert found[0]["value"] == found[1]["value"], "the same weights and seeds"
    assert (out / "best").read_text() == "checkpoint-90\n"
    assert sorted(path.name for path in (out / "step_0000090/pictures").glob("*.png"))[0] == "p0_seed42.png"
    assert (out / "best_checkpoint/model_index.json").exists()
    drawn = {"height": 64, "width": 64, "num_inference_steps": 2, "guidance_scale": 7.5}
    assert json.loads((out / "config.json").read_text())["fixed"]["image settings"] == drawn, "7.5 is of its call"


@pytest.mark.slow
def test_later_checkpoints_are_drawn_with_the_settings_of_the_first_scored_one(tmp_path: Path) -> None:
    """As in a folder that was begun when other defaults held: 3 steps are not those of the pipeline's call."""
    from support import tiny_models

    source, models = tiny_models.built("stable_diffusion"), tmp_path / "models"
    shutil.copytree(source, models / "checkpoint-1")
    (tmp_path / "prompts.csv").write_text("image_id,prompt\np0,a red car\np1,a blue car\n")
    words = [
        "--prompts",
        tmp_path / "prompts.csv",
        "--reference",
        "streets",
        "--num_reference",
        "32",
        "--metrics",
        "fd",
    ]
    words += ["--allow_few", "--nproc", "1", "--settle_s", "0.2", "--height", "64", "--width", "64", "--once"]
    assert watch(models, *words, "--num_inference_steps", "3").returncode == 0
    path = models / "watch/config.json"
    record = json.loads(path.read_text())
    record["fixed"] |= {"num_inference_steps": None}  # as if the default had been 3 then
    record["fixed"].pop("image settings")
    runs.write_json_with_digest(path, {name: value for name, value in record.items() if name != "digest"})
    shutil.copytree(source, models / "checkpoint-2")
    assert watch(models, *words).returncode == 0
    for step in (1, 2):
        fixed = json.loads((models / f"watch/step_{step:07d}/pictures/config.json").read_text())["fixed"]
        assert fixed["num_inference_steps"] == 3
    first, second = rows(models / "watch")
    assert first["value"] == second["value"]


def test_while_nothing_comes_it_waits_and_a_signal_ends_it(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    words = ["watch", str(tmp_path / "models"), "--reference", "streets", "--num_samples", "4", "--allow_few"]
    with commands.started(commands.halation(words), tmp_path / "log") as command:
        commands.until(lambda: "waiting for checkpoints" in command.said(), command=command)
        command.process.terminate()
        assert command.process.wait(20) == 143
    assert "stopped with 0 checkpoints waiting" in command.said()


def test_one_that_never_gets_whole_is_named_and_fails(tmp_path: Path) -> None:
    (tmp_path / "models/checkpoint-5").mkdir(parents=True)
    (tmp_path / "models/checkpoint-5/model_index.json").write_text('{"unet": ["diffusers", "U"]}')
    done = watch(tmp_path / "models", "--once", "--reference", "streets", "--settle_s", 0)
    assert done.returncode == 1
    assert "checkpoint-5 is incomplete and no longer changes: unet/ is missing" in done.stderr
    assert json.loads((tmp_path / "models/watch/failed.json").read_text())["checkpoint-5"]["step"] == 5


def test_one_without_all_its_files_is_given_up_after_two_tries(tmp_path: Path) -> None:
    place = tmp_path / "run/checkpoints/step_0000002"
    place.mkdir(parents=True)
    (place / "COMMIT.json").write_text('{"sha256": {"ema.safetensors": "0"}}')
    done = watch(tmp_path / "run", "--once", "--reference", "streets", "--num_samples", 2, "--allow_few")
    assert done.returncode == 1
    assert done.stderr.count("step 2: taking it failed") == 2
    assert json.loads((tmp_path / "run/watch/failed.json").read_text())["step_0000002"]["tries"] == 2


def test_one_that_is_removed_before_its_turn_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (2, 4, 7):
        place = tmp_path / f"checkpoints/step_{step:07d}"
        place.mkdir(parents=True)
        (place / "COMMIT.json").write_text('{"sha256": {}}')
    config = WatchConfig(run=tmp_path, every=2, min_step=3)
    progress, monitor = WatchProgress("plain"), FolderMonitor(tmp_path)
    watching = CheckpointWatcher(config, tmp_path / "watch", progress, StopSignals(), "prompts.txt", monitor)
    assert [each.step for each in watching.list_waiting()] == [4], "2 is too early, 7 is odd"
    shutil.rmtree(tmp_path / "checkpoints/step_0000004")
    assert watching.list_waiting() == watching.list_waiting() == []
    assert capsys.readouterr().err == "step_0000004 was removed before it was scored; skipping it\n"


def test_a_training_that_starts_again_leaves_what_the_watch_is_writing(tmp_path: Path) -> None:
    (tmp_path / "watch/step_0000002/pictures").mkdir(parents=True)
    ours = tmp_path / "watch/step_0000002/pictures/.1_seed42.png.host-1-0.tmp"
    theirs = tmp_path / ".metrics.jsonl.host-1-0.tmp"
    for path in (ours, theirs):
        path.touch()
    runs.remove_temporaries(tmp_path)
    assert ours.exists()
    assert not theirs.exists()


# -- flags


def test_the_folder_is_given_by_its_place_by_its_name_or_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "watch.yaml"
    file.write_text("run: runs/a\nevery: 500\n")
    by_place = cli.parse("watch", ["runs/a", "--every", "500"])
    assert by_place == cli.parse("watch", ["--every", "500", "--run", "runs/a"])
    assert by_place == cli.parse("watch", ["--run=runs/a", "--every=500"])
    assert by_place == cli.parse("watch", ["--config", str(file)])
    assert cli.parse("watch", ["--config", str(file), "runs/b"]).run == Path("runs/b")
    assert cli.parse("watch", ["--once", "runs/a"]).once


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"run": "nosuch"}, "nosuch does not exist"),
        ({"run": "file"}, "file is a file"),
        ({"output_dir": "."}, "is the folder that is watched"),
        ({"output_dir": "checkpoints"}, "is the folder that is watched"),
        ({"best_by": "recall", "metrics": ("fd", "kid")}, "--best_by recall with --metrics fd kid"),
        ({"reference": ()}, "no --reference"),
        ({"reference": ("nosuch",)}, "there is no folder or file nosuch"),
        ({"reference": ("",)}, '--reference ""'),
        ({"poll_s": 0.0}, "--poll_s 0"),
        ({"every": 0}, "--every 0"),
        ({"height": 0}, "--height 0"),
        ({"gpu_ids": (99,)}, "no such GPU: 99"),
    ],
)
def test_what_cannot_be_is_refused(
    settings: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    paths = {name: Path(settings[name]) for name in ("run", "output_dir") if name in settings}
    values = {"run": Path("."), "reference": ("streets",)} | settings | paths
    with pytest.raises(InputError, match=words):
        resolve_config(WatchConfig(**values))


def test_one_of_several_copies_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="one of several copies"):
        resolve_config(WatchConfig(run=tmp_path, reference=("streets",)))


def test_best_by_one_of_four_goes_with_prdc(tmp_path: Path) -> None:
    resolve_config(WatchConfig(run=tmp_path, reference=("streets",), best_by="recall", metrics=("fd", "prdc")))


def test_a_folder_without_checkpoints_is_refused_where_it_is_not_waited_for(tmp_path: Path) -> None:
    done = watch(tmp_path, "--once", "--reference", "streets", "--num_samples", 2)
    assert done.returncode == 2
    assert "no checkpoint to score" in done.stderr


def test_the_reference_of_a_run_is_what_it_was_trained_on(trained: Path) -> None:
    assert resolve_config(WatchConfig(run=trained)).reference == ("streets",)


def test_more_samples_than_prompts_are_refused(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a red car\ntwo trees\n")
    config = WatchConfig(run=tmp_path, reference=("streets",), prompts=str(tmp_path / "prompts.txt"), num_samples=3)
    with pytest.raises(InputError, match=r"--num_samples 3, but .*prompts\.txt has 2 prompts"):
        load_prompts(config)


def test_prompts_of_a_watch_may_be_texts(tmp_path: Path) -> None:
    config = WatchConfig(run=tmp_path, reference=("streets",), prompts=("a red car", "two trees"))
    assert [row.prompt for row in load_prompts(config).rows()] == ["a red car", "two trees"]


def test_captions_of_a_folder_are_the_prompts_and_a_folder_without_any_is_refused(tmp_path: Path) -> None:
    from PIL import Image

    folder = tmp_path / "real"
    folder.mkdir()
    Image.new("RGB", (32, 32)).save(folder / "a.png")
    config = WatchConfig(run=tmp_path, reference=(str(folder),))
    with pytest.raises(InputError, match="no --prompts, and no captions in the reference"):
        load_prompts(config)
    (folder / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "un été"}\n')
    assert [row.prompt for row in load_prompts(config).rows()] == ["un été"]
    statistics = tmp_path / "real.npz"
    statistics.touch()
    with pytest.raises(InputError, match="it is not a folder"):
        load_prompts(WatchConfig(run=tmp_path, reference=(str(statistics),)))
