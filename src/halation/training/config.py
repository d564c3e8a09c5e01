"""Settings of `halation train`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar

import tyro

from halation.config import ABOVE_ZERO, BELOW_ONE, MAX_SEED, Conflict, free_setting, setting
from halation.evaluation.config import EvaluateConfig, Metric
from halation.generation.config import MaybeText

DIT_DEFAULTS: Mapping[str, Any] = {
    "n_steps": 20_000,
    "batch_size": 32,
    "accumulate": 1,
    "lr": 1e-4,
    "warmup_steps": 0,
    "dtype": "fp32",
    "ckpt_every": 1000,
    "sample_steps": 10,
}
"""Defaults of settings that have others when a pipeline is fine-tuned (`training.pipeline_finetuning`)."""
PromptRows = Annotated[tuple[str, ...], tyro.conf.Suppress]
if TYPE_CHECKING:  # None means "not given"; all of them have a value before a session reads them
    ResolvedInt: TypeAlias = int
    ResolvedFloat: TypeAlias = float
    ResolvedDtype: TypeAlias = Literal["fp32", "bf16", "fp16"]
else:
    ResolvedInt = Annotated[int | None, tyro.conf.arg(metavar="INT")]
    ResolvedFloat = Annotated[float | None, tyro.conf.arg(metavar="FLOAT")]
    ResolvedDtype = Literal["fp32", "bf16", "fp16"] | None
ONLY_FOR_PIPELINES = (
    *("lora_rank", "lora_alpha", "lora_targets", "aspect_buckets", "weights_dtype", "revision", "variant"),
)
NOT_FOR_PIPELINES = {
    "model": "the pipeline brings its own transformer",
    "vae": "the pipeline brings its own autoencoder",
    "patch_size": "the pipeline's transformer has its own",
    "num_register_tokens": "the pipeline's transformer has none",
}
TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow", "swanlab", "comet_ml", "clearml", "aim", "none"]
SIZE_CONFLICT = Conflict(
    "image_size", "height and width", "give one or two positive numbers", when=lambda config: len(config.image_size) > 2
)

TRACKER_CONFLICTS = (
    Conflict(
        "tracker_project report_to",
        "a tracker with projects: wandb, trackio, mlflow, swanlab, comet_ml, clearml or aim",
        "name it with --report_to, or leave --tracker_project out",
        when=lambda config: bool(config.tracker_project) and set(config.report_to) <= {"tensorboard", "none"},
    ),
    Conflict(
        "tracker_entity report_to",
        "a tracker with teams: wandb, swanlab or comet_ml",
        "name it with --report_to, or leave --tracker_entity out",
        when=lambda config: (
            bool(config.tracker_entity) and not {"wandb", "swanlab", "comet_ml"} & set(config.report_to)
        ),
    ),
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a diffusion transformer; all ranks sample at each checkpoint.

    The same command, run again, resumes from the last checkpoint.
    """

    COMMON = (
        "output_dir data image_size model model_path lora_rank n_steps batch_size accumulate lr warmup_steps ema_decay "
        "seed dtype gradient_checkpointing compile engine nproc gpu_ids validation_images ckpt_every keep_last "
        "report_to sample_prompts sample_prompts_file sample_steps guidance_scale eval_every eval_metrics"
    )
    """What --help shows; --help_all shows every setting."""
    USUAL_DEFAULTS = DIT_DEFAULTS
    """Shown in the help of settings whose default is None."""

    # -- output and data
    output_dir: Path = free_setting(Path("runs/train"))
    """Run folder: config, metrics, checkpoints, samples, logs, export."""
    data: str = setting("streets")
    """Training data: a folder with metadata.jsonl|csv (file_name and text), a .txt file beside each image or one folder
    per class; a CSV file of images and captions; or `streets` (embedded, rendered on the fly)."""
    max_images: int = setting(0, low=0)
    """Train only on the first images of the data; 0 uses all."""
    image_size: tuple[int, ...] = setting((), low=1)
    """Height and width of the images; one number means a square. By default 64 64, or the native size of the model
    of --model_path."""
    aspect_buckets: bool = setting(False)
    """Keep each image near its own proportions, at about the area of --image_size; a batch holds one shape.
    For --model_path."""
    # -- model
    model: str = setting("small")
    """Model: tiny, mini, small, base, large or xlarge; or a model to start from: a run, checkpoint or export, or
    `streets-64` of the package."""
    model_path: str = free_setting("")
    """Fine-tune the transformer of a diffusers pipeline (HunyuanDiT, PixArt, SD3, FLUX, Wan): a folder or a name on
    the hub."""
    revision: MaybeText = setting(None)
    """Branch, tag or commit of a model on the Hub; by default main. A resumed run keeps the commit it started with."""
    variant: MaybeText = setting(None)
    """Variant of the weights on the Hub, such as fp16; by default the plain weights."""
    lora_rank: int = setting(0, low=0)
    """Rank of LoRA adapters that are trained instead of the transformer's own weights; 0 trains all weights.
    For --model_path."""
    lora_alpha: float = setting(0.0, low=0)
    """The adapters' output is scaled by lora_alpha / lora_rank; 0 means lora_rank, a scale of 1."""
    lora_targets: tuple[str, ...] = setting(())
    """Names of the linear layers that get adapters; by default the attention layers of the model family."""
    patch_size: int = setting(0, low=0)
    """Side of a token in pixels (or latents); 0 picks 4 up to 64 pixels, 8 above, and 2 for latents."""
    num_register_tokens: int = setting(0, low=0)
    """Learned extra tokens that take part in attention and are dropped before the output."""
    vae: str = setting("")
    """Folder of a diffusers AutoencoderKL: train on its latents. Empty: train on pixels."""
    # -- optimisation
    n_steps: ResolvedInt = setting(None, change="grows", low=1)
    """Total number of optimizer steps; it may be raised when a run is resumed. By default 20,000, or for a fine-tuned
    pipeline by the number of images."""
    batch_size: ResolvedInt = setting(None, low=1)
    """Micro-batch size per rank. The global batch, batch_size * ranks * accumulate, is fixed for the run. By default
    32, or for a fine-tuned pipeline by memory and number of images."""
    accumulate: ResolvedInt = setting(None, low=1)
    """Gradient accumulation: micro-batches whose gradients are summed before a step; by default 1, or for a fine-tuned
    pipeline without --batch_size as many as the global batch needs."""
    lr: ResolvedFloat = setting(None, low=ABOVE_ZERO)
    """Learning rate after warm-up; by default 1e-4, or for a fine-tuned pipeline that of its family, with or without
    LoRA."""
    warmup_steps: ResolvedInt = setting(None, low=0)
    """Steps over which the learning rate rises from zero; by default 0, or for a fine-tuned pipeline a tenth of the
    steps, at most 100."""
    decay_steps: int = setting(0, low=0)
    """Steps after warm-up over which the learning rate falls to zero along a cosine; 0 keeps it constant."""
    weight_decay: float = setting(0.0, low=0)
    """AdamW's decoupled weight decay."""
    betas: tuple[float, float] = setting((0.9, 0.999), low=0, high=BELOW_ONE)
    """AdamW's decay rates of the two gradient moments."""
    grad_clip: float = setting(1.0, low=0)
    """Gradient clipping: maximum norm of the gradient; 0 disables it."""
    ema_decay: float = setting(0.9999, low=0, high=BELOW_ONE)
    """Decay of the EMA, whose weights produce the samples; it warms up with the number of updates. 0 trains without
    an EMA, which saves its memory: samples, evaluation and export use the raw weights."""
    caption_dropout: float = setting(0.1, low=0, high=1)
    """Share of images trained without their caption; guidance needs it."""
    time_sampling: Literal["logit_normal", "uniform"] | None = setting(None)
    """Distribution of training times between image (0) and noise (1); by default logit_normal, or that of the model
    family for --model_path."""
    time_shift: float | None = setting(None, low=ABOVE_ZERO)
    """Values above 1 shift times towards noise, in training and, for a DiT, in sampling; by default 1, or the shift of
    the model's scheduler."""
    seed: int = setting(0, low=0, high=MAX_SEED)
    """Seed of the initial weights, the order of the data and all training noise."""
    # -- precision, speed and memory
    dtype: ResolvedDtype = setting(None)
    """Mixed precision: the precision of the forward and backward pass; by default fp32, or for a fine-tuned pipeline
    bf16 on a GPU that computes in it."""
    weights_dtype: Literal["fp32", "bf16"] = setting("fp32")
    """fp32 keeps master weights and optimizer in float32; bf16 keeps them in bfloat16: half the memory, but small
    updates are lost. The EMA is float32 either way."""
    deterministic: bool = setting(False)
    """Use only deterministic kernels on a GPU (slower). On a CPU, results are always deterministic."""
    nan_policy: Literal["stop", "skip"] = setting("stop")
    """What all ranks do if a loss or gradient is not finite on one of them: stop the run, or skip the update."""

    # -- distributed
    engine: Literal["auto", "single", "ddp", "fsdp", "deepspeed"] = setting("auto")
    """How training is distributed: auto selects ddp for several ranks and single for one; fsdp (FSDP2) and deepspeed
    (ZeRO) shard weights, gradients, optimizer and EMA."""
    zero_stage: Literal[1, 2, 3] = setting(2)
    """What deepspeed shards: 1 the optimizer, 2 gradients too, 3 weights and EMA too."""
    deepspeed_config: str = free_setting("")
    """DeepSpeed's own JSON config; it overrides --zero_stage, but not the settings that Halation's flags decide."""
    offload_optimizer: bool = setting(False)
    """Keep the optimizer state in host memory (deepspeed; with fsdp the weights too): slower, for models that do not
    fit."""
    nproc: int = free_setting(0)
    """Ranks to start on this machine; 0 starts one per GPU, or one without a GPU. Under torchrun or srun the command
    joins their ranks."""
    gpu_ids: tuple[int, ...] = free_setting(())
    """GPUs to use, numbered as torch does within CUDA_VISIBLE_DEVICES; by default all."""
    oversubscribe: bool = free_setting(False)
    """Allow several ranks on one GPU (over gloo): for tests, not for speed."""
    dist_timeout_s: float = free_setting(600.0, low=ABOVE_ZERO)
    """Seconds without progress after which a rank is reported as hanging and the job fails."""
    max_restarts: int = free_setting(1, low=0)
    """How often the ranks are restarted from the last checkpoint after one of them has failed."""
    threads: int = setting(1, low=1)
    """CPU threads per rank; results are reproducible only with the same number."""
    # -- precision, speed and memory
    compile: bool = setting(False)
    """Compile the transformer blocks: the same maths with other rounding, after a minute or two of compilation."""
    gradient_checkpointing: bool = setting(False)
    """Gradient checkpointing: recompute the activations of the blocks in the backward pass. Less memory, a third more
    work."""

    # -- data loading
    cache: Literal["auto", "none", "memory", "pixels", "latents"] = free_setting("auto")
    """Where prepared images are cached: in memory, or in memory-mapped files (pixels, latents). With auto, latents are
    cached if --vae or --model_path is set, else images in memory."""
    cache_dir: str = free_setting("")
    """Folder of that cache; by default `cache` in the run folder. Runs on the same data can share it."""
    num_workers: int = free_setting(0, low=0)
    """Processes that render or decode images ahead of training; 0 uses threads."""
    validation_images: int = setting(64, low=0)
    """Images held out for the validation loss (at most 5 % of a folder)."""

    # -- checkpoints and logs
    ckpt_every: ResolvedInt = free_setting(None, low=0)
    """Steps between checkpoints that are kept; 0 writes none of them. By default 1000, or for a fine-tuned pipeline
    about a tenth of the steps."""
    ckpt_latest_every: int = free_setting(0, low=0)
    """Steps between checkpoints of which only the newest is kept; 0 writes none of them."""
    keep_last: int = free_setting(3, low=0)
    """Number of kept checkpoints on disk; 0 keeps all."""
    log_every: int = free_setting(10, low=1)
    """Steps between lines in metrics.jsonl."""
    report_to: tuple[TrackerName, ...] = free_setting(("tensorboard",))
    """Trackers besides metrics.jsonl; they are offline unless their variables (WANDB_MODE, ...) say otherwise."""
    run_name: str = free_setting("")
    """Name of the run in trackers; by default that of the environment (WANDB_NAME, ...), else the folder's name."""
    tracker_project: str = free_setting("")
    """Project or experiment in trackers; by default that of the environment (WANDB_PROJECT, ...), else halation."""
    tracker_entity: str = free_setting("")
    """Team or account in wandb, workspace in Comet and SwanLab; by default that of the environment or the login."""
    progress: Literal["auto", "rich", "plain", "json", "none"] = free_setting("auto")
    """Progress display; auto shows a bar on a terminal and a line every 30 s elsewhere."""

    # -- sampling
    sample: bool = free_setting(True)
    """Sample on all ranks at every checkpoint, at the end of an epoch and of training."""
    sample_prompts: tuple[str, ...] = free_setting(())
    """Prompts to sample (validation prompts), or one file of them; by default the eight driving prompts for streets,
    captions or class names of a folder."""
    sample_prompts_file: str = free_setting("")
    """File of more prompts (txt, csv, jsonl, parquet), appended to --sample_prompts; `-` is standard input. Columns
    height, width, steps, guidance_scale, negative_prompt and seed set those of one prompt."""
    sample_rows: PromptRows = free_setting(())
    """Rows of that file with settings of their own, as JSON."""
    sample_steps: ResolvedInt = free_setting(None, low=1)
    """Denoising steps per sample; by default 10, or for a fine-tuned pipeline its own default."""
    sample_seed: int = free_setting(42, low=0, high=MAX_SEED)
    """Sample k uses seed sample_seed + k at every checkpoint, so that checkpoints can be compared."""
    same_seed: bool = free_setting(False)
    """Use the same seed for every prompt."""
    sampler: Literal["euler", "heun", "multistep"] = free_setting("multistep")
    """Solver for a DiT; heun calls the model almost twice per step. A model of --model_path uses its own scheduler."""
    sample_all: bool = free_setting(True)
    """Sample all prompts at every checkpoint; --no_sample_all samples only the first ones, one per rank."""
    sample_names: Literal["index", "gpu", "rank"] = free_setting("index")
    """File names: sample_00.png; gpu_0_sample.png, where 0 is also the prompt's number; or
    epoch_0001_rank_0_sample_00.png, all in one folder, with a contiguous share of the prompts per rank."""
    sample_offload: bool = free_setting(False)
    """Move the optimizer state to host memory during sampling, for a model that barely fits in training."""
    guidance_scale: float | None = free_setting(None, low=0)
    """Classifier-free guidance; 1 disables it and halves the work. By default 3, or the default of the pipeline
    of --model_path."""
    sample_batch_size: int = free_setting(1, low=1)
    """Images in one forward. It changes the rounding of the images, so it never depends on the number of GPUs."""
    sample_raw: bool = free_setting(False)
    """Also sample from the raw weights, besides the EMA."""
    sample_timeout_s: float = free_setting(0.0, low=0)
    """Seconds a rank may spend on one denoising step before it is reported as hanging; 0 is dist_timeout_s."""

    # -- evaluation
    eval_every: int = free_setting(0, low=0)
    """Steps between evaluations of the EMA on all ranks; the last step is always evaluated. 0 disables evaluation."""
    eval_metrics: tuple[Metric, ...] = free_setting(())
    """Metrics, as in `halation evaluate`: fid, kid, is, fd, prdc, clip, agreement; by default fd, kid and prdc, for
    streets also agreement."""
    eval_images: int = free_setting(1000, low=16, high=10**6)
    """Images sampled for an evaluation, with the captions or classes of the reference. Metrics computed on too few
    images are flagged `few`."""
    eval_reference: int = free_setting(5000, low=16, high=10**6)
    """Maximum number of real images to compare with: the first validation scenes of streets, or the first training
    images of a folder."""
    eval_extractor: str = free_setting("")
    """Extractor for fd, kid and prdc: inception, dinov2, clip, streets, or a model's folder; by default streets for
    streets, else inception."""
    eval_weights: str = free_setting("")
    """File, folder or hub name of that extractor's weights, instead of the default ones."""
    eval_clip_model: str = free_setting(EvaluateConfig.clip_model)
    """CLIP model of the CLIP score: folder or hub name."""
    eval_batch_size: int = free_setting(16, low=1)
    """Batch size for sampling and for the extractor in an evaluation; it affects the last bits of the scores."""
    eval_steps: int = free_setting(0, low=0)
    """Denoising steps of these images; 0 is sample_steps."""
    # -- resuming
    restart: bool = free_setting(False)
    """Start over at step 0 if every checkpoint of the run is damaged, instead of failing. An undamaged checkpoint is
    still resumed from."""
    accept_changes: bool = free_setting(False)
    """Continue with changed settings; the change is recorded in config.json."""

    CONFLICTS = (
        SIZE_CONFLICT,
        *TRACKER_CONFLICTS,
        *(
            Conflict(name, "a diffusers pipeline to fine-tune", "give --model_path", without="model_path")
            for name in ONLY_FOR_PIPELINES
        ),
        *(Conflict(f"{name} model_path", f"one of the two: {why}") for name, why in NOT_FOR_PIPELINES.items()),
        Conflict(
            "weights_dtype lora_rank",
            "adapters in float32 over a base in --dtype",
            "leave --weights_dtype out; --dtype bf16 makes the base narrow",
        ),
        Conflict(
            "sample_raw ema_decay",
            "an EMA to sample from besides the raw weights",
            "leave --sample_raw out: without an EMA all samples are from the raw weights",
            when=lambda config: config.sample_raw and config.ema_decay == 0,
        ),
        *(
            Conflict(name, "the rank of the adapters", "give --lora_rank 16", without="lora_rank")
            for name in ("lora_alpha", "lora_targets")
        ),
    )


ConfigT = TypeVar("ConfigT", bound=TrainConfig)


def missing_settings(config: TrainConfig) -> list[str]:
    """Names of the settings in DIT_DEFAULTS that are not given and not resolved yet."""
    return [name for name in DIT_DEFAULTS if getattr(config, name) is None]


def fill_dit_defaults(config: ConfigT) -> ConfigT:
    """Give missing settings the defaults of training a DiT and of distillation."""
    return dataclasses.replace(config, **{name: DIT_DEFAULTS[name] for name in missing_settings(config)})
