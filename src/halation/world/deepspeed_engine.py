"""DeepSpeed's ZeRO 1, 2 and 3 behind the face of an engine; DeepSpeed is imported only where it was asked for."""

from __future__ import annotations

import importlib.util

from torch import nn

from halation.errors import InputError
from halation.world.engines import Engine, EngineSettings
from halation.world.ranks import World


class DeepSpeed(Engine):
    """Optimizer (1), gradients too (2), weights too (3) live in shards."""

    name = "deepspeed"

    def __init__(self, world: World, module: nn.Module, settings: EngineSettings) -> None:
        super().__init__(world, module)
        if importlib.util.find_spec("deepspeed") is None:
            raise InputError(
                "--engine deepspeed, but DeepSpeed is not installed", "the extra", "pip install 'halation[deepspeed]'"
            )
        self.settings = settings
