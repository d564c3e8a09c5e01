"""A checkpoint is taken only when complete, and a hard link keeps it after its removal."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from halation.runs import run_folder as runs
from halation.watcher import checkpoint_scanner
from halation.watcher.checkpoint_scanner import CheckpointScanner, parse_step


def pipeline(folder: Path, age_s: float = 1000.0) -> Path:
    """A folder as `save_pretrained()` of a pipeline writes it, with weights in two shards and in one file."""
    index = {"_class_name": "P", "unet": ["diffusers", "U"], "vae": ["diffusers", "V"], "safety_checker": [None, None]}
    for name in ("unet", "vae"):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text("{}")
    save_file({"w": np.ones(64, np.float32)}, folder / "vae/model.safetensors")
    shards = [f"model-0000{k}-of-00002.safetensors" for k in (1, 2)]
    for k, shard in enumerate(shards):
        save_file({f"w{k}": np.ones(64, np.float32)}, folder / "unet" / shard)
    listing = {"weight_map": {f"w{k}": shard for k, shard in enumerate(shards)}}
    (folder / "unet/model.safetensors.index.json").write_text(json.dumps(listing))
    (folder / "model_index.json").write_text(json.dumps(index))
    aged(folder, age_s)
    return folder


def aged(folder: Path, age_s: float) -> None:
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - age_s,) * 2)


def halations(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "ema.safetensors").write_bytes(b"weights")
    (folder / "COMMIT.json").write_text(json.dumps({"sha256": {"ema.safetensors": "0"}}))
    return folder


def names(found: list[checkpoint_scanner.CheckpointFolder]) -> list[str]:
    return [each.name for each in found]


@pytest.mark.parametrize(
    ("name", "step"),
    [("checkpoint-500", 500), ("epoch_3", 3), ("step_0002000", 2000), ("sd15-lora-e12", 12), ("final", None), ("7", 7)],
)
def test_the_step_is_the_last_number_in_a_name(name: str, step: int | None) -> None:
    assert parse_step(name) == step


def test_checkpoints_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("checkpoint-1000", "checkpoint-200", "checkpoint-90", "final", ".hidden-5"):
        pipeline(tmp_path / name)
    (tmp_path / "logs-3").mkdir()
    watched = CheckpointScanner(folder=tmp_path, settle_s=60)
    assert names(watched.scan()) == ["checkpoint-90", "checkpoint-200", "checkpoint-1000"]
    assert watched.unnumbered == {"final"}


def test_the_export_of_a_run_of_halation_is_not_spoken_of(tmp_path: Path) -> None:
    pipeline(tmp_path / "export")
    watched = CheckpointScanner(folder=tmp_path, settle_s=60)
    watched.scan()
    assert watched.unnumbered == {"export"}, "somebody else's folder of that name"
    (tmp_path / "export/halation.json").write_text("{}")
    watched = CheckpointScanner(folder=tmp_path, settle_s=60)
    watched.scan()
    assert watched.unnumbered == set()


def test_a_run_is_known_by_its_checkpoints_folder_and_a_commit_file_is_enough(tmp_path: Path) -> None:
    halations(tmp_path / "checkpoints/step_0000010")
    (tmp_path / "checkpoints/step_0000020").mkdir()
    halations(tmp_path / "checkpoints/.saving_step_0000030")
    (found,) = CheckpointScanner(folder=tmp_path, settle_s=60).scan()
    assert (found.step, found.name, found.folder) == (10, "step_0000010", tmp_path / "checkpoints/step_0000010")
    assert names(CheckpointScanner(folder=tmp_path / "checkpoints", settle_s=60).scan()) == ["step_0000010"]


def test_a_checkpoint_that_a_run_put_aside_as_damaged_is_none(tmp_path: Path) -> None:
    halations(tmp_path / "checkpoints/damaged_step_0000010_a1b2")
    watched = CheckpointScanner(folder=tmp_path, settle_s=60)
    assert watched.scan() == []
    assert not watched.unrecognized


def test_a_folder_that_looks_like_a_checkpoint_and_is_none_is_known(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-500/unet").mkdir(parents=True)
    watched = CheckpointScanner(folder=tmp_path, settle_s=60)
    assert watched.scan() == []
    assert not watched.unrecognized, "its list may still come"
    os.utime(tmp_path / "checkpoint-500", (time.time() - 1000,) * 2)
    assert watched.scan() == []
    assert watched.unrecognized == {"checkpoint-500"}


def test_a_pipeline_that_still_changes_is_not_taken(tmp_path: Path) -> None:
    folder = pipeline(tmp_path / "checkpoint-1", age_s=0)
    watched = CheckpointScanner(folder=tmp_path, settle_s=60)
    assert watched.scan() == []
    assert list(watched.unsettled) == ["checkpoint-1"]
    watched.snapshots[folder].unchanged_since -= 100  # so long ago it was looked at
    save_file({"w": np.ones(99, np.float32)}, folder / "vae/model.safetensors")
    assert watched.scan() == [], "100 s after the first look, but at once after the last change"
    watched.snapshots[folder].unchanged_since -= 100
    assert names(watched.scan()) == ["checkpoint-1"]
    assert not watched.unsettled


def test_files_from_the_future_settle_by_our_own_clock(tmp_path: Path) -> None:
    pipeline(tmp_path / "checkpoint-1", age_s=-3600)
    watched = CheckpointScanner(folder=tmp_path, settle_s=0.2)
    assert watched.scan() == []
    time.sleep(0.3)
    assert names(watched.scan()) == ["checkpoint-1"]


def cut(folder: Path) -> None:
    path = folder / "unet/model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (cut, "bytes of weights, but its header requires"),
        (
            lambda folder: (folder / "unet/model-00001-of-00002.safetensors").unlink(),
            "model-00001-of-00002.safetensors is missing",
        ),
        (lambda folder: shutil.rmtree(folder / "vae"), "vae/ is missing"),
        (lambda folder: (folder / "model_index.json").write_text('{"unet'), "cannot be read"),
        (lambda folder: (folder / "model_index.json").write_text("[]"), "cannot be read"),
        (lambda folder: (folder / "unet/model.safetensors.index.json").write_text("{}"), "cannot be read"),
    ],
)  # fmt: skip
def test_a_pipeline_that_lacks_something_is_not_taken_and_says_what(tmp_path: Path, harm: object, words: str) -> None:
    folder = pipeline(tmp_path / "checkpoint-1")
    harm(folder)  # type: ignore[operator]
    aged(folder, 1000)
    watched = CheckpointScanner(folder=tmp_path, settle_s=60)
    assert watched.scan() == []
    assert words in watched.incomplete["checkpoint-1"]


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_second_name_costs_nothing_and_outlives_the_first(tmp_path: Path) -> None:
    folder = pipeline(tmp_path / "checkpoint-1")
    before = content(folder)
    assert checkpoint_scanner.hard_link(folder, tmp_path / "pins/checkpoint-1")
    weights = "vae/model.safetensors"
    assert (folder / weights).samefile(tmp_path / "pins/checkpoint-1" / weights)
    shutil.rmtree(folder)
    assert content(tmp_path / "pins/checkpoint-1") == before


def test_a_link_into_a_cache_is_followed(tmp_path: Path) -> None:
    folder = pipeline(tmp_path / "checkpoint-1")
    before = content(folder)
    (folder / "vae/model.safetensors").rename(tmp_path / "blob")
    (folder / "vae/model.safetensors").symlink_to(tmp_path / "blob")
    (folder / "unet").rename(tmp_path / "unet")
    (folder / "unet").symlink_to(tmp_path / "unet")
    checkpoint_scanner.copy_checkpoint(folder, tmp_path / "kept")
    shutil.rmtree(folder)
    shutil.rmtree(tmp_path / "unet")
    (tmp_path / "blob").unlink()
    assert content(tmp_path / "kept") == before


def test_on_another_file_system_it_is_copied(tmp_path: Path) -> None:
    elsewhere = Path("/dev/shm")
    if not elsewhere.is_dir() or elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip(
            "every folder here takes hard links: /dev/shm is missing, "
            "or lies on the file system of the temporary folder"
        )
    folder = pipeline(tmp_path / "checkpoint-1")
    target = elsewhere / f"halation_{os.getpid()}"
    try:
        assert not checkpoint_scanner.hard_link(folder, target)
        assert not list(elsewhere.glob(f"*halation_{os.getpid()}*")), "something is left of the attempt"
        checkpoint_scanner.copy_checkpoint(folder, target)
        assert content(target) == content(folder)
    finally:
        shutil.rmtree(target, ignore_errors=True)


@pytest.mark.parametrize("lost", ["vae/model.safetensors", "unet/model-00001-of-00002.safetensors", "model_index.json"])
def test_one_that_is_just_being_removed_gets_no_second_name(tmp_path: Path, lost: str) -> None:
    folder = pipeline(tmp_path / "checkpoint-1")
    shutil.rmtree(folder / Path(lost).parent) if lost.startswith("vae") else (folder / lost).unlink()
    with pytest.raises(FileNotFoundError):
        checkpoint_scanner.hard_link(folder, tmp_path / "pins/checkpoint-1")
    assert list((tmp_path / "pins").iterdir()) == []


def test_a_checkpoint_of_halation_that_is_gone_gets_no_second_name(tmp_path: Path) -> None:
    folder = halations(tmp_path / "checkpoints/step_0000010")
    (folder / "ema.safetensors").unlink()
    for gone in (folder, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError):
            checkpoint_scanner.hard_link(gone, tmp_path / "pins/step_0000010")


def test_a_folder_is_removed_as_a_whole(tmp_path: Path) -> None:
    folder = pipeline(tmp_path / "checkpoint-1")
    runs.remove_folder(folder)
    runs.remove_folder(folder)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_call_was_making_or_removing_is_swept(tmp_path: Path) -> None:
    for name in (".pinned/.a-1.tmp", "step_0000001/.pictures.removing", ".best_checkpoint.incoming", ".pinned/a-2"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "weights").touch()
    checkpoint_scanner.clean_up(tmp_path)
    assert [path.parent.relative_to(tmp_path) for path in tmp_path.rglob("weights")] == [Path(".pinned/a-2")]


def test_links_that_lead_back_keep_no_checkpoint_from_being_taken_and_kept(tmp_path: Path) -> None:
    folder = pipeline(tmp_path / "runs" / "checkpoint-1")
    for name in ("a", "b"):
        (folder / name).symlink_to(".")
    (found,) = CheckpointScanner(folder=tmp_path / "runs", settle_s=5.0).scan()
    assert checkpoint_scanner.hard_link(found.folder, tmp_path / "kept")
    assert not (tmp_path / "kept" / "a").exists()
