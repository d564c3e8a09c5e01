"""Families under engines: sharded is whole bit for bit, compiled blocks are close."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from halation.models.denoiser import SolverSettings
from halation.models.pipelines.training.denoiser import PipelineDenoiser
from halation.models.pipelines.training.lora import LoraSettings
from halation.sample_specs import SampleBatch, SampleSpec
from support import tiny_models
from support.rank_pool import RankPool
from support.tiny_models import needs_inductor

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def _rows(denoiser: PipelineDenoiser, rank: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(2, *denoiser.sample_shape(32, 32), generator=generator)
    condition = {
        name: torch.randn(2, *row.shape[1:], generator=generator) if row.is_floating_point() else ~row.repeat(2, 1)
        for name, row in denoiser.family.zero_condition().items()
    }
    placed = denoiser.add_size_condition(condition, torch.tensor([[64, 64], [32, 48]]), 32, 32)
    return x, torch.tensor([0.3, 0.8]), placed


def _batch(rank: int) -> SampleBatch:
    spec = SampleSpec(
        index=rank, id=str(rank), prompt="a red car", seed=rank, height=32, width=32, steps=2, guidance_scale=3.0
    )
    return SampleBatch(specs=(spec,), num_real=1)


def sharded_equals_whole(world: Any, folder: Path, dtype: str, rank_of_lora: int) -> list[bool]:
    """Whether forwards and samples of a sharded model have the bits of the whole one, and its gradients are there."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    warnings.simplefilter("ignore")
    lora = LoraSettings(rank=rank_of_lora) if rank_of_lora else None
    denoiser = PipelineDenoiser.open(folder, dtype=dtype, weights_dtype="fp32", lora=lora, height=32, width=32)
    solver = SolverSettings(dtype=torch.float32 if dtype == "fp32" else torch.bfloat16)
    x, t, condition = _rows(denoiser, world.rank)
    inputs = denoiser.prepare(_batch(world.rank), "cpu")

    def forward() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bf16"):
            return denoiser.forward(denoiser.module, x, t, condition)

    whole, drawn = forward().detach(), denoiser.sample(inputs, solver, lambda: None)
    mesh = init_device_mesh("cpu", (world.size,))
    denoiser.enable_gradient_checkpointing()
    for unit in denoiser.shard_units():
        fully_shard(unit, mesh=mesh)
    fully_shard(denoiser.module, mesh=mesh)
    answer = forward()
    answer.float().square().mean().backward()
    trained = [weight for weight in denoiser.module.parameters() if weight.requires_grad]
    return [
        torch.equal(answer, whole),
        all(weight.grad is not None for weight in trained),
        torch.equal(denoiser.sample(inputs, solver, lambda: None), drawn),
    ]


