"""What ranks are asked to do in tests of the DeepSpeed engine, with a module small enough to look at."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halation.distributed.checkpoint.reader import CheckpointReader
from halation.distributed.checkpoint.writer import CheckpointWriter
from halation.distributed.engines.ddp_fsdp import EngineSettings
from halation.distributed.world import World
from halation.errors import InputError
from halation.flow.ema import Ema
from halation.training import checkpoint_state
from halation.training.build_components import build_engine
from halation.training.loop import (
    MODEL,
    MicroBatch,
    StepSettings,
    TrainedNetwork,
    TrainState,
    mixed_precision,
    train_steps,
)


class Adapted(nn.Module):
    """A layer that stays as it is, in bfloat16, with a trained one in float32 added to it."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.base = nn.Linear(num_in, num_out, dtype=torch.bfloat16).requires_grad_(False)
        self.down, self.up = nn.Linear(num_in, 2, bias=False), nn.Linear(2, num_out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base: torch.Tensor = self.base(x.to(torch.bfloat16))
        return base.to(x.dtype) + self.up(self.down(x))


def small_module(kind: str = "plain") -> nn.Module:
    """Odd sizes, so that no parameter divides evenly among ranks; a vector of one element; one that is not trained."""
    torch.manual_seed(0)
    if kind == "adapters":
        return nn.Sequential(Adapted(5, 7), nn.GELU(), nn.Identity(), Adapted(7, 1))
    module = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.GELU(), nn.Linear(7, 3), nn.Linear(3, 1))
    module[4].weight.requires_grad = False
    return module.to(torch.bfloat16) if kind == "bf16" else module


class Trainee:
    """A small training with a fixed series of batches, a step at a time; it is its own Denoiser, objective and loader."""

    def __init__(
        self,
        world: World,
        engine: str = "deepspeed",
        stage: int = 2,
        num_micro: int = 1,
        kind: str = "plain",
        **settings: Any,
    ) -> None:
        self.world = world
        self.num_micro = num_micro
        self.whole = small_module(kind)
        known = {"zero_stage": stage, "global_batch": 6 * num_micro, "num_micro_batches": num_micro, "grad_clip": 0.5}
        units = [self.whole[0], self.whole[3]]
        self.engine = build_engine(engine, world, self.whole, units, EngineSettings(**known | settings))
        self.engine.prepare_optimizer(0.05, (0.9, 0.99), 0.01)
        self.ema = Ema(self.engine.master_weights(), 0.9)
        self.position = TrainState()
        self.dtype = settings.get("dtype", "fp32")
        with mixed_precision(world.device, self.dtype):
            losses = self.objective(self.engine.wrapped_module, self.rows(0)[0])
        self.engine.warm_up(losses.float().sum())

    def objective(self, module: nn.Module, rows: MicroBatch) -> torch.Tensor:
        output: torch.Tensor = module(rows.x0)
        return (output.float() - rows.noise).square().flatten() * rows.t

    def rows(self, step: int, factor: float = 1.0) -> list[MicroBatch]:
        """This rank's rows of a batch that does not depend on the number of ranks."""
        batch = torch.randn(self.num_micro, 6, 6, generator=torch.Generator().manual_seed(step))
        share = 6 // self.world.size
        mine = slice(self.world.rank * share, (self.world.rank + 1) * share)
        times = torch.full((share,), factor if self.world.rank == 0 else 1.0)
        return [
            MicroBatch(x0=micro[mine, :5], noise=micro[mine, 5:], t=times, condition={}, weight=torch.ones(share))
            for micro in batch
        ]

    def train(self, num_steps: int, factors: dict[int, float] | None = None, policy: str = "skip") -> list[Any]:
        settings = StepSettings(
            global_batch=6 * self.num_micro,
            lr=0.05,
            warmup_steps=2,
            decay_steps=0,
            grad_clip=0.5,
            dtype=self.dtype,
            nan_policy=policy,
        )
        first = self.position.step
        batches = (self.rows(step, (factors or {}).get(step, 1.0)) for step in range(first, first + num_steps))
        return list(
            train_steps(
                self.world, self.parts(), batches, settings, self.position, stop=lambda: 0, save_failed=lambda: False,
            )
        )  # fmt: skip

    def parts(self) -> dict[str, TrainedNetwork]:
        return {MODEL: TrainedNetwork(engine=self.engine, ema=self.ema, objective=self.objective)}

    def forward(self) -> torch.Tensor:
        """A forward of the bare module, as sampling does it."""
        with torch.no_grad(), mixed_precision(self.world.device, self.dtype):
            output: torch.Tensor = self.whole(torch.linspace(-1, 1, 10).reshape(2, 5))
        self.engine.reshard()
        return output

    def drawn(self) -> torch.Tensor:
        """A forward with the averages in the weights' place, as the tasks after a save do it."""
        self.ema.swap()
        self.engine.sync_master_weights()
        output = self.forward()
        self.ema.swap()
        self.engine.sync_master_weights()
        return output

    def bits(self) -> dict[str, torch.Tensor]:
        pieces = checkpoint_state.checkpoint_parts(self.parts())
        return {f"{part}/{name}": p.local.clone() for part, named in pieces.items() for name, p in named.items()}

    def save(self, folder: Path) -> None:
        checkpoints = CheckpointWriter(self.world, folder, keep_last=0, sharded=self.engine.saves_shards)
        words = checkpoint_state.shared_state(self.position, self.ema, {}, {})
        checkpoints.save(self.position.step, "kept", checkpoint_state.checkpoint_parts(self.parts()), words, {})
        checkpoints.wait()
        checkpoints.raise_if_failed()
        self.world.all_gather_object("saved")

    def load(self, folder: Path) -> None:
        self.position = checkpoint_state.restore(CheckpointReader(folder), self.parts())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def losses(
    world: World, engine: str, settings: dict[str, Any], num_steps: int = 6
) -> tuple[list[float], list[float], torch.Tensor, torch.Tensor]:
    trainee = Trainee(world, engine, **settings)
    reports = trainee.train(num_steps)
    return [r.loss for r in reports], [r.grad_norm for r in reports], trainee.forward(), trainee.drawn()


