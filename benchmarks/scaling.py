"""Scaling: images per second of `halation train` on 1, 2, 4 and 8 ranks.

The results are shown beside the expectations of seed document 003. A rank is a GPU if there are several, otherwise a
CPU process with one thread; then the speed-up is at most the number of cores. `--batch_size` is per rank, as in the
document, so the global batch grows with the ranks.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from benchmarks import inputs, measure, shipped

HOPED = {2: 1.8, 4: 3.5, 8: 7.0}
LOG_EVERY = 5


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One kind of machine."""

    kind: str
    worlds: tuple[int, ...]
    model: str
    image_size: int
    batch: int
    windows: int
    flags: tuple[str, ...] = ()


def settings(size: str, num_gpus: int, num_cores: int) -> list[Setting]:
    """Return the settings: GPUs if there is more than one, and always the CPU."""
    if size == "small":
        return [Setting(kind="cpu", worlds=(1, 2), model="tiny", image_size=32, batch=8, windows=3)]
    worlds = tuple(world for world in (1, 2, 4, 8) if world <= max(4, num_cores))
    found = [Setting(kind="cpu", worlds=worlds, model="tiny", image_size=64, batch=8, windows=5)]
    if num_gpus > 1:
        several = tuple(world for world in (1, 2, 4, 8) if world <= num_gpus)
        flags = ("--dtype", "bf16", "--compile")
        found.insert(
            0, Setting(kind="gpu", worlds=several, model="base", image_size=64, batch=128, windows=6, flags=flags)
        )
    return found


def pictures_per_s(setting: Setting, world: int, work: Path) -> float:
    """Return the throughput of the shipped command over all ranks, from its metrics."""
    side = str(setting.image_size)
    last = LOG_EVERY * (setting.windows + 1)
    words = [
        "--data", "streets", "--model", setting.model, "--image_size", side, side, "--batch_size", str(setting.batch),
        "--n_steps", "100000", "--ckpt_every", "0", "--no_sample", "--validation_images", "0", "--log_every", str(LOG_EVERY),
        "--report_to", "none", "--progress", "plain", "--nproc", str(world), *setting.flags,
        *(("--num_workers", "4") if setting.kind == "gpu" else ()),
    ]  # fmt: skip
    extra = {"CUDA_VISIBLE_DEVICES": ""} if setting.kind == "cpu" else {}
    run = work / f"{setting.kind}_{world}"
    lines = shipped.train(words, run, run.with_suffix(".log"), until_step=last, limit_s=300, extra=extra)
    found = shipped.rates(lines, setting.batch * world, LOG_EVERY)
    measure.say(f"{world} {setting.kind} ranks: {statistics.median(found):.1f} images/s ({measure.spread(found)})")
    return statistics.median(found)


def table(setting: Setting, work: Path) -> list[measure.Row]:
    rates = {world: pictures_per_s(setting, world, work) for world in setting.worlds}
    (work / "again").mkdir()
    again = pictures_per_s(setting, 1, work / "again")
    alone = statistics.mean([rates[1], again])
    drift = f"1 rank before and after: {rates[1]:.1f}, {again:.1f}"
    rows = []
    for world in setting.worlds[1:]:
        ideal = min(world, measure.num_cores()) if setting.kind == "cpu" else world
        note = f"ideal {ideal}x ({setting.kind}), document {HOPED[world]}x"
        rows.append(
            measure.Row(
                case=f"{world} {setting.kind} ranks, {setting.model} {setting.image_size} px", ours=rates[world], peer=alone,
                unit="images/s", limit=alone * ideal, check=drift, equality="E1", note=note,
            )
        )  # fmt: skip
    return rows


def main(arguments: list[str] | None = None) -> measure.Report:
    asked = measure.parser(__doc__ or "").parse_args(arguments)
    import torch

    rows: list[measure.Row] = []
    with inputs.workplace(asked.work) as work:
        for setting in settings(asked.size, torch.cuda.device_count(), measure.num_cores()):
            folder = work / setting.kind
            folder.mkdir()
            rows += table(setting, folder)
    facts = measure.machine() | {"gpus": torch.cuda.device_count(), "peer": "one rank of the same command"}
    report = measure.Report(name="scaling", rows=tuple(rows), facts=facts)
    measure.finish(report, asked.output)
    return report


if __name__ == "__main__":
    main()
