"""Memory of training: estimated as allocated; out of memory while sampling halves the batch and is marked."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from halation.distributed.engines.ddp_fsdp import local_tensor
from halation.training import command as job
from halation.training import memory_fit_check
from halation.training.config import TrainConfig
from halation.training.session import TrainingSession
from support import tiny_models
from support.rank_functions import PROMPTS, small_config
from support.rank_pool import RankPool

pytestmark = [pytest.mark.ranks, pytest.mark.faults]


def train_cramped(world: Any, config: TrainConfig, most_rows: int) -> list[int]:
    """Forwards without gradient of over `most_rows` rows find no memory; return the sizes tried."""
    tried: list[int] = []

    def refuse(_module: Any, arguments: tuple[Any, ...]) -> None:
        if not torch.is_grad_enabled() and len(arguments[0]) != 32:  # 32 rows are the validation loss
            tried.append(len(arguments[0]))
            if len(arguments[0]) > most_rows:
                raise torch.OutOfMemoryError("no room for so many rows")

    with job.open_run_on_rank_zero(config, world), TrainingSession(world, config) as session:
        session.prepare()
        session.denoiser.module.register_forward_pre_hook(refuse)
        session.run()
    return tried


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((folder / "samples/step_0000002/samples.json").read_text())["samples"]
    return rows


def weights_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "checkpoints/step_0000002").glob("*.safetensors")}


def test_a_batch_too_large_is_drawn_in_halves_and_marked(ranks: RankPool, tmp_path: Path) -> None:
    config = small_config(tmp_path / "cramped", sample_prompts=PROMPTS[:4], sample_batch_size=4)
    tried = ranks.run(1, train_cramped, config, 4)[0]
    assert tried[0] == 8  # four images and their null branches, refused
    assert set(tried[1:]) == {4}
    assert [row["state"] for row in rows_of(config.output_dir)] == ["done"] * 4
    assert [row["micro_batch"] for row in rows_of(config.output_dir)] == [2] * 4

    roomy = small_config(tmp_path / "roomy", sample_prompts=PROMPTS[:4], sample_batch_size=4)
    assert set(ranks.run(1, train_cramped, roomy, 8)[0]) == {8}
    assert all("micro_batch" not in row for row in rows_of(roomy.output_dir))
    assert weights_of(config.output_dir) == weights_of(roomy.output_dir)


def test_a_single_image_that_does_not_fit_is_a_failed_row_and_training_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    config = small_config(tmp_path / "hopeless", sample_prompts=PROMPTS[:2], sample_batch_size=2)
    assert 1 not in ranks.run(1, train_cramped, config, 1)[0]
    assert [row["state"] for row in rows_of(config.output_dir)] == ["failed"] * 2
    assert "no room for so many rows" in rows_of(config.output_dir)[0]["reason"]
    assert (config.output_dir / "export/model.safetensors").exists()


# The estimate against what an engine allocates


class AllocatedBytes(TrainingSession):
    """Sums the bytes of the tensors of each part in a step, between its backward pass and its update."""

    found: dict[str, int]

    def _build_networks(self) -> None:
        config, world = self.config, self.world
        self.estimate = memory_fit_check.estimate_memory(config, self.denoiser, world.size)
        super()._build_networks()
        clip = self.engine.clip_grad_norm

        def look(*arguments: Any) -> torch.Tensor:
            if self.train_state.step == 1:  # the optimizer has its state since the first step
                self.found = self._look()
            return clip(*arguments)

        self.engine.clip_grad_norm = look  # type: ignore[method-assign]

    def _look(self) -> dict[str, int]:
        parameters = list(self.denoiser.module.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        frozen = [parameter for parameter in parameters if not parameter.requires_grad]
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
        masters: list[torch.Tensor] = []
        engine: Any = self.engine
        if engine.name == "deepspeed":
            masters = list(engine._partitions)
            if engine.sharded:
                trained, frozen = [p.ds_tensor for p in trained], [p.ds_tensor for p in frozen]
                gradients.append(engine.zero_optimizer.grad_partitions_flat_buffer)
            else:
                gradients += [each for group in engine.zero_optimizer.averaged_gradients.values() for each in group]
        moments = [value for state in engine.optimizer.state.values() for value in state.values()]
        averages = self.ema.tensors().values() if self.ema is not None else ()
        return {
            "frozen_weights": storage_bytes([*frozen, *self.denoiser.module.buffers()]),
            "trained_weights": storage_bytes([*trained, *masters]),
            "gradients": storage_bytes(gradients),
            "optimizer": storage_bytes(moments),
            "ema": storage_bytes(averages),
        }


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages of this rank's tensors, each counted once."""
    storages = {local_tensor(tensor).untyped_storage() for tensor in tensors}
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def allocated(world: Any, config: TrainConfig) -> dict[str, tuple[int, float]]:
    """The allocated and the estimated bytes of each part, on this rank."""
    session = AllocatedBytes(world, config)
    with job.open_run_on_rank_zero(config, world), session:
        session.prepare()
        session.run()
        return {name: (size, getattr(session.estimate, name)) for name, size in session.found.items()}


