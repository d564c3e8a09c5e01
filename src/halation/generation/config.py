"""Settings of `halation generate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from halation.config import ABOVE_ZERO, Conflict, free_setting, setting

# None means "not given"; the help shows the type alone.
MaybeInt = Annotated[int | None, tyro.conf.arg(metavar="INT")]
MaybeFloat = Annotated[float | None, tyro.conf.arg(metavar="FLOAT")]


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Draw an image for every prompt of a list, on every GPU: the same command again does what is missing.

    An image depends on its prompt, its seed, the model and these settings, and not on the number of GPUs.
    """

    # -- what is drawn from what
    prompts_csv: Annotated[str, tyro.conf.arg(aliases=["--prompts"])] = free_setting("")
    """Prompt list: CSV, TXT (one a line), JSONL or Parquet; `-` is standard input. Columns: prompt or caption, and if
    wanted image_id, seed, negative_prompt, width, height, steps, guidance_scale."""
    prompts_format: Literal["", "csv", "txt", "jsonl", "parquet"] = free_setting("")
    """Format of the list where its name does not tell."""
    model_path: str = free_setting("")
    """Folder of a diffusers pipeline (or its name on the hub), a run, checkpoint or export of Halation, or a model of
    the package, such as `streets-64`; `testcard` needs no model, `testcard:0.2` takes 0.2 s a batch."""
    output_dir: Path = free_setting(Path("outputs/generated"))
    """Folder for the images, their metadata and the ledger."""
    num_samples: int = setting(0, change="grows", low=0, high=10**12)
    """Draw the first so many prompts; 0 is all. A later call may ask for more."""
    seed_start: int = setting(42, low=0, high=2**63 - 1)
    """Sample k is drawn from seed seed_start + k, unless its row has a seed of its own."""
    num_inference_steps: MaybeInt = setting(None, low=1, high=10_000)
    """Denoising steps; by default 20, or those that a student or a model of the package is made for."""
    guidance_scale: MaybeFloat = setting(None, low=0)
    """Classifier-free guidance; by default 7.5, or what a Halation run used."""
    height: MaybeInt = setting(None, low=1, high=16_384)
    """Height in pixels; by default 480, or the size a Halation model was made for."""
    width: MaybeInt = setting(None, low=1, high=16_384)
    """Width in pixels; by default 832, or the size a Halation model was made for."""
    num_frames: int = setting(1, low=1, high=10_000)
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
    batch_size: int = setting(4, low=1, high=10_000)
    """Images in a batch, the unit of work. It is part of the images' bits."""
    micro_batch: int = setting(0, low=0, high=10**12)
    """Images of a batch drawn at once; 0 tries how many fit into memory, once, and the run keeps to it."""
    dtype: Literal["", "bf16", "fp16", "fp32"] = setting("")
    """Precision; by default bf16 on a GPU and fp32 on a CPU."""
    compile: bool = setting(False)
    """Compile the transformer's block: faster after a minute or two, and another rounding (E1)."""
    cfg_truncation_step: MaybeInt = setting(None, low=0)
    """From this step on only the conditional branch runs: up to half the time, other images (E2)."""
    enable_half_frame: bool = setting(False)
    """Two-expert video models: the first expert draws half the frames, doubled for the second (E2). Changes nothing
    for one frame."""
    offload: Literal["none", "model", "layers"] = free_setting("none")
    """Where a model is larger than a GPU: move whole parts (the two experts of Wan in turn), or layer by layer."""
    fps: int = setting(16, low=1, high=10_000)
    """Frames a second of an MP4."""
    png: Literal["auto", "zlib", "isal"] = free_setting("auto")
    """What compresses PNGs; auto is isal where it is installed. A run keeps to its first choice."""
    threads: int = setting(1, low=1, high=10_000)
    """CPU threads a worker on a CPU computes with. It is part of the images' bits there."""

    # -- who draws it
    gpu_ids: tuple[int, ...] = free_setting(())
    """GPUs to use, as torch counts them within CUDA_VISIBLE_DEVICES; by default all."""
    nproc: int = free_setting(0)
    """Workers; 0 is one for each GPU, or without a GPU one (on a Ray cluster one for each node)."""
    oversubscribe: bool = free_setting(False)
    """Allow several workers on one GPU."""
    cluster: str = free_setting("local")
    """local; ray starts Ray on this machine, auto joins the cluster that runs (RAY_ADDRESS), ray://HOST:PORT one
    elsewhere; files is for several commands on one shared folder."""
    stall_timeout_s: float = free_setting(600.0, low=ABOVE_ZERO)
    """Seconds without a step after which a worker is taken for hung and replaced."""
    lease_s: float = free_setting(60.0, low=ABOVE_ZERO)
    """With --cluster files: seconds of silence after which another process takes over what one had claimed."""

    # -- around it
    verify: bool = free_setting(False)
    """First check every image against its hash in the ledger, and draw damaged ones again."""
    accept_changes: bool = free_setting(False)
    """Go on in a folder that was begun with other settings; the change is recorded and new images belong to a new
    epoch."""
    progress: Literal["auto", "rich", "plain", "json", "none"] = free_setting("auto")
    """auto shows bars on a terminal and lines elsewhere."""

    CONFLICTS = (
        Conflict(
            "",
            "a list of prompts",
            "give --prompts_csv FILE (csv, txt, jsonl, parquet), or - for standard input",
            without="prompts_csv",
        ),
        Conflict(
            "cluster",
            "local, files, ray, auto or ray://HOST:PORT",
            "choose one of these",
            when=lambda config: config.cluster not in ("local", "files") and not config.uses_ray,
        ),
        Conflict(
            "gpu_ids cluster",
            "no list of GPUs: Ray knows which GPUs every node has and gives each worker one",
            "leave --gpu_ids out; --nproc N takes N of the cluster's GPUs, CUDA_VISIBLE_DEVICES limits a node where "
            "Ray is started on it",
            when=lambda config: bool(config.gpu_ids) and config.uses_ray,
        ),
        Conflict(
            "accept_changes cluster",
            "the settings the folder was begun with: other processes may be drawing with them now",
            "use the old settings, or another --output_dir",
            when=lambda config: config.accept_changes and config.cluster == "files",
        ),
        Conflict(
            "micro_batch batch_size",
            "at most the whole batch at once",
            "lower --micro_batch",
            when=lambda config: config.micro_batch > config.batch_size,
        ),
    )

    @property
    def uses_ray(self) -> bool:
        return self.cluster in ("ray", "auto") or self.cluster.startswith("ray://")
