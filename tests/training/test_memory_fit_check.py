"""The memory estimate is near what autograd keeps, and a refusal names a batch that fits."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._profiler import _EventType
from torch.distributed import HashStore

from halation.distributed.world import World
from halation.errors import InputError
from halation.models.dit.denoiser import DiTDenoiser, create_dit
from halation.models.pipelines.training.denoiser import PipelineDenoiser, module_dtype
from halation.models.pipelines.training.lora import inject_lora
from halation.runs.run_folder import RunFolder
from halation.training import memory_fit_check, pipeline_finetuning, training_task
from halation.training.config import TrainConfig, fill_dit_defaults
from halation.training.loop import denoising_objective, mixed_precision
from halation.training.training_task import TrainingTask
from support import tiny_models

pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # in FLUX
CPU = torch.device("cpu")


def kept_bytes(denoiser: DiTDenoiser, rows: int, size: int) -> int:
    """Bytes of all storages that a forward keeps for its backward."""
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        losses = denoising_objective(denoiser)(
            denoiser.module, training_task.dummy_batch(denoiser, rows, (size, size), CPU)
        )
    assert losses.requires_grad
    return sum(seen.values())


@pytest.mark.parametrize(("size", "patch", "registers"), [(32, 8, 0), (32, 4, 4), (64, 4, 0)])
def test_the_estimate_is_within_a_quarter_of_what_is_kept(size: int, patch: int, registers: int) -> None:
    denoiser = create_dit(
        "tiny", height=size, width=size, captions=["a car at night"], patch_size=patch, num_register_tokens=registers
    ).init_weights(0)
    each = (kept_bytes(denoiser, 4, size) - kept_bytes(denoiser, 2, size)) / 2
    config = denoiser.config
    cost = memory_fit_check.ImageCost(
        flops=denoiser.flops_per_image(),
        hidden_size=config.hidden,
        num_blocks=config.depth,
        num_values=1,
        dtype="fp32",
        gradient_checkpointing=False,
    )
    assert 0.75 < cost.activation_bytes() / each < 1.25


def cost(checkpointing: bool = False) -> memory_fit_check.ImageCost:
    return memory_fit_check.ImageCost(
        flops=10**9, hidden_size=100, num_blocks=6, num_values=10, dtype="fp32", gradient_checkpointing=checkpointing
    )


def test_a_batch_that_does_not_fit_is_refused_with_a_size_that_does() -> None:
    """A batch that fits is accepted; one that does not is refused with a size that does."""
    each = cost().bytes_on_host()
    config = fill_dit_defaults(TrainConfig(batch_size=64, accumulate=2))
    assert memory_fit_check.batch_error(config, cost(), CPU, 64, 64 * each) is None
    error = memory_fit_check.batch_error(config, cost(), CPU, 64, 50 * each)
    assert error is not None
    assert "--batch_size 32 " in error.action
    assert "--accumulate 4 " in error.action
    assert memory_fit_check.batch_error(config, cost(), CPU, 32, 50 * each) is None


def test_where_not_even_one_image_fits_a_smaller_model_is_the_advice() -> None:
    error = memory_fit_check.batch_error(
        fill_dit_defaults(TrainConfig(batch_size=1)), cost(), CPU, 1, cost().bytes_on_host() / 2
    )
    assert error is not None
    assert "--model" in error.action


@pytest.mark.parametrize(
    ("settings", "advised", "not_advised"),
    [
        ({}, ("--gradient_checkpointing", "--dtype bf16"), ()),
        ({"dtype": "bf16"}, ("--gradient_checkpointing",), ("--dtype bf16",)),
        ({"gradient_checkpointing": True}, ("--dtype bf16",), ("--gradient_checkpointing",)),
        ({"dtype": "bf16", "gradient_checkpointing": True}, (), ("--dtype", "--gradient_checkpointing", " or ")),
    ],
)
def test_a_smaller_batch_is_advised_with_what_is_not_done_yet(
    settings: dict[str, Any], advised: tuple[str, ...], not_advised: tuple[str, ...]
) -> None:
    hint = memory_fit_check.batch_size_hint(fill_dit_defaults(TrainConfig(batch_size=8, accumulate=3, **settings)), 4)
    assert hint.startswith("try --batch_size 4 (with --accumulate 6 for the same global batch)")
    assert all(text in hint for text in advised)
    assert not any(text in hint for text in not_advised)


def test_checkpointing_keeps_less_and_ranks_share_a_machine() -> None:
    assert cost(checkpointing=True).activation_bytes() < cost().activation_bytes() / 3
    alone, shared = memory_fit_check.free_bytes(CPU, 1), memory_fit_check.free_bytes(CPU, 4)
    assert 0 < shared < alone


# The estimate by parts, of real shapes without memory

GB = 10**9
REAL_CONFIGS: dict[str, dict[str, Any]] = {
    "flux": {"guidance_embeds": True},  # the class defaults are those of FLUX.1
    "wan": {"num_attention_heads": 40, "attention_head_dim": 128, "ffn_dim": 13824, "num_layers": 40, "text_dim": 4096},
    "sd3": {
        "sample_size": 128, "num_layers": 38, "num_attention_heads": 38, "attention_head_dim": 64,
        "caption_projection_dim": 2432, "joint_attention_dim": 4096, "pooled_projection_dim": 2048,
        "qk_norm": "rms_norm", "pos_embed_max_size": 192,
    },
    "hunyuan": {
        "num_layers": 40, "num_attention_heads": 16, "attention_head_dim": 88, "hidden_size": 1408, "sample_size": 128,
        "cross_attention_dim": 1024, "cross_attention_dim_t5": 2048, "pooled_projection_dim": 1024, "in_channels": 4,
        "patch_size": 2, "mlp_ratio": 4.3637,
    },
}  # fmt: skip
BILLIONS = {"flux": 11.9, "wan": 14.3, "sd3": 8.1, "hunyuan": 1.5}
"""FLUX.1, Wan 14 B, SD3.5-large and HunyuanDiT."""


@functools.cache
def opened(family: str, dtype: str, weights_dtype: str, lora_rank: int) -> PipelineDenoiser:
    """A tiny pipeline as fine-tuning opens it, with a transformer of the real shape on the meta device.

    The precision of the weights and the adapters are those that the tiny one was opened with.
    """
    config = tuning(family, dtype=dtype, weights_dtype=weights_dtype, lora_rank=lora_rank)
    denoiser = pipeline_finetuning.open_denoiser(config, CPU)
    kind: Any = type(denoiser.module)
    with torch.device("meta"):
        module = kind(**REAL_CONFIGS[family]).to(module_dtype(denoiser.module))
    if denoiser.lora is not None:
        inject_lora(module, denoiser.lora, denoiser.family.lora_targets, seed=0)
    denoiser.module = module
    return denoiser


def tuning(family: str, **settings: Any) -> TrainConfig:
    folder = (
        tiny_models.wan(Path(tempfile.mkdtemp()), two_experts=False) if family == "wan" else tiny_models.built(family)
    )
    return fill_dit_defaults(TrainConfig(model_path=str(folder), image_size=(64, 64), batch_size=1, **settings))


def decision(family: str, gigabytes: float, num_ranks: int, **settings: Any) -> InputError | None:
    """What the check before training says on this many GPUs of this size."""
    settings = {"engine": "single"} | settings
    config = fill_dit_defaults(TrainConfig(model_path="model", image_size=(64, 64), batch_size=1, **settings))
    world = World(rank=0, size=num_ranks, local_rank=0, device=CPU, store=HashStore(), control=None, timeout_s=1.0)
    denoiser = opened(family, config.dtype, config.weights_dtype, config.lora_rank)
    assert sum(p.numel() for p in denoiser.module.parameters()) == pytest.approx(BILLIONS[family] * GB, rel=0.03)
    try:
        memory_fit_check.check_weights_fit(world, config, denoiser, gigabytes * GB)
    except InputError as error:
        return error
    return None


LORA: dict[str, Any] = {"lora_rank": 16, "dtype": "bf16"}
SHARDED: dict[str, Any] = {"engine": "fsdp"}
ZERO3: dict[str, Any] = {"engine": "deepspeed", "zero_stage": 3}


@pytest.mark.parametrize(
    ("family", "gigabytes", "num_ranks", "settings", "fits"),
    [
        ("flux", 32, 1, LORA, True),
        ("flux", 40, 1, LORA, True),
        ("flux", 24, 1, LORA, False),
        ("flux", 24, 1, LORA | {"dtype": "fp32"}, False),
        ("flux", 40, 1, LORA | {"dtype": "fp32"}, False),
        ("flux", 40, 8, LORA | SHARDED, True),
        ("flux", 8, 8, LORA | SHARDED, True),
        ("flux", 8, 8, LORA | {"engine": "ddp"}, False),
        ("flux", 8, 8, LORA | ZERO3, False),  # loaded as a whole before it is sharded
        ("flux", 32, 8, LORA | ZERO3, True),
        ("flux", 24, 8, LORA | {"engine": "deepspeed", "zero_stage": 2}, False),
        ("wan", 48, 8, LORA | SHARDED, True),
        ("wan", 24, 1, LORA, False),
        ("sd3", 24, 1, LORA, True),
        ("sd3", 24, 4, LORA | {"engine": "ddp"}, True),
        ("flux", 80, 1, {}, False),
        ("flux", 80, 8, {"engine": "ddp"}, False),
        ("flux", 80, 8, SHARDED, True),
        ("flux", 80, 8, ZERO3, True),
        ("flux", 40, 8, SHARDED | {"offload_optimizer": True}, True),
        ("hunyuan", 40, 1, {}, True),
        ("hunyuan", 24, 1, {}, False),
        ("hunyuan", 24, 1, {"dtype": "bf16"}, False),  # autocast: the weights stay in float32
        ("hunyuan", 20, 1, {"weights_dtype": "bf16"}, True),
        ("hunyuan", 14, 1, {"weights_dtype": "bf16"}, False),
        ("hunyuan", 14, 1, {"weights_dtype": "bf16", "ema_decay": 0.0}, True),
    ],
)
def test_a_real_model_is_refused_only_where_it_does_not_fit(
    family: str, gigabytes: float, num_ranks: int, settings: dict[str, Any], fits: bool
) -> None:
    error = decision(family, gigabytes, num_ranks, **settings)
    assert (error is None) == fits, error


def test_a_refusal_names_all_and_trained_parameters_and_every_part() -> None:
    error = decision("flux", 20, 1, **LORA)
    assert error is not None
    text = str(error)
    assert "training 26.1 million of 11.9 billion parameters takes 22.7 GiB on each device without any image" in text
    assert re.search(r"frozen weights 22\.2 GiB, trained weights \d+ MiB, gradients \d+ MiB, optimizer \d+ MiB", text)
    assert "at most 18.6 GiB, the memory of one device" in text


@pytest.mark.parametrize(
    ("settings", "num_ranks", "advised", "not_advised"),
    [
        (LORA, 1, ["--engine fsdp"], ["--lora_rank", "--weights_dtype", "--dtype", "--ema_decay", "--zero_stage"]),
        (LORA | {"dtype": "fp32"}, 1, ["--dtype bf16"], ["--lora_rank", "--weights_dtype", "--ema_decay"]),
        ({}, 1, ["--engine fsdp", "--lora_rank 16", "--weights_dtype bf16", "--ema_decay 0"], ["--offload_optimizer"]),
        ({"weights_dtype": "bf16", "ema_decay": 0.0}, 1, ["--lora_rank 16"], ["--weights_dtype", "--ema_decay"]),
        (SHARDED, 2, ["--offload_optimizer", "more GPUs"], ["--engine", "--zero_stage"]),
        (ZERO3, 2, ["--engine fsdp"], ["--zero_stage", "--lora_rank"]),
    ],
)
def test_the_advice_is_what_these_settings_leave_open(
    settings: dict[str, Any], num_ranks: int, advised: list[str], not_advised: list[str]
) -> None:
    error = decision("flux", 6, num_ranks, **settings)
    assert error is not None
    assert [text for text in advised if text not in error.action] == []
    assert [text for text in not_advised if text in error.action] == []


@pytest.mark.parametrize(
    ("stage", "advised", "not_advised"),
    [
        (2, ["--zero_stage 3", "--offload_optimizer"], ["--engine"]),
        (3, ["--offload_optimizer"], ["--engine", "--zero"]),
    ],
)
def test_zero_is_advised_to_shard_more_or_to_offload(stage: int, advised: list[str], not_advised: list[str]) -> None:
    error = decision("flux", 56, 2, engine="deepspeed", zero_stage=stage)
    assert error is not None
    assert [text for text in advised if text not in error.action] == []
    assert [text for text in not_advised if text in error.action] == []


def test_the_parts_add_up_to_the_total() -> None:
    denoiser = opened("hunyuan", "fp32", "fp32", 0)
    config = fill_dit_defaults(TrainConfig(model_path="model", engine="single"))
    estimate = memory_fit_check.estimate_memory(config, denoiser, 1)
    number = estimate.num_trained
    assert estimate.num_parameters == number
    assert estimate.trained_weights == estimate.gradients == estimate.ema == 4 * number
    assert estimate.optimizer == pytest.approx(8 * number, rel=1e-5)
    assert sum(estimate.parts().values()) == estimate.total
    without = memory_fit_check.estimate_memory(dataclasses.replace(config, ema_decay=0.0), denoiser, 1)
    assert without.ema == 0
    assert without.total == estimate.total - 4 * number


# Activations


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("hunyuan", {}),
        ("hunyuan", {"gradient_checkpointing": True}),
        ("sd3", {"lora_rank": 4, "dtype": "bf16"}),
        pytest.param("flux", {"dtype": "bf16"}, marks=pytest.mark.slow),
        pytest.param("pixart", {"dtype": "bf16", "gradient_checkpointing": True}, marks=pytest.mark.slow),
        pytest.param("dit", {"dtype": "bf16"}, marks=pytest.mark.slow),
    ],
)
def test_the_memory_of_a_pass_is_what_the_allocator_reports(
    tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    """The estimate, made without memory, against torch's profiler over a real pass."""
    task, config = small_task(tmp_path, family, **settings)
    estimate = memory_fit_check.check_batch_fits(task, config, config.batch_size, math.inf)
    batch = training_task.dummy_batch(task.denoiser, config.batch_size, (64, 64), CPU)
    objective = denoising_objective(task.denoiser)
    for _ in range(2):  # the first pass makes what later ones keep
        task.denoiser.module.zero_grad(set_to_none=True)
        with torch.profiler.profile(profile_memory=True) as profile:
            with mixed_precision(CPU, config.dtype):
                losses = objective(task.denoiser.module, batch)
            losses.float().sum().backward()  # type: ignore[no-untyped-call]
    measured = peak_bytes(profile)
    assert estimate.activations + estimate.gradients == pytest.approx(measured, rel=0.15)


