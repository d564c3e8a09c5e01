"""Teachers of a moment: a tiny DiT with random weights as an export, and settings that learn from it in a second."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from halation.distillation.config import DistillConfig
from halation.models.dit.denoiser import create_dit
from halation.runs.run_folder import scratch_folder
from support import rank_jobs

SIDE = 32
_folders = contextlib.ExitStack()
atexit.register(_folders.close)


@functools.cache
def dit(side: int = SIDE, guidance_scale: float = 2.0) -> Path:
    """The folder of an export whose every weight reaches the pixels."""
    denoiser = create_dit("tiny", height=side, width=side, captions=rank_jobs.PROMPTS, patch_size=8).init_weights(7)
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():  # zeros hide what is not connected
        for parameter in denoiser.module.parameters():
            if not parameter.any():
                parameter.normal_(0.0, 0.1, generator=generator)
    folder = _folders.enter_context(scratch_folder("halation_teacher_"))
    sampling = {
        "height": side,
        "width": side,
        "guidance_scale": guidance_scale,
        "sampler": "multistep",
        "time_shift": 1.0,
    }
    (folder / "config.json").write_text(json.dumps(denoiser.describe() | {"sampling": sampling}))
    save_file(dict(denoiser.module.state_dict()), folder / "model.safetensors")
    return folder


def prompts(folder: Path, num: int = 5) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "prompts.txt"
    path.write_text("".join(f"{prompt}\n" for prompt in rank_jobs.PROMPTS[:num]))
    return path


def small_config(folder: Path, teacher: Path | None = None, **changes: Any) -> DistillConfig:
    """A distillation of a second, written out as the job writes it."""
    from halation.distillation import command as distill

    settings: dict[str, Any] = {
        "output_dir": folder,
        "teacher_path": str(teacher or dit()),
        "data_path": str(prompts(folder.parent / "lists")),
        "batch_size": 2,
        "n_steps": 2,
        "teacher_steps": 4,
        "teacher_states": 4,
        "student_steps": 2,
        "ckpt_every": 1,
        "keep_last": 0,
        "log_every": 1,
        "lr": 1e-2,
        "ema_decay": 0.5,
        "sample_prompts": rank_jobs.PROMPTS[:2],
        "sample_steps": 2,
        "report_to": ("none",),
        "progress": "none",
        "dist_timeout_s": 30.0,
    }
    settings |= changes
    if settings.get("num_epochs"):
        del settings["n_steps"]
    if settings.get("objective", "velocity") == "velocity":
        settings["student_steps"] = None
    return distill.resolve_config(DistillConfig(**settings))
