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
    """Watch a folder of checkpoints: generate from each new one, score it, keep the best.

    The checkpoints are those of a Halation run, or diffusers pipelines of any trainer. The scores are plotted. The
    command can be stopped at any time; the same command resumes it.
    """

    COMMON = (
        "run output_dir every once prompts num_samples seed_start num_inference_steps guidance_scale height width "
        "reference metrics extractor allow_few best_by gpu_ids nproc"
    )
    """What --help shows; --help_all shows every setting."""

    # -- checkpoints
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|DIR")] = dataclasses.field(
        metadata={"change": "free", "positional": True}
    )
    """A Halation run, or a folder of diffusers pipelines (subfolders with model_index.json; the last number in a name
    is the step)."""
    output_dir: Path | None = free_setting(None)
    """Folder for images, scores and the best checkpoint; by default `watch` in the watched folder."""
    every: int = free_setting(1, low=1, high=10**9)
    """Score only steps that are multiples of this number."""
    min_step: int = free_setting(0, low=0, high=10**12)
    """Skip steps before this one."""
    once: bool = free_setting(False)
    """Score the existing checkpoints, then exit; exit code 1 if a checkpoint failed."""
    poll_s: float = free_setting(30.0, low=ABOVE_ZERO)
    """Seconds between scans of the folder."""
    settle_s: float = free_setting(60.0, low=0)
    """Seconds that the files of a pipeline must be unchanged before it is scored. Checkpoints of Halation need no
    delay: COMMIT.json marks them as complete."""

    # -- images
    prompts: tuple[str, ...] = free_setting(())
    """Prompts: texts, or one file (csv, txt, jsonl, parquet); by default the captions of the reference: `streets`, or a
    folder with captions."""
    num_samples: int = setting(0, low=0, high=10**12)
    """Generate only this many prompts, the first ones; 0 is all, which for `streets` is --num_reference."""
    seed_start: int = setting(42, low=0, high=2**63 - 1)
    """Image k uses seed seed_start + k at every checkpoint, so that checkpoints can be compared."""
    num_inference_steps: MaybeInt = setting(None, low=1, high=10**9)
    """Denoising steps; by default those of the pipeline's own call, 20 for a DiT of Halation, or those of a distilled
    student."""
    guidance_scale: MaybeFloat = setting(None, low=0)
    """Guidance scale; by default that of the pipeline's own call, or the scale of the Halation run."""
    height: MaybeInt = setting(None, low=1, high=16_384)
    """Height in pixels; by default that of the pipeline, or the native size of a Halation model."""
    width: MaybeInt = setting(None, low=1, high=16_384)
    """Width in pixels; by default that of the pipeline, or the native size of a Halation model."""
    batch_size: int = setting(4, low=1, high=10**9)
    """Images in a batch. It affects the rounding of the images."""
    dtype: Literal["", "bf16", "fp16", "fp32"] = setting("")
    """Precision of the model; by default bf16 on a GPU and fp32 on a CPU."""
    raw: bool = setting(False)
    """For Halation checkpoints: use the raw weights instead of the EMA."""

    # -- scores
    reference: tuple[str, ...] = setting(())
    """Real images: a folder, `streets`, or saved statistics; by default the training data of a Halation run."""
    num_reference: int = setting(5000, low=1, high=10**9)
    """Number of validation scenes in the reference `streets`."""
    metrics: tuple[Metric, ...] = setting(())
    """fid, kid, is, fd, prdc, clip, agreement; by default those of `halation evaluate` for this extractor."""
    extractor: str = setting("")
    """Extractor for fd, kid and prdc: inception, dinov2, clip, streets, or a folder; by default streets for the
    reference `streets`, else inception."""
    weights: str = setting("")
    """File, folder or hub name of the extractor's weights, instead of the default ones."""
    clip_model: str = setting("")
    """CLIP model of the CLIP score: folder or hub name."""
    resize: Literal["clean", "tf", "torch"] = setting("clean")
    """How images are resized for the extractor: as in clean-fid, TensorFlow 1 or pytorch-fid."""
    allow_few: bool = setting(False)
    """Compute metrics on too few images; such scores are flagged `few`."""
    allow_missing: bool = free_setting(False)
    """Score a checkpoint although some of its images failed; its scores are marked, and with --once the exit code
    is 1."""
    best_by: ScoreName = free_setting("")
    """The score that decides which checkpoint is best; by default the first one."""
    images: Literal["all", "best", "none"] = free_setting("all")
    """Which images to keep after scoring; a grid of the first 16 is always kept."""

    # -- distributed
    gpu_ids: tuple[int, ...] = free_setting(())
    """GPUs to use, numbered as torch does within CUDA_VISIBLE_DEVICES; by default all."""
    nproc: int = free_setting(0, low=0, high=10**12)
    """Processes for generating and for scoring; 0 is one per GPU."""
    accept_changes: bool = free_setting(False)
    """Continue in a folder that was created with other settings; the change is recorded, and earlier scores stay."""
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
    """The scores that --metrics produce."""
    prdc = ("precision", "recall", "density", "coverage")
    return [name for metric in config.metrics for name in (prdc if metric == "prdc" else (metric,))]
