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
MaybeText = Annotated[str | None, tyro.conf.arg(metavar="TEXT")]
RESOLVED_SETTINGS = ("height", "width", "num_inference_steps", "guidance_scale")
"""Settings whose defaults are those of the model, or of a folder that was started before."""


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Generate an image for every prompt of a list, on all GPUs.

    The same command again generates only the missing images. An image depends on its prompt, its seed, the model and
    these settings, not on the number of GPUs.
    """

    COMMON = (
        "prompts prompts_csv model_path output_dir num_samples seed_start num_inference_steps guidance_scale height "
        "width num_frames negative_prompt scheduler batch_size dtype compile offload gpu_ids nproc cluster "
        "accept_changes progress"
    )
    """What --help shows; --help_all shows every setting."""

    # -- prompts, model and output
    prompts: tuple[str, ...] = free_setting(())
    """Prompts: texts, or one file as for --prompts_csv."""
    prompts_csv: str = free_setting("")
    """Prompt list: CSV, TXT (one prompt per line), JSONL or Parquet; `-` is standard input. Columns: prompt or caption;
    optional: image_id, seed, negative_prompt, width, height, steps, guidance_scale."""
    prompts_format: Literal["", "csv", "txt", "jsonl", "parquet"] = free_setting("")
    """Format of the prompt list, if its file name does not show it."""
    model_path: str = free_setting("")
    """Folder of a diffusers pipeline (or its name on the Hub), a Halation run, checkpoint or export, or a bundled model
    such as `streets-64`. `testcard` needs no model; `testcard:0.2` takes 0.2 s per batch."""
    revision: MaybeText = setting(None)
    """Branch, tag or commit of a model on the Hub; by default main. A resumed run keeps the commit it started with."""
    variant: MaybeText = setting(None)
    """Variant of the weights on the Hub, such as fp16; by default the plain weights."""
    output_dir: Path = free_setting(Path("outputs/generated"))
    """Folder for the images, their metadata and the ledger."""
    # -- images
    num_samples: int = setting(0, change="grows", low=0, high=10**12)
    """Generate images for the first N prompts; 0 means all. A later call may raise it."""
    seed_start: int = setting(42, low=0, high=2**63 - 1)
    """Image k uses the seed seed_start + k, unless its row has a seed."""
    num_inference_steps: MaybeInt = setting(None, low=1, high=10_000)
    """Denoising steps; by default those of the pipeline's own call, 20 for a DiT of Halation, or the number that a
    student or bundled model was trained for."""
    guidance_scale: MaybeFloat = setting(None, low=0)
    """Guidance scale; by default that of the pipeline's own call, or the value a Halation run used. Refused for a model
    that ignores it."""
    height: MaybeInt = setting(None, low=1, high=16_384)
    """Height in pixels; by default that of the pipeline, or the size a Halation model was trained at."""
    width: MaybeInt = setting(None, low=1, high=16_384)
    """Width in pixels; by default that of the pipeline, or the size a Halation model was trained at."""
    num_frames: int = setting(1, low=1, high=10_000)
    """Frames for video models: 1, the default whatever the model, writes an image; more write an MP4 and its frames."""
    negative_prompt: str = setting("")
    """Negative prompt for rows without one."""
    scheduler: str = setting("")
    """Solver to use instead of the model's: euler, heun, dpm++, unipc, ddim ..., or the name of a diffusers class."""
    raw: bool = setting(False)
    """For Halation checkpoints: use the raw weights instead of the EMA."""
    pipeline_args: tuple[str, ...] = setting(())
    """Further arguments of the pipeline call, as KEY=VALUE with a JSON value, for example max_sequence_length=256."""

    # -- precision, speed and memory
    batch_size: int = setting(4, low=1, high=10_000)
    """Images in a batch, the unit of work. It affects the bits of the images."""
    micro_batch: int = setting(0, low=0, high=10**12)
    """Images of a batch in one forward; 0 measures once how many fit into memory and fixes that for the run."""
    dtype: Literal["", "bf16", "fp16", "fp32"] = setting("")
    """Precision; by default bf16 on a GPU and fp32 on a CPU."""
    compile: bool = setting(False)
    """Compile the transformer blocks: faster after a minute or two, with different rounding (E1)."""
    cfg_truncation_step: MaybeInt = setting(None, low=0)
    """From this step on, run only the conditional branch: up to twice as fast, but different images (E2)."""
    enable_half_frame: bool = setting(False)
    """Two-expert video models: the first expert generates half the frames, which are doubled for the second (E2). No
    effect with one frame."""
    offload: Literal["none", "model", "layers"] = free_setting("none")
    """For a model that does not fit on a GPU: offload whole components (the two experts of Wan in turn), or single
    layers."""
    fps: int = setting(16, low=1, high=10_000)
    """Frames per second of an MP4."""
    png: Literal["auto", "zlib", "isal"] = free_setting("auto")
    """PNG compressor; auto uses isal if it is installed. The first choice is fixed for the run."""
    threads: int = setting(1, low=1, high=10_000)
    """CPU threads per worker on a CPU. It affects the bits of the images there."""

    # -- distributed
    gpu_ids: tuple[int, ...] = free_setting(())
    """GPUs to use, as torch numbers them within CUDA_VISIBLE_DEVICES; by default all."""
    nproc: int = free_setting(0)
    """Number of workers; 0 is one per GPU, or one without a GPU (on a Ray cluster, one per node)."""
    oversubscribe: bool = free_setting(False)
    """Allow several workers on one GPU."""
    cluster: str = free_setting("local")
    """Where the workers run: local uses this machine; ray starts Ray on this machine, auto joins the running cluster
    (RAY_ADDRESS), and ray://HOST:PORT joins a remote one; files is for several commands that share one folder."""
    stall_timeout_s: float = free_setting(600.0, low=ABOVE_ZERO)
    """Seconds without a step after which a worker counts as hung and is replaced."""
    lease_s: float = free_setting(60.0, low=ABOVE_ZERO)
    """With --cluster files: seconds without a heartbeat after which another process takes over a process's batches."""

    # -- resume and output
    verify: bool = free_setting(False)
    """First check every image against its hash in the ledger, and generate damaged ones again."""
    accept_changes: bool = free_setting(False)
    """Continue in a folder that was started with other settings; the change is recorded and new images belong to a new
    epoch."""
    progress: Literal["auto", "rich", "plain", "json", "none"] = free_setting("auto")
    """Progress display; auto shows bars on a terminal and lines elsewhere."""

    CONFLICTS = (
        Conflict(
            "",
            "a list of prompts",
            "give --prompts with texts or one FILE (csv, txt, jsonl, parquet), or - for standard input",
            without="prompts_csv prompts",
        ),
        Conflict("prompts prompts_csv", "one of the two: both name the prompts", "leave one out"),
        Conflict(
            "cluster",
            "local, files, ray, auto or ray://HOST:PORT",
            "choose one of these",
            when=lambda config: config.cluster not in ("local", "files") and not config.uses_ray,
        ),
        Conflict(
            "gpu_ids cluster",
            "no list of GPUs: Ray knows the GPUs of every node and assigns one to each worker",
            "omit --gpu_ids; --nproc N uses N of the cluster's GPUs, and CUDA_VISIBLE_DEVICES, set where Ray is "
            "started, limits a node",
            when=lambda config: bool(config.gpu_ids) and config.uses_ray,
        ),
        Conflict(
            "accept_changes cluster",
            "the settings the folder was started with: other processes may be using them now",
            "use the old settings, or another --output_dir",
            when=lambda config: config.accept_changes and config.cluster == "files",
        ),
        Conflict(
            "micro_batch batch_size",
            "a micro-batch of at most --batch_size images",
            "lower --micro_batch",
            when=lambda config: config.micro_batch > config.batch_size,
        ),
    )

    @property
    def uses_ray(self) -> bool:
        return self.cluster in ("ray", "auto") or self.cluster.startswith("ray://")
