"""Small training loops for ranks: of an engine, of a user with RankSampler, of a session."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halation import RankSampler
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
from halation.training.session import TrainingSession

PROMPTS = ("a red car", "a blue car", "rain", "a tree", "night")


# A session that compares its state before and after sampling


class StateCheckingSession(TrainingSession):
    """Assert that the tasks after a save leave `_visible` unchanged; subclasses define it for their engine."""

    num_looks = 0

    def _after_save(self, step: int) -> None:
        before = self._visible()
        super()._after_save(step)
        assert self._visible() == before
        self.num_looks += 1

    def _visible(self) -> dict[str, Any]:
        raise AssertionError("a subclass defines _visible")


# A small module trained by an engine


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
    """A small training with fixed batches, step by step: denoiser, objective and loader in one."""

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


def engine_losses(
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


# A loop in a user's script that calls RankSampler


def network() -> nn.Sequential:
    """A network with dropout, a part in another mode, and a norm whose buffers DDP would broadcast."""
    generator = torch.Generator().manual_seed(0)
    made = nn.Sequential(nn.Linear(12, 16), nn.Dropout(0.3), nn.BatchNorm1d(16), nn.Linear(16, 12)).train()
    for weight in made.parameters():
        weight.data = 0.2 * torch.randn(weight.shape, generator=generator)
    made[2].eval()
    return made


def drawer(model: nn.Module, spoilt: str = "", sloppy: bool = False, amp: bool = False) -> Any:
    """draw(prompt, generator): a 2 x 2 image from noise through the model; `sloppy` uses global RNGs."""

    def draw(prompt: str, generator: torch.Generator) -> torch.Tensor:
        if prompt == spoilt:
            raise ValueError(f"no image for {prompt}")
        noise = torch.randn(1, 12, generator=None if sloppy else generator)
        if sloppy:
            noise = noise + random.random() + torch.from_numpy(np.random.randn(1, 12)).float()
        noise = noise + len(prompt) / 10
        random.random(), np.random.rand(), torch.rand(3)
        assert not torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
        assert not any(part.training for part in model.modules())
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            image = torch.sigmoid(4 * model(noise)).float().reshape(3, 2, 2)
        model.train()  # as many a draw does that was written for a loop without a sampler
        return image

    return draw


def user_loop_losses(world: World, out: str, every: int, spread: str = "ddp", autocast: bool = False) -> list[Any]:
    """Losses of four steps, then weights and random states; with `every` 0 nothing is sampled."""
    random.seed(1), np.random.seed(2), torch.manual_seed(3 + world.rank)
    inside = network()
    model: nn.Module = DistributedDataParallel(inside) if spread == "ddp" else inside
    optimizer = torch.optim.SGD(inside.parameters(), lr=0.1)
    sampler = RankSampler(drawer(inside, amp=autocast), PROMPTS, out, 7, model=model, every=max(every, 1))
    seen: list[Any] = []
    for step in range(1, 5):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if every and step % 2:  # with an empty cache of casts
                assert all(sample.state == "done" for sample in sampler(step))
            warm = model(torch.randn(4, 12))
            if every and not step % 2:  # with a full one
                assert all(sample.state == "done" for sample in sampler(step))
            batch = torch.randn(4, 12) + random.random() + np.random.rand()
            loss = (model(batch) - batch).float().square().mean() + 0.1 * warm.float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    modes = [module.training for module in model.modules()]
    weights = [weight.detach().numpy().tobytes() for weight in inside.parameters()]
    hooks = [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules()]
    return [
        seen,
        modes,
        weights,
        hooks,
        torch.is_grad_enabled(),
        random.random(),
        np.random.rand(),
        torch.rand(2).tolist(),
    ]


def drawn(world: World, out: str, prompts: tuple[str, ...], step: int = 3, **options: Any) -> list[tuple[Any, ...]]:
    """One call of a sampler without training; the samples as each rank gets them."""
    spoilt, sloppy = options.pop("spoilt", ""), options.pop("sloppy", False)
    model = network()
    sampler = RankSampler(drawer(model, spoilt, sloppy), prompts, out, 7, model=model, **options)
    samples = sampler(step)
    dist.barrier()  # the trainer's group is whole afterwards
    return [(s.index, s.prompt, s.seed, s.state, s.file and s.file.name, s.reason, s.rank) for s in samples]


def drawn_sharded(world: World, out: str, prompts: tuple[str, ...], spoilt: str = "") -> tuple[list[Any], list[Any]]:
    """The same with a sharded model between training steps; its weights are doubled while drawing."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
    mesh = init_device_mesh("cpu", (world.size,))
    for part in (model[1], model):  # the first layer is the root's, which stays whole after a forward without gradients
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @contextlib.contextmanager
    def doubled() -> Iterator[None]:
        for weight in model.parameters():
            weight.data.mul_(2.0)
        yield
        for weight in model.parameters():
            weight.data.mul_(0.5)

    def train() -> float:
        loss = model(torch.ones(2, 12)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    sampler = RankSampler(drawer(model, spoilt), prompts, out, 7, model=model, weights=doubled)
    first = train()
    samples = sampler(1)
    return [(s.index, s.state, s.rank) for s in samples], [first, train(), train()]


def drawn_zero_3(world: World, out: str, prompts: tuple[str, ...]) -> tuple[list[Any], list[bytes]]:
    """The same from DeepSpeed's ZeRO-3, and the bits of its weights afterwards."""
    module = network()
    known = EngineSettings(zero_stage=3, global_batch=6, num_micro_batches=1, grad_clip=0.5)
    engine = build_engine("deepspeed", world, module, [module[0], module[3]], known)
    engine.prepare_optimizer(0.05, (0.9, 0.99), 0.01)
    engine.warm_up(engine.wrapped_module(torch.ones(2, 12)).square().sum())
    samples = RankSampler(drawer(module), prompts, out, 7, model=engine.wrapped_module)(1)
    return [(s.index, s.state, s.rank) for s in samples], [
        tensor.detach().numpy().tobytes() for tensor in engine.master_weights().values()
    ]


class Failing(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled() and dist.get_rank() == 1:
            raise ValueError("a layer broke")
        return super().forward(input)


def failing_inside(world: World, out: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(Failing(12, 12), nn.Linear(12, 12))
    for part in (*model, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (world.size,)))
    RankSampler(drawer(model), PROMPTS, out, model=model, timeout_s=20.0)(1)


def unsampled_losses(world: World) -> list[float]:
    return drawn_sharded(world, "/dev/null/nowhere", ())[1]


def drawn_by_wrapper(world: World, out: str) -> list[tuple[str, str]]:
    model = DistributedDataParallel(network())
    samples = RankSampler(drawer(model), PROMPTS, out, model=model)(0)
    return [(sample.state, sample.reason) for sample in samples]


def drawn_slowly(world: World, out: str) -> list[str]:
    """Rank 1 takes twice as long as the trainer's group has patience."""

    def draw(prompt: str, generator: torch.Generator) -> np.ndarray:
        time.sleep(2.0 if world.rank == 1 else 0.0)
        return np.zeros((2, 2, 3), np.uint8)

    samples = RankSampler(draw, PROMPTS[:2], out, timeout_s=30.0)(1)
    return [sample.state for sample in samples]


def drawn_after_validation(world: World, out: str) -> list[tuple[Any, ...]]:
    """One prompt, after a forward without a backward, which leaves all weights of a root's own group whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
    fully_shard(model, mesh=init_device_mesh("cpu", (world.size,)))
    with torch.no_grad():
        model(torch.ones(2, 12))
    samples = RankSampler(drawer(model), PROMPTS[:1], out, model=model, timeout_s=20.0)(1)
    return [(s.index, s.state, s.rank) for s in samples]


def failing_between(world: World, out: str, step: int, nested: bool = True) -> list[tuple[str, str]]:
    """Rank 1 fails after the first of two forwards at step 2, after the second at step 3.

    Nested shards make the others wait in the second forward; the root's own stay whole, so that the others finish
    theirs.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
    for part in (model[1], model) if nested else (model,):
        fully_shard(part, mesh=init_device_mesh("cpu", (world.size,)))
    now = 1

    def draw(prompt: str, generator: torch.Generator) -> torch.Tensor:
        value = torch.zeros(1, 12)
        for forward in (1, 2):
            value = model(value)
            if world.rank == 1 and now == forward + 1:
                raise ValueError(f"not finite after forward {forward}")
        return torch.sigmoid(value).reshape(3, 2, 2)

    sampler = RankSampler(draw, PROMPTS[:2], out, model=model, timeout_s=20.0)
    sampler(1)
    now = step
    return [(sample.state, sample.reason) for sample in sampler(step)]


def hanging(world: World, out: str) -> None:
    def draw(prompt: str, generator: torch.Generator) -> np.ndarray:
        if world.rank == 1:
            time.sleep(3.4)
            os._exit(0)  # the others have given up by now
        return np.zeros((2, 2, 3), np.uint8)

    RankSampler(draw, PROMPTS[:2], out, timeout_s=2.0)(1)


def join_by_tcp(folder: Path, rank: int, size: int) -> None:
    """A default group as torchrun, mp.spawn and own launchers make it: rank 0 hosts the store."""
    dist.destroy_process_group()
    port = folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        (folder / "port.tmp").write_text(str(store.port))
        (folder / "port.tmp").rename(port)
    else:
        wait_for(port)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def wait_for(*paths: Path, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not all(path.exists() for path in paths) and time.monotonic() < deadline:
        time.sleep(0.02)


WAYS_TO_LEAVE = {
    "exit": lambda: sys.exit(3),
    "BaseException": lambda: exec("raise BaseException('no such kind')"),
    "SIGINT": lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(5)),
    "SIGTERM": lambda: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(5)),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "_exit": lambda: os._exit(0),
}


def leaving(world: World, out: str, who: int, how: str, where: str = "draw") -> None:
    """One rank leaves; each other rank writes a file with its error and the seconds until it came.

    `where`: inside `draw`; `between` two calls; in a draw whose `forward` is sharded; in a draw, but its process lives
    `on`; or in a draw while a `worker` that the rank forked lives on.
    """
    folder = Path(out)
    size, rank = world.size, world.rank
    join_by_tcp(folder, rank, size)
    model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
    if where == "forward":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        for part in (*model, model):
            fully_shard(part, mesh=init_device_mesh("cpu", (size,)))
    now = 0

    def leave() -> None:
        if where == "worker" and os.fork() == 0:
            time.sleep(12)
            os._exit(0)
        (folder / "left").write_text(str(time.time()))
        WAYS_TO_LEAVE[how]()

    def draw(prompt: str, generator: torch.Generator) -> torch.Tensor:
        image = torch.sigmoid(model(torch.randn(1, 12, generator=generator))).reshape(3, 2, 2)
        if now == 2 and rank == who:
            time.sleep(0.5)
            leave()
        return torch.sigmoid(model(image.reshape(1, 12))).reshape(3, 2, 2)

    sampler = RankSampler(draw, PROMPTS, folder / "run", model=model, timeout_s=100.0)
    sampler(1)
    now = 2
    if where == "between" and rank == who:
        leave()
    try:
        sampler(2)
    except BaseException as error:
        if rank == who and where == "on":
            wait_for(*(folder / f"told_{other}" for other in range(size) if other != who), timeout_s=50.0)
        if rank != who:
            after_s = time.time() - float((folder / "left").read_text())
            (folder / f"told_{rank}.tmp").write_text(json.dumps([type(error).__name__, str(error), after_s]))
            (folder / f"told_{rank}.tmp").rename(folder / f"told_{rank}")
        raise


def drawn_while_stopped(world: World, out: str) -> list[str]:
    """Rank 1 computes without giving other threads a turn, rank 2 is stopped, both for a second."""

    def draw(prompt: str, generator: torch.Generator) -> np.ndarray:
        if world.rank == 1:
            sum(range(10**8))
        if world.rank == 2:
            is_stopped = f"[ \"$(cut -d' ' -f3 /proc/{os.getpid()}/stat)\" = T ]"
            wake = f"until {is_stopped}; do sleep 0.05; done; sleep 1; kill -CONT {os.getpid()}"
            subprocess.Popen(["/bin/sh", "-c", wake])
            os.kill(os.getpid(), signal.SIGSTOP)
        return np.zeros((2, 2, 3), np.uint8)

    samples = RankSampler(draw, PROMPTS[:3], Path(out) / "run", timeout_s=60.0)(1)
    return [sample.state for sample in samples]


def drawn_with_default_device(world: World, out: str) -> list[str]:
    """The trainer has set a default device on which nothing can be computed."""
    torch.set_default_device("meta")
    try:
        samples = RankSampler(lambda *_: np.zeros((2, 2, 3), np.uint8), PROMPTS[:3], Path(out) / "run")(1)
    finally:
        torch.set_default_device(None)
    return [sample.state for sample in samples]


def told_in_long_draw(world: World, out: str) -> None:
    """Rank 1 is killed; rank 0 writes its log and the seconds to a file while its own draw goes on."""
    folder, rank = Path(out), world.rank
    join_by_tcp(folder, rank, world.size)
    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    def draw(prompt: str, generator: torch.Generator) -> np.ndarray:
        if rank == 1:
            (folder / "left").touch()
            os._exit(9)
        wait_for(folder / "left", timeout_s=50.0)
        began = time.monotonic()
        while not messages and time.monotonic() - began < 30:
            time.sleep(0.1)
        (folder / "told").write_text(json.dumps([messages, time.monotonic() - began]))
        return np.zeros((2, 2, 3), np.uint8)

    logging.getLogger("halation.distributed").addHandler(Handler())
    RankSampler(draw, PROMPTS[:2], folder / "run", timeout_s=100.0)(1)


def called_by_first_alone(world: World, out: str) -> None:
    if world.rank == 0:
        RankSampler(drawer(network()), PROMPTS, out, timeout_s=2.0)(1)


def drawn_over_damage(world: World, out: str) -> list[str]:
    """Rank 0 alone meets a record that is damaged."""
    model = network()
    sampler = RankSampler(drawer(model), PROMPTS, out, model=model, timeout_s=5.0)
    return [sample.state for step in (1, 2) for sample in sampler(step)]


def left_behind(world: World, out: str) -> tuple[list[int], list[int]]:
    """How many keys the trainer's store has, and how many groups torch knows, after each of four calls."""
    model = network()
    sampler = RankSampler(drawer(model), PROMPTS, out, model=model)
    keys, groups = [], []
    for step in range(1, 5):
        sampler(step)
        dist.barrier()
        keys.append(dist.distributed_c10d._get_default_store().num_keys())
        groups.append(len(dist.distributed_c10d._world.pg_map))
        dist.barrier()
    return keys, groups


def disagreeing(world: World, out: str) -> None:
    RankSampler(drawer(network()), PROMPTS, out)(world.rank)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix != ".json"}
