"""Duel 11: the cost of a 10.8 GB checkpoint for training, against torch.save and DCP.

A plain DiT-XL/2 trains while each side saves, so the cost of a save is measured twice: the seconds for which the call
blocks, and the seconds lost until the bytes are written, that is the call plus the extra time of the steps meanwhile.
DCP uses async_save in a thread. Everything is on the same disk. Ours hashes and fsyncs its files; the peers do neither.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import inputs, measure
from benchmarks.checkpoint_sides import Dcp, Ours, Side, State, TorchSave
from benchmarks.plain_dit import PlainTraining, Shape

NEXT_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One size of the duel."""

    shape: Shape
    batch: int
    rounds: int
    peace: int
    """Undisturbed steps before a save, to compare the steps after it with."""
    watched_s: float
    """Seconds for which steps are timed during a save; after that, training waits for the save."""
    tuned: bool


FULL = Setting(
    shape=Shape(depth=28, hidden=1152, heads=16, grid=32), batch=64, rounds=5, peace=12, watched_s=20.0, tuned=True
)
SMALL = Setting(
    shape=Shape(depth=4, hidden=256, heads=4, grid=16), batch=4, rounds=3, peace=8, watched_s=2.0, tuned=False
)


@dataclass(kw_only=True)
class Cost:
    """The cost of one save, in seconds."""

    blocked_s: float
    peace_s: float
    """The median step before it."""
    next_s: list[float]
    """The steps right after it."""
    meanwhile_s: list[float]
    """All steps until it was written, including those."""
    written_s: float

    @property
    def lost_s(self) -> float:
        return self.blocked_s + max(0.0, sum(self.meanwhile_s) - len(self.meanwhile_s) * self.peace_s)

    @property
    def slower(self) -> float:
        """The median of the steps right after it, relative to an undisturbed step."""
        return statistics.median(self.next_s) / self.peace_s

    def as_json(self) -> dict[str, Any]:
        rounded = {
            "blocked_s": round(self.blocked_s, 5),
            "lost_s": round(self.lost_s, 5),
            "peace_s": round(self.peace_s, 5),
            "written_s": round(self.written_s, 2),
            "next_steps": [round(step / self.peace_s, 3) for step in self.next_s],
            "longest_step_meanwhile": round(max(self.meanwhile_s) / self.peace_s, 3),
        }
        return rounded | {"steps_meanwhile": len(self.meanwhile_s)}


class Training:
    """Trains the plain DiT step by step; the loss is read after each step, as for logging."""

    def __init__(self, setting: Setting) -> None:
        on_gpu = torch.cuda.is_available()
        if not on_gpu:
            torch.set_num_threads(1)
        torch.set_float32_matmul_precision("high")
        self.device = torch.device("cuda:0" if on_gpu else "cpu")
        shape = setting.shape
        latents = torch.randn(512, shape.channels, shape.grid, shape.grid, device=self.device)
        self.training = PlainTraining(
            shape, latents, setting.batch, tuned=setting.tuned, compiled=setting.tuned, bf16=setting.tuned
        )
        self.side: Side | None = None
        self.training.optimizer.register_step_pre_hook(self._before_update)

    def _before_update(self, *_: Any) -> None:
        if self.side is not None:
            self.side.before_update()

    def step(self) -> float:
        began = time.perf_counter()
        float(self.training.step())
        return time.perf_counter() - began

    def state(self) -> State:
        """Return the training state: weights, EMA, both moments; 10.8 GB for DiT-XL/2."""
        model = {name: p.detach() for name, p in self.training.model.named_parameters() if p.requires_grad}
        average = dict(zip(model, self.training.average, strict=True))
        moments = self.training.optimizer.state
        optimizer = {
            f"{name}.{moment}": moments[p][moment]
            for name, p in self.training.model.named_parameters()
            for moment in ("exp_avg", "exp_avg_sq")
            if p.requires_grad
        }
        return {"model": model, "ema": average, "optimizer": optimizer}


