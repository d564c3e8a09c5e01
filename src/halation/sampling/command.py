"""`halation sample`: the pictures training drew, from a checkpoint, by hand, on any number of ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halation.config import ABOVE_0, AT_LEAST_0, SEEDS, as_json, check_ranges
from halation.distributed import launcher
from halation.distributed.signals import exit_code
from halation.errors import HalationError, InputError, Interrupted
from halation.models.bundled import advice, embedded_names, meant, portable
from halation.models.dit.prompt_warnings import remarks
from halation.runs import folder as runs
from halation.runs import lock
from halation.sampling.config import SampleConfig

if TYPE_CHECKING:
    from halation.distributed.world import World

# 0, and -1 where 0 has a meaning, stand for what the run used.
SAMPLE_RANGES = {
    **dict.fromkeys(("sample_steps", "batch_size", "threads"), (0, math.inf)),
    "guidance_scale": (-1, AT_LEAST_0[1]),
    "sample_seed": (-1, SEEDS[1]),
    "dist_timeout_s": ABOVE_0,
}


def run(config: SampleConfig) -> int:
    """Draw on ranks that are already there or on ranks started here; exit code 0 only if every picture is there."""
    check_ranges(config, SAMPLE_RANGES)
    config = dataclasses.replace(config, checkpoint=folder_of(config.checkpoint))
    places = () if launcher.launched() else launcher.devices(config.nproc, config.gpu_ids, config.oversubscribe)
    if not places:
        run_rank(config)
        return 0
    config, identity = _resolved(config)
    assert config.output_dir is not None
    runs.make_folder(config.output_dir)
    with lock.held(config.output_dir, "sample"):
        begin(config.output_dir, identity)
        if len(places) == 1:
            os.environ[launcher.DEVICE] = places[0]
            run_rank(config, held=True)
        else:
            launcher.Launcher(__name__, as_json(config), places, 0, config.output_dir).run()
    return 0


def folder_of(checkpoint: str | Path) -> Path:
    """The folder that is meant; what can be found without torch is said at once."""
    folder = meant(checkpoint)
    if folder.name == "latest" and folder.is_file():  # the text file that names the newest one
        folder = folder.parent / folder.read_text().strip()
    if folder.is_file():
        raise InputError(f"{folder} is a file", "a run, a checkpoint or an export", "give the folder it is in")
    if not folder.is_dir():
        raise InputError(
            f"there is no folder {folder}",
            f"a run, a checkpoint, an export, or a model of the package: {', '.join(embedded_names())}",
            advice(checkpoint, "check --checkpoint"),
        )
    return folder


def _resolved(config: SampleConfig) -> tuple[SampleConfig, dict[str, Any]]:
    """The checkpoint that is meant, the prompts written out, a folder of its own for these very pictures, and what decides them."""
    from halation.models.checkpoints import digest_of, refuse_lost_base

    folder, recorded = _newest(Path(config.checkpoint))
    refuse_lost_base(folder)
    settings = _settings(config, recorded)
    config = dataclasses.replace(config, checkpoint=folder, prompts=settings["prompts"], prompts_file="")
    identity = {"model": digest_of(folder, raw=config.raw), **json.loads(json.dumps(settings))}
    if config.output_dir is None:
        name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
        config = dataclasses.replace(config, output_dir=Path("outputs") / f"samples_{name}")
    return config, identity


def _newest(checkpoint: Path) -> tuple[Path, dict[str, Any]]:
    """The checkpoint and how it was sampled; looked for again where a run that is still training has just replaced it."""
    from halation.models.checkpoints import find, sampling_of

    for _again in range(3):
        folder = find(checkpoint)
        try:
            return folder, sampling_of(folder)
        except InputError:
            if folder.is_dir():
                raise
    return folder, sampling_of(folder)


def begin(folder: Path, identity: dict[str, Any]) -> None:
    """Pictures of another model or other settings under the same names would pass for these: refuse the folder."""
    record = runs.Run(folder).config
    ours = [
        path.name for name in ("sample_*.png", "sample_*.txt", "grid.png", "samples.json") for path in folder.glob(name)
    ]
    if ours and not record.exists():
        raise InputError(
            f"{folder} holds {ours[0]}, which `halation sample` did not put there",
            "an empty folder, or one of its own",
            "choose another --output_dir, or leave it out",
        )
    if ours:
        lines = runs.difference(runs.read_json(record).get("fixed", {}), identity)
        if lines:
            raise InputError(
                f"{folder} holds other pictures:\n" + "\n".join(lines),
                "an empty folder, or the settings its pictures were drawn with",
                "choose another --output_dir, or leave it out",
            )
    runs.publish_json(record, {"job": "sample", "fixed": identity})


def read_config(path: Path) -> SampleConfig:
    return from_json(json.loads(path.read_text()))


def from_json(values: dict[str, Any]) -> SampleConfig:
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return SampleConfig(**values | {"checkpoint": Path(values["checkpoint"]), "output_dir": Path(values["output_dir"])})


def run_rank(config: SampleConfig, held: bool = False) -> None:
    """One rank; under torchrun or srun, where no parent did it, rank 0 also holds the folder."""
    launcher.die_with_parent()
    from halation.distributed.world import joined, on_first

    world = joined(config.gpu_ids, config.oversubscribe, config.dist_timeout_s, max(1, config.threads))
    with world.leaving_together(), contextlib.ExitStack() as stack:
        if not held and launcher.RENDEZVOUS not in os.environ:

            def open_folder(_beat: Any) -> dict[str, Any]:
                """On rank 0 for all: a run that is still training may have another newest checkpoint a moment later."""
                chosen, identity = _resolved(config)
                assert chosen.output_dir is not None
                runs.make_folder(chosen.output_dir)
                stack.enter_context(lock.held(chosen.output_dir, "sample"))
                begin(chosen.output_dir, identity)
                return as_json(chosen)

            config = from_json(on_first(world, "opening the folder", open_folder, config.dist_timeout_s))
        assert config.output_dir is not None
        _draw(world, config, config.output_dir)


def _draw(world: World, config: SampleConfig, folder: Path) -> None:
    import torch

    from halation.distributed.signals import StopSignals
    from halation.models.blocks import compile_units
    from halation.models.checkpoints import load_denoiser, sampling_of
    from halation.models.model_ref import distilled_steps, few_steps_words, guidance_words
    from halation.sampling.denoiser_sampler import Drawing, SampleSettings
    from halation.sampling.files import Place, publish_index
    from halation.step_progress import Progress

    checkpoint = Path(config.checkpoint)
    recorded = sampling_of(checkpoint)
    settings = SampleSettings(**_settings(config, recorded))
    learned = distilled_steps(recorded)
    if learned and settings.steps != learned["steps"] and world.first:
        words = few_steps_words(settings.steps, learned["steps"], learned["distilled"])
        sys.stderr.write(f"halation: --sample_steps: {words}\n")
    if recorded.get("distilled") and settings.guidance_scale != recorded["guidance_scale"] and world.first:
        words = guidance_words(settings.guidance_scale, recorded["guidance_scale"])
        sys.stderr.write(f"halation: --guidance_scale {words}\n")
    if world.first:
        for words in remarks(checkpoint, portable(checkpoint), settings.prompts, lengths=False):
            sys.stderr.write(f"halation: {words}\n")
    if settings.deterministic:  # read by cuBLAS when it is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(settings.threads)
    torch.use_deterministic_algorithms(settings.deterministic)
    denoiser = load_denoiser(checkpoint, raw=config.raw, checked=True).to(world.device)
    denoiser.encode_prompts((*settings.prompts, ""))
    if settings.compile:
        compile_units(denoiser.shard_units())
    place = Place(folder=folder, suffix="_raw" if config.raw else "")
    kind = config.progress if world.first else "none"
    words = "steps" if world.size == 1 else f"steps on each of {world.size} ranks"
    with StopSignals() as signals, Progress(kind, 1, 0, "drawing") as progress:
        drawing = Drawing(
            world,
            denoiser,
            settings,
            sharded=False,
            timeout_s=config.dist_timeout_s,
            stop=lambda: signals.number,
            on_step=lambda done, total: progress.update(done, words, {}, total),
        )
        rows = drawing.run(place, "by hand")
    if world.first:
        publish_index(place, rows, {"checkpoint": portable(checkpoint)})
    missing = [row for row in rows if row["state"] != "done"]
    if missing and signals.number:
        raise Interrupted(
            f"stopped with {len(missing)} of {len(rows)} pictures to go; the same command draws them",
            exit_code(signals.number),
        )
    if missing:
        reasons = "\n".join(f"  {row['file']}: {row['reason'] or 'interrupted'}" for row in missing)
        raise HalationError(
            f"{len(missing)} of {len(rows)} pictures are missing; the same command draws them:\n{reasons}"
        )
    if world.first and config.progress not in ("json", "none"):
        sys.stderr.write(
            f"{len(rows)} picture{'s' if len(rows) > 1 else ''} in {folder}, together in {folder / 'grid.png'}\n"
        )


def _settings(config: SampleConfig, recorded: dict[str, Any]) -> dict[str, Any]:
    """What the run used, with what was asked for on top."""
    from halation.prompts import from_flags
    from halation.sampling.denoiser_sampler import SampleSettings

    needed = {f.name for f in dataclasses.fields(SampleSettings) if f.default is dataclasses.MISSING}
    if not needed <= recorded.keys():
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
        "compile": config.compile,
    }
    merged = recorded | {name: value for name, value in asked.items() if value is not None}
    names = {field.name for field in dataclasses.fields(SampleSettings)}
    return {name: tuple(value) if name == "prompts" else value for name, value in merged.items() if name in names}
