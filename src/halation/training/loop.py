"""The training loop: batch, loss, step, average; a generator that yields after every step and knows nothing of what is done then."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from halation.distributed.engines.ddp_fsdp import Engine
from halation.distributed.world import World
from halation.errors import HalationError
from halation.faults import fault_point
from halation.flow.ema import Ema
from halation.models.denoiser import AUTOCAST

MAX_SKIPPED = 20


@dataclass(frozen=True, kw_only=True)
class Rows:
    """One micro-batch on the device; `weight` is 0 for rows that only fill it up."""

    x0: Tensor
    noise: Tensor
    t: Tensor
    condition: dict[str, Tensor]
    weight: Tensor
    step: int = 0
    """The step it belongs to, counted from 0: the same number on all ranks."""
    extra: dict[str, Tensor] = field(default_factory=dict)
    """What an objective wants besides: one row a picture."""


Objective = Callable[[nn.Module, Rows], Tensor]
"""Module and rows in, one loss a row out."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One network of a training with its optimizer. Most trainings have one, called MODEL."""

    engine: Engine
    objective: Objective | None = None
    """What it learns in a step that it leads; None for one that only goes along with another's."""
    ema: Ema | None = None
    lr: float | None = None
    """Instead of the settings'."""


MODEL = "model"


def model_alone(step: int) -> tuple[str, ...]:
    """The turns of a training with one part."""
    return (MODEL,)


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What decides a step besides the batch."""

    global_batch: int
    lr: float
    warmup_steps: int
    decay_steps: int
    grad_clip: float
    dtype: str
    nan_policy: str

    def lr_at(self, step: int) -> float:
        """Linear rise, then constant or a cosine to zero; `step` counts from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.decay_steps == 0:
            return self.lr
        done = min((step - self.warmup_steps) / self.decay_steps, 1.0)
        return self.lr * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(kw_only=True)
class Position:
    """Where a run stands; all of it is in every checkpoint."""

    step: int = 0
    pictures: int = 0
    loss_scale: float = 1.0
    good_steps: int = 0
    skipped: int = 0


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What all ranks know after a step."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    data_s: float
    skipped: bool
    stop: int
    save_failed: bool
    asked: int = 0
    """What the first rank was asked for before this step, as the caller numbers it."""


def autocast(device: torch.device, dtype: str) -> contextlib.AbstractContextManager[object]:
    wanted = AUTOCAST[dtype]
    return contextlib.nullcontext() if wanted is None else torch.autocast(device.type, wanted)


def train_steps(
    world: World,
    parts: Mapping[str, Part],
    batches: Iterable[Sequence[Rows]],
    settings: StepSettings,
    position: Position,
    stop: Callable[[], int],
    save_failed: Callable[[], bool],
    let_change: Callable[[], None] = lambda: None,
    turn: Callable[[int], Sequence[str]] = model_alone,
    asked: Callable[[], int] = lambda: 0,
) -> Iterator[StepReport]:
    """Take one step for each list of micro-batches. Every decision is made from numbers that all ranks share.

    `turn` names the parts that a step (counted from 0) moves; the first of them says what is learned.
    `asked` is a number on the first rank, 0 elsewhere; all ranks find it in the report of the same step.
    """
    words = _Words(world)
    skipped_in_a_row = 0
    waiting_since = time.perf_counter()
    for rows in batches:
        began = time.perf_counter()
        lr = settings.lr_at(position.step)
        moving = [parts[name] for name in turn(position.step)]
        for part in moving:
            part.engine.set_lr(lr if part.lr is None else part.lr * lr / settings.lr)
        local_loss = _gradients(world, moving, rows, settings, position.loss_scale)
        # Launched before the loss is read, so that a GPU does not stand still between the two.
        norms = [part.engine.grad_norm(settings.grad_clip, position.loss_scale) for part in moving]
        loss, stopping, failed, not_finite, wishes = words.share(local_loss, stop(), save_failed(), asked())
        norm = math.hypot(*map(float, norms))
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            let_change()  # a save may still be reading
            _move(moving)
            skipped_in_a_row = 0
        else:
            skipped_in_a_row += 1
            position.skipped += 1
            _judge(settings, position, loss, norm, not_finite, skipped_in_a_row)
        for part in moving:
            part.engine.zero_grad()
        _adapt_scale(settings, position, finite)
        position.step += 1
        position.pictures += settings.global_batch
        fault_point("train.step")
        yield StepReport(
            step=position.step,
            loss=loss,
            grad_norm=norm,
            lr=lr,
            data_s=began - waiting_since,
            skipped=not finite,
            stop=stopping,
            save_failed=failed,
            asked=wishes,
        )
        waiting_since = time.perf_counter()


