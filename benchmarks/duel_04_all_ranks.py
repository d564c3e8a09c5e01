"""Duel 4: eight samples on all ranks, against rank 0 alone while the others wait.

The peer is the pattern of diffusers' training examples. Both sides use the same sampling code in the same gloo world,
in turns. The models are a real tiny model and a model that mostly sleeps, as if each rank had its own device, so that
four ranks are fair on two cores. The shipped `halation sample --nproc N` is also run, to time it and to compare its
files byte for byte.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import inputs, measure, shipped

PROMPTS = tuple(
    f"a {time} street with {count} cars" for time in ("sunny", "dark") for count in ("no", "one", "two", "three")
)
RESULT = "result.json"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One size of the duel."""

    worlds: tuple[int, ...]
    image_size: int
    steps: int
    sleep_s: float
    rounds: int

    @property
    def fault(self) -> str:
        return f"sample.forward:1+:sleep={self.sleep_s}"


# The sleep must be much longer than the computation, or the shared cores are measured instead of the pattern.
FULL = Setting(worlds=(2, 4), image_size=32, steps=6, sleep_s=0.1, rounds=5)
SMALL = Setting(worlds=(2,), image_size=32, steps=4, sleep_s=0.05, rounds=2)


def model(setting: Setting, work: Path) -> Path:
    """Train a model for two steps with the shipped command; return its export."""
    run = work / "run"
    size = str(setting.image_size)
    words = [
        "train", "--output_dir", str(run), "--model", "tiny", "--image_size", size, size, "--n_steps", "2", "--batch_size", "4",
        "--no_sample", "--validation_images", "0", "--sample_steps", str(setting.steps), "--report_to", "none", "--nproc", "1",
    ]  # fmt: skip
    shipped.halation(words, work / "train.log", CPU)
    return run / "export"


CPU = {"CUDA_VISIBLE_DEVICES": ""}


def by_command(setting: Setting, export: Path, size: int, work: Path) -> tuple[float, dict[str, bytes]]:
    """Run `halation sample --nproc SIZE`; return the busiest rank's seconds and the files."""
    folder = work / f"command_{size}"
    words = [
        "sample",
        "--checkpoint",
        str(export),
        "--output_dir",
        str(folder),
        "--nproc",
        str(size),
        "--prompts",
        *PROMPTS,
    ]
    shipped.halation(words, work / "sample.log", CPU | {"HALATION_FAULT": setting.fault})
    by_rank: dict[int, float] = {}
    for row in json.loads((folder / "samples.json").read_text())["samples"]:
        by_rank[row["rank"]] = by_rank.get(row["rank"], 0.0) + row["seconds"]
    return max(by_rank.values()), {path.name: path.read_bytes() for path in folder.glob("sample_*.png")}


