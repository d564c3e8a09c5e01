"""Settings of `halation sample`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from halation.config import ABOVE_ZERO, MAX_SEED, setting


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """Sample images from a checkpoint on all ranks, bit-identical to those of training.

    The result does not depend on the number of ranks. Settings that are not given are those of the checkpoint's run.
    """

    # -- checkpoint and output
    checkpoint: Annotated[str | Path, tyro.conf.arg(aliases=["--model_path"])]
    """A checkpoint folder, a run folder (its newest valid checkpoint), an export folder, or a bundled model such as
    `streets-64`."""
    output_dir: Path | None = None
    """Folder for the images, their prompts, grid.png and samples.json; by default a new folder under outputs/."""
    # -- sampling
    prompts: tuple[str, ...] = ()
    """Prompts to sample, or one file of them; by default those of the run."""
    prompts_file: str = ""
    """File of prompts (txt, csv, jsonl, parquet), sampled after those above; `-` is standard input. Columns height,
    width, steps, guidance_scale, negative_prompt and seed set those of one prompt."""
    prompt_rows: Annotated[tuple[str, ...], tyro.conf.Suppress] = ()
    """Rows of that file with settings of their own, as JSON."""
    sample_steps: int = setting(0, low=0)
    """Denoising steps; 0 uses the setting of the run."""
    sample_seed: int = setting(-1, low=-1, high=MAX_SEED)
    """Image k uses the seed sample_seed + k; -1 uses the setting of the run."""
    same_seed: bool | None = None
    """Use the same seed for every prompt."""
    sampler: Literal["", "euler", "heun", "multistep"] = ""
    """Solver; empty uses the setting of the run."""
    guidance_scale: float = setting(-1.0, low=-1)
    """Classifier-free guidance; -1 uses the setting of the run."""
    batch_size: int = setting(0, low=0)
    """Images per batch; 0 uses the setting of the run. It affects the bits of the images."""
    # -- precision and weights
    dtype: Literal["", "fp32", "bf16", "fp16"] = ""
    """Precision; empty uses the setting of the run."""
    compile: bool | None = None
    """Compile the transformer block; by default as in the run, because compiled blocks round differently."""
    raw: bool = False
    """Use the raw weights instead of the EMA."""
    # -- distributed
    nproc: int = 0
    """Ranks to start on this machine; 0 is one per GPU, or one without a GPU."""
    gpu_ids: tuple[int, ...] = ()
    """GPUs to use, numbered as in torch within CUDA_VISIBLE_DEVICES; by default all."""
    oversubscribe: bool = False
    """Allow several ranks on one GPU (over gloo): for tests, not for speed."""
    dist_timeout_s: float = setting(600.0, low=ABOVE_ZERO)
    """Seconds without progress after which a rank is reported as failed."""
    threads: int = setting(0, low=0)
    """CPU threads per rank; 0 uses the setting of the run. It affects the bits of the images."""
    progress: Literal["auto", "rich", "plain", "json", "none"] = "auto"
    """auto shows a bar on a terminal and lines elsewhere."""