def _gradients(
    world: World, moving: Sequence[Part], rows: Sequence[Rows], settings: StepSettings, scale: float
) -> Tensor:
    """Gradient of the mean loss over the global batch; returns this rank's share of that mean."""
    leader = moving[0]
    assert leader.objective is not None, "the first part of a turn says what is learned"
    total = torch.zeros((), device=world.device)
    for number, micro in enumerate(rows):
        with contextlib.ExitStack() as stack:
            for part in moving:
                stack.enter_context(part.engine.accumulating(last=number == len(rows) - 1))
            with autocast(world.device, settings.dtype):
                losses = leader.objective(leader.engine.trained, micro)
            share = (losses.float() * micro.weight).sum() / settings.global_batch
            # Engines divide by the number of ranks, but a share is already part of the whole mean.
            leader.engine.backward(share * (world.size * scale))
        total = total + share.detach()
    return total


def _move(moving: Sequence[Part]) -> None:
    for part in moving:
        part.engine.step()
        if part.ema is not None:
            part.ema.update()


def _judge(
    settings: StepSettings, position: Position, loss: float, norm: float, ranks: list[int], in_a_row: int
) -> None:
    """Stop all ranks, or let the step pass without an update. In fp16 an overflow is how the loss scale is found."""
    if settings.dtype == "fp16" and math.isfinite(loss) and position.loss_scale > 1.0:
        return
    where = f" on rank {', '.join(map(str, ranks))}" if ranks else ""
    if settings.nan_policy == "stop" or in_a_row > MAX_SKIPPED:
        raise HalationError(
            f"the loss is not finite at step {position.step + 1}{where} (loss {loss}, gradient norm {norm}); weights of the last "
            "checkpoint, where there is one, are good. Try a lower --lr, --grad_clip, --dtype bf16 or fp32, or --nan_policy skip"
        )


def _adapt_scale(settings: StepSettings, position: Position, finite: bool) -> None:
    """fp16's loss scale: half after an overflow, double after 2,000 good steps."""
    if settings.dtype != "fp16":
        return
    position.good_steps = position.good_steps + 1 if finite else 0
    if not finite:
        position.loss_scale = max(1.0, position.loss_scale / 2)
    elif position.good_steps % 2000 == 0:
        position.loss_scale = min(2.0**24, position.loss_scale * 2)


class _Words:
    """The few numbers that ranks share at every step, in one small reduction: loss, who is not finite, who was asked to stop, what else was asked."""

    def __init__(self, world: World) -> None:
        self.world = world

    def share(self, loss: Tensor, stop: int, save_failed: bool, asked: int) -> tuple[float, int, bool, list[int], int]:
        world = self.world
        numbers = torch.zeros(3 + 2 * world.size, dtype=torch.float64, device=world.device)
        numbers[0] = loss
        numbers[1] = float(save_failed)
        numbers[2 + world.rank] = (~torch.isfinite(loss)).double()
        numbers[2 + world.size + world.rank] = stop
        numbers[-1] = asked
        shared = world.sum(numbers).tolist()
        not_finite = [rank for rank in range(world.size) if shared[2 + rank] > 0]
        return shared[0], int(max(shared[2 + world.size : -1])), shared[1] > 0, not_finite, int(shared[-1])
