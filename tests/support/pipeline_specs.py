"""Shared by the pipeline tests: specs, our images of them, and the same images from the pipeline alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch

from halation.models.async_image_result import Frames
from halation.models.pipelines.pipeline_model import PipelineModel, open_pipeline
from halation.sample_specs import SampleSpec
from support import tiny_pipelines

PROMPTS = (
    "a red cat on the street",
    "two blue houses at night, a painting",
    "dog",
    "three green trees and a car by day",
)


def specs(*prompts: str, **changes: Any) -> list[SampleSpec]:
    common = {"height": 32, "width": 32, "steps": 3, "guidance_scale": 4.0, **changes}
    first = int(common.pop("seed", 7))
    return [
        SampleSpec(index=index, id=str(index), prompt=prompt, seed=first + index, **common)
        for index, prompt in enumerate(prompts)
    ]


@functools.cache
def opened(family: str) -> PipelineModel:
    """One model a family for the tests that change nothing about it."""
    return open_pipeline(tiny_pipelines.built(family), dtype="fp32", device="cpu")


@functools.cache
def plain_pipe(family: str) -> Any:
    pipe = diffusers.DiffusionPipeline.from_pretrained(str(tiny_pipelines.built(family)), use_safetensors=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def drawn(model: PipelineModel, wanted: Sequence[SampleSpec]) -> list[Frames]:
    images = model.draw(wanted, lambda: None).collect()
    for image in images:
        assert isinstance(image, np.ndarray), image
    return images  # type: ignore[return-value]


def plain(pipe: Any, wanted: Sequence[SampleSpec], **arguments: Any) -> list[Frames]:
    """What a person gets who calls the pipeline and saves what it returns."""
    first = wanted[0]
    name = type(pipe).__name__
    if name in ("HunyuanDiTPipeline", "PixArtAlphaPipeline", "PixArtSigmaPipeline", "SanaPipeline"):
        arguments["use_resolution_binning"] = False
    zeroed = name == "StableDiffusionXLPipeline" and not any(spec.negative_prompt for spec in wanted)
    if (name != "FluxPipeline" or "true_cfg_scale" in arguments) and not zeroed:
        arguments["negative_prompt"] = [spec.negative_prompt for spec in wanted]
    if name == "WanPipeline":
        arguments["num_frames"] = first.num_frames
    output = pipe(
        prompt=[spec.prompt for spec in wanted],
        generator=[torch.Generator("cpu").manual_seed(spec.seed) for spec in wanted],
        num_inference_steps=first.steps,
        guidance_scale=first.guidance_scale,
        height=first.height,
        width=first.width,
        output_type="pil",
        **arguments,
    )[0]
    videos = [video if isinstance(video, list) else [video] for video in output]
    return [np.stack([np.asarray(frame) for frame in video]) for video in videos]


def reopened(path: Path, **options: Any) -> PipelineModel:
    return open_pipeline(path, **{"dtype": "fp32", "device": "cpu", **options})