def peak_bytes(profile: torch.profiler.profile) -> int:
    """The most bytes that torch's allocator had handed out, beyond those at the start."""
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    waiting = list(profile.profiler.kineto_results.experimental_event_tree())
    totals: list[tuple[int, int, int]] = []
    while waiting:
        event: Any = waiting.pop()
        waiting += event.children
        if event.tag == _EventType.Allocation:
            totals.append((event.start_time_ns, event.extra_fields.total_allocated, event.extra_fields.alloc_size))
    _, first, size = min(totals)
    return max(total for _, total, _ in totals) - (first - size)


def small_task(folder: Path, family: str, **settings: Any) -> tuple[TrainingTask, TrainConfig]:
    """A task with its model, as a session has it before it builds the engine."""
    known: dict[str, Any] = {"image_size": (64, 64), "batch_size": 4, "engine": "single", "output_dir": folder}
    if family != "dit":
        known["model_path"] = str(tiny_models.built(family))
    config = fill_dit_defaults(TrainConfig(**known | settings))
    world = World(rank=0, size=1, local_rank=0, device=CPU, store=HashStore(), control=None, timeout_s=1.0)
    task = TrainingTask(world, config, RunFolder(folder))
    if family == "dit":
        task.denoiser = create_dit("tiny", height=64, width=64, captions=["a car"], patch_size=8).init_weights(0)
    else:
        task.denoiser = pipeline_finetuning.open_denoiser(config, CPU)
    if config.gradient_checkpointing:
        task.denoiser.enable_gradient_checkpointing()
    return task, config


