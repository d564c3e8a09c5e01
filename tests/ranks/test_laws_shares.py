"""Contiguous shares on real ranks: finished ranks help; bytes and names stay the same."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halation.models.checkpoint_loading import find_checkpoint, load_denoiser, read_sampling_settings
from halation.sampling.all_rank_sampler import DenoiserSampler, SampleSettings
from halation.sampling.sample_folder import RankNaming, SampleFolder, publish_index
from halation.training import command as job
from halation.training.config import TrainConfig
from halation.training.session import TrainingSession
from support import rank_functions, run_readers
from support.rank_pool import RankPool

pytestmark = pytest.mark.ranks

PROMPTS = (*rank_functions.PROMPTS, "a bridge in fog")


def draw(world: Any, folder: Path, output: Path, prompts: tuple[str, ...], batch_size: int, stop: int) -> list[Any]:
    """Draw from a run's newest checkpoint in contiguous shares; (rank, state) of each image."""
    checkpoint = find_checkpoint(folder)
    settings = SampleSettings.from_json(
        read_sampling_settings(checkpoint) | {"prompts": prompts, "sheet_size": batch_size}
    )
    denoiser = load_denoiser(checkpoint, raw=False)
    asked = (lambda: stop) if world.is_rank_zero else (lambda: 0)
    drawing = DenoiserSampler(
        world, denoiser, settings, sharded=False, timeout_s=30.0, stop=asked, share_mode="contiguous"
    )
    place = SampleFolder(folder=output, naming=RankNaming(epoch=1, num_prompts=len(prompts), num_ranks=4))
    rows = drawing.run(place, "for a test")
    if world.is_rank_zero:
        publish_index(place, rows, {})
    return [(row["rank"], row["state"]) for row in rows]


def draw_sharded(world: Any, config: TrainConfig, output: Path) -> list[Any]:
    with job.open_run_on_rank_zero(config, world), TrainingSession(world, config) as session:
        session.prepare()
        assert session._resume()
        with session.ema.swap_during():
            settings = dataclasses.replace(session.sample_settings, prompts=PROMPTS[:4])
            drawing = DenoiserSampler(
                world, session.denoiser, settings, sharded=True, timeout_s=30.0, stop=lambda: 0, share_mode="contiguous"
            )
            rows = drawing.run(SampleFolder(folder=output), "in shards")
            session.engine.reshard()
    return [(row["rank"], row["state"]) for row in rows]