def sharded_experts_equal_whole(world: Any, folder: Path, dtype: str) -> list[bool]:
    """Whether two frozen experts in shards answer as the whole ones do, while each rank asks for other times."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    warnings.simplefilter("ignore")
    settings = {"dtype": dtype, "weights_dtype": dtype, "lora": None, "height": 32, "width": 32}
    denoiser = PipelineDenoiser.open(folder, **settings, allow_experts=True)  # type: ignore[arg-type]
    denoiser.module.requires_grad_(False)
    x, _, condition = _rows(denoiser, world.rank)
    inputs = denoiser.prepare(_batch(world.rank), "cpu")
    times = [
        torch.tensor([0.9, 0.2]),
        *(torch.full((2,), (0.95, 0.3, 0.8)[(world.rank + turn) % 3]) for turn in (0, 1)),
    ]

    @torch.no_grad()
    def forward(t: Tensor) -> Tensor:
        return denoiser.forward(denoiser.module, x, t, condition)

    whole, drawn = [forward(t) for t in times], denoiser.sample(inputs, SolverSettings(), lambda: None)
    mesh = init_device_mesh("cpu", (world.size,))
    for unit in denoiser.shard_units():
        fully_shard(unit, mesh=mesh)
    fully_shard(denoiser.module, mesh=mesh)
    denoiser.module.always_run_both = True  # type: ignore[assignment]
    answers = [torch.equal(forward(t), answer) for t, answer in zip(times, whole, strict=True)]
    return [*answers, torch.equal(denoiser.sample(inputs, SolverSettings(), lambda: None), drawn)]


def compiled_close_to_eager(world: Any, folder: Path) -> float:
    """The largest difference that compiled blocks make, with recomputed activations and DDP around the transformer."""
    from torch.nn.parallel import DistributedDataParallel

    denoiser = PipelineDenoiser.open(folder, dtype="fp32", weights_dtype="fp32", lora=None, height=32, width=32)
    x, t, condition = _rows(denoiser, world.rank)
    eager = denoiser.forward(denoiser.module, x, t, condition).detach()
    denoiser.enable_gradient_checkpointing()
    for unit in denoiser.shard_units():
        unit.compile(dynamic=False)
    wrapped = DistributedDataParallel(denoiser.module)
    answer = denoiser.forward(wrapped, x, t, condition)
    answer.square().mean().backward()
    assert all(weight.grad is not None for weight in denoiser.module.parameters())
    return float((answer.detach() - eager).abs().max())


def partitioned_equals_whole(world: Any, folder: Path, rank_of_lora: int) -> list[bool]:
    """Whether forwards and samples under ZeRO-3 have the bits of the whole model, and a step changes them."""
    from halation.distributed.engines.ddp_fsdp import EngineSettings
    from halation.training.build_components import build_engine

    warnings.simplefilter("ignore")
    lora = LoraSettings(rank=rank_of_lora) if rank_of_lora else None
    denoiser = PipelineDenoiser.open(folder, dtype="fp32", weights_dtype="fp32", lora=lora, height=32, width=32)
    x, t, condition = _rows(denoiser, world.rank)
    inputs = denoiser.prepare(_batch(world.rank), "cpu")
    whole = denoiser.forward(denoiser.module, x, t, condition).detach()
    drawn = denoiser.sample(inputs, SolverSettings(), lambda: None)
    denoiser.enable_gradient_checkpointing()
    engine = build_engine("deepspeed", world, denoiser.module, denoiser.shard_units(), EngineSettings(zero_stage=3))
    engine.prepare_optimizer(1e-3, (0.9, 0.99), 0.0)
    before = denoiser.sample(inputs, SolverSettings(), lambda: None)
    answer = denoiser.forward(engine.module, x, t, condition)
    engine.backward(answer.square().mean())
    engine.clip_grad_norm(1.0)
    engine.step()
    engine.reshard()
    after = denoiser.sample(inputs, SolverSettings(), lambda: None)
    engine.reshard()
    return [torch.equal(before, drawn), torch.equal(answer, whole), not torch.equal(after, drawn)]


@pytest.mark.parametrize(
    ("family", "size"), [("hunyuan", 2), ("hunyuan", 3), ("pixart", 2), ("sd3", 2), ("flux", 3), ("wan_one", 2)]
)
def test_a_sharded_family_answers_and_draws_with_the_bits_of_the_whole(family: str, size: int, ranks: RankPool) -> None:
    folder = tiny_models.built(family)
    assert ranks.run(size, sharded_equals_whole, folder, "fp32", 0) == [[True, True, True]] * size


@pytest.mark.parametrize(("dtype", "size"), [("fp32", 3), ("bf16", 2)])
def test_sharded_experts_answer_the_rows_of_each_rank_with_the_bits_of_the_whole(
    dtype: str, size: int, ranks: RankPool
) -> None:
    assert ranks.run(size, sharded_experts_equal_whole, tiny_models.built("wan"), dtype) == [[True] * 4] * size


@pytest.mark.parametrize("family", ["hunyuan", "flux"])
def test_float32_adapters_on_a_bfloat16_base_are_sharded_together(family: str, ranks: RankPool) -> None:
    folder = tiny_models.built(family)
    assert ranks.run(2, sharded_equals_whole, folder, "bf16", 2) == [[True, True, True]] * 2


@needs_inductor
def test_compiled_and_recomputed_blocks_under_ddp_differ_by_rounding_alone(ranks: RankPool) -> None:
    for difference in ranks.run(2, compiled_close_to_eager, tiny_models.built("hunyuan"), timeout_s=280.0):
        assert difference < 1e-4


@pytest.mark.parametrize(
    ("family", "lora_rank"), [("hunyuan", 0), ("hunyuan", 2), ("pixart", 0), ("sd3", 2), ("flux", 0), ("wan_one", 0)]
)
def test_a_family_partitioned_by_zero_answers_and_draws_with_the_bits_of_the_whole(
    family: str, lora_rank: int, ranks: RankPool
) -> None:
    pytest.importorskip("deepspeed")
    folder = tiny_models.built(family)
    assert ranks.run(2, partitioned_equals_whole, folder, lora_rank) == [[True, True, True]] * 2
