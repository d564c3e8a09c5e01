"""Settings of `halation evaluate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from halation.config import ABOVE_ZERO, Conflict, setting
from halation.errors import InputError
from halation.generation.config import MaybeFloat, MaybeInt

Metric = Literal["fid", "kid", "fd", "is", "prdc", "clip", "agreement"]


def fid_conflict(prefix: str = "") -> Conflict:
    """FID by an extractor that is not Inception; `prefix` is that of the flags."""
    return Conflict(
        f"{prefix}metrics {prefix}extractor",
        "a Frechet distance of Inception features, which is what FID means",
        f"ask for fd (FD-streets), or for --{prefix}extractor inception",
        when=lambda config: (
            getattr(config, f"{prefix}extractor") == "streets" and "fid" in getattr(config, f"{prefix}metrics")
        ),
    )


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Score images: on every GPU, in one pass over them, with numbers that say how they came about, or an error.

    One rank or many, in one go or resumed: the same bits.
    """

    # -- what is scored
    generated: str = ""
    """Images to score: a folder, or the folder of a `halation generate` (its ledger is checked)."""
    model_path: str = ""
    """Instead of --generated: a model (folder or name) that draws --prompts as `halation generate` would; no image
    touches the disk."""
    prompts: str = ""
    """Prompt list that the images were drawn for (csv, txt, jsonl, parquet), matched by image id; a run of `halation
    generate` has its own."""
    reference: tuple[str, ...] = ()
    """Real images: a folder, `streets`, or saved statistics (.npz with mu and sigma, .safetensors of ours; several are
    merged)."""

    # -- by which numbers
    metrics: tuple[Metric, ...] = ()
    """fid, kid, is (inception score), fd (Frechet distance of --extractor), prdc (precision, recall, density,
    coverage), clip, agreement (street captions). By default fid and kid; with --extractor streets fd, kid, prdc
    and, where captions are known, agreement."""
    extractor: str = ""
    """Features of fd, kid and prdc: inception, dinov2, clip, streets, or the folder of a DINOv2 or CLIP model; by
    default inception, or streets where the reference is `streets`."""
    weights: str = ""
    """File, folder or hub name of the extractor's weights, instead of the usual ones."""
    inception_weights: str = ""
    """The same for fid and is where --extractor is another one."""
    clip_model: str = "openai/clip-vit-large-patch14"
    """CLIP model of the CLIP score: folder or hub name."""
    resize: Literal["clean", "tf", "torch"] = "clean"
    """How images are brought to Inception's and DINOv2's size: as clean-fid, as TensorFlow 1 (torch-fidelity), or as
    pytorch-fid."""
    allow_few: bool = False
    """Score fewer images than a metric can bear; such numbers are marked."""
    allow_sizes: bool = False
    """Score a folder whose images differ in size."""
    num_reference: int = setting(5000, low=1, high=10**9)
    """Validation scenes that the reference `streets` stands for."""
    kid_subsets: int = setting(100, low=1, high=10**9)
    """Random subsets KID is averaged over."""
    kid_subset_size: int = setting(1000, low=2, high=10**9)
    """Images in each of them."""
    nearest_k: int = setting(3, low=1, high=10_000)
    """Neighbours that make the radius in precision, recall, density and coverage."""
    bootstrap: int = setting(0, low=0, high=10**12)
    """Draws for a 95 % bootstrap interval of fid and fd; each takes as long as the number itself."""

    # -- with --model_path
    num_samples: int = setting(0, low=0, high=10**12)
    """Score the first so many images or prompts; 0 is all."""
    num_inference_steps: MaybeInt = setting(None, low=1, high=10_000)
    """Denoising steps; by default 20, or those that a student or a model of the package is made for."""
    guidance_scale: MaybeFloat = setting(None, low=0, high=1e9)
    """Classifier-free guidance; by default 7.5, or what a Halation run used."""
    height: MaybeInt = setting(None, low=1, high=16_384)
    """Height in pixels; by default 480, or the size a Halation model was made for."""
    width: MaybeInt = setting(None, low=1, high=16_384)
    """Width in pixels; by default 832, or the size a Halation model was made for."""
    seed_start: int = setting(42, low=0, high=2**63 - 1)
    """Sample k is drawn from seed seed_start + k, unless its row has a seed of its own."""
    negative_prompt: str = ""
    """What to stay away from, for rows without one of their own."""
    scheduler: str = ""
    """Another solver than the model's own."""
    raw: bool = False
    """For Halation checkpoints: draw from the weights as they are instead of their average."""
    model_batch_size: int = setting(4, low=1, high=10_000)
    """Images the model draws at once; it is part of their bits, as --batch_size of `halation generate`."""
    model_dtype: Literal["", "bf16", "fp16", "fp32"] = ""
    """Precision the model draws in; by default bf16 on a GPU and fp32 on a CPU."""
    compile: bool = False
    """Compile the transformer's block."""

    # -- how
    batch_size: int = setting(32, low=1, high=10_000)
    """Images the extractor sees at once; it is part of the features' bits."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the extractor; the reference implementations use fp32."""
    decode_workers: int = setting(-1, low=-1, high=1024)
    """Processes for each rank that decode and resize; -1 shares the CPU cores between the ranks."""
    threads: int = setting(1, low=1, high=10_000)
    """CPU threads a rank computes with; on a CPU it is part of the features' bits."""
    nproc: int = 0
    """Ranks to start on this machine; 0 is one for each GPU, or without a GPU up to one for each core."""
    gpu_ids: tuple[int, ...] = ()
    """GPUs to use, as torch counts them within CUDA_VISIBLE_DEVICES; by default all."""
    oversubscribe: bool = False
    """Allow several ranks on one GPU."""
    dist_timeout_s: float = setting(600.0, low=ABOVE_ZERO, high=1e9)
    """Seconds without progress after which a rank is given up and named."""
    keep_features: int = setting(200_000, low=0, high=10**12)
    """Up to so many images their features are kept (in the cache); of more only the moments, which serve fid and fd
    alone."""
    cache_dir: Path | None = None
    """Where features are kept, so that a call again or a new metric does only what is missing; by default
    ~/.cache/halation/features."""

    # -- what comes out
    check: bool = False
    """Only see whether the extractors' weights and the reference are there, and end: before a long drawing, for
    instance."""
    save_statistics: Path | None = None
    """Write the statistics (and features) of the generated side by --extractor here (.safetensors), to be a reference
    later."""
    json: bool = False
    """Print one JSON object on standard output instead of a table."""
    output: Path | None = None
    """Also write the JSON object to this file."""
    progress: Literal["auto", "rich", "plain", "json", "none"] = "auto"
    """auto shows a bar on a terminal and lines elsewhere."""

    CONFLICTS = (
        Conflict("generated model_path", "images to score, or a model to draw them", "give one of the two"),
        Conflict("", "images to score, or a model to draw them", "give one of the two", without="generated model_path"),
        Conflict(
            "prompts",
            "a file, which every rank can read",
            "write the prompts to a file",
            when=lambda config: config.prompts == "-",
        ),
        Conflict(
            "reference",
            "one folder, `streets`, or files of statistics",
            "give one; several files of statistics are merged",
            when=lambda config: (
                len(config.reference) > 1
                and not all(path.endswith((".npz", ".safetensors")) for path in config.reference)
            ),
        ),
        Conflict(
            "save_statistics",
            "a file ending in .safetensors",
            "give it that ending",
            when=lambda config: config.save_statistics is not None and config.save_statistics.suffix != ".safetensors",
        ),
    )


def check_reference(config: EvaluateConfig, metrics: Sequence[str]) -> None:
    """Refuse a reference that is missing for these metrics or that does not exist."""
    if "" in config.reference:
        raise InputError(
            '--reference ""', "real images, or saved statistics", "check --reference: a variable may be unset"
        )
    if metrics and not config.reference:
        raise InputError(
            f"no --reference for {', '.join(metrics)}",
            "real images to compare with",
            "give --reference FOLDER, `streets`, or saved statistics (.npz, .safetensors)",
        )
    for path in config.reference:
        if path != "streets" and not Path(path).exists():
            raise InputError(
                f"--reference: there is no folder or file {path}",
                "real images, or saved statistics",
                "check --reference",
            )
