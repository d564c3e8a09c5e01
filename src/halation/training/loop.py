"""The training loop: a generator that takes a step for each batch and yields a report."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from halation.distributed.engines.ddp_fsdp import Engine
from halation.distributed.world import World
from halation.errors import HalationError
from halation.fault_injection import fault_point
from halation.flow.ema import Ema
from halation.models.denoiser import TrainedModule
from halation.models.dtypes import DTYPES

MAX_SKIPPED_STEPS = 20
_STORED_AS = {"num_images": "pictures"}
"""Names in a checkpoint that differ from those in code."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One micro-batch on the device; `weight` is 0 for padding rows."""

    x0: Tensor
    noise: Tensor
    t: Tensor
    condition: dict[str, Tensor]
    weight: Tensor
    step: int = 0
    """The step it belongs to, counted from 0: the same number on all ranks."""
    extra: dict[str, Tensor] = field(default_factory=dict)
    """Further inputs of the objective, one row per image."""


Objective = Callable[[nn.Module, MicroBatch], Tensor]
"""Takes a module and a micro-batch, returns one loss per row."""


@dataclass(frozen=True, kw_only=True)
class TrainedNetwork:
    """A trained network with its optimizer. Most runs have only one, called MODEL."""

    engine: Engine
    objective: Objective | None = None
    """Objective of the steps in which this network comes first; None if it only follows another network."""
    ema: Ema | None = None
    lr: float | None = None
    """Overrides the learning rate of the settings."""


MODEL = "model"


def only_model(step: int) -> tuple[str, ...]:
    """The active networks of a run with one network."""
    return (MODEL,)


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """Settings of a step, besides the batch."""

    global_batch: int
    lr: float
    warmup_steps: int
    decay_steps: int
    grad_clip: float
    dtype: str
    nan_policy: str

    def lr_at(self, step: int) -> float:
        """Linear warm-up, then constant or a cosine to zero; `step` counts from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.decay_steps == 0:
            return self.lr
        done = min((step - self.warmup_steps) / self.decay_steps, 1.0)
        return self.lr * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(kw_only=True)
class TrainState:
    """Progress of a run; every checkpoint holds all of it."""

    step: int = 0
    num_images: int = 0
    loss_scale: float = 1.0
    good_steps: int = 0
    skipped: int = 0

    def update_loss_scale(self, finite: bool) -> None:
        """Update fp16's loss scale: half after an overflow, double after 2,000 good steps."""
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.loss_scale = max(1.0, self.loss_scale / 2)
        elif self.good_steps % 2000 == 0:
            self.loss_scale = min(2.0**24, self.loss_scale * 2)

    def as_json(self) -> dict[str, Any]:
        """Return the state as a checkpoint stores it."""
        values = asdict(self)
        return {_STORED_AS.get(name, name): value for name, value in values.items()}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> TrainState:
        """Read the state that a checkpoint stores."""
        names = {key: name for name, key in _STORED_AS.items()}
        return cls(**{names.get(key, key): value for key, value in stored.items()})


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The result of a step, the same on all ranks."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    data_s: float
    skipped: bool
    stop_signal: int
    save_failed: bool
    requests: int = 0
    """Requests that rank 0 received before this step, encoded by the caller as a number."""


def mixed_precision(device: torch.device, dtype: str) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if dtype == "fp32" else torch.autocast(device.type, DTYPES[dtype])


def train_steps(
    world: World,
    networks: Mapping[str, TrainedNetwork],
    batches: Iterable[Sequence[MicroBatch]],
    settings: StepSettings,
    train_state: TrainState,
    stop: Callable[[], int],
    save_failed: Callable[[], bool],
    before_update: Callable[[], None] = lambda: None,
    active_networks: Callable[[int], Sequence[str]] = only_model,
    poll_requests: Callable[[], int] = lambda: 0,
) -> Iterator[StepReport]:
    """Run one step for each list of micro-batches and yield its report.

    All decisions depend only on values that all ranks share. `active_networks` names the networks that a step (counted
    from 0) updates; the first one has the objective. `poll_requests` returns a number on rank 0 and 0 elsewhere; all
    ranks get it in the report of the same step.
    """
    reduction = _StepReduction(world)
    skipped_in_a_row = 0
    waiting_since = time.perf_counter()
    for micro_batches in batches:
        start_time = time.perf_counter()
        lr = settings.lr_at(train_state.step)
        active = [networks[name] for name in active_networks(train_state.step)]
        for network in active:
            network.engine.set_lr(lr if network.lr is None else network.lr * lr / settings.lr)
        local_loss = _compute_gradients(world, active, micro_batches, settings, train_state.loss_scale)
        # Launched before the loss is read, so that the GPU does not idle between the two.
        norms = [part.engine.clip_grad_norm(settings.grad_clip, train_state.loss_scale) for part in active]
        loss, stop_signal, failed, not_finite, requests = reduction.all_reduce(
            local_loss, stop(), save_failed(), poll_requests()
        )
        norm = math.hypot(*map(float, norms))
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            before_update()  # a save may still be reading the weights
            for network in active:
                network.engine.step()
                if network.ema is not None:
                    network.ema.update()
            skipped_in_a_row = 0
        else:
            skipped_in_a_row += 1
            train_state.skipped += 1
            _handle_nonfinite(settings, train_state, loss, norm, not_finite, skipped_in_a_row)
        for network in active:
            network.engine.zero_grad()
        if settings.dtype == "fp16":
            train_state.update_loss_scale(finite)
        train_state.step += 1
        train_state.num_images += settings.global_batch
        fault_point("train.step")
        yield StepReport(
            step=train_state.step,
            loss=loss,
            grad_norm=norm,
            lr=lr,
            data_s=start_time - waiting_since,
            skipped=not finite,
            stop_signal=stop_signal,
            save_failed=failed,
            requests=requests,
        )
        waiting_since = time.perf_counter()


