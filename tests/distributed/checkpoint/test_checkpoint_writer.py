"""A checkpoint with a final name is complete, survives every kill, and damage is detected."""

from __future__ import annotations

import json
import logging
import random
import resource
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from halation.distributed.checkpoint.reader import CheckpointReader, TensorShard
from halation.distributed.checkpoint.writer import (
    CheckpointWriter,
    CommittedCheckpoint,
    find_damage,
    find_newest_valid,
    list_committed,
)
from halation.distributed.world import World
from halation.training.checkpoint_state import rename_damaged_checkpoint
from support import run_readers
from support.rank_pool import RankPool, RanksFailed

SAVES = [(1, "latest"), (2, "kept"), (3, "latest"), (4, "kept")]


SHAPES = {"weight": (5, 3), "bias": (7,), "one_row": (1, 4), "scale": ()}


def expected_tensors(step: int, part: str) -> dict[str, Tensor]:
    """The tensors of a part at a step, whole."""
    generator = torch.Generator().manual_seed(step * 2 + (part == "ema"))
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def rank_shards(step: int, part: str, rank: int, size: int) -> dict[str, TensorShard]:
    """This rank's rows by ceiling division, as FSDP2 cuts them: later ranks may hold none; scalars are everywhere."""
    found = {}
    for name, tensor in expected_tensors(step, part).items():
        if tensor.ndim == 0:
            found[name] = TensorShard(local=tensor, start=0, shape=())
            continue
        rows = -(-tensor.shape[0] // size)
        start = min(rank * rows, tensor.shape[0])
        found[name] = TensorShard(local=tensor[start : start + rows], start=start, shape=tuple(tensor.shape))
    return found


def checkpoint_parts(step: int, rank: int = 0, size: int = 1) -> dict[str, dict[str, TensorShard]]:
    return {part: rank_shards(step, part, rank, size) for part in ("model", "ema")}


def open_checkpoints(world: World, folder: Path, keep_last: int, sharded: bool) -> CheckpointWriter:
    return CheckpointWriter(world, folder, keep_last=keep_last, sharded=sharded)


def save_one(checkpoints: CheckpointWriter, step: int, kind: str) -> None:
    world = checkpoints.world
    whole = checkpoint_parts(step, world.rank, world.size) if checkpoints.sharded else checkpoint_parts(step)
    checkpoints.save(step, kind, whole, {"position": step}, {"rng": [step, world.rank]})


def save_all(
    world: World, folder: Path, saves: list[tuple[int, str]], keep_last: int = 0, sharded: bool = False
) -> list[Any]:
    """Take these saves one after another; the error each of them ended with."""
    checkpoints = open_checkpoints(world, folder, keep_last, sharded)
    errors = []
    for step, kind in saves:
        save_one(checkpoints, step, kind)
        checkpoints.wait()
        errors.append(checkpoints.error)
        checkpoints.error = None
    return errors


def resume_and_save(world: World, folder: Path, saves: list[tuple[int, str]], keep_last: int) -> int:
    """As a restarted run does: open, go on from the newest good one, and take the saves that are still to come."""
    checkpoints = open_checkpoints(world, folder, keep_last, sharded=False)
    found = find_newest_valid(folder)
    begun = found.step if found else 0
    for step, kind in saves:
        if step > begun:
            save_one(checkpoints, step, kind)
    checkpoints.wait()
    checkpoints.raise_if_failed()
    return begun


def assert_state(folder: Path, step: int) -> None:
    """By the checker and by the Reader alike."""
    assert run_readers.checkpoint_problem(folder) is None
    reader = CheckpointReader(folder)
    assert reader.state == {"position": step}
    for part in ("model", "ema"):
        wanted = expected_tensors(step, part)
        theirs = run_readers.checkpoint_tensors(folder, part)
        assert sorted(reader.names(part)) == sorted(wanted) == sorted(theirs)
        for name, tensor in reader.read_part(part):
            assert torch.equal(tensor, wanted[name])
            assert np.array_equal(theirs[name], wanted[name].numpy())


def fault(tmp_path: Path, request: str) -> dict[str, str]:
    return {"HALATION_FAULT": request, "HALATION_FAULT_LOG": str(tmp_path / "fired")}


def fired(tmp_path: Path) -> list[str]:
    path = tmp_path / "fired"
    return path.read_text().split() if path.exists() else []


def read_as(world: World, folder: Path, step: int) -> bool:
    """Whether this rank gets exactly its rows, whatever number of ranks wrote them."""
    reader = CheckpointReader(folder)
    for part in ("model", "ema"):
        for name, piece in rank_shards(step, part, world.rank, world.size).items():
            rows = piece.local.shape[0] if piece.local.ndim else None
            found = reader.read(part, name, piece.start, rows)
            if found.shape != piece.local.shape or not torch.equal(found, piece.local):
                return False
    return reader.read_rank_state(0) == {"rng": [step, 0]}


@pytest.mark.ranks
@pytest.mark.parametrize(("writers", "sharded"), [(1, False), (2, False), (1, True), (2, True), (3, True)])
def test_what_one_number_of_ranks_wrote_another_reads(
    ranks: RankPool, tmp_path: Path, writers: int, sharded: bool
) -> None:
    assert ranks.run(writers, save_all, tmp_path, [(7, "kept")], 0, sharded) == [[None]] * writers
    folder = tmp_path / "step_0000007"
    assert_state(folder, 7)
    assert len(list(folder.glob("model*"))) == (writers if sharded else 1)
    assert (tmp_path / "latest").read_text() == "step_0000007\n"
    for readers in (1, 2, 3):
        assert ranks.run(readers, read_as, folder, 7) == [True] * readers
    assert CheckpointReader(folder).read_rank_state(writers) is None
    assert run_readers.leftovers(tmp_path) == []


def test_tensors_without_rows_come_back_as_they_were(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(1, save_empty, tmp_path)
    reader = CheckpointReader(tmp_path / "step_0000001")
    assert reader.read("model", "none").shape == (0, 3)
    assert reader.read("model", "none", 0, 0).shape == (0, 3)
    assert reader.read("model", "some", 2, 0).shape == (0, 3)
    assert not reader.has_part("optimizer")


def save_empty(world: World, folder: Path) -> None:
    tensors = {"none": torch.zeros(0, 3), "some": torch.ones(2, 3)}
    parts = {name: TensorShard(local=tensor, start=0, shape=tuple(tensor.shape)) for name, tensor in tensors.items()}
    checkpoints = open_checkpoints(world, folder, 0, sharded=False)
    checkpoints.save(1, "kept", {"model": parts}, {}, {})
    checkpoints.wait()
    checkpoints.raise_if_failed()


def test_a_save_holds_the_values_of_its_moment(ranks: RankPool, tmp_path: Path) -> None:
    """The copy is made in the step; what training does to the weights while the disk is busy is not saved."""
    ranks.run(1, save_and_overwrite, tmp_path, environment=fault(tmp_path, "checkpoint.part:1:sleep=0.3"))
    assert fired(tmp_path) == ["checkpoint.part:1:sleep=0.3:0"]
    assert_state(tmp_path / "step_0000001", 1)


def save_and_overwrite(world: World, folder: Path) -> None:
    checkpoints = open_checkpoints(world, folder, 0, sharded=False)
    parts = checkpoint_parts(1)
    checkpoints.save(1, "kept", parts, {"position": 1}, {"rng": [1, 0]})
    for pieces in parts.values():
        for piece in pieces.values():
            piece.local.fill_(99.0)
    checkpoints.wait()


@pytest.mark.faults
def test_a_second_save_waits_for_the_first(ranks: RankPool, tmp_path: Path) -> None:
    [(first_s, second_s)] = ranks.run(
        1, save_twice, tmp_path, environment=fault(tmp_path, "checkpoint.fsync:1:sleep=0.8")
    )
    assert fired(tmp_path) == ["checkpoint.fsync:1:sleep=0.8:0"]
    assert first_s < 0.4, "a save must not hold up the step"
    assert 0.6 < second_s < 5.0, "a save must wait for the one before it"
    for step in (1, 2):
        assert_state(tmp_path / f"step_{step:07d}", step)


def save_twice(world: World, folder: Path) -> tuple[float, float]:
    checkpoints = open_checkpoints(world, folder, 0, sharded=False)
    times = []
    for step in (1, 2):
        began = time.monotonic()
        save_one(checkpoints, step, "kept")
        times.append(time.monotonic() - began)
    checkpoints.wait()
    return times[0], times[1]


def test_rotation_keeps_the_last_kept_ones_and_one_latest(ranks: RankPool, tmp_path: Path) -> None:
    saves = [(step, "kept" if step % 3 == 0 else "latest") for step in range(1, 12)]
    ranks.run(1, save_all, tmp_path, saves, 2)
    assert [(item.step, item.kind) for item in list_committed(tmp_path)] == [(6, "kept"), (9, "kept"), (11, "latest")]
    assert list(run_readers.valid_checkpoints(tmp_path)) == [6, 9, 11]
    ranks.run(1, save_all, tmp_path / "all", saves, 0)
    assert list(run_readers.valid_checkpoints(tmp_path / "all")) == [3, 6, 9, 11]


@pytest.mark.faults
@pytest.mark.parametrize("saves", [SAVES[:2], pytest.param(SAVES, marks=pytest.mark.slow)], ids=["two", "four"])
def test_a_kill_at_every_point_of_saving_leaves_a_checkpoint_that_loads(
    ranks: RankPool, tmp_path: Path, saves: list[tuple[int, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Kill at the Nth passage of any point, for every N until a run ends; each time the run resumes."""
    names: Counter[str] = Counter()
    folder = tmp_path / "run"
    last = saves[-1][0]
    while killed(ranks, folder, saves, fault(tmp_path, f"*:{names.total() + 1}:kill")):
        [row] = fired(tmp_path)
        (tmp_path / "fired").unlink()
        names[row.split(":")[0]] += 1
        assert_survived(folder, first=names["checkpoint.latest"] > 0)
        survivors = run_readers.valid_checkpoints(folder)
        [begun] = ranks.run(1, resume_and_save, folder, saves, 1)
        assert begun == max(survivors, default=0)
        assert_survived(folder, first=True)
        assert max(run_readers.valid_checkpoints(folder)) == last
        if begun < last:  # the last save has tidied up
            assert list(run_readers.checkpoints(folder)) == [last]
        assert [path for path in run_readers.leftovers(folder) if not path.endswith(".tmp")] == []
        shutil.rmtree(folder)
    with capsys.disabled():
        sys.stdout.write(f"\n{names.total()} fault points fired while saving: {dict(names)}\n")
    assert fired(tmp_path) == []
    wanted = {"copy", "part", "fsync", "commit", "rename", "latest", "rotate", "remove"}
    assert wanted == {name.removeprefix("checkpoint.") for name in names if name.startswith("checkpoint.")}
    for point in ("open", "write", "fsync", "rename", "renamed"):
        assert names[f"publish.{point}"] == 5 * len(saves)


def killed(ranks: RankPool, folder: Path, saves: list[tuple[int, str]], environment: dict[str, str]) -> bool:
    """Whether the fault fired before the last save was done."""
    try:
        return ranks.run(1, save_all, folder, saves, 1, environment=environment) != [[None] * len(saves)]
    except RanksFailed as failure:
        return failure.troubles[0].exit_code == -9


def assert_survived(folder: Path, first: bool) -> None:
    """Every folder with a checkpoint's name is whole and equals its step; once there was one, there is one."""
    steps = run_readers.checkpoints(folder)
    assert steps or not first
    for step, path in steps.items():
        assert_state(path, step)
    found = find_newest_valid(folder)
    assert (found.step if found else None) == max(steps, default=None)


@pytest.mark.ranks
@pytest.mark.faults
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_sharded_save_of_which_one_rank_dies_was_never_one(ranks: RankPool, tmp_path: Path, rank: int) -> None:
    ranks.run(2, save_all, tmp_path, [(1, "kept")], 0, True)
    for number, point in enumerate(("checkpoint.part:1", "checkpoint.fsync:2", "publish.rename:1"), 1):
        with pytest.raises(RanksFailed) as failure:
            ranks.run(
                2, save_all, tmp_path, [(2, "kept")], 0, True,
                timeout_s=2.5, environment=fault(tmp_path, f"{point}:kill:{rank}"),
            )  # fmt: skip
        assert failure.value.troubles[rank].exit_code == -9
        assert len(fired(tmp_path)) == number
        assert list(run_readers.checkpoints(tmp_path)) == [1]
    assert ranks.run(2, save_all, tmp_path, [(2, "kept")], 0, True) == [[None], [None]]
    assert list(run_readers.valid_checkpoints(tmp_path)) == [1, 2]
    assert run_readers.leftovers(tmp_path) == []


@pytest.mark.ranks
@pytest.mark.faults
def test_a_rank_that_leaves_no_word_is_named(ranks: RankPool, tmp_path: Path) -> None:
    first, _second = ranks.run(
        2, save_impatiently, tmp_path, environment=fault(tmp_path, "checkpoint.part:1:sleep=1.5:1")
    )
    assert fired(tmp_path) == ["checkpoint.part:1:sleep=1.5:1"]
    assert first[0].endswith("no file list from rank 1 within 1 s")  # and no advice about disks
    assert run_readers.checkpoints(tmp_path) == {}


def save_impatiently(world: World, folder: Path) -> list[str | None]:
    world.timeout_s = 1.0
    return save_all(world, folder, [(1, "kept")], 0, True)


OK_ONCE = [
    *(f"checkpoint.{point}:1:EIO" for point in ("part", "fsync", "commit", "rename", "latest")),
    *(f"publish.{point}:{passage}:ENOSPC" for point in ("open", "fsync") for passage in (1, 3, 4, 5)),
    "publish.write:2:ENOSPC",
    "publish.rename:4:EROFS",
]


@pytest.mark.slow
@pytest.mark.faults
def test_a_disk_that_refuses_once_is_asked_again(ranks: RankPool, tmp_path: Path) -> None:
    for number, request in enumerate(OK_ONCE):
        folder = tmp_path / str(number)
        environment = fault(tmp_path, request)
        assert ranks.run(1, save_all, folder, [(1, "kept")], environment=environment) == [[None]], request
        assert len(fired(tmp_path)) == number + 1, request
        assert list(run_readers.valid_checkpoints(folder)) == [1], request
        assert (folder / "latest").read_text() == "step_0000001\n"
        assert run_readers.leftovers(folder) == [], request


@pytest.mark.faults
@pytest.mark.parametrize("error", ["ENOSPC", *(pytest.param(e, marks=pytest.mark.slow) for e in ("EIO", "EROFS"))])
def test_a_disk_that_refuses_for_good_is_reported_and_harms_nothing(
    ranks: RankPool, tmp_path: Path, error: str
) -> None:
    ranks.run(1, save_all, tmp_path, [(1, "kept")], 1)
    points = ("checkpoint.part", "checkpoint.fsync", "checkpoint.commit", "checkpoint.rename", "publish.write")
    for point in points:
        began = time.monotonic()
        environment = fault(tmp_path, f"{point}:1+:{error}")
        [[message]] = ranks.run(1, save_all, tmp_path, [(2, "kept")], 1, environment=environment)
        assert time.monotonic() - began < 20
        assert len(fired(tmp_path)) >= 2, "tried again before giving up"
        assert str(tmp_path) in message
        assert "run the same command again" in message
        (tmp_path / "fired").unlink()
        assert list(run_readers.checkpoints(tmp_path)) == [1]
        assert_state(tmp_path / "step_0000001", 1)
        assert run_readers.leftovers(tmp_path) == []


def test_a_disk_that_is_really_full_is_reported(ranks: RankPool, tmp_path: Path) -> None:
    """A limit on file size refuses writes inside safetensors, where no fault point reaches."""
    ranks.run(1, save_all, tmp_path, [(1, "kept")])
    [message, sigxfsz] = ranks.run(1, save_with_little_space, tmp_path)[0]
    assert sigxfsz == "limited"
    assert f"cannot save checkpoint step_0000002 in {tmp_path}" in message
    assert list(run_readers.valid_checkpoints(tmp_path)) == list(run_readers.checkpoints(tmp_path)) == [1]
    assert run_readers.leftovers(tmp_path) == []


def save_with_little_space(world: World, folder: Path) -> tuple[str | None, str]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, before[1]))
    try:
        [error] = save_all(world, folder, [(2, "kept")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return error, "limited"


@pytest.mark.faults
def test_an_error_nobody_thought_of_is_not_lost_with_its_thread(ranks: RankPool, tmp_path: Path) -> None:
    [[message]] = ranks.run(
        1, save_all, tmp_path, [(1, "kept")], environment=fault(tmp_path, "checkpoint.part:1:raise")
    )
    assert fired(tmp_path) == ["checkpoint.part:1:raise:0"]
    assert "InjectedFault: fault injected at checkpoint.part" in message
    assert run_readers.checkpoints(tmp_path) == {}


@pytest.fixture(scope="module")
def two_saves(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2, sharded over two ranks."""
    folder = tmp_path_factory.mktemp("two_saves")
    ranks.run(2, save_all, folder, [(1, "kept"), (2, "kept")], 0, True)
    return folder


def assert_found_out(folder: Path, caplog: pytest.LogCaptureFixture, what: str) -> None:
    """The damaged newest one is named aloud and set aside with its bytes; the one before it is taken."""
    assert run_readers.checkpoint_problem(folder / "step_0000002") is not None, what
    caplog.clear()
    with caplog.at_level(logging.ERROR):
        found = find_newest_valid(folder, on_damage=rename_damaged_checkpoint)
    assert found == CommittedCheckpoint(folder=folder / "step_0000001", step=1, kind="kept"), what
    assert "step_0000002 is damaged" in caplog.text, what
    assert not (folder / "step_0000002").exists(), what
    assert len(list(folder.glob("damaged_step_0000002_*"))) == 1, what
    caplog.clear()
    assert find_newest_valid(folder) == found, what
    assert caplog.text == "", what


def copy_of(two_saves: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(two_saves, folder)
    return folder


def test_every_flipped_bit_is_found(two_saves: Path, tmp_path: Path) -> None:
    folder = copy_of(two_saves, tmp_path) / "step_0000002"
    assert find_damage(folder) is None
    generator = random.Random(20260731)
    files = sorted(path for path in folder.iterdir())
    assert len(files) == 8
    flips = 0
    for path in files:
        data = path.read_bytes()
        for _ in range(50):
            offset, bit = generator.randrange(len(data)), generator.randrange(8)
            path.write_bytes(data[:offset] + bytes([data[offset] ^ 1 << bit]) + data[offset + 1 :])
            assert find_damage(folder) is not None, f"{path.name}: bit {bit} of byte {offset}"
            flips += 1
        path.write_bytes(data)
    assert find_damage(folder) is None
    assert flips == 400


def test_a_bit_flipped_in_any_file_sends_the_run_back_to_the_checkpoint_before(
    two_saves: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in sorted(path.name for path in (two_saves / "step_0000002").iterdir()):
        folder = copy_of(two_saves, tmp_path)
        path = folder / "step_0000002" / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
        assert_found_out(folder, caplog, name)


def test_missing_and_cut_files_send_the_run_back(
    two_saves: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in sorted(path.name for path in (two_saves / "step_0000002").iterdir()):
        size = (two_saves / "step_0000002" / name).stat().st_size
        for left in (None, 0, 1, size // 2, size - 12, size - 1):
            folder = copy_of(two_saves, tmp_path)
            path = folder / "step_0000002" / name
            if left is None:
                path.unlink()
            else:
                path.write_bytes(path.read_bytes()[:left])
            if name == "COMMIT.json" and left == size - 1:
                assert find_damage(path.parent) is None, "only the last line's end is gone"
                continue
            assert_found_out(folder, caplog, f"{name} cut to {left}")


@pytest.mark.parametrize(
    "commit",
    ["", "{", "null", "[]", "{}", '{"step": 2}', '{"step": 2, "kind": "kept", "sha256": {}}', "\udcff", "[" * 5000],
)
def test_a_commit_file_that_says_nothing_sends_the_run_back(
    two_saves: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, commit: str
) -> None:
    folder = copy_of(two_saves, tmp_path)
    (folder / "step_0000002" / "COMMIT.json").write_bytes(commit.encode(errors="surrogateescape"))
    assert_found_out(folder, caplog, commit)


def test_a_part_of_another_step_under_the_right_name_is_found(
    two_saves: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copy_of(two_saves, tmp_path)
    name = "ema-00002-of-00002.safetensors"
    shutil.copy(folder / "step_0000001" / name, folder / "step_0000002" / name)
    assert_found_out(folder, caplog, name)


def test_damage_everywhere_leaves_nothing_to_go_on_from(
    two_saves: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copy_of(two_saves, tmp_path)
    for path in folder.glob("step_*/state.json"):
        path.write_text(json.dumps({"position": 3}))
    assert find_newest_valid(folder, on_damage=rename_damaged_checkpoint) is None
    assert sum("is damaged" in record.getMessage() for record in caplog.records) == 2
    assert find_newest_valid(tmp_path / "nowhere") is None


def test_names_that_only_look_like_a_checkpoint_are_left_alone(two_saves: Path, tmp_path: Path) -> None:
    folder = copy_of(two_saves, tmp_path)
    (folder / "step_best").mkdir()
    (folder / "step_0000003x").mkdir()
    found = find_newest_valid(folder, on_damage=rename_damaged_checkpoint)
    assert found is not None
    assert found.step == 2
    assert (folder / "step_best").is_dir()


def test_a_damaged_checkpoint_of_the_same_step_makes_way_for_a_new_save(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(1, save_all, tmp_path, [(1, "kept"), (2, "kept")])
    (tmp_path / "step_0000002" / "COMMIT.json").write_text("{")
    ranks.run(1, save_all, tmp_path, [(2, "kept")])
    assert_state(tmp_path / "step_0000002", 2)
    assert run_readers.leftovers(tmp_path) == []


def test_rotation_does_not_count_damaged_ones_among_those_it_keeps(ranks: RankPool, tmp_path: Path) -> None:
    """A commit file that cannot be trusted is no checkpoint: the good ones around it stay."""
    ranks.run(1, save_all, tmp_path, [(1, "kept"), (2, "kept")], 2)
    (tmp_path / "step_0000002" / "COMMIT.json").write_text("{")
    ranks.run(1, save_all, tmp_path, [(3, "kept")], 2)
    assert list(run_readers.valid_checkpoints(tmp_path)) == [1, 3]