def test_a_batch_too_large_for_the_device_is_refused_with_one_that_fits(tmp_path: Path) -> None:
    task, config = small_task(tmp_path, "dit", batch_size=64)
    whole = memory_fit_check.check_batch_fits(task, config, 64, math.inf)
    fixed = whole.total - whole.activations
    with pytest.raises(InputError) as refused:
        memory_fit_check.check_batch_fits(task, config, 64, fixed + whole.activations / 3)
    assert "--batch_size 64 would take about" in refused.value.found
    assert "activations" in refused.value.found
    assert refused.value.action.startswith("try --batch_size 16 (with --accumulate 4 for the same global batch)")
    smaller = dataclasses.replace(config, batch_size=16, accumulate=4)
    memory_fit_check.check_batch_fits(task, smaller, 64, fixed + whole.activations / 3)
    with pytest.raises(InputError, match="not even one image fits"):
        memory_fit_check.check_batch_fits(task, config, 64, fixed + 1)


def test_the_estimate_leaves_no_trace_in_the_model(tmp_path: Path) -> None:
    """A real pass after it gives the loss of a model that was never estimated."""
    losses = []
    for name, estimated in (("first", True), ("second", False)):
        task, config = small_task(tmp_path / name, "hunyuan")
        if estimated:
            memory_fit_check.check_batch_fits(task, config, config.batch_size, math.inf)
        batch = training_task.dummy_batch(task.denoiser, 2, (64, 64), CPU)
        losses.append(denoising_objective(task.denoiser)(task.denoiser.module, batch))
        assert all(type(parameter) is torch.nn.Parameter for parameter in task.denoiser.module.parameters())
    assert torch.equal(losses[0], losses[1])
