"""`halation sample`: the pictures training drew, from a checkpoint, by hand, on any number of ranks."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from halation import runs
from halation.config.fields import as_json
from halation.config.sample import SampleConfig
from halation.errors import HalationError, InputError
from halation.jobs.train import RANGES, check_ranges
from halation.world import launch

# 0, and -1 where 0 has a meaning, stand for what the run used.
SAMPLE_RANGES = {
    **dict.fromkeys(("sample_steps", "batch_size", "threads"), (0, math.inf)),
    "guidance_scale": (-1, RANGES["guidance_scale"][1]),
    "sample_seed": (-1, RANGES["sample_seed"][1]),
    "dist_timeout_s": RANGES["dist_timeout_s"],
}


def run(config: SampleConfig) -> int:
    """Draw on ranks that are already there or on ranks started here; exit code 0 only if every picture is there."""
    if not config.checkpoint.is_dir():
        raise InputError(
            f"there is no folder {config.checkpoint}", "a run, a checkpoint or an export", "check --checkpoint"
        )
    check_ranges(config, SAMPLE_RANGES)
    if launch.launched():
        run_rank(config)
        return 0
    places = launch.devices(config.nproc, config.gpu_ids, config.oversubscribe)
    runs.make_folder(config.output_dir)
    with runs.held(config.output_dir, "sample"):
        if len(places) == 1:
            os.environ[launch.DEVICE] = places[0]
            run_rank(config)
        else:
            launch.Launcher("sample", as_json(config), places, 0, config.output_dir).run()
    return 0


def read_config(path: Path) -> SampleConfig:
    values = json.loads(path.read_text())
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return SampleConfig(**values | {"checkpoint": Path(values["checkpoint"]), "output_dir": Path(values["output_dir"])})


def run_rank(config: SampleConfig) -> None:
    launch.die_with_parent()
    import torch

    from halation.jobs.models import find, load_denoiser, sampling_of
    from halation.jobs.session import joined
    from halation.training.sampling import Drawing, Place, SampleSettings, publish_index
    from halation.world.ranks import on_first
    from halation.world.signals import StopSignals

    world = joined(config.gpu_ids, config.oversubscribe, config.dist_timeout_s, max(1, config.threads))
    try:
        folder = Path(
            on_first(
                world, "checking the checkpoint", lambda _beat: str(find(config.checkpoint)), config.dist_timeout_s
            )
        )
        settings = SampleSettings(**_settings(config, sampling_of(folder)))
        torch.set_num_threads(settings.threads)
        denoiser = load_denoiser(folder, raw=config.raw).to(world.device)
        denoiser.encode_prompts(settings.prompts)
        place = Place(folder=config.output_dir, suffix="_raw" if config.raw else "")
        with StopSignals() as signals:
            drawing = Drawing(
                world, denoiser, settings, sharded=False, timeout_s=config.dist_timeout_s, stop=lambda: signals.number
            )
            rows = drawing.run(place, "by hand")
        if world.first:
            publish_index(place, rows, {"checkpoint": str(folder)})
        missing = [row for row in rows if row["state"] != "done"]
        if missing:
            reasons = "\n".join(f"  {row['file']}: {row['reason'] or 'interrupted'}" for row in missing)
            raise HalationError(
                f"{len(missing)} of {len(rows)} pictures are missing; the same command draws them:\n{reasons}"
            )
        if world.first and config.progress not in ("json", "none"):
            sys.stderr.write(
                f"{len(rows)} pictures in {config.output_dir}, together in {config.output_dir / 'grid.png'}\n"
            )
    finally:
        world.close()


def _settings(config: SampleConfig, recorded: dict[str, Any]) -> dict[str, Any]:
    """What the run used, with what was asked for on top."""
    from halation.prompts import from_flags
    from halation.training.sampling import SampleSettings

    if not recorded:
        raise InputError(
            f"{config.checkpoint} does not say how it was sampled",
            "a checkpoint or export of this release",
            "export it again",
        )
    asked = {
        "prompts": tuple(from_flags(config.prompts, config.prompts_file or None)) or None,
        "steps": config.sample_steps or None,
        "seed": config.sample_seed if config.sample_seed >= 0 else None,
        "same_seed": config.same_seed,
        "sampler": config.sampler or None,
        "guidance_scale": config.guidance_scale if config.guidance_scale >= 0 else None,
        "sheet_size": config.batch_size or None,
        "dtype": config.dtype or None,
        "threads": config.threads or None,
    }
    merged = recorded | {name: value for name, value in asked.items() if value is not None}
    names = {field.name for field in dataclasses.fields(SampleSettings)}
    return {name: tuple(value) if name == "prompts" else value for name, value in merged.items() if name in names}
