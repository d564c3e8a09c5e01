"""Settings of `halation generate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from halation.config import free_setting, setting

# "Not said" is a value of its own here, which a person need not see.
MaybeInt = Annotated[int | None, tyro.conf.arg(metavar="INT")]
MaybeFloat = Annotated[float | None, tyro.conf.arg(metavar="FLOAT")]


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Draw an image for every prompt of a list, on every GPU: the same command again does what is missing.

    An image depends on its prompt, its seed, the model and these settings, and not on the number of GPUs.
    """

    # -- what is drawn from what
    prompts_csv: Annotated[str, tyro.conf.arg(aliases=["--prompts"])] = free_setting("")
    """Prompt list: CSV, TXT (one a line), JSONL or Parquet; `-` is standard input. Columns: prompt or caption, and if wanted image_id, seed,
    negative_prompt, width, height, steps, guidance_scale."""
    prompts_format: Literal["", "csv", "txt", "jsonl", "parquet"] = free_setting("")
    """Format of the list where its name does not tell."""
    model_path: str = free_setting("")
    """Folder of a diffusers pipeline (or its name on the hub), a run, checkpoint or export of Halation, or a model of the package, such as
    `streets-64`; `testcard` needs no model, `testcard:0.2` takes 0.2 s a batch."""
    output_dir: Path = free_setting(Path("outputs/generated"))
    """Folder for the images, their metadata and the ledger."""
    num_samples: int = setting(0, change="grows")
    """Draw the first so many prompts; 0 is all. A later call may ask for more."""
    seed_start: int = setting(42)
    """Sample k is drawn from seed seed_start + k, unless its row has a seed of its own."""
    num_inference_steps: MaybeInt = setting(None)
    """Denoising steps; by default 20, or those that a student or a model of the package is made for."""
    guidance_scale: MaybeFloat = setting(None)
    """Classifier-free guidance; by default 7.5, or what a Halation run used."""
    height: MaybeInt = setting(None)
    """Height in pixels; by default 480, or the size a Halation model was made for."""
    width: MaybeInt = setting(None)
    """Width in pixels; by default 832, or the size a Halation model was made for."""
    num_frames: int = setting(1)
    """Frames of a video model: one is an image, more are an MP4 and its frames."""
    negative_prompt: str = setting("")
    """What to stay away from, for rows without one of their own."""
    scheduler: str = setting("")
    """Another solver than the model's own: euler, heun, dpm++, unipc, ddim ..., or the name of a diffusers class."""
    raw: bool = setting(False)
    """For Halation checkpoints: draw from the weights as they are instead of their average."""
    pipeline_args: tuple[str, ...] = setting(())
    """Further options of the pipeline's call, as KEY=VALUE with a JSON value, for instance max_sequence_length=256."""

    # -- how it is drawn
    batch_size: int = setting(4)
    """Images in a batch, the unit of work. It is part of the images' bits."""
    micro_batch: int = setting(0)
    """Images of a batch drawn at once; 0 tries how many fit into memory, once, and the run keeps to it."""
    dtype: Literal["", "bf16", "fp16", "fp32"] = setting("")
    """Precision; by default bf16 on a GPU and fp32 on a CPU."""
    compile: bool = setting(False)
    """Compile the transformer's block: faster after a minute or two, and another rounding (E1)."""
    cfg_truncation_step: MaybeInt = setting(None)
    """From this step on only the conditional branch runs: up to half the time, other images (E2)."""
    enable_half_frame: bool = setting(False)
    """Two-expert video models: the first expert draws half the frames, doubled for the second (E2). Changes nothing for one frame."""
    offload: Literal["none", "model", "layers"] = free_setting("none")
    """Where a model is larger than a GPU: move whole parts (the two experts of Wan in turn), or layer by layer."""
    fps: int = setting(16)
    """Frames a second of an MP4."""
    png: Literal["auto", "zlib", "isal"] = free_setting("auto")
    """What compresses PNGs; auto is isal where it is installed. A run keeps to its first choice."""
    threads: int = setting(1)
    """CPU threads a worker on a CPU computes with. It is part of the images' bits there."""

    # -- who draws it
    gpu_ids: tuple[int, ...] = free_setting(())
    """GPUs to use, as torch counts them within CUDA_VISIBLE_DEVICES; by default all."""
    nproc: int = free_setting(0)
    """Workers; 0 is one for each GPU, or without a GPU one (on a Ray cluster one for each node)."""
    oversubscribe: bool = free_setting(False)
    """Allow several workers on one GPU."""
    cluster: str = free_setting("local")
    """local; ray starts Ray on this machine, auto joins the cluster that runs (RAY_ADDRESS), ray://HOST:PORT one elsewhere; files is for
    several commands on one shared folder."""
    stall_timeout_s: float = free_setting(600.0)
    """Seconds without a step after which a worker is taken for hung and replaced."""
    lease_s: float = free_setting(60.0)
    """With --cluster files: seconds of silence after which another process takes over what one had claimed."""

    # -- around it
    verify: bool = free_setting(False)
    """First check every image against its hash in the ledger, and draw damaged ones again."""
    accept_changes: bool = free_setting(False)
    """Go on in a folder that was begun with other settings; the change is recorded and new images belong to a new epoch."""
    progress: Literal["auto", "rich", "plain", "json", "none"] = free_setting("auto")
    """auto shows bars on a terminal and lines elsewhere."""