def turn(training: Training, side: Side, setting: Setting) -> Cost:
    """Run undisturbed steps, a save, and steps until it is written."""
    peace = statistics.median([training.step() for _ in range(setting.peace)])
    state = training.state()
    training.side = side
    measure.synchronise()
    began = time.perf_counter()
    side.save(state)
    blocked = time.perf_counter() - began
    steps: list[float] = []
    while len(steps) < NEXT_STEPS or (side.busy() and time.perf_counter() - began < setting.watched_s):
        steps.append(training.step())
    side.finish()
    training.side = None
    return Cost(
        blocked_s=blocked, peace_s=peace, next_s=steps[:NEXT_STEPS], meanwhile_s=steps,
        written_s=time.perf_counter() - began,
    )  # fmt: skip


def copy_rate(device: torch.device) -> float:
    """Return bytes per second of a copy to allocated host memory (pinned, if from a GPU)."""
    size = 2**31 if device.type == "cuda" else 2**27
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return size / min(measure.seconds(lambda: target.copy_(source, non_blocking=True)) for _ in range(5))


def equal(training: Training, ours: Ours, peer: TorchSave) -> str:
    """Save one state with both sides and compare the files tensor by tensor."""
    from halation.distributed.checkpoint.reader import CheckpointReader
    from halation.distributed.checkpoint.writer import find_newest_valid

    state = training.state()
    ours.save(state)
    ours.finish()
    peer.save(state)
    found = find_newest_valid(ours.folder)
    assert found is not None
    reader = CheckpointReader(found.folder)
    theirs = torch.load(peer.file, map_location="cpu", mmap=True, weights_only=True)
    differing = [
        f"{part}/{name}"
        for part, tensors in theirs.items()
        for name, tensor in tensors.items()
        if not torch.equal(reader.read(part, name), tensor)
    ]
    if differing:
        return f"{len(differing)} tensors DIFFERENT, the first is {differing[0]}"
    return f"{sum(map(len, theirs.values()))} tensors equal bit for bit"


@dataclass(kw_only=True)
class Duel:
    """The sides that have not failed, and the costs of their saves."""

    setting: Setting
    training: Training
    sides: dict[str, Side]
    costs: dict[str, list[Cost]] = field(default_factory=dict)
    first: dict[str, Cost] = field(default_factory=dict)

    def play(self, deadline: float, on_round: Callable[[], None]) -> None:
        """Run one warm-up save per side, then the rounds; a side that fails is dropped."""
        for number in range(self.setting.rounds + 1):
            for name in list(self.sides):
                if number > 1 and time.monotonic() > deadline:
                    measure.say(f"out of time after {number - 1} of {self.setting.rounds} rounds")
                    return
                self._turn(name, number)
            if number:
                on_round()

    def _turn(self, name: str, number: int) -> None:
        try:
            cost = turn(self.training, self.sides[name], self.setting)
        except Exception:  # noqa: BLE001 - if a peer fails, the others are still measured
            measure.say(f"{name} failed and is dropped:\n{traceback.format_exc()}")
            del self.sides[name]
            self.training.side = None
            return
        which = f"round {number}" if number else "first save"
        measure.say(f"{name}, {which}: {cost.as_json()}")
        if number:
            self.costs.setdefault(name, []).append(cost)
        else:
            self.first[name] = cost

    def middle(self, name: str, value: Callable[[Cost], float]) -> float:
        return statistics.median(value(cost) for cost in self.costs[name])


def rows(duel: Duel, limit_s: float, check: str) -> tuple[measure.Row, ...]:
    found = []
    for name in duel.costs:
        if name == "ours" or "ours" not in duel.costs:
            continue
        for case, value, limit in (
            ("the call blocks", lambda cost: cost.blocked_s, limit_s),
            ("lost until written", lambda cost: cost.lost_s, limit_s),
            ("a step right after", lambda cost: cost.slower, 1.0),
        ):
            found.append(
                measure.Row(
                    case=f"{case} / {name}", ours=duel.middle("ours", value), peer=duel.middle(name, value),
                    unit="of a step" if "step" in case else "s", limit=limit, check=check, equality="E0",
                )
            )  # fmt: skip
    return tuple(found)


