"""Settings of `halation evaluate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from halation.generation.config import MaybeFloat, MaybeInt

Metric = Literal["fid", "kid", "fd", "is", "prdc", "clip", "agreement"]


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Score images: on every GPU, in one pass over them, with numbers that say how they came about, or an error.

    One rank or many, in one go or resumed: the same bits.
    """

    # -- what is scored
    generated: str = ""
    """Images to score: a folder, or the folder of a `halation generate` (its ledger is checked)."""
    model_path: str = ""
    """Instead of --generated: a model (folder or name) that draws --prompts as `halation generate` would; no image touches the disk."""
    prompts: str = ""
    """Prompt list that the images were drawn for (csv, txt, jsonl, parquet), matched by image id; a run of `halation generate` has its own."""
    reference: tuple[str, ...] = ()
    """Real images: a folder, `streets`, or saved statistics (.npz with mu and sigma, .safetensors of ours; several are merged)."""

    # -- by which numbers
    metrics: tuple[Metric, ...] = ()
    """fid, kid, is (inception score), fd (Frechet distance of --extractor), prdc (precision, recall, density, coverage), clip, agreement (street
    captions). By default fid and kid; with --extractor streets fd, kid, prdc and, where captions are known, agreement."""
    extractor: str = ""
    """Features of fd, kid and prdc: inception, dinov2, clip, streets, or the folder of a DINOv2 or CLIP model; by default inception, or streets
    where the reference is `streets`."""
    weights: str = ""
    """File, folder or hub name of the extractor's weights, instead of the usual ones."""
    inception_weights: str = ""
    """The same for fid and is where --extractor is another one."""
    clip_model: str = "openai/clip-vit-large-patch14"
    """CLIP model of the CLIP score: folder or hub name."""
    resize: Literal["clean", "tf", "torch"] = "clean"
    """How images are brought to Inception's and DINOv2's size: as clean-fid, as TensorFlow 1 (torch-fidelity), or as pytorch-fid."""
    allow_few: bool = False
    """Score fewer images than a metric can bear; such numbers are marked."""
    allow_sizes: bool = False
    """Score a folder whose images differ in size."""
    num_reference: int = 5000
    """Validation scenes that the reference `streets` stands for."""
    kid_subsets: int = 100
    """Random subsets KID is averaged over."""
    kid_subset_size: int = 1000
    """Images in each of them."""
    nearest_k: int = 3
    """Neighbours that make the radius in precision, recall, density and coverage."""
    bootstrap: int = 0
    """Draws for a 95 % bootstrap interval of fid and fd; each takes as long as the number itself."""

    # -- with --model_path
    num_samples: int = 0
    """Score the first so many images or prompts; 0 is all."""
    num_inference_steps: MaybeInt = None
    """Denoising steps; by default 20, or those that a student or a model of the package is made for."""
    guidance_scale: MaybeFloat = None
    """Classifier-free guidance; by default 7.5, or what a Halation run used."""
    height: MaybeInt = None
    """Height in pixels; by default 480, or the size a Halation model was made for."""
    width: MaybeInt = None
    """Width in pixels; by default 832, or the size a Halation model was made for."""
    seed_start: int = 42
    """Sample k is drawn from seed seed_start + k, unless its row has a seed of its own."""
    negative_prompt: str = ""
    """What to stay away from, for rows without one of their own."""
    scheduler: str = ""
    """Another solver than the model's own."""
    raw: bool = False
    """For Halation checkpoints: draw from the weights as they are instead of their average."""
    model_batch_size: int = 4
    """Images the model draws at once; it is part of their bits, as --batch_size of `halation generate`."""
    model_dtype: Literal["", "bf16", "fp16", "fp32"] = ""
    """Precision the model draws in; by default bf16 on a GPU and fp32 on a CPU."""
    compile: bool = False
    """Compile the transformer's block."""

    # -- how
    batch_size: int = 32
    """Images the extractor sees at once; it is part of the features' bits."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the extractor; the reference implementations use fp32."""
    decode_workers: int = -1
    """Processes for each rank that decode and resize; -1 shares the CPU cores between the ranks."""
    threads: int = 1
    """CPU threads a rank computes with; on a CPU it is part of the features' bits."""
    nproc: int = 0
    """Ranks to start on this machine; 0 is one for each GPU, or without a GPU up to one for each core."""
    gpu_ids: tuple[int, ...] = ()
    """GPUs to use, as torch counts them within CUDA_VISIBLE_DEVICES; by default all."""
    oversubscribe: bool = False
    """Allow several ranks on one GPU."""
    dist_timeout_s: float = 600.0
    """Seconds without progress after which a rank is given up and named."""
    keep_features: int = 200_000
    """Up to so many images their features are kept (in the cache); of more only the moments, which serve fid and fd alone."""
    cache_dir: Path | None = None
    """Where features are kept, so that a call again or a new metric does only what is missing; by default ~/.cache/halation/features."""

    # -- what comes out
    check: bool = False
    """Only see whether the extractors' weights and the reference are there, and end: before a long drawing, for instance."""
    save_statistics: Path | None = None
    """Write the statistics (and features) of the generated side by --extractor here (.safetensors), to be a reference later."""
    json: bool = False
    """Print one JSON object on standard output instead of a table."""
    output: Path | None = None
    """Also write the JSON object to this file."""
    progress: Literal["auto", "rich", "plain", "json", "none"] = "auto"
    """auto shows a bar on a terminal and lines elsewhere."""