def world_of(size: int, setting: Setting, name: str, export: Path, work: Path) -> dict[str, Any]:
    """Start the ranks of one world of this benchmark and return the result of rank 0."""
    place = Path(tempfile.mkdtemp(prefix=f"world_{size}_", dir=work))
    command = [sys.executable, "-m", "benchmarks.duel_04_all_ranks", "--as_rank", name, str(export), str(place)]
    ranks = []
    for rank in range(size):
        extra = CPU | {
            "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "HALATION_RENDEZVOUS": str(place),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        ranks.append(subprocess.Popen(command, env=shipped.environment(extra), cwd=Path(__file__).resolve().parents[1]))
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise SystemExit(f"the ranks of a world of {size} exited with {codes}")
    result: dict[str, Any] = json.loads((place / RESULT).read_text())
    return result


def as_rank(name: str, export: Path, place: Path) -> None:
    """Run one rank of a world: both patterns in turn, with the real and the sleeping model."""
    import torch
    import torch.distributed as dist

    from halation.distributed.world import World, init_from_env
    from halation.models.checkpoint_loading import load_denoiser

    torch.set_num_threads(1)
    setting = FULL if name == "full" else SMALL
    world = init_from_env(torch.device("cpu"))
    alone = dist.new_group([0], backend="gloo")
    solo = None
    if world.is_rank_zero:
        assert alone is not None
        solo = World(
            rank=0, size=1, local_rank=0, device=world.device, store=dist.HashStore(), control=alone, timeout_s=600
        )
    patterns = Patterns(setting, world, solo, load_denoiser(export, raw=False), place)
    found = {}
    for kind, fault in (("real", ""), ("sleeping", setting.fault)):
        os.environ["HALATION_FAULT"] = fault
        patterns.all_ranks()
        turns: dict[str, Callable[[], float]] = {
            "ours": lambda: measure.seconds(patterns.all_ranks),
            "peer": lambda: measure.seconds(patterns.rank_0_alone),
        }
        found[kind] = measure.interleaved(turns, setting.rounds)
    if world.is_rank_zero:
        (place / RESULT).write_text(json.dumps(found))
    dist.barrier()
    world.close()


class Patterns:
    """The two ways to sample the same specs in one world."""

    def __init__(self, setting: Setting, world: Any, solo: Any, denoiser: Any, place: Path) -> None:
        from halation.sampling.all_rank_sampler import SampleSettings

        self.world, self.solo, self.denoiser, self.place = world, solo, denoiser, place
        self.number = 0
        self.settings = SampleSettings(
            prompts=PROMPTS, height=setting.image_size, width=setting.image_size, steps=setting.steps, seed=42, same_seed=False,
            sampler="multistep", guidance_scale=3.0, batch_size=1, dtype="fp32",
        )  # fmt: skip

    def _draw(self, world: Any) -> None:
        from halation.sampling.all_rank_sampler import DenoiserSampler
        from halation.sampling.sample_folder import SampleFolder

        drawing = DenoiserSampler(world, self.denoiser, self.settings, sharded=False, timeout_s=600, stop=lambda: 0)
        rows = drawing.run(SampleFolder(folder=self.place / f"drawing_{self.number}"), f"{self.number}")
        assert all(row["state"] == "done" for row in rows), rows

    def _together(self) -> None:
        import torch.distributed as dist

        self.number += 1
        dist.barrier()

    def all_ranks(self) -> None:
        self._together()
        self._draw(self.world)

    def rank_0_alone(self) -> None:
        """Run the rank-0 pattern: rank 0 samples everything, the others wait at a barrier."""
        import torch.distributed as dist

        self._together()
        if self.solo is not None:
            self._draw(self.solo)
        dist.barrier()


def duel(setting: Setting, name: str, work: Path) -> measure.Report:
    measure.say("training a tiny model for two steps")
    export = model(setting, work)
    command = {}
    files: dict[int, dict[str, bytes]] = {}
    for size in (1, *setting.worlds):
        command[size], files[size] = by_command(setting, export, size, work)
        measure.say(f"halation sample --nproc {size}, sleeping model: {command[size]:.2f} s")
    rows = []
    for size in setting.worlds:
        same = len(files[1]) == len(PROMPTS) and files[size] == files[1]
        check = f"{len(files[size])} files {'byte-identical' if same else 'DIFFERENT'}"
        found = world_of(size, setting, name, export, work)
        measure.say(f"{size} ranks: {found}")
        for kind in ("sleeping", "real"):
            middle = measure.medians(found[kind])
            ideal = size if kind == "sleeping" else min(size, measure.num_cores())
            rows.append(_row(f"{size} ranks, {kind} model", middle["ours"], middle["peer"], ideal, check))
        rows.append(_row(f"{size} ranks, halation sample, one run each", command[size], command[1], size, check))
    facts = measure.machine() | {"prompts": len(PROMPTS), "steps": setting.steps, "sleep_s": setting.sleep_s}
    return measure.Report(name="duel_04_all_ranks", rows=tuple(rows), facts=facts)


def _row(case: str, ours: float, peer: float, ideal: int, check: str) -> measure.Row:
    note = f"ideal {ideal}x"
    return measure.Row(
        case=case, ours=ours, peer=peer, unit="s", limit=peer / ideal, check=check, equality="E0", note=note
    )


def main(arguments: list[str] | None = None) -> measure.Report:
    words = sys.argv[1:] if arguments is None else arguments
    asked = measure.parser(__doc__ or "").parse_args(words)
    setting = FULL if asked.size == "full" else SMALL
    with inputs.workplace(asked.work) as work:
        report = duel(setting, asked.size, work)
    measure.finish(report, asked.output)
    if any("DIFFERENT" in row.check for row in report.rows):
        raise SystemExit("the number of ranks changed an image")
    return report


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[1] == "--as_rank":
        with contextlib.redirect_stdout(sys.stderr):
            as_rank(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
    else:
        main()
