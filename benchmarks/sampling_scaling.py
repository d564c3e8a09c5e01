"""Scaling of samples at a checkpoint with the number of ranks.

The goal: on N ranks, eight prompts of ten steps take at most 1.15 x ceil(8 / N) / 8 of the time of one rank. The
sampling code is that of training; only the model's forward sleeps instead of computing, as if each rank had its own
device. All worlds are in the same processes and sample in turns. `sharded` is sampling with fsdp and ZeRO-3: every
forward is a collective, and a rank without a prompt runs a dummy batch.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import inputs, measure, shipped
from halation.models.dit.denoiser import DiTDenoiser

GOAL = 1.15
NUM_PROMPTS = 8
SIZE = 32
PROMPTS = tuple(
    f"a {weather} street with {num} cars" for weather in ("sunny", "rainy") for num in ("no", "one", "two", "three")
)
RESULT = "result.json"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One size of the benchmark."""

    worlds: tuple[int, ...]
    steps: int
    sleep_s: float
    rounds: int


FULL = Setting(worlds=(1, 2, 3, 4, 8), steps=10, sleep_s=0.1, rounds=5)
SMALL = Setting(worlds=(1, 2, 3), steps=5, sleep_s=0.1, rounds=2)


def ideal(num_ranks: int) -> float:
    """Return the ideal share of one rank's time, in rounds of one image per rank."""
    return -(-NUM_PROMPTS // num_ranks) / NUM_PROMPTS


class Sleeping(DiTDenoiser):
    """A DiT whose forward sleeps and returns x / 2, so that every seed gives another image."""

    sleep_s = 0.0

    def forward(self, module: nn.Module, x: Tensor, t: Tensor, condition: dict[str, Tensor]) -> Tensor:
        time.sleep(self.sleep_s)
        return x / 2


def make_model(setting: Setting) -> Sleeping:
    from halation.models.dit.denoiser import create_dit

    plain = create_dit("tiny", height=SIZE, width=SIZE, captions=PROMPTS)
    result = Sleeping(config=plain.config, space=plain.space, tokenizer=plain.tokenizer)
    result.init_weights(0)
    result.sleep_s = setting.sleep_s
    return result


class Drawings:
    """Samples on one rank in all worlds it belongs to; a world of n has the first n ranks."""

    def __init__(self, setting: Setting, world: Any, place: Path) -> None:
        import torch.distributed as dist

        from halation.distributed.world import World
        from halation.sampling.all_rank_sampler import SampleSettings

        self.world, self.place, self.number = world, place, 0
        self.denoiser = make_model(setting)
        self.settings = SampleSettings(
            prompts=PROMPTS, height=SIZE, width=SIZE, steps=setting.steps, seed=42, same_seed=False, sampler="multistep",
            guidance_scale=3.0, batch_size=1, dtype="fp32",
        )  # fmt: skip
        self.worlds: dict[int, Any] = {}
        for size in setting.worlds:
            group = dist.new_group(list(range(size)), backend="gloo")  # every rank must create every group
            if world.rank < size:
                self.worlds[size] = World(
                    rank=world.rank,
                    size=size,
                    local_rank=world.rank,
                    device=world.device,
                    store=dist.PrefixStore(f"of_{size}", world.store),
                    control=group,
                    timeout_s=600,
                )

    def draw(self, size: int, *, sharded: bool) -> float:
        """Return seconds from the common start until all ranks of this world have all rows.

        Ranks outside the world wait.
        """
        import torch.distributed as dist

        from halation.sampling.all_rank_sampler import DenoiserSampler
        from halation.sampling.sample_folder import SampleFolder

        self.number += 1
        dist.barrier()
        began = time.perf_counter()
        if size in self.worlds:
            drawing = DenoiserSampler(
                self.worlds[size], self.denoiser, self.settings, sharded=sharded, timeout_s=600, stop=lambda: 0
            )
            rows = drawing.run(SampleFolder(folder=self.place / f"{self.number:03d}_{size}"), f"number {self.number}")
            assert all(row["state"] == "done" for row in rows), rows
        took = time.perf_counter() - began
        dist.barrier()
        return took


def as_rank(name: str, place: Path) -> None:
    """Run one rank: all worlds in turn, first with independent ranks, then as if sharded."""
    import torch.distributed as dist

    from halation.distributed.world import init_from_env

    torch.set_num_threads(1)
    setting = FULL if name == "full" else SMALL
    world = init_from_env(torch.device("cpu"))
    drawings = Drawings(setting, world, place)
    found = {}
    for kind in ("apart", "sharded"):
        turns: dict[str, Callable[[], float]] = {
            str(size): lambda size=size, kind=kind: drawings.draw(size, sharded=kind == "sharded")  # type: ignore[misc]
            for size in setting.worlds
        }
        turns[str(setting.worlds[-1])]()  # warm-up: the first sampling of a process imports modules
        found[kind] = measure.interleaved(turns, setting.rounds)
        if world.is_rank_zero:
            measure.say(f"{kind}: { ({size: measure.spread(times) for size, times in found[kind].items()}) }")
    if world.is_rank_zero:
        (place / RESULT).write_text(json.dumps(found))
    dist.barrier()
    world.close()


def all_ranks(setting: Setting, name: str, place: Path) -> dict[str, dict[str, list[float]]]:
    """Start the ranks of the largest world and return the result of rank 0."""
    command = [sys.executable, "-m", "benchmarks.sampling_scaling", "--as_rank", name, str(place)]
    num_ranks = setting.worlds[-1]
    ranks = []
    for rank in range(num_ranks):
        extra = {
            "RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank), "HALATION_RENDEZVOUS": str(place),
            "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        ranks.append(subprocess.Popen(command, env=shipped.environment(extra), cwd=Path(__file__).resolve().parents[1]))
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise SystemExit(f"the ranks of a world of {num_ranks} exited with {codes}")
    result: dict[str, dict[str, list[float]]] = json.loads((place / RESULT).read_text())
    return result


def compared(place: Path) -> str:
    """Compare the image files of all worlds, which must be byte-identical."""
    drawings = [
        {path.name: path.read_bytes() for path in folder.glob("*.png")}
        for folder in sorted(place.iterdir())
        if folder.is_dir()
    ]
    first = drawings[0]
    same = len(set(first.values())) == NUM_PROMPTS and all(drawing == first for drawing in drawings)
    return f"{len(drawings)} drawings of {len(first)} {'byte-identical' if same else 'DIFFERENT'}"


def benchmark(setting: Setting, name: str, work: Path) -> measure.Report:
    place = Path(tempfile.mkdtemp(prefix="worlds_", dir=work))
    found = all_ranks(setting, name, place)
    check = compared(place)
    rows = []
    costs = []
    for kind, times in found.items():
        middle = measure.medians(times)
        alone = middle["1"]
        for size in setting.worlds[1:]:
            limit = alone * ideal(size)
            costs.append(middle[str(size)] / limit)
            note = f"{costs[-1]:.3f} of the ideal, goal at most {GOAL}{'' if costs[-1] <= GOAL else ': MISSED'}"
            rows.append(
                measure.Row(
                    case=f"{size} ranks, {kind}", ours=middle[str(size)], peer=alone, unit="s", limit=limit, check=check,
                    equality="E0", note=note,
                )
            )  # fmt: skip
    facts = measure.machine() | {
        "prompts": NUM_PROMPTS, "steps": setting.steps, "sleep_s": setting.sleep_s, "worst": round(max(costs), 3), "goal": GOAL,
    }  # fmt: skip
    return measure.Report(name="sampling_scaling", rows=tuple(rows), facts=facts)


def main(arguments: list[str] | None = None) -> measure.Report:
    asked = measure.parser(__doc__ or "").parse_args(arguments)
    with inputs.workplace(asked.work) as work:
        report = benchmark(FULL if asked.size == "full" else SMALL, asked.size, work)
    measure.finish(report, asked.output)
    if any("DIFFERENT" in row.check for row in report.rows):
        raise SystemExit("the number of ranks changed an image")
    return report


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] == "--as_rank":
        with contextlib.redirect_stdout(sys.stderr):
            as_rank(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
