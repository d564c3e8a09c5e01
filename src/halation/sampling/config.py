"""Settings of `halation sample`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from halation.config import ABOVE_ZERO, MAX_SEED, setting


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """Draw images from a checkpoint on all ranks: the same bytes that training drew, for any number of ranks.

    What is not given here is taken from the run the checkpoint belongs to.
    """

    checkpoint: Annotated[str | Path, tyro.conf.arg(aliases=["--model_path"])]
    """A checkpoint folder, a run folder (its newest good checkpoint), an export folder, or a model of the package,
    such as `streets-64`."""
    output_dir: Path | None = None
    """Folder for the images, their prompts, grid.png and samples.json; by default one of their own under outputs/."""
    prompts: tuple[str, ...] = ()
    """Prompts to draw; by default those of the run."""
    prompts_file: str = ""
    """File of prompts (txt, csv, jsonl, parquet), drawn after those above; `-` is standard input."""
    sample_steps: int = setting(0, low=0)
    """Denoising steps; 0 is what the run used."""
    sample_seed: int = setting(-1, low=-1, high=MAX_SEED)
    """Image k is drawn from seed sample_seed + k; -1 is what the run used."""
    same_seed: bool | None = None
    """Draw every prompt from the same seed."""
    sampler: Literal["", "euler", "heun", "multistep"] = ""
    """Solver; empty is what the run used."""
    guidance_scale: float = setting(-1.0, low=-1)
    """Classifier-free guidance; -1 is what the run used."""
    batch_size: int = setting(0, low=0)
    """Images in a batch; 0 is what the run used. It is part of the image's bits."""
    dtype: Literal["", "fp32", "bf16", "fp16"] = ""
    """Precision; empty is what the run used."""
    compile: bool | None = None
    """Compile the transformer block; by default as the run did, because compiled images round differently."""
    raw: bool = False
    """Draw from the weights as they are instead of their average."""
    nproc: int = 0
    """Ranks to start on this machine; 0 is one for each GPU, or one without a GPU."""
    gpu_ids: tuple[int, ...] = ()
    """GPUs to use, as torch counts them within CUDA_VISIBLE_DEVICES; by default all."""
    oversubscribe: bool = False
    """Allow several ranks on one GPU (over gloo): for tests, not for speed."""
    dist_timeout_s: float = setting(600.0, low=ABOVE_ZERO)
    """Seconds without progress after which a rank is given up and named."""
    threads: int = setting(0, low=0)
    """CPU threads a rank computes with; 0 is what the run used. It is part of the image's bits."""
    progress: Literal["auto", "rich", "plain", "json", "none"] = "auto"
    """auto shows a bar on a terminal and lines elsewhere."""