def _compute_gradients(
    world: World,
    active: Sequence[TrainedNetwork],
    micro_batches: Sequence[MicroBatch],
    settings: StepSettings,
    scale: float,
) -> Tensor:
    """Compute gradients of the global batch's mean loss; return this rank's share of it."""
    leader = active[0]
    assert leader.objective is not None, "the first active network must have an objective"
    total = torch.zeros((), device=world.device)
    for number, micro_batch in enumerate(micro_batches):
        with contextlib.ExitStack() as stack:
            for network in active:
                stack.enter_context(network.engine.accumulate(last=number == len(micro_batches) - 1))
            with mixed_precision(world.device, settings.dtype):
                losses = leader.objective(leader.engine.wrapped_module, micro_batch)
            share = (losses.float() * micro_batch.weight).sum() / settings.global_batch
            # Engines divide by the number of ranks, but a share is already a part of the global mean.
            leader.engine.backward(share * (world.size * scale))
        total = total + share.detach()
    return total


def _handle_nonfinite(
    settings: StepSettings, train_state: TrainState, loss: float, norm: float, ranks: list[int], num_in_a_row: int
) -> None:
    """Stop all ranks, or skip the update. In fp16, overflows only lower the loss scale."""
    if settings.dtype == "fp16" and math.isfinite(loss) and train_state.loss_scale > 1.0:
        return
    where = f" on rank {', '.join(map(str, ranks))}" if ranks else ""
    if settings.nan_policy == "stop" or num_in_a_row > MAX_SKIPPED_STEPS:
        raise HalationError(
            f"the loss is not finite at step {train_state.step + 1}{where} (loss {loss}, gradient norm {norm}); "
            "the last checkpoint, if there is one, is not affected. "
            "Try a lower --lr, --grad_clip, --dtype bf16 or fp32, or --nan_policy skip"
        )


class _StepReduction:
    """The status that all ranks reduce at each step, in one small collective.

    It holds the loss, the ranks with a loss that is not finite, stop signals, failed saves and requests.
    """

    def __init__(self, world: World) -> None:
        self.world = world

    def all_reduce(
        self, loss: Tensor, stop_signal: int, save_failed: bool, requests: int
    ) -> tuple[float, int, bool, list[int], int]:
        world = self.world
        numbers = torch.zeros(3 + 2 * world.size, dtype=torch.float64, device=world.device)
        numbers[0] = loss
        numbers[1] = float(save_failed)
        numbers[2 + world.rank] = (~torch.isfinite(loss)).double()
        numbers[2 + world.size + world.rank] = stop_signal
        numbers[-1] = requests
        shared = world.all_reduce_sum(numbers).tolist()
        not_finite = [rank for rank in range(world.size) if shared[2 + rank] > 0]
        return shared[0], int(max(shared[2 + world.size : -1])), shared[1] > 0, not_finite, int(shared[-1])


def denoising_objective(denoiser: TrainedModule) -> Objective:
    """Squared error of the family's prediction (velocity, noise or v) on its noise path."""
    path = denoiser.noise_path

    def losses(module: nn.Module, rows: MicroBatch) -> Tensor:
        x = path.add_noise(rows.x0, rows.noise, rows.t)
        prediction = denoiser.forward(module, x, rows.t, rows.condition)
        return (prediction.float() - path.target(rows.x0, rows.noise, rows.t)).square().flatten(1).mean(1)

    return losses