LORA: dict[str, Any] = {"lora_rank": 3, "dtype": "bf16"}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("engine", "size", "changes"),
    [
        ("single", 1, {}),
        ("single", 1, {"ema_decay": 0.0}),
        ("ddp", 2, {}),
        ("fsdp", 2, {}),
        ("fsdp", 2, LORA),
        pytest.param("single", 1, LORA, marks=SLOW),
        pytest.param("ddp", 2, LORA, marks=SLOW),
        pytest.param("fsdp", 3, {}, marks=SLOW),
        pytest.param("fsdp", 3, {"ema_decay": 0.0}, marks=SLOW),
        pytest.param("single", 1, {"weights_dtype": "bf16"}, marks=SLOW),
        pytest.param("fsdp", 2, {"weights_dtype": "bf16"}, marks=SLOW),
        pytest.param("zero1", 2, {}, marks=SLOW),
        pytest.param("zero2", 2, {}, marks=SLOW),
        pytest.param("zero3", 2, {}, marks=SLOW),
        pytest.param("zero2", 2, LORA, marks=SLOW),
        pytest.param("zero3", 2, LORA, marks=SLOW),
        pytest.param("zero2", 2, {"weights_dtype": "bf16"}, marks=SLOW),
        pytest.param("zero3", 2, {"weights_dtype": "bf16"}, marks=SLOW),
        pytest.param("zero3", 3, {"ema_decay": 0.0}, marks=SLOW),
    ],
)
def test_the_estimated_bytes_are_those_that_an_engine_allocates(
    ranks: RankPool, tmp_path: Path, engine: str, size: int, changes: dict[str, Any]
) -> None:
    """Weights, gradients, optimizer and EMA of rank 0, in the second step of a real training."""
    settings: dict[str, Any] = {"engine": engine, "sample": False, "validation_images": 0, "n_steps": 2, "lr": 1e-4}
    if engine.startswith("zero"):
        settings |= {"engine": "deepspeed", "zero_stage": int(engine[-1])}
    if changes.keys() & {"lora_rank", "weights_dtype"}:
        settings |= {"model_path": str(tiny_models.built("hunyuan")), "model": TrainConfig.model, "patch_size": 0}
        settings |= {"max_images": 6, "dist_timeout_s": 100.0}
    config = small_config(tmp_path, **settings | changes)
    found = ranks.run(size, allocated, config, timeout_s=400.0, world_timeout_s=200.0)[0]
    if engine in ("zero1", "zero2"):  # a rank keeps the whole gradient of a tensor that two ranks share
        held, estimated = found.pop("gradients")
        assert estimated <= held <= 1.9 * estimated
    assert {name: sizes[0] for name, sizes in found.items()} == {name: sizes[1] for name, sizes in found.items()}
