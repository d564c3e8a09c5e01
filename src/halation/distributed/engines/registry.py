"""Choose an engine by name, and refuse settings that do not fit it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch.distributed as dist
from torch import nn

from halation.distributed.engines import deepspeed_config
from halation.distributed.engines.ddp_fsdp import DDPEngine, Engine, EngineSettings, FSDPEngine
from halation.distributed.world import World
from halation.errors import InputError

log = logging.getLogger(__name__)


def build_engine(
    name: str,
    world: World,
    module: nn.Module,
    units: Sequence[nn.Module],
    settings: EngineSettings = EngineSettings(),  # noqa: B008 - frozen
) -> Engine:
    """The engine of this name over this module; `auto` is ddp for several ranks and single for one."""
    check_engine_settings(name, world, settings)
    name = _resolve_name(name, world)
    if name == "single":
        return Engine(world, module)
    if name == "ddp":
        return DDPEngine(world, module) if dist.is_initialized() else Engine(world, module)
    if name == "fsdp":
        return FSDPEngine(world, module, units, settings.offload_optimizer)
    from halation.distributed.engines.deepspeed import DeepSpeedEngine

    unknown = deepspeed_config.find_unknown_keys(deepspeed_config.read_config(settings.deepspeed_config))
    if unknown and world.is_rank_zero:
        log.warning("--deepspeed_config: DeepSpeed may not know %s, and then ignores it", ", ".join(unknown))
    return DeepSpeedEngine(world, module, settings)


def _resolve_name(name: str, world: World) -> str:
    if name != "auto":
        return name
    return "ddp" if world.size > 1 else "single"


def check_engine_settings(name: str, world: World, settings: EngineSettings) -> None:
    """Refuse what does not go together, before data and model cost anything."""
    name = _resolve_name(name, world)
    if name == "single" and world.size > 1:
        raise InputError(
            f"--engine single with {world.size} ranks",
            "one rank",
            "use --engine ddp or fsdp, or --nproc 1 (ranks would never meet)",
        )
    if settings.offload_optimizer and name in ("single", "ddp"):
        raise InputError(
            f"--offload_optimizer with --engine {name}",
            "an engine that can keep the optimizer in host memory",
            "use --engine fsdp or deepspeed, or leave the flag away",
        )
    if settings.deepspeed_config and name != "deepspeed":
        raise InputError(
            f"--deepspeed_config with --engine {name}", "--engine deepspeed", "add it, or leave the file away"
        )
    if settings.zero_stage != EngineSettings.zero_stage and name != "deepspeed":
        raise InputError(
            f"--zero_stage {settings.zero_stage} with --engine {name}",
            "--engine deepspeed",
            "add it, or leave the stage away",
        )
    if name == "deepspeed":
        from halation.distributed.engines.deepspeed import build_config, import_deepspeed

        import_deepspeed(world)
        user_config = deepspeed_config.read_config(settings.deepspeed_config)
        deepspeed_config.find_unknown_keys(user_config)
        build_config(user_config, settings, pin_memory=False)