def report(duel: Duel, num_bytes: int, rate: float, check: str) -> measure.Report:
    facts = measure.machine() | {
        "safetensors": _version("safetensors"),
        "state_gb": round(num_bytes / 1e9, 2),
        "pinned_copy_gb_per_s": round(rate / 1e9, 2),
    }
    if "ours" in duel.costs:
        blocked = duel.middle("ours", lambda cost: cost.blocked_s)
        facts |= {
            "our_copy_gb_per_s": round(num_bytes / blocked / 1e9, 2),
            "share_of_copy": round(num_bytes / rate / blocked, 3),
            "our_longest_step_meanwhile": round(
                duel.middle("ours", lambda cost: max(cost.meanwhile_s) / cost.peace_s), 3
            ),
            "our_steps_meanwhile": round(
                duel.middle("ours", lambda cost: statistics.mean(cost.meanwhile_s) / cost.peace_s), 3
            ),
        }
    facts |= {f"first save of {name}, s": round(cost.blocked_s, 3) for name, cost in duel.first.items()}
    facts |= {f"{name} written, s": round(duel.middle(name, lambda cost: cost.written_s), 1) for name in duel.costs}
    return measure.Report(name="duel_11_checkpoint", rows=rows(duel, num_bytes / rate, check), facts=facts)


def _version(name: str) -> str:
    import importlib.metadata

    return importlib.metadata.version(name)


def sides_of(training: Training, world: Any, work: Path) -> tuple[dict[str, Side], Ours, TorchSave]:
    ours, peer = Ours(world, work / "ours", training.state()), TorchSave(work / "torch_save")
    sides: dict[str, Side] = {
        "ours": ours,
        "torch.save": peer,
        "DCP async": Dcp(work / "dcp", world.control),
    }
    return sides, ours, peer


def main(arguments: list[str] | None = None) -> measure.Report:
    from halation.distributed.world import init_from_env

    parser = measure.parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, help="turns of each side (default: 5)")
    parser.add_argument("--limit_s", type=float, default=480.0, help="start no turn after this many seconds")
    asked = parser.parse_args(arguments)
    deadline = time.monotonic() + asked.limit_s
    setting = FULL if asked.size == "full" and torch.cuda.is_available() else SMALL
    if asked.size == "full" and setting is SMALL:
        measure.say("no GPU: running the small size instead")
    if asked.rounds:
        setting = dataclasses.replace(setting, rounds=asked.rounds)
    with inputs.workplace(asked.work) as work:
        training = Training(setting)
        world = init_from_env(training.device)
        measure.say(f"first step {training.step():.1f} s, second {training.step():.3f} s")
        num_bytes = sum(t.nbytes for tensors in training.state().values() for t in tensors.values())
        rate = copy_rate(training.device)
        measure.say(f"{num_bytes / 1e9:.2f} GB of state; a copy to host memory runs at {rate / 1e9:.1f} GB/s")
        sides, ours, peer = sides_of(training, world, work)
        duel = Duel(setting=setting, training=training, sides=sides)
        duel.play(deadline, lambda: measure.write(report(duel, num_bytes, rate, "not compared"), asked.output))
        try:
            check = equal(training, ours, peer)
        except Exception:  # noqa: BLE001 - the results are valid without it
            check = "not compared"
            measure.say(traceback.format_exc())
        found = report(duel, num_bytes, rate, check)
        world.close()
    measure.finish(found, asked.output)
    if "DIFFERENT" in check:
        raise SystemExit(check)
    return found


if __name__ == "__main__":
    main()
