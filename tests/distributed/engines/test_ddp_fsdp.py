"""All engines: trained parameters, precision, optimizer state and bad combinations."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from halation.distributed.engines.ddp_fsdp import EngineSettings
from halation.distributed.engines.deepspeed_config import find_unknown_keys
from halation.distributed.world import World
from halation.errors import InputError
from halation.training.build_components import build_engine
from support import training_loops
from support.rank_pool import RankPool

pytestmark = pytest.mark.ranks
ZERO = pytest.mark.skipif(find_spec("deepspeed") is None, reason="the extra `deepspeed` is not installed")
SLOW = pytest.mark.slow
ENGINES = [
    pytest.param({"engine": "ddp"}, id="ddp"),
    pytest.param({"engine": "fsdp"}, id="fsdp"),
    pytest.param({"stage": 1}, id="zero1", marks=[ZERO, SLOW]),
    pytest.param({"stage": 2}, id="zero2", marks=ZERO),
    pytest.param({"stage": 3}, id="zero3", marks=ZERO),
]


def losses(world: World, settings: dict[str, Any]) -> tuple[list[float], dict[str, str]]:
    """The losses of some steps, and the types of everything that is saved."""
    trainee = training_loops.Trainee(world, **{"engine": "deepspeed"} | settings)
    reports = trainee.train(4)
    return [report.loss for report in reports], {name: str(value.dtype) for name, value in trainee.bits().items()}


def refusal(world: World, name: str, settings: EngineSettings) -> str:
    try:
        build_engine(name, world, torch.nn.Linear(2, 2), [], settings)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("settings", ENGINES)
def test_only_adapters_are_trained_and_saved_over_a_frozen_narrow_base(
    ranks: RankPool, tmp_path: Path, settings: dict[str, Any]
) -> None:
    expected, _ = ranks.run(1, losses, {"engine": "single", "kind": "adapters"})[0]
    found, dtypes = ranks.run(2, losses, settings | {"kind": "adapters"})[0]
    assert found == pytest.approx(expected, abs=1e-4)
    assert found[0] != found[-1]
    assert {name.rsplit(".", 2)[1] for name in dtypes} == {"down", "up"}
    assert set(dtypes.values()) == {"torch.float32"}
    full = {"engine": "deepspeed", "kind": "adapters"} | settings
    assert all(ranks.run(2, training_loops.resume_is_exact, tmp_path, full))


@pytest.mark.parametrize("settings", ENGINES)
def test_weights_in_bf16_train_with_an_average_in_float32(
    ranks: RankPool, tmp_path: Path, settings: dict[str, Any]
) -> None:
    narrow = {"engine": "deepspeed", "kind": "bf16", "dtype": "bf16"} | settings
    expected, _ = ranks.run(1, losses, {"engine": "single"})[0]
    found, dtypes = ranks.run(2, losses, narrow)[0]
    assert found == pytest.approx(expected, abs=0.05)
    assert {dtype for name, dtype in dtypes.items() if name.startswith("ema/")} == {"torch.float32"}
    # ZeRO keeps float32 masters of its own.
    wanted = "torch.float32" if "stage" in settings else "torch.bfloat16"
    kept = {dtype for name, dtype in dtypes.items() if not name.startswith("ema/") and "/step/" not in name}
    assert kept == {wanted}
    assert all(ranks.run(2, training_loops.resume_is_exact, tmp_path, narrow))


def test_fsdp_with_its_optimizer_in_host_memory_trains_to_the_same_bits_on_a_cpu(ranks: RankPool) -> None:
    plain = ranks.run(2, losses, {"engine": "fsdp"})[0]
    assert ranks.run(2, losses, {"engine": "fsdp", "offload_optimizer": True})[0] == plain


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_drawing_with_the_optimizer_parked_leaves_every_bit_as_it_is(ranks: RankPool, engine: str) -> None:
    assert all(ranks.run(2, training_loops.sampling_is_invisible, {"engine": engine}))


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("single", EngineSettings(offload_optimizer=True), "use --engine fsdp or deepspeed"),
        ("ddp", EngineSettings(offload_optimizer=True), "--offload_optimizer with --engine ddp"),
        ("fsdp", EngineSettings(deepspeed_config="x.json"), "--deepspeed_config with --engine fsdp"),
        ("ddp", EngineSettings(zero_stage=3), "--zero_stage 3 with --engine"),
        pytest.param("deepspeed", EngineSettings(deepspeed_config="x.json"), "No such file", marks=ZERO),
    ],
)
def test_what_does_not_go_together_is_refused(ranks: RankPool, name: str, settings: EngineSettings, words: str) -> None:
    assert words in ranks.run(1, refusal, name, settings)[0]


def test_a_slip_in_the_name_of_a_section_is_refused_with_the_name_that_was_meant() -> None:
    with pytest.raises(InputError, match="did you mean 'zero_optimization'"):
        find_unknown_keys({"zero_optimisation": {"stage": 3}})
    assert find_unknown_keys({"no_such_key": 1, "bf16": {}, "zero_optimization": {}}) == ["no_such_key"]
