"""Settings of `halation train`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from halation.config import ABOVE_ZERO, BELOW_ONE, MAX_SEED, Conflict, free_setting, setting
from halation.evaluation.config import EvaluateConfig, Metric

ONLY_FOR_PIPELINES = ("lora_rank", "lora_alpha", "lora_targets", "aspect_buckets", "weights_dtype")
NOT_FOR_PIPELINES = {
    "model": "the pipeline brings its own transformer",
    "vae": "the pipeline brings its own autoencoder",
    "patch_size": "the pipeline's transformer has its own",
    "num_register_tokens": "the pipeline's transformer has none",
}
SIZE_CONFLICT = Conflict(
    "image_size", "height and width", "give one or two positive numbers", when=lambda config: len(config.image_size) > 2
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a diffusion transformer on every rank, with samples from every rank at every checkpoint.

    The same command again goes on where the last one stopped.
    """

    # -- what is trained on what
    output_dir: Path = free_setting(Path("runs/train"))
    """Folder of the run: config, metrics, checkpoints, samples, logs, export."""
    data: str = setting("streets")
    """`streets` (embedded, drawn on the fly); a folder: metadata.jsonl|csv with file_name and text, or one folder per
    class; or a CSV file of images and captions."""
    max_images: int = setting(0, low=0)
    """Train on the first images of the data only; 0 takes all."""
    image_size: tuple[int, ...] = setting((), low=1)
    """Height and width of the images; one number means a square. By default 64 64, or what the model of --model_path
    was made for."""
    aspect_buckets: bool = setting(False)
    """Keep each image near its own proportions, at about the area of --image_size; a batch holds one shape. For
    --model_path."""
    model: str = setting("small")
    """tiny, mini, small, base, large or xlarge; or what to start from: a run, checkpoint or export, or `streets-64` of
    the package."""
    model_path: str = free_setting("")
    """Fine-tune the transformer of a diffusers pipeline (HunyuanDiT, PixArt, SD3, FLUX, Wan): its folder, or its name
    on the hub."""
    lora_rank: int = setting(0, low=0)
    """Rank of LoRA adapters that are trained instead of the transformer's own weights; 0 trains all weights. For
    --model_path."""
    lora_alpha: float = setting(0.0, low=0)
    """Scale of the adapters' sum is lora_alpha / lora_rank; 0 means lora_rank, a scale of 1."""
    lora_targets: tuple[str, ...] = setting(())
    """Names of the linear layers that get adapters; by default those of the family's attention."""
    patch_size: int = setting(0, low=0)
    """Pixels (or latents) on a side of a token; 0 picks 4 up to 64 pixels and 8 above, and 2 on latents."""
    num_register_tokens: int = setting(0, low=0)
    """Learned extra tokens that take part in attention and are dropped before the output."""
    vae: str = setting("")
    """Folder of a diffusers AutoencoderKL: train on its latents. Empty: train on pixels."""
    n_steps: int = setting(20_000, change="grows", low=1)
    """Optimizer steps in all; a resumed run may ask for more."""
    batch_size: int = setting(32, low=1)
    """Images a rank takes through the model at once. The product with ranks and accumulation is the run's global
    batch, and stays with the run."""
    accumulate: int = setting(1, low=1)
    """Micro-batches whose gradients are added up before a step."""
    lr: float = setting(1e-4, low=ABOVE_ZERO)
    """Learning rate after warm-up."""
    warmup_steps: int = setting(0, low=0)
    """Steps over which the learning rate rises from zero."""
    decay_steps: int = setting(0, low=0)
    """Steps after warm-up over which it falls to zero along a cosine; 0 keeps it constant."""
    weight_decay: float = setting(0.0, low=0)
    """AdamW's decoupled weight decay."""
    betas: tuple[float, float] = setting((0.9, 0.999), low=0, high=BELOW_ONE)
    """AdamW's two decay rates of gradient moments."""
    grad_clip: float = setting(1.0, low=0)
    """Largest norm of the gradient; 0 does not clip."""
    ema_decay: float = setting(0.9999, low=0, high=BELOW_ONE)
    """Decay of the average of the weights that samples are drawn from; it warms up with the number of updates."""
    caption_dropout: float = setting(0.1, low=0, high=1)
    """Share of images that are trained without their caption, which is what guidance needs."""
    time_sampling: Literal["logit_normal", "uniform"] | None = setting(None)
    """How training times are spread between image (0) and noise (1); by default logit_normal, and what its family uses
    for --model_path."""
    time_shift: float | None = setting(None, low=ABOVE_ZERO)
    """Moves times towards noise (above 1), in training and, for a DiT, in sampling; by default 1, or the shift of the
    model's scheduler."""
    seed: int = setting(0, low=0, high=MAX_SEED)
    """Decides the first weights, the order of the data and all training noise."""
    dtype: Literal["fp32", "bf16", "fp16"] = setting("fp32")
    """Precision of the forward and backward pass."""
    weights_dtype: Literal["fp32", "bf16"] = setting("fp32")
    """fp32 keeps master weights and optimizer in float32; bf16 keeps them in bfloat16: half the memory, but small
    updates are lost. The EMA is float32 either way."""
    deterministic: bool = setting(False)
    """Only kernels whose results repeat bit for bit on a GPU (slower). On a CPU they always do."""
    nan_policy: Literal["stop", "skip"] = setting("stop")
    """What all ranks do when a loss or gradient is not finite on one of them."""

    # -- how it is spread
    engine: Literal["auto", "single", "ddp", "fsdp", "deepspeed"] = setting("auto")
    """auto takes ddp for several ranks and single for one; fsdp (FSDP2) and deepspeed (ZeRO) shard weights, gradients,
    optimizer and EMA."""
    zero_stage: Literal[1, 2, 3] = setting(2)
    """What deepspeed shards: 1 the optimizer, 2 gradients too, 3 weights and EMA too."""
    deepspeed_config: str = free_setting("")
    """DeepSpeed's own JSON config; what it says goes before --zero_stage, except what Halation's flags decide."""
    offload_optimizer: bool = setting(False)
    """Keep the optimizer's state in host memory (fsdp, where the weights go along, and deepspeed): slower, for models
    that do not fit."""
    nproc: int = free_setting(0)
    """Ranks to start on this machine; 0 is one for each GPU, or one without a GPU. Under torchrun or srun those ranks
    are joined."""
    gpu_ids: tuple[int, ...] = free_setting(())
    """GPUs to use, as torch counts them within CUDA_VISIBLE_DEVICES; by default all."""
    oversubscribe: bool = free_setting(False)
    """Allow several ranks on one GPU (over gloo): for tests, not for speed."""
    dist_timeout_s: float = free_setting(600.0, low=ABOVE_ZERO)
    """Seconds without progress after which a rank is given up and named."""
    max_restarts: int = free_setting(1, low=0)
    """How often ranks are started again from the last checkpoint after one of them failed."""
    threads: int = setting(1, low=1)
    """CPU threads a rank computes with; part of what makes results repeat."""
    compile: bool = setting(False)
    """Compile the transformer's blocks: the same maths with other rounding, after a minute or two of compiling."""
    gradient_checkpointing: bool = setting(False)
    """Keep no activations inside blocks and compute them again: less memory, a third more work."""

    # -- data
    cache: Literal["auto", "none", "memory", "pixels", "latents"] = free_setting("auto")
    """Where prepared images are kept: in memory, or in memory-mapped files (pixels, latents). auto: latents with --vae
    or --model_path, else memory."""
    cache_dir: str = free_setting("")
    """Folder of that cache; by default `cache` in the run's folder. Runs on the same data may share it."""
    num_workers: int = free_setting(0, low=0)
    """Processes that draw or decode images ahead of training; 0 uses threads."""
    validation_images: int = setting(64, low=0)
    """Images kept out of training for the validation loss (of a folder at most 5 %)."""

    # -- what is written when
    ckpt_every: int = free_setting(1000, low=0)
    """Steps between checkpoints that are kept; 0 writes none of them."""
    ckpt_latest_every: int = free_setting(0, low=0)
    """Steps between checkpoints of which only the newest is kept; 0 writes none of them."""
    keep_last: int = free_setting(3, low=0)
    """How many kept checkpoints stay on disk; 0 keeps all."""
    log_every: int = free_setting(10, low=1)
    """Steps between lines in metrics.jsonl."""
    report_to: tuple[Literal["tensorboard", "wandb", "trackio", "none"], ...] = free_setting(("tensorboard",))
    """Trackers besides metrics.jsonl; wandb is offline unless WANDB_MODE says otherwise."""
    run_name: str = free_setting("")
    """Name of the run in trackers; by default the folder's name."""
    progress: Literal["auto", "rich", "plain", "json", "none"] = free_setting("auto")
    """auto shows a bar on a terminal and a line every 30 s elsewhere."""

    # -- samples
    sample: bool = free_setting(True)
    """Draw samples on all ranks at every checkpoint, at the end of an epoch and of training."""
    sample_prompts: tuple[str, ...] = free_setting(())
    """Prompts to draw; by default the eight driving prompts for streets, captions or class names of a folder."""
    sample_prompts_file: str = free_setting("")
    """File of prompts (txt, csv, jsonl, parquet), drawn after those above; `-` is standard input."""
    sample_steps: int = free_setting(10, low=1)
    """Denoising steps a sample."""
    sample_seed: int = free_setting(42, low=0, high=MAX_SEED)
    """Sample k is drawn from seed sample_seed + k at every checkpoint, so checkpoints compare."""
    same_seed: bool = free_setting(False)
    """Draw every prompt from the same seed."""
    sampler: Literal["euler", "heun", "multistep"] = free_setting("multistep")
    """Solver of a DiT's samples; heun runs the model almost twice a step. A model of --model_path is drawn with its
    own scheduler."""
    sample_all: bool = free_setting(True)
    """Draw all prompts at every checkpoint; --no_sample_all draws as many as there are ranks, the first ones."""
    sample_names: Literal["index", "gpu", "rank"] = free_setting("index")
    """Names of the files: sample_00.png; gpu_0_sample.png, where 0 is the prompt's number too; or
    epoch_0001_rank_0_sample_00.png, all in one folder, by contiguous shares of the prompts."""
    sample_offload: bool = free_setting(False)
    """Park the optimizer's state in host memory while samples are drawn, for a model that only just trains."""
    guidance_scale: float | None = free_setting(None, low=0)
    """Classifier-free guidance; 1 switches it off and halves the work. By default 3, or what the pipeline of
    --model_path uses."""
    sample_batch_size: int = free_setting(1, low=1)
    """Images in a batch, that is in one forward. It is part of the image's bits, so it never follows from the number
    of GPUs."""
    sample_raw: bool = free_setting(False)
    """Also draw from the weights as they are, beside the EMA's."""
    sample_timeout_s: float = free_setting(0.0, low=0)
    """Seconds a rank may spend on one denoising step before it is named as hanging; 0 is dist_timeout_s."""

    # -- evaluations
    eval_every: int = free_setting(0, low=0)
    """Steps between evaluations of the average of the weights on all ranks, the last step included; 0 never
    evaluates."""
    eval_metrics: tuple[Metric, ...] = free_setting(())
    """fid, kid, is, fd, prdc, clip, agreement, as in `halation evaluate`; by default fd, kid and prdc, and for streets
    agreement."""
    eval_images: int = free_setting(1000, low=16, high=10**6)
    """Images drawn for an evaluation, for the captions or classes of the reference. Fewer than a metric can bear are
    scored and marked."""
    eval_reference: int = free_setting(5000, low=16, high=10**6)
    """Real images to compare with at most: the first validation scenes of streets, the first training images of a
    folder."""
    eval_extractor: str = free_setting("")
    """Features of fd, kid and prdc: inception, dinov2, clip, streets, or a model's folder; by default streets for
    streets, else inception."""
    eval_weights: str = free_setting("")
    """File, folder or hub name of that extractor's weights, instead of the usual ones."""
    eval_clip_model: str = free_setting(EvaluateConfig.clip_model)
    """CLIP model of the CLIP score: folder or hub name."""
    eval_batch_size: int = free_setting(16, low=1)
    """Images in a batch of an evaluation and in a batch of the extractor; part of the numbers' last bits."""
    eval_steps: int = free_setting(0, low=0)
    """Denoising steps of these images; 0 is sample_steps."""
    restart: bool = free_setting(False)
    """Start over at step 0 where every checkpoint of the run is damaged, instead of refusing; a whole one is still
    gone on from."""
    accept_changes: bool = free_setting(False)
    """Go on with changed settings; the change is recorded in config.json."""

    CONFLICTS = (
        SIZE_CONFLICT,
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
        *(
            Conflict(name, "the rank of the adapters", "give --lora_rank 16", without="lora_rank")
            for name in ("lora_alpha", "lora_targets")
        ),
    )
