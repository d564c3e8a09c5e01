"""Settings of `halation evaluate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from halation.config import ABOVE_ZERO, Conflict, setting
from halation.errors import InputError
from halation.generation.config import MaybeFloat, MaybeInt, MaybeText

Metric = Literal["fid", "kid", "fd", "is", "prdc", "clip", "agreement"]


def fid_conflict(prefix: str = "") -> Conflict:
    """Return the conflict of FID with another extractor; `prefix` is that of the flags."""
    return Conflict(
        f"{prefix}metrics {prefix}extractor",
        "a Frechet distance of Inception features, which is what FID means",
        f"use fd (FD-streets), or --{prefix}extractor inception",
        when=lambda config: (
            getattr(config, f"{prefix}extractor") == "streets" and "fid" in getattr(config, f"{prefix}metrics")
        ),
    )


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Score images on all GPUs in one pass.

    Each score comes with its provenance; what cannot be computed is an error. The result is bit-identical for any
    number of ranks, and after a resume.
    """

    COMMON = (
        "generated model_path prompts reference metrics extractor clip_model resize allow_few num_samples "
        "num_inference_steps guidance_scale height width seed_start batch_size nproc gpu_ids cache_dir check json "
        "output"
    )
    """What --help shows; --help_all shows every setting."""

    # -- images
    generated: str = ""
    """Images to score: a folder, or the output folder of `halation generate` (its ledger is checked)."""
    model_path: str = ""
    """Instead of --generated: a model (folder or name) that generates images for --prompts as `halation generate`
    would, without writing them to disk."""
    prompts: tuple[str, ...] = ()
    """Prompts of the images: one file (csv, txt, jsonl, parquet), matched by image id, or texts, the first one for
    image 000001; not needed for a run of `halation generate`."""
    reference: tuple[str, ...] = ()
    """Real images: a folder, `streets`, or saved statistics (.npz with mu and sigma, or .safetensors
    of --save_statistics; several of these are merged)."""

    # -- metrics
    metrics: tuple[Metric, ...] = ()
    """Metrics: fid, kid, is (inception score), fd (Frechet distance of --extractor), prdc (precision, recall, density,
    coverage), clip, agreement (street captions). By default fid and kid; with --extractor streets fd, kid, prdc
    and, if captions are known, agreement."""
    extractor: str = ""
    """Extractor for fd, kid and prdc: inception, dinov2, clip, streets, or the folder of a DINOv2 or CLIP model; by
    default inception, or streets if the reference is `streets`."""
    weights: str = ""
    """File, folder or Hub name of the extractor's weights, instead of the default."""
    inception_weights: str = ""
    """The same for fid and is, if --extractor is not inception."""
    clip_model: str = "openai/clip-vit-large-patch14"
    """CLIP model for the CLIP score: folder or Hub name."""
    resize: Literal["clean", "tf", "torch"] = "clean"
    """How images are resized for Inception and DINOv2: as clean-fid, as TensorFlow 1 (torch-fidelity), or as
    pytorch-fid."""
    allow_few: bool = False
    """Score fewer images than a metric needs; such scores are flagged `few`."""
    allow_missing: bool = False
    """Score the images that exist of an unfinished run of `halation generate`; the report lists the missing ones, and
    the exit code is 1."""
    allow_sizes: bool = False
    """Score a folder whose images differ in size."""
    num_reference: int = setting(5000, low=1, high=10**9)
    """Number of validation scenes of the reference `streets`."""
    kid_subsets: int = setting(100, low=1, high=10**9)
    """Random subsets that KID is averaged over."""
    kid_subset_size: int = setting(1000, low=2, high=10**9)
    """Images in each KID subset."""
    nearest_k: int = setting(3, low=1, high=10_000)
    """Neighbours that define the radius in precision, recall, density and coverage."""
    bootstrap: int = setting(0, low=0, high=10**12)
    """Resamplings for a 95 % bootstrap interval of fid and fd; each takes as long as the metric itself."""

    # -- images of a model (--model_path)
    revision: MaybeText = setting(None)
    """Branch, tag or commit of a model on the Hub; by default main."""
    variant: MaybeText = setting(None)
    """Variant of the weights on the Hub, such as fp16; by default the plain weights."""
    num_samples: int = setting(0, low=0, high=10**12)
    """Score the first N images or prompts; 0 means all."""
    num_inference_steps: MaybeInt = setting(None, low=1, high=10_000)
    """Denoising steps; by default those of the pipeline's own call, 20 for a DiT of Halation, or the number that a
    student or bundled model was trained for."""
    guidance_scale: MaybeFloat = setting(None, low=0, high=1e9)
    """Guidance scale; by default that of the pipeline's own call, or the value a Halation run used. Refused for a model
    that ignores it."""
    height: MaybeInt = setting(None, low=1, high=16_384)
    """Height in pixels; by default that of the pipeline, or the size a Halation model was trained at."""
    width: MaybeInt = setting(None, low=1, high=16_384)
    """Width in pixels; by default that of the pipeline, or the size a Halation model was trained at."""
    seed_start: int = setting(42, low=0, high=2**63 - 1)
    """Image k uses the seed seed_start + k, unless its row has a seed."""
    negative_prompt: str = ""
    """Negative prompt for rows without one."""
    scheduler: str = ""
    """Solver to use instead of the model's."""
    raw: bool = False
    """For Halation checkpoints: use the raw weights instead of the EMA."""
    model_batch_size: int = setting(4, low=1, high=10_000)
    """Images in a batch of the model; affects their bits, like --batch_size of `halation generate`."""
    model_dtype: Literal["", "bf16", "fp16", "fp32"] = ""
    """Precision of the model; by default bf16 on a GPU and fp32 on a CPU."""
    compile: bool = False
    """Compile the transformer blocks."""

    # -- computation and distributed
    batch_size: int = setting(32, low=1, high=10_000)
    """Images in a batch of the extractor; affects the bits of the features."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the extractor; the reference implementations use fp32."""
    decode_workers: int = setting(-1, low=-1, high=1024)
    """Processes per rank that decode and resize images; -1 divides the CPU cores among the ranks."""
    threads: int = setting(1, low=1, high=10_000)
    """CPU threads per rank; on a CPU they affect the bits of the features."""
    nproc: int = 0
    """Ranks to start on this machine; 0 is one per GPU, or without a GPU up to one per core."""
    gpu_ids: tuple[int, ...] = ()
    """GPUs to use, as torch numbers them within CUDA_VISIBLE_DEVICES; by default all."""
    oversubscribe: bool = False
    """Allow several ranks on one GPU."""
    dist_timeout_s: float = setting(600.0, low=ABOVE_ZERO, high=1e9)
    """Seconds without progress after which the command ends and names the rank."""
    keep_features: int = setting(200_000, low=0, high=10**12)
    """Keep the features (in the cache) of up to this many images; for more images only the moments are kept, which
    suffice for fid and fd alone."""
    cache_dir: Path | None = None
    """Folder for cached features, so that a repeated call or a new metric computes only what is missing; by default
    ~/.cache/halation/features."""

    # -- output
    check: bool = False
    """Only check that the extractors' weights and the reference are available, then exit; for example before a long
    generation."""
    save_statistics: Path | None = None
    """Write the statistics (and features) of the generated images by --extractor to this file (.safetensors), for use
    as a reference."""
    json: bool = False
    """Print one JSON object on standard output instead of a table."""
    output: Path | None = None
    """Also write the JSON object to this file."""
    progress: Literal["auto", "rich", "plain", "json", "none"] = "auto"
    """Progress display; auto shows a bar on a terminal and lines elsewhere."""

    CONFLICTS = (
        *(
            Conflict(name, "a model of the Hub that generates images", "give --model_path", without="model_path")
            for name in ("revision", "variant")
        ),
        Conflict("generated model_path", "images to score, or a model to generate them", "give one of the two"),
        Conflict(
            "", "images to score, or a model to generate them", "give one of the two", without="generated model_path"
        ),
        Conflict("allow_missing model_path", "the output folder of `halation generate`", "leave --allow_missing out"),
        Conflict(
            "prompts",
            "a file that every rank can read",
            "write the prompts to a file",
            when=lambda config: tuple(config.prompts) == ("-",),
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
            "use that suffix",
            when=lambda config: config.save_statistics is not None and config.save_statistics.suffix != ".safetensors",
        ),
    )


def check_reference(config: EvaluateConfig, metrics: Sequence[str]) -> None:
    """Raise if these metrics need a reference that is not given or does not exist."""
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
