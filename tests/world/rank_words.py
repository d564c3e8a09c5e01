"""What a rank of the pool does in the tests of words, vigils and engines."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from torch import nn

from halation.errors import HalationError, InputError, RankFailure
from halation.world.engines import adamw, fill_optimizer, optimizer_pieces, piece, spread
from halation.world.ranks import Vigil, World, check_ranks_agree, on_first

WORDS: list[Any] = ["", "ä" * 1000, {"日本": [1, None, True]}, "🙂\u0000\n"]


def exchange_all(world: World) -> list[list[Any]]:
    return [world.exchange(WORDS[(world.rank + turn) % len(WORDS)]) for turn in range(len(WORDS))]


def from_first(world: World) -> Any:
    return world.from_first({"rank": world.rank})


def on_first_value(world: World) -> Any:
    return on_first(world, "a value", lambda _beat: [world.rank, "Straße"], 5.0)


def on_first_error(world: World) -> tuple[str, int]:
    def refuse(_beat: Any) -> None:
        raise InputError("found", "expected", "action")

    try:
        on_first(world, "an error", refuse, 5.0)
    except HalationError as error:
        return str(error), error.exit_code
    return "no error", 0


def on_first_slowly(world: World, beats: int, pause_s: float) -> tuple[Any, float]:
    """Rank 0 works longer than the timeout, but says so all the time."""

    def work(beat: Any) -> str:
        for _ in range(beats):
            time.sleep(pause_s)
            beat()
        return "done"

    began = time.monotonic()
    return on_first(world, "slow work", work, 1.0), time.monotonic() - began


def meet(world: World, timeout_s: float, idle: dict[int, str]) -> tuple[str, float]:
    """All ranks work and meet, but the idle ones sleep, stop or die on the way; what this rank was told, and when."""
    began = time.monotonic()
    try:
        with Vigil(world, "a test", timeout_s) as vigil:
            for _ in range(3):
                vigil.beat()
                time.sleep(0.1)
            what = idle.get(world.rank)
            if what == "sleep":
                doze_off()
            elif what == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            words = vigil.finish(world.rank)
    except RankFailure as failure:
        return str(failure), time.monotonic() - began
    return str(words), time.monotonic() - began


def doze_off() -> None:
    time.sleep(5.0)


def blame(world: World) -> str:
    """Rank 1 has come one beat less far than the others when rank 0 asks who is behind."""
    with Vigil(world, "a forward", 5.0) as vigil:
        for _ in range(3 if world.rank == 1 else 4):
            vigil.beat()
        time.sleep(1.2)
        found = vigil.blame()
        vigil.finish("")
    return found


def agree(world: World, broken: int | None) -> str:
    tensors = {"a": torch.ones(3), "b": torch.arange(5.0), "flags": torch.tensor([True, False])}
    if world.rank == broken:
        tensors["b"][3] = torch.nextafter(torch.tensor(3.0), torch.tensor(4.0))
    try:
        check_ranks_agree(world, tensors.items(), "at step 7")
    except RankFailure as failure:
        return str(failure)
    return "agreed"


def pieces_come_back(world: World, engine_name: str) -> bool:
    """Train two steps, take weights and optimizer apart, and put them into a fresh optimizer; shapes of one row included."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    engine = spread(engine_name, world, module, [module[0]])
    optimizer = adamw(engine, 0.1, (0.9, 0.99), 0.01)
    for _ in range(2):
        engine.trained(torch.ones(2, 5) * (world.rank + 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    rows = world.exchange({name: [p.start, *p.local.shape] for name, p in model_pieces(engine).items()})
    for name, parameter in engine.named_parameters():
        if engine.sharded and sum(row[name][1] for row in rows) != parameter.shape[0]:
            return False
    saved = {name: p.local.clone() for name, p in optimizer_pieces(engine, optimizer).items()}
    fresh = adamw(engine, 0.1, (0.9, 0.99), 0.01)
    fill_optimizer(engine, fresh, lambda name, _start, _rows: saved[name].clone())
    found = optimizer_pieces(engine, fresh)
    return sorted(found) == sorted(saved) and all(torch.equal(found[name].local, saved[name]) for name in saved)


def model_pieces(engine: Any) -> dict[str, Any]:
    return {name: piece(parameter.detach()) for name, parameter in engine.named_parameters()}


def single_engine(world: World) -> str:
    try:
        return spread("single", world, nn.Linear(2, 2), []).name
    except InputError as error:
        return str(error)


def meet_or_raise(world: World, timeout_s: float, idle: dict[int, str]) -> None:
    message, _ = meet(world, timeout_s, idle)
    if message.startswith("rank "):
        raise RankFailure(message)
