"""Halation's own checkpoints as a model to draw with: the same phases that training draws its samples in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from halation.errors import InputError
from halation.flow.samplers import SAMPLERS
from halation.generation.workers.model_runner import OnStep
from halation.models import sampling as draw
from halation.models.blocks import compile_units
from halation.models.denoiser import OWN, Denoiser, Solver
from halation.models.image_result import Frames, PaintError, Painting
from halation.specs import Sheet, Spec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class CheckpointModel:
    """A denoiser with the sampler and the time shift it was trained for."""

    def __init__(
        self,
        denoiser: Denoiser,
        *,
        device: str,
        dtype: str,
        sampler: str,
        time_shift: float,
        truncate_from: int | None,
        compile: bool,
        own_sampler: str,
    ) -> None:
        own = own_sampler == OWN
        if own and (sampler != OWN or truncate_from is not None):
            raise InputError(
                f"--{'scheduler' if sampler != OWN else 'cfg_truncation_step'} with a checkpoint of a fine-tuned pipeline",
                "its own scheduler and guidance",
                "draw from the run's export/ folder, which is a whole pipeline and takes every option",
            )
        if not own and sampler not in SAMPLERS:
            raise InputError(
                f"--scheduler {sampler}",
                f"one of {', '.join(SAMPLERS)} for a Halation checkpoint",
                "choose one of these",
            )
        self.denoiser = denoiser
        self.device = device
        self.dtype = DTYPES[dtype]
        self.sampler = sampler
        self.time_shift = time_shift
        self.truncate_from = truncate_from
        denoiser.module.eval()
        if compile:
            compile_units(denoiser.shard_units())
        options = {"compile": "E1" if compile else "", "scheduler": "E2" if sampler != own_sampler else ""}
        options["cfg_truncation_step"] = "E2" if truncate_from is not None else ""
        self.facts: dict[str, Any] = {
            "pipeline": denoiser.name,
            "scheduler": sampler,
            "dtype": dtype,
            "options": {name: kind for name, kind in options.items() if kind},
        }

    def check(self, spec: Spec) -> None:
        self.denoiser.sample_shape(spec.height, spec.width)
        if spec.num_frames != 1:
            raise InputError(
                f"--num_frames {spec.num_frames}", "1: this model draws pictures", "leave --num_frames out"
            )
        if self.truncate_from is not None and spec.guidance_scale == 1.0:
            raise InputError(
                "--cfg_truncation_step with --guidance_scale 1",
                "a second branch that could be left out",
                "leave --cfg_truncation_step out, or raise the guidance",
            )

    def draw(self, specs: Sequence[Spec], on_step: OnStep) -> Painting:
        sheet = Sheet(specs=tuple(specs), num_real=len(specs))
        solver = Solver(
            sampler=self.sampler,
            pair=draw.needs_pair(specs),
            dtype=self.dtype,
            shift=self.time_shift,
            truncate_from=self.truncate_from,
        )
        decoded = draw.draw(self.denoiser, sheet, solver, device=self.device, on_step=on_step)

        def collect() -> list[Frames | PaintError]:
            return [
                PaintError(str(decoded.failures[row])) if row in decoded.failures else decoded.pixels[row][None]
                for row in range(len(specs))
            ]

        return Painting(collect=collect)