def sampling_is_invisible(world: World, settings: dict[str, Any]) -> bool:
    quiet, drawing = Trainee(world, **settings), None
    quiet.train(4)
    expected = quiet.bits()
    del quiet
    drawing = Trainee(world, **settings)
    for _ in range(4):
        drawing.train(1)
        before = drawing.bits()
        with drawing.engine.offload_optimizer_state():
            drawing.drawn()
            drawing.forward()
        if not same(before, drawing.bits()):
            return False
    return same(expected, drawing.bits())


def resume_is_exact(world: World, folder: Path, settings: dict[str, Any]) -> bool:
    trainee = Trainee(world, **settings)
    trainee.train(3)
    trainee.save(folder)
    trainee.train(3)
    expected, image = trainee.bits(), trainee.drawn()
    del trainee
    resumed = Trainee(world, **settings)
    resumed.load(folder / "step_0000003")
    resumed.train(3)
    return same(expected, resumed.bits()) and torch.equal(image, resumed.drawn())


def save_after(world: World, folder: Path, settings: dict[str, Any]) -> torch.Tensor:
    trainee = Trainee(world, **settings)
    trainee.train(3)
    trainee.save(folder)
    return trainee.drawn()


def go_on(world: World, folder: Path, settings: dict[str, Any]) -> tuple[torch.Tensor, list[float]]:
    trainee = Trainee(world, **settings)
    trainee.load(folder / "step_0000003")
    image = trainee.drawn()
    return image, [report.loss for report in trainee.train(3)]


def skipping_leaves_no_trace(world: World, settings: dict[str, Any], factor: float) -> tuple[bool, list[bool]]:
    """A step whose loss or gradient is not finite on rank 0 alone, against a run whose step there never was."""
    trainee = Trainee(world, **settings)
    trainee.train(2)
    before = trainee.bits()
    skipped = [report.skipped for report in trainee.train(1, {2: factor})]
    clean = same(before, trainee.bits())
    trainee.train(2)
    expected = Trainee(world, **settings)
    expected.train(2)
    expected.position.step += 1
    expected.train(2)
    return clean and same(expected.bits(), trainee.bits()), skipped


def refusal(world: World, config: Any, folder: Path, settings: dict[str, Any]) -> str:
    path = folder / f"ds_{world.rank}.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    try:
        Trainee(world, deepspeed_config=str(path), micro_batch_size=6, **settings)
    except InputError as error:
        return str(error)
    return ""


def precise(
    world: World, settings: dict[str, Any], config: dict[str, Any], folder: Path
) -> tuple[list[float], set[str], bool]:
    """Losses, the type of the weights, and whether averages change places exactly."""
    path = folder / f"ds_{world.rank}.json"
    path.write_text(json.dumps(config))
    trainee = Trainee(world, deepspeed_config=str(path), **settings)
    reports = trainee.train(4)
    before, weights = trainee.bits(), [p.detach().clone() for p in trainee.whole.parameters()]
    trainee.drawn()
    exact = same(before, trainee.bits()) and all(
        torch.equal(one, two) for one, two in zip(weights, trainee.whole.parameters(), strict=True)
    )
    assert all(math.isfinite(report.loss) for report in reports)
    return [report.loss for report in reports], {str(p.dtype) for p in trainee.whole.parameters()}, exact


def scaled_losses(world: World, settings: dict[str, Any], scale: float) -> tuple[list[float], list[float]]:
    trainee = Trainee(world, **settings)
    trainee.position.loss_scale = scale
    reports = trainee.train(6)
    return [report.loss for report in reports], [report.grad_norm for report in reports]


def accepted(world: World, config: dict[str, Any], folder: Path) -> tuple[int, int]:
    """The stage that counts, and a setting of the file that only DeepSpeed knows."""
    path = folder / "ds.json"
    path.write_text(json.dumps(config))
    engine: Any = Trainee(world, deepspeed_config=str(path), micro_batch_size=6).engine
    return engine.stage, engine.ds_engine.zero_param_persistence_threshold()
