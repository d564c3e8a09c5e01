"""`halation sample`: sample from a checkpoint on any number of ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halation.config import as_json, check_settings, from_json
from halation.distributed import launcher
from halation.distributed.stop_signals import exit_code
from halation.errors import HalationError, InputError, Interrupted, format_count
from halation.input_files import read_bytes
from halation.models.model_folder import bundled_names, portable_name, resolve_model_path, suggest_model
from halation.models.model_path_resolver import ModelRef
from halation.progress import StepProgress
from halation.prompt_files import collect_prompts, parse_rows
from halation.runs import lock
from halation.runs import run_folder as runs
from halation.sampling.config import SampleConfig

if TYPE_CHECKING:
    from halation.distributed.world import World

_MAX_NAME_BYTES = 4096


def run(config: SampleConfig) -> int:
    """Sample on launched ranks or start them; return 0 only if every image exists."""
    sample(config)
    return 0


def sample(config: SampleConfig) -> Path:
    """Sample as `run` does, and return the folder of the images."""
    check_settings(config)
    config = dataclasses.replace(config, checkpoint=resolve_checkpoint(config.checkpoint))
    devices = (
        () if launcher.is_launched() else launcher.select_devices(config.nproc, config.gpu_ids, config.oversubscribe)
    )
    if not devices:
        return run_rank(config)
    config, identity = _resolve_config(config)
    assert config.output_dir is not None
    runs.make_folder(config.output_dir)
    with lock.lock_folder(config.output_dir, "sample") as monitor:
        prepare_folder(config.output_dir, identity)
        if len(devices) == 1:
            os.environ[launcher.DEVICE_ENV] = devices[0]
            run_rank(config, has_lock=True)
        else:
            launcher.Launcher(run_rank, config, devices, 0, config.output_dir, monitor).run()
    return config.output_dir


def resolve_checkpoint(checkpoint: str | Path) -> Path:
    """Return the folder of a checkpoint argument; check what is possible without torch."""
    folder = resolve_model_path(checkpoint)
    if folder.name == "latest" and folder.is_file():  # a text file with the name of the newest checkpoint
        try:
            folder = folder.parent / read_bytes(folder, _MAX_NAME_BYTES).decode().strip()
        except UnicodeDecodeError as error:
            raise InputError(f"{folder} is not text", "the name of a checkpoint", "give its folder") from error
    if folder.is_file():
        raise InputError(f"{folder} is a file", "a run, a checkpoint or an export", "give the folder it is in")
    if not folder.is_dir():
        raise InputError(
            f"there is no folder {folder}",
            f"a run, a checkpoint, an export, or a bundled model: {', '.join(bundled_names())}",
            suggest_model(checkpoint, "check --checkpoint"),
        )
    return folder


def _resolve_config(config: SampleConfig) -> tuple[SampleConfig, dict[str, Any]]:
    """Resolve checkpoint, prompts and output folder; also return all that decides the images."""
    from halation.models.checkpoint_loading import check_base_exists, weights_digest

    folder, recorded = _find_checkpoint(Path(config.checkpoint))
    check_base_exists(folder)
    prompts, rows = collect_prompts(config.prompts, config.prompt_rows, config.prompts_file or None)
    config = dataclasses.replace(config, checkpoint=folder, prompts=prompts, prompt_rows=rows, prompts_file="")
    settings = _merge_settings(config, recorded)
    own = zip(settings["prompts"], settings.get("rows", ()), strict=False)
    config = dataclasses.replace(
        config,
        prompts=tuple(settings["prompts"]),
        prompt_rows=tuple(json.dumps({"prompt": prompt} | row) for prompt, row in own),
    )
    identity = {"model": weights_digest(folder, raw=config.raw), **json.loads(json.dumps(settings))}
    if config.output_dir is None:
        name = runs.hash_json(identity)[:8]
        config = dataclasses.replace(config, output_dir=Path("outputs") / f"samples_{name}")
    return config, identity


def _find_checkpoint(checkpoint: Path) -> tuple[Path, dict[str, Any]]:
    """Find the checkpoint and its sampling settings; retry if a training has just replaced it."""
    from halation.models.checkpoint_loading import find_checkpoint, read_sampling_settings

    for _again in range(3):
        folder = find_checkpoint(checkpoint)
        try:
            return folder, read_sampling_settings(folder)
        except InputError:
            if folder.is_dir():
                raise
    return folder, read_sampling_settings(folder)


def prepare_folder(folder: Path, identity: dict[str, Any]) -> None:
    """Record the settings in the folder; reject images of another model or other settings."""
    record = runs.RunFolder(folder).config
    existing = [
        path.name for name in ("sample_*.png", "sample_*.txt", "grid.png", "samples.json") for path in folder.glob(name)
    ]
    if existing and not record.exists():
        raise InputError(
            f"{folder} contains {existing[0]}, which `halation sample` did not write",
            "an empty folder, or one that `halation sample` wrote",
            "choose another --output_dir, or leave it out",
        )
    if existing:
        runs.check_unchanged(
            runs.read_json(record).get("fixed", {}),
            identity,
            f"{folder} contains other images",
            "an empty folder, or the settings that its images were sampled with",
            "choose another --output_dir, or leave it out",
        )
    runs.write_json_atomic(record, {"job": "sample", "fixed": identity})


def run_rank(config: SampleConfig, has_lock: bool = False) -> Path:
    """Run one rank and return the folder; under torchrun or srun, rank 0 also locks it."""
    launcher.tie_rank_to_launcher()
    from halation.distributed.world import init_world, run_on_rank_zero

    world = init_world(config.gpu_ids, config.oversubscribe, config.dist_timeout_s, max(1, config.threads))
    with world.close_on_success(), contextlib.ExitStack() as stack:
        if not has_lock and launcher.RENDEZVOUS_ENV not in os.environ:

            def prepare_on_first_rank(_heartbeat: Any) -> dict[str, Any]:
                """Resolve on rank 0 for all ranks: the newest checkpoint of a running training may change."""
                resolved, identity = _resolve_config(config)
                assert resolved.output_dir is not None
                runs.make_folder(resolved.output_dir)
                stack.enter_context(lock.lock_folder(resolved.output_dir, "sample"))
                prepare_folder(resolved.output_dir, identity)
                return as_json(resolved)

            values = run_on_rank_zero(world, "opening the folder", prepare_on_first_rank, config.dist_timeout_s)
            config = from_json(SampleConfig, values)
        assert config.output_dir is not None
        _draw_samples(world, config, config.output_dir)
    return config.output_dir


def _draw_samples(world: World, config: SampleConfig, folder: Path) -> None:
    import torch

    from halation.distributed.stop_signals import StopSignals
    from halation.models.checkpoint_loading import load_denoiser, read_sampling_settings
    from halation.models.denoiser import compile_blocks
    from halation.sampling.all_rank_sampler import DenoiserSampler, SampleSettings
    from halation.sampling.sample_folder import SampleFolder, publish_index

    checkpoint = Path(config.checkpoint)
    recorded = read_sampling_settings(checkpoint)
    settings = SampleSettings.from_json(_merge_settings(config, recorded))
    if world.is_rank_zero:
        model_ref = ModelRef.of_checkpoint(checkpoint, recorded, name=portable_name(checkpoint))
        for warning in model_ref.warnings(
            settings.steps, settings.guidance_scale, settings.prompts, steps_flag="sample_steps", check_lengths=False
        ):
            sys.stderr.write(f"halation: {warning}\n")
    if settings.deterministic:  # cuBLAS reads this at first use
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(settings.threads)
    torch.use_deterministic_algorithms(settings.deterministic)
    denoiser = load_denoiser(checkpoint, raw=config.raw, checked=True).to(world.device)
    settings.check_rows(denoiser)
    denoiser.encode_prompts((*settings.texts(), ""))
    if settings.compile:
        compile_blocks(denoiser.shard_units())
    sample_folder = SampleFolder(folder=folder, suffix="_raw" if config.raw else "", depth=0)
    kind = config.progress if world.is_rank_zero else "none"
    words = "steps" if world.size == 1 else f"steps on each of {world.size} ranks"
    with StopSignals() as signals, StepProgress(kind, 1, 0, "sampling") as progress:
        sampler = DenoiserSampler(
            world,
            denoiser,
            settings,
            sharded=False,
            timeout_s=config.dist_timeout_s,
            stop=lambda: signals.number,
            on_step=lambda done, total: progress.update(done, words, {}, total),
        )
        rows = sampler.run(sample_folder, "from the checkpoint")
    if world.is_rank_zero:
        publish_index(sample_folder, rows, {"checkpoint": portable_name(checkpoint)})
    missing = [row for row in rows if row["state"] != "done"]
    if missing and signals.number:
        raise Interrupted(
            f"stopped with {len(missing)} of {format_count(len(rows), 'image')} missing; "
            "run the same command again to sample them",
            exit_code(signals.number),
        )
    if missing:
        reasons = "\n".join(f"  {row['file']}: {row['reason'] or 'interrupted'}" for row in missing)
        raise HalationError(
            f"{len(missing)} of {format_count(len(rows), 'image')} missing; "
            f"run the same command again to sample them:\n{reasons}"
        )
    if world.is_rank_zero and config.progress not in ("json", "none"):
        sys.stderr.write(f"{format_count(len(rows), 'image')} in {folder}, overview in {folder / 'grid.png'}\n")


def _merge_settings(config: SampleConfig, recorded: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the run, overridden by those of the command."""
    from halation.sampling.all_rank_sampler import SampleSettings

    if not SampleSettings.required_keys() <= recorded.keys():
        raise InputError(
            f"{config.checkpoint} has no sampling settings",
            "a checkpoint or export of this release",
            "export it again",
        )
    overrides = {
        "prompts": config.prompts or None,
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
    if config.prompts:
        rows = parse_rows(config.prompts, config.prompt_rows)
        recorded = {name: value for name, value in recorded.items() if name != "rows"} | (
            {"rows": rows} if rows else {}
        )
    return recorded | {name: value for name, value in overrides.items() if value is not None}