@pytest.fixture(scope="module")
def trained(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    ranks.run(
        1, rank_functions.train, rank_functions.small_config(folder, n_steps=1, sample=False, validation_images=0)
    )
    return folder


@pytest.fixture
def drawn(ranks: RankPool, trained: Path, tmp_path: Path) -> Callable[..., Any]:
    """`drawn(size, fault=..., num=..., batch_size=...)`: who drew what, and all files."""

    def run(size: int, fault: str = "", num: int = 6, batch_size: int = 1, stop: int = 0) -> tuple[Any, Any]:
        output = tmp_path / f"{size}_{num}_{batch_size}_{len(fault)}_{stop}"
        environment = {"HALATION_FAULT": fault} if fault else {}
        words = ranks.run(size, draw, trained, output, PROMPTS[:num], batch_size, stop, environment=environment)
        assert all(word == words[0] for word in words)
        return words[0], run_readers.sample_files(output)

    return run


def test_shares_are_contiguous_and_images_equal_those_of_one_rank(
    drawn: Callable[..., Any],
) -> None:
    """Shares are contiguous, and every image has the bytes and the name it has on one rank."""
    alone, published = drawn(1)
    assert alone == [(0, "done")] * 6
    assert len(published) == 6 + 6 + 1
    for size in (2, 3):
        rows, images = drawn(size)
        assert images == published
        firsts = [rows[rank * 6 // size] for rank in range(size)]
        assert firsts == [(rank, "done") for rank in range(size)], "nobody takes the first of a share"
    assert drawn(3, num=1)[0] == [(0, "done")]
    assert drawn(3, num=0) == ([], {})


def test_a_finished_rank_takes_over_from_the_slowest_with_the_same_images(
    drawn: Callable[..., Any],
) -> None:
    """A finished rank takes over all but the first image of the slowest; images stay the same."""
    _, published = drawn(1)
    rows, images = drawn(3, fault="sample.forward:1+:sleep=0.4:0")
    assert rows[0][0] == 0
    assert rows[1][0] != 0, "rank 0 was still at its first"
    assert {state for _, state in rows} == {"done"}
    assert images == published
    rows, _ = drawn(2, fault="sample.forward:1+:sleep=0.4:1")
    assert [rank for rank, _ in rows] == [0, 0, 0, 1, 0, 0]


@pytest.mark.slow
def test_batches_of_several_images_are_shared_and_taken_over_whole(drawn: Callable[..., Any]) -> None:
    _, published = drawn(1, num=5, batch_size=2)
    rows, images = drawn(2, num=5, batch_size=2, fault="sample.forward:1+:sleep=0.4:0")
    assert [rank for rank, _ in rows] == [0, 0, 1, 1, 1], "shares of 2 and 1 batches, of which the second went over"
    assert images == published


@pytest.mark.faults
def test_a_rank_whose_images_fail_takes_nobody_elses(drawn: Callable[..., Any]) -> None:
    """It would be the fastest of all. Others may even draw what it has not begun."""
    rows, _ = drawn(2, fault="sample.prepare:1+:raise:1;sample.forward:1+:sleep=0.1:0")
    assert rows[:3] == [(0, "done")] * 3
    assert rows[3] == (1, "failed")
    assert all(row in ((1, "failed"), (0, "done")) for row in rows[4:])


def test_a_wish_to_stop_on_one_rank_leaves_nothing_to_claim(drawn: Callable[..., Any]) -> None:
    rows, _ = drawn(2, stop=15, fault="sample.forward:1+:sleep=0.3:1")
    assert rows[0] == (-1, "open")
    assert rows[3] == (1, "done"), "what was begun is ended"
    assert rows[4:] == [(-1, "open")] * 2


@pytest.mark.slow
def test_sharded_ranks_draw_contiguous_shares_in_equal_rounds(ranks: RankPool, tmp_path: Path) -> None:
    """Sharded ranks draw contiguous shares in equally many rounds and take nothing over."""
    config = rank_functions.small_config(
        tmp_path, engine="fsdp", n_steps=1, sample_prompts=PROMPTS[:4], validation_images=0
    )
    ranks.run(3, rank_functions.train, config)
    words = ranks.run(3, draw_sharded, config, tmp_path / "sharded")
    assert words[0] == [(0, "done"), (0, "done"), (1, "done"), (1, "done")]
    published = run_readers.sample_files(tmp_path / "samples" / "step_0000001")
    published.pop("grid.png")
    assert run_readers.sample_files(tmp_path / "sharded") == published


# In a training


def by_rank(folder: Path, **changes: Any) -> TrainConfig:
    settings = {"sample_names": "rank", "validation_images": 0, "max_images": 8, "lr": 2e-2, "ema_decay": 0.5}
    settings |= {"sample_prompts": PROMPTS[:3], "n_steps": 5, "ckpt_latest_every": 2}
    return rank_functions.small_config(folder, **settings | changes)


def told(folder: Path, epoch: int) -> dict[str, Any]:
    said: dict[str, Any] = json.loads((folder / f"samples/epoch_{epoch:04d}_samples.json").read_text())
    return said


@pytest.mark.slow
def test_samples_of_all_epochs_are_in_one_folder_also_after_a_resume(ranks: RankPool, tmp_path: Path) -> None:
    """Eight images in batches of four: epochs end at steps 2 and 4; the fifth is in the third."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ranks.run(2, rank_functions.train, by_rank(whole))
    names = {"rank_0_sample_00", "rank_0_sample_01", "rank_1_sample_00"}
    wanted = {f"epoch_000{epoch}_{name}{kind}" for epoch in (1, 2, 3) for name in names for kind in (".png", ".txt")}
    published = run_readers.sample_files(whole / "samples")
    assert set(published) == wanted | {f"epoch_000{epoch}_grid.png" for epoch in (1, 2, 3)}
    assert [told(whole, epoch)["step"] for epoch in (1, 2, 3)] == [2, 4, 5]
    assert told(whole, 3)["ranks"] == 2
    assert ranks.run(2, rank_functions.train_until, by_rank(parts), 4, 1) == [143, 143]
    stale = (whole / "samples/epoch_0001_rank_0_sample_00.png").read_bytes()
    (parts / "samples/epoch_0002_rank_0_sample_00.png").write_bytes(stale)
    ranks.run(1, rank_functions.train, by_rank(parts))
    resumed = run_readers.sample_files(parts / "samples")
    first = {name: data for name, data in published.items() if "epoch_0001" in name}
    assert {name: data for name, data in resumed.items() if "epoch_0001" in name} == first
    assert [told(parts, epoch)["ranks"] for epoch in (1, 2, 3)] == [2, 1, 1]
    for name, same in [("0_sample_00", "0_sample_00"), ("0_sample_01", "0_sample_01"), ("0_sample_02", "1_sample_00")]:
        assert resumed[f"epoch_0002_rank_{name}.png"] == published[f"epoch_0002_rank_{same}.png"]
    assert len([name for name in resumed if "epoch_0002" in name]) == 7, "no file of another naming is left"


@pytest.mark.slow
def test_samples_of_an_epoch_replace_each_other_and_a_kill_leaves_no_mixture(ranks: RankPool, tmp_path: Path) -> None:
    """Steps of one epoch replace each other under its names, and a kill leaves no mixture."""
    config = by_rank(tmp_path / "run", n_steps=2, ckpt_every=1)
    ranks.run(2, rank_functions.train, dataclasses.replace(config, n_steps=1))
    first = run_readers.sample_files(tmp_path / "run/samples")
    assert told(tmp_path / "run", 1)["step"] == 1
    ranks.run(2, rank_functions.train, config)
    second = run_readers.sample_files(tmp_path / "run/samples")
    assert set(first) == set(second)
    assert told(tmp_path / "run", 1)["step"] == 2
    assert all(first[name] != second[name] for name in first if name.endswith("0.png")), "drawn again, not found there"
    ranks.run(3, rank_functions.train, config)
    assert run_readers.sample_files(tmp_path / "run/samples") == second, (
        "complete, under the names of the ranks that began"
    )
