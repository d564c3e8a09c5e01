"""Laws of training on a CUDA device: samples and evaluations leave bits and memory alone."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from halation.distributed.world import init_process_groups
from halation.training import command as job
from halation.training.config import TrainConfig
from halation.training.session import TrainingSession
from support import rank_functions, run_readers, tiny_models
from support.rank_pool import RankPool, RanksFailed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ranks,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda:0"
NUM_STEPS = 3
REPEATING = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


class Weighed(TrainingSession):
    """Weighs the device's memory before and after each evaluation, and at its height between the two."""

    def __init__(self, world: Any, config: TrainConfig) -> None:
        super().__init__(world, config)
        self.weights: list[tuple[int, int, int]] = []

    def _evaluate(self, step: int, saved: bool) -> bool:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        due = super()._evaluate(step, saved)
        if due:
            self.weights.append((before, torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()))
        return due


def train(world: Any, config: TrainConfig, limit: int) -> list[tuple[int, int, int]]:
    """A whole training on the GPU, of whose memory only so many bytes may be used; 0 is all."""
    world.close()  # the pool's own, of CPUs
    warnings.simplefilter("ignore")  # libraries' own, which differ from machine to machine
    torch.use_deterministic_algorithms(False)
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1] if limit else 1.0)
    mine = init_process_groups(
        rank=0, size=1, local_rank=0, device=torch.device(DEVICE), store=dist.HashStore(), timeout_s=60.0
    )
    with mine.close_on_success(), job.open_run_on_rank_zero(config, mine), Weighed(mine, config) as session:
        session.prepare()
        session.run()
        return session.weights


def run(ranks: RankPool, config: TrainConfig, limit: int = 0) -> list[tuple[int, int, int]]:
    found: list[tuple[int, int, int]] = ranks.run(
        1, train, job.resolve_config(config), limit, timeout_s=120.0, environment=REPEATING
    )[0]
    return found


def small(folder: Path, **changes: Any) -> TrainConfig:
    """Bits that repeat, in bf16, and steps large enough that weights show."""
    settings = {"n_steps": NUM_STEPS, "lr": 2e-2, "ema_decay": 0.5, "dtype": "bf16", "deterministic": True}
    return rank_functions.small_config(folder, **settings | changes)


def quiet(folder: Path, **changes: Any) -> TrainConfig:
    return small(folder, **{"sample": False, "validation_images": 0} | changes)


def model(name: str) -> dict[str, Any]:
    """A DiT of pixels, or a tiny HunyuanDiT."""
    if name == "dit":
        return {}
    path = str(tiny_models.built("hunyuan"))
    return {
        "model_path": path,
        "model": TrainConfig().model,
        "patch_size": 0,
        "image_size": (64, 64),
        "max_images": 8,
    }


@pytest.mark.parametrize("name", ["dit", "hunyuan"])
def test_training_that_samples_at_every_step_has_the_bits_of_one_that_never_samples(
    ranks: RankPool, tmp_path: Path, name: str
) -> None:
    run(ranks, small(tmp_path / "drawing", ckpt_every=1, **model(name)))
    run(ranks, quiet(tmp_path / "never", ckpt_every=0, **model(name)))
    drawn = json.loads((tmp_path / f"drawing/samples/step_{NUM_STEPS:07d}/samples.json").read_text())["samples"]
    assert [row["state"] for row in drawn] == ["done", "done"]
    assert len(set(run_readers.losses(tmp_path / "never").values())) == NUM_STEPS
    assert run_readers.losses(tmp_path / "drawing") == run_readers.losses(tmp_path / "never")
    assert run_readers.checkpoint_bytes(tmp_path / "drawing", NUM_STEPS) == run_readers.checkpoint_bytes(
        tmp_path / "never", NUM_STEPS
    )


def test_an_evaluation_gives_its_memory_back_and_leaves_the_bits_alone(ranks: RankPool, tmp_path: Path) -> None:
    weights = tiny_models.inception_safetensors(tmp_path / "inception.safetensors")
    evaluated = quiet(
        tmp_path / "looking", n_steps=2, eval_every=1, eval_images=16, eval_reference=16, eval_batch_size=8,
        eval_extractor="inception", eval_weights=str(weights), eval_metrics=("kid",),
    )  # fmt: skip
    found = run(ranks, evaluated)
    assert len(found) == 2
    for number, (before, highest, after) in enumerate(found):
        assert highest > before + 80 * 2**20, "FID's Inception was on the device"
        # The first of all may leave a workspace to cuBLAS, half the network's size; after it nothing may stay.
        assert after - before <= (2**20 if number else 48 * 2**20), f"{(after - before) / 2**20:.1f} MiB stayed"
    run(ranks, quiet(tmp_path / "never", n_steps=2))
    assert run_readers.checkpoint_bytes(tmp_path / "looking", 2) == run_readers.checkpoint_bytes(tmp_path / "never", 2)


def height(folder: Path) -> float:
    return max(float(row["memory_gb"]) for row in run_readers.metric_rows(folder) if "memory_gb" in row)


@pytest.mark.parametrize("name", ["dit", "hunyuan"])
def test_activation_checkpointing_takes_less_memory_and_gives_the_same_losses(
    ranks: RankPool, tmp_path: Path, name: str
) -> None:
    changes = {"batch_size": 64, "image_size": (64, 64), "patch_size": 4, "n_steps": 2, "lr": 1e-3}
    if name == "hunyuan":
        folder = tiny_models.hunyuan(tmp_path / "model", hidden=128, num_layers=8)
        changes |= model(name) | {"model_path": str(folder), "image_size": (128, 128), "max_images": 64}
    run(ranks, quiet(tmp_path / "keeping", **changes))
    run(ranks, quiet(tmp_path / "recomputing", gradient_checkpointing=True, **changes))
    assert height(tmp_path / "recomputing") < 0.7 * height(tmp_path / "keeping")
    kept = run_readers.losses(tmp_path / "keeping")
    assert run_readers.losses(tmp_path / "recomputing") == pytest.approx(kept, rel=1e-3)


@pytest.mark.parametrize("name", ["dit", "hunyuan"])
def test_a_batch_that_cannot_fit_is_refused_with_one_to_try(ranks: RankPool, tmp_path: Path, name: str) -> None:
    with pytest.raises(RanksFailed) as hopeless:
        run(ranks, quiet(tmp_path / "hopeless", **model(name) | {"batch_size": 50_000_000}))
    trouble = hopeless.value.troubles[0]
    assert (trouble.kind, trouble.exit_code) == ("InputError", 2)
    assert "--batch_size 50000000 would take about" in trouble.message
    assert "try --batch_size" in trouble.message


def test_a_batch_that_runs_out_of_memory_is_refused_with_half_of_it(ranks: RankPool, tmp_path: Path) -> None:
    """The device has enough, so it is tried, but this process may take 2 GiB only."""
    batch = {"batch_size": 256, "image_size": (64, 64), "patch_size": 4, "dtype": "fp32"}
    with pytest.raises(RanksFailed) as tried:
        run(ranks, quiet(tmp_path, **batch), 2 * 2**30)
    trouble = tried.value.troubles[0]
    assert (trouble.kind, trouble.exit_code) == ("InputError", 2)
    assert f"a batch of 256 images does not fit into the memory of {DEVICE}" in trouble.message
    assert "try --batch_size 128 (with --accumulate 2 " in trouble.message
