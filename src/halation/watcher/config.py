"""Settings of `halation watch`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from halation.config import ABOVE_ZERO, Conflict, free_setting, setting
from halation.evaluation.config import Metric
from halation.generation.config import MaybeFloat, MaybeInt

ScoreName = Literal["", "fid", "kid", "fd", "is", "precision", "recall", "density", "coverage", "clip", "agreement"]


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Follow a folder of checkpoints: draw images from each new one, score them, keep the best.

    The checkpoints are those of a Halation run, or diffusers pipelines that any trainer writes. The scores are plotted.
    Stop it at any time; the same command goes on.
    """

    # -- what is watched
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|DIR")] = dataclasses.field(
        metadata={"change": "free", "positional": True}
    )
    """A Halation run, or a folder of diffusers pipelines (subfolders with model_index.json; the last number in a name
    is the step)."""
    output_dir: Path | None = free_setting(None)
    """Folder for images, scores and the best checkpoint; by default `watch` in the folder that is watched."""
    every: int = free_setting(1, low=1, high=10**9)
    """Score only steps that this number divides."""
    min_step: int = free_setting(0, low=0, high=10**12)
    """Score no step before this one."""
    once: bool = free_setting(False)
    """Score what is there, then end; exit code 1 if a checkpoint failed."""
    poll_s: float = free_setting(30.0, low=ABOVE_ZERO)
    """Seconds between two looks at the folder."""
    settle_s: float = free_setting(60.0, low=0)
    """Take a pipeline only when its files have not changed for so long. Halation's own checkpoints say themselves that
    they are whole."""

    # -- what is drawn
    prompts: str = free_setting("")
    """Prompt list (csv, txt, jsonl, parquet); by default the captions of the reference: `streets`, or a folder with
    captions."""
    num_samples: int = setting(0, low=0, high=10**12)
    """Draw the first so many prompts; 0 is all, which for `streets` is as many as --num_reference."""
    seed_start: int = setting(42, low=0, high=2**63 - 1)
    """Image k is drawn from seed seed_start + k at every checkpoint, so checkpoints compare."""
    num_inference_steps: MaybeInt = setting(None, low=1, high=10**9)
    """Denoising steps; by default 20, or those a student was distilled to draw in."""
    guidance_scale: MaybeFloat = setting(None, low=0)
    """Classifier-free guidance; by default 7.5, or what a Halation run used."""
    height: MaybeInt = setting(None, low=1, high=16_384)
    """Height in pixels; by default 480, or the size a Halation model was made for."""
    width: MaybeInt = setting(None, low=1, high=16_384)
    """Width in pixels; by default 832, or the size a Halation model was made for."""
    batch_size: int = setting(4, low=1, high=10**9)
    """Images a model draws at once. It is part of the images' bits."""
    dtype: Literal["", "bf16", "fp16", "fp32"] = setting("")
    """Precision of the drawing; by default bf16 on a GPU and fp32 on a CPU."""
    raw: bool = setting(False)
    """For Halation checkpoints: draw from the weights as they are instead of their average."""

    # -- how it is scored
    reference: tuple[str, ...] = setting(())
    """Real images: a folder, `streets`, or saved statistics; by default what a Halation run was trained on."""
    num_reference: int = setting(5000, low=1, high=10**9)
    """Validation scenes that the reference `streets` stands for."""
    metrics: tuple[Metric, ...] = setting(())
    """fid, kid, is, fd, prdc, clip, agreement; by default what `halation evaluate` takes for this extractor."""
    extractor: str = setting("")
    """Features of fd, kid and prdc: inception, dinov2, clip, streets, or a folder; by default inception, or streets
    where the reference is that."""
    weights: str = setting("")
    """File, folder or hub name of the extractor's weights, instead of the usual ones."""
    clip_model: str = setting("")
    """CLIP model of the CLIP score: folder or hub name."""
    resize: Literal["clean", "tf", "torch"] = setting("clean")
    """How images are brought to the extractor's size: as clean-fid, as TensorFlow 1, or as pytorch-fid."""
    allow_few: bool = setting(False)
    """Score fewer images than a metric can bear; such numbers are marked."""
    best_by: ScoreName = free_setting("")
    """The number that decides which checkpoint is best; by default the first one."""
    images: Literal["all", "best", "none"] = free_setting("all")
    """Whose images stay after scoring; a grid of the first 16 always does."""

    # -- processes
    gpu_ids: tuple[int, ...] = free_setting(())
    """GPUs to use, as torch counts them within CUDA_VISIBLE_DEVICES; by default all."""
    nproc: int = free_setting(0, low=0, high=10**12)
    """Processes that draw, and that score; 0 is one for each GPU."""
    accept_changes: bool = free_setting(False)
    """Go on in a folder that was begun with other settings; the change is recorded, and earlier numbers stay."""
    progress: Literal["auto", "rich", "plain", "json", "none"] = free_setting("auto")
    """auto shows a live line on a terminal and lines elsewhere."""

    CONFLICTS = (
        Conflict(
            "best_by metrics",
            lambda config: f"one of {', '.join(_scores(config))}",
            "choose one of them, or add it to --metrics",
            when=lambda config: bool(config.best_by and config.metrics) and config.best_by not in _scores(config),
        ),
    )


def _scores(config: WatchConfig) -> list[str]:
    """The numbers that --metrics stands for."""
    prdc = ("precision", "recall", "density", "coverage")
    return [name for metric in config.metrics for name in (prdc if metric == "prdc" else (metric,))]
