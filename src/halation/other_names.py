"""Names that settings have in other commands, and in diffusers, kohya and accelerate."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Set
from itertools import chain
from typing import Any, NamedTuple

from halation.errors import InputError, shorten

KOHYA = "kohya (sd-scripts, musubi)"
TRAINERS = "diffusers, kohya, SimpleTuner"


class OtherName(NamedTuple):
    """A name that other tools, or other commands of Halation, have for a setting."""

    tools: str
    settings: str = ""
    """Settings with the same meaning: the name stands for the first one that the command has."""
    meaning: str = ""
    """What it is there. This and the next two are the answer where there is no such setting."""
    ours: str = ""
    """What there is instead, or why there is nothing."""
    action: str = "leave it out"
    unless: str = ""
    """In a command that has this setting the name is ambiguous, and is answered."""
    refused: str = ""
    """Values with this character are answered: they mean something else."""
    values: Mapping[str, str] = {}
    """Values that are called otherwise here; YAML reads `no` as False."""


OTHER_NAMES = {
    # -- other commands of Halation
    "prompts": OtherName("Halation", "sample_prompts"),
    "prompts_file": OtherName("Halation", "prompts_csv prompts sample_prompts_file"),
    "prompts_csv": OtherName("Halation", "prompts_file prompts sample_prompts_file"),
    "sample_prompts": OtherName("Halation, kohya", "prompts"),
    "sample_prompts_file": OtherName("Halation", "prompts_file prompts_csv prompts"),
    "num_inference_steps": OtherName("Halation, diffusers", "sample_steps"),
    "sample_steps": OtherName("Halation", "num_inference_steps"),
    "steps": OtherName(
        "Halation, kohya",
        "num_inference_steps sample_steps",
        meaning="ambiguous in a training",
        ours="--n_steps (optimizer steps) or --sample_steps (denoising steps of a sample)",
        action="give one of the two",
        unless="n_steps",
    ),
    "seed": OtherName("diffusers, kohya", "seed_start sample_seed"),
    "seed_start": OtherName("Halation", "sample_seed"),
    "sample_seed": OtherName("Halation", "seed_start"),
    "model": OtherName("Halation", "model_path checkpoint"),
    "checkpoint": OtherName(
        "Halation",
        "model_path",
        meaning="ambiguous in a training",
        ours="the same command resumes its newest checkpoint by itself; --model RUN starts from the weights of a run, "
        "--model_path from a diffusers pipeline",
        action="leave it out, or give the one that is meant",
        unless="n_steps",
    ),
    "teacher_path": OtherName(
        "Halation",
        "model_path checkpoint",
        meaning="the model that a student learns from",
        ours="--teacher_path of `halation distill`",
        action="use that command",
        unless="n_steps",
    ),
    # -- model
    "pretrained_model_name_or_path": OtherName(TRAINERS, "model_path checkpoint"),
    "base_model": OtherName("diffusers, mflux", "model_path checkpoint"),
    "pretrained_teacher_model": OtherName("diffusers", "teacher_path"),
    "ckpt": OtherName(
        KOHYA,
        meaning="a model in a single file",
        ours="--model_path: the folder of a diffusers pipeline, or its name on the Hub",
        action="give the folder",
    ),
    "dit": OtherName(
        "musubi",
        meaning="the file of the transformer",
        ours="--model_path: the folder of a diffusers pipeline with all its parts",
        action="give the folder",
    ),
    "network_dim": OtherName(KOHYA, "lora_rank"),
    "rank": OtherName("diffusers", "lora_rank"),
    "network_alpha": OtherName(KOHYA, "lora_alpha"),
    "network_module": OtherName(
        KOHYA, meaning="the kind of adapter", ours="LoRA, which --lora_rank turns on", action="give --lora_rank 16"
    ),
    "network_weights": OtherName(
        KOHYA,
        meaning="adapters to start from",
        ours="the same command resumes its own adapters by itself",
    ),
    "lora_layers": OtherName(
        "diffusers",
        "lora_targets",
        meaning="names of layers, separated by commas",
        ours="--lora_targets, separated by spaces",
        action="give --lora_targets to_q to_k to_v",
        refused=",",
    ),
    "train_text_encoder": OtherName(
        "diffusers, SimpleTuner",
        meaning="training of the text encoders",
        ours="text encoders stay as they are, because their outputs are cached",
    ),
    # -- data
    "train_data_dir": OtherName("diffusers, kohya", "data data_path"),
    "instance_data_dir": OtherName("diffusers, SimpleTuner", "data data_path"),
    "dataset_name": OtherName(
        "diffusers",
        meaning="a data set of the Hub",
        ours="--data: a folder of images with metadata.jsonl or metadata.csv, or a CSV file",
        action="download it first (hf download --repo-type dataset NAME --local-dir DIR), then give --data DIR",
    ),
    "dataset_config": OtherName(
        KOHYA,
        meaning="a TOML file of folders",
        ours="--data: one folder of images with captions, or a CSV file",
        action="give --data; --config reads flags from a TOML file",
    ),
    "caption_column": OtherName(
        "diffusers",
        meaning="the column of the captions",
        ours="--data, which looks for them in the column `text` of the metadata file",
        action="name the column `text`, and leave this out",
    ),
    "image_column": OtherName(
        "diffusers",
        meaning="the column of the images",
        ours="--data, which looks for them in the column `file_name` of the metadata file",
        action="name the column `file_name`, and leave this out",
    ),
    "instance_prompt": OtherName(
        "diffusers, SimpleTuner",
        meaning="one caption for all images",
        ours="--data reads a caption for each image",
        action="write it into the metadata file, once for each image",
    ),
    "max_train_samples": OtherName("diffusers", "max_images"),
    "resolution": OtherName(
        TRAINERS,
        "image_size",
        meaning="one number, or width,height",
        ours="--image_size HEIGHT WIDTH in a training, else --height and --width",
        action="give these, height first",
        refused=",",
    ),
    "center_crop": OtherName(
        "diffusers, SimpleTuner",
        meaning="images are cropped at their centre",
        ours="that is always so; --aspect_buckets keeps their proportions",
    ),
    "random_flip": OtherName("diffusers", meaning="images are mirrored at random", ours="images are used as they are"),
    "enable_bucket": OtherName(KOHYA, "aspect_buckets"),
    "caption_dropout_rate": OtherName(KOHYA, "caption_dropout"),
    "caption_dropout_probability": OtherName("SimpleTuner", "caption_dropout"),
    "proportion_empty_prompts": OtherName("diffusers", "caption_dropout"),
    "cache_latents": OtherName(
        "diffusers, kohya",
        meaning="latents are computed once",
        ours="that is so with --vae or --model_path; --cache says where",
        action="leave it out, or give --cache latents",
    ),
    "cache_latents_to_disk": OtherName(
        KOHYA,
        meaning="latents are kept in files",
        ours="--cache latents, which is the default with --vae or --model_path",
        action="leave it out, or give --cache latents",
    ),
    "dataloader_num_workers": OtherName("diffusers", "num_workers"),
    "max_data_loader_n_workers": OtherName(KOHYA, "num_workers"),
    "with_prior_preservation": OtherName(
        "diffusers", meaning="a second loss on images of the class", ours="training uses the images of --data alone"
    ),
    "prior_loss_weight": OtherName(
        "diffusers, kohya",
        meaning="the weight of prior preservation",
        ours="training uses the images of --data alone",
    ),
    "class_data_dir": OtherName(
        "diffusers", meaning="images for prior preservation", ours="training uses the images of --data alone"
    ),
    "class_prompt": OtherName(
        "diffusers", meaning="the prompt of prior preservation", ours="training uses the images of --data alone"
    ),
    # -- optimisation
    "learning_rate": OtherName(TRAINERS, "lr"),
    "train_batch_size": OtherName(TRAINERS, "batch_size"),
    "per_device_train_batch_size": OtherName("transformers", "batch_size"),
    "gradient_accumulation_steps": OtherName("diffusers, kohya, accelerate, SimpleTuner", "accumulate"),
    "max_train_steps": OtherName(TRAINERS, "n_steps"),
    "max_steps": OtherName("Lightning, transformers", "n_steps"),
    "num_train_epochs": OtherName(
        "diffusers, SimpleTuner",
        "num_epochs",
        meaning="passes over the data",
        ours="--n_steps: the number of optimizer steps",
        action="give --n_steps: images * epochs / (batch_size * ranks * accumulate)",
    ),
    "max_train_epochs": OtherName(
        KOHYA,
        "num_epochs",
        meaning="passes over the data",
        ours="--n_steps: the number of optimizer steps",
        action="give --n_steps: images * epochs / (batch_size * ranks * accumulate)",
    ),
    "lr_warmup_steps": OtherName(TRAINERS, "warmup_steps"),
    "lr_scheduler": OtherName(
        TRAINERS,
        meaning="the shape of the learning rate",
        ours="--warmup_steps, then constant, or a cosine to zero over --decay_steps",
        action="give --decay_steps for a cosine; leave it out for constant",
    ),
    "adam_beta1": OtherName(
        "diffusers, SimpleTuner",
        meaning="the first decay rate of AdamW",
        ours="--betas, both rates in one flag",
        action="give --betas 0.9 0.999",
    ),
    "adam_beta2": OtherName(
        "diffusers, SimpleTuner",
        meaning="the second decay rate of AdamW",
        ours="--betas, both rates in one flag",
        action="give --betas 0.9 0.999",
    ),
    "adam_weight_decay": OtherName("diffusers, SimpleTuner", "weight_decay"),
    "adam_epsilon": OtherName("diffusers", meaning="a term of AdamW", ours="it is that of torch, 1e-8"),
    "max_grad_norm": OtherName(TRAINERS, "grad_clip"),
    "optimizer": OtherName(
        "diffusers, SimpleTuner",
        meaning="the optimizer",
        ours="it is AdamW, in float32 (--weights_dtype bf16 halves its memory)",
    ),
    "optimizer_type": OtherName(
        KOHYA,
        meaning="the optimizer",
        ours="it is AdamW, in float32 (--weights_dtype bf16 halves its memory)",
    ),
    "use_8bit_adam": OtherName(
        "diffusers, kohya",
        meaning="an optimizer in 8 bits",
        ours="AdamW in float32; --lora_rank, --weights_dtype bf16 and --offload_optimizer need less memory",
        action="use one of these",
    ),
    "use_ema": OtherName(
        "diffusers, SimpleTuner",
        meaning="an average of the weights is kept",
        ours="it is kept, and samples are drawn with it; --ema_decay sets its decay",
    ),
    "snr_gamma": OtherName(
        "diffusers, SimpleTuner",
        meaning="a weighting of the loss by noise level",
        ours="the loss has no weights; --time_sampling chooses the noise levels",
    ),
    "weighting_scheme": OtherName(
        "diffusers",
        meaning="the distribution of noise levels",
        ours="--time_sampling logit_normal or uniform",
        action="give --time_sampling",
    ),
    "timestep_sampling": OtherName(
        KOHYA,
        meaning="the distribution of noise levels",
        ours="--time_sampling logit_normal or uniform",
        action="give --time_sampling",
    ),
    "discrete_flow_shift": OtherName(
        KOHYA,
        meaning="the shift of noise levels",
        ours="--time_shift, in training and in sampling",
        action="give --time_shift",
    ),
    # -- precision and processes
    "mixed_precision": OtherName(
        "diffusers, kohya, accelerate, SimpleTuner", "dtype", values={"no": "fp32", "False": "fp32"}
    ),
    "full_bf16": OtherName(
        KOHYA, meaning="weights in bfloat16", ours="--weights_dtype bf16", action="give --weights_dtype bf16"
    ),
    "num_processes": OtherName("accelerate", "nproc"),
    "nproc_per_node": OtherName("torchrun", "nproc"),
    "num_machines": OtherName(
        "accelerate",
        meaning="the number of machines",
        ours="torchrun or srun starts the ranks of several machines; the command joins them",
        action="start it with torchrun or srun",
    ),
    "main_process_port": OtherName(
        "accelerate", meaning="the port of the ranks", ours="the variable MASTER_PORT", action="set MASTER_PORT"
    ),
    "use_fsdp": OtherName("accelerate", meaning="sharding", ours="--engine fsdp", action="give --engine fsdp"),
    "use_deepspeed": OtherName(
        "accelerate", meaning="sharding", ours="--engine deepspeed", action="give --engine deepspeed"
    ),
    "deepspeed_config_file": OtherName("accelerate", "deepspeed_config"),
    "enable_xformers_memory_efficient_attention": OtherName(
        "diffusers",
        meaning="an implementation of attention",
        ours="torch's fused attention is always used",
    ),
    "xformers": OtherName(
        KOHYA, meaning="an implementation of attention", ours="torch's fused attention is always used"
    ),
    "enable_model_cpu_offload": OtherName(
        "diffusers",
        meaning="components wait in host memory",
        ours="--offload model in `halation generate`",
        action="give --offload model there",
    ),
    # -- checkpoints and logs
    "outdir": OtherName(KOHYA, "output_dir"),
    "output_name": OtherName(
        KOHYA,
        meaning="the name of the files",
        ours="--output_dir: every run has a folder, with fixed names in it",
        action="give --output_dir; --run_name names the run in trackers",
    ),
    "checkpointing_steps": OtherName("diffusers, SimpleTuner", "ckpt_every"),
    "checkpoint_step_interval": OtherName("SimpleTuner", "ckpt_every"),
    "save_every_n_steps": OtherName(KOHYA, "ckpt_every"),
    "save_every_n_epochs": OtherName(
        KOHYA,
        "sample_interval",
        meaning="epochs between checkpoints",
        ours="--ckpt_every: steps between checkpoints",
        action="give --ckpt_every",
    ),
    "checkpoints_total_limit": OtherName("diffusers, SimpleTuner", "keep_last"),
    "resume_from_checkpoint": OtherName(
        "diffusers, SimpleTuner",
        meaning="a checkpoint to continue from",
        ours="the same command with the same --output_dir resumes by itself",
    ),
    "resume": OtherName(
        "kohya, torchtune",
        meaning="continues a run",
        ours="the same command with the same --output_dir resumes by itself",
    ),
    "overwrite_output_dir": OtherName(
        "transformers",
        meaning="starts over in a used folder",
        ours="a folder is never overwritten: the same command resumes it",
        action="give another --output_dir",
    ),
    "logging_dir": OtherName(
        "diffusers, kohya, accelerate",
        meaning="the folder of the logs",
        ours="logs and the files of TensorBoard are in --output_dir",
    ),
    "log_with": OtherName("kohya, accelerate", "report_to"),
    "tracker_run_name": OtherName("SimpleTuner", "run_name"),
    "wandb_run_name": OtherName(KOHYA, "run_name"),
    # -- sampling
    "validation_prompt": OtherName("diffusers, SimpleTuner", "sample_prompts"),
    "validation_prompts": OtherName("diffusers", "sample_prompts"),
    "validation_num_inference_steps": OtherName("SimpleTuner", "sample_steps"),
    "validation_guidance": OtherName("SimpleTuner", "guidance_scale"),
    "validation_seed": OtherName("SimpleTuner", "sample_seed"),
    "validation_steps": OtherName(
        "diffusers",
        meaning="steps between samples",
        ours="samples are drawn at each checkpoint: --ckpt_every, or --ckpt_latest_every, which keeps only one",
        action="give --ckpt_latest_every",
    ),
    "validation_epochs": OtherName(
        "diffusers",
        "sample_interval",
        meaning="epochs between samples",
        ours="samples are drawn at each checkpoint: --ckpt_every, in steps",
        action="give --ckpt_every",
    ),
    "num_validation_images": OtherName(
        "diffusers",
        meaning="images for each validation prompt",
        ours="one image for each of --sample_prompts, from different noise",
        action="give the prompt several times",
    ),
    "sample_every_n_steps": OtherName(
        KOHYA,
        meaning="steps between samples",
        ours="samples are drawn at each checkpoint: --ckpt_every, or --ckpt_latest_every, which keeps only one",
        action="give --ckpt_latest_every",
    ),
    "sample_every_n_epochs": OtherName(
        KOHYA,
        "sample_interval",
        meaning="epochs between samples",
        ours="samples are drawn at each checkpoint: --ckpt_every, in steps",
        action="give --ckpt_every",
    ),
    "guidance": OtherName("mflux, BFL", "guidance_scale"),
    "cfg_scale": OtherName("stable-diffusion-webui", "guidance_scale"),
    "infer_steps": OtherName("musubi", "num_inference_steps sample_steps"),
    "ddim_steps": OtherName("CompVis", "num_inference_steps sample_steps"),
    "prompt": OtherName("diffusers, kohya", "prompts sample_prompts"),
    "from_file": OtherName("kohya, CompVis", "prompts_csv prompts_file prompts"),
    "num_images_per_prompt": OtherName(
        "diffusers",
        meaning="images for each prompt",
        ours="one image for each row of the prompts; --num_samples is the number of rows",
        action="give the prompt several times: every row has its own seed",
    ),
    "images_per_prompt": OtherName(
        KOHYA,
        meaning="images for each prompt",
        ours="one image for each row of the prompts; --num_samples is the number of rows",
        action="give the prompt several times: every row has its own seed",
    ),
}
"""By the name elsewhere. A setting of the command itself always goes before this table."""


def find_setting(name: str, value: Any, settings: Set[str], where: str) -> tuple[str, Any]:
    """Return the setting that another name stands for, and its value; the name is empty if it is unknown.

    A name that means something else raises InputError, which says what it is there and what there is here.
    """
    other = OTHER_NAMES.get(name)
    if other is None:
        return "", value
    known = [one for one in other.settings.split() if one in settings]
    differs = bool(other.refused) and other.refused in str(value)
    if known and other.unless not in settings and not differs:
        return known[0], other.values.get(str(value), value)
    if not other.meaning:
        names = " or ".join(f"--{one}" for one in other.settings.split())
        raise InputError(
            f"{where}{name} ({other.tools}) stands for {names}, which this command does not have",
            "settings of this command",
            "leave it out; --help_all lists all of them",
        )
    found = f"{where}{name} {shorten(value)}" if differs else f"{where}{name}"
    flags = re.findall(r"--(\w+)", other.ours)
    elsewhere = bool(flags) and settings.isdisjoint(flags) and "`halation" not in other.ours
    raise InputError(
        f"{found} ({other.tools}): {other.meaning}",
        f"{other.ours}, in other commands" if elsewhere else other.ours,
        "leave it out" if elsewhere else other.action,
    )


def accepted_names(settings: Set[str]) -> dict[str, list[str]]:
    """Return the other names that stand for each of these settings."""
    names: dict[str, list[str]] = {}
    for name, other in OTHER_NAMES.items():
        known = [one for one in other.settings.split() if one in settings]
        if known and name not in settings and other.unless not in settings:
            names.setdefault(known[0], []).append(name)
    return names


def nearest_name(name: str, settings: Set[str]) -> str:
    """Return the setting, or accepted other name, that is spelled most alike; empty if none is alike."""
    accepted = chain.from_iterable(accepted_names(settings).values())
    near = difflib.get_close_matches(name[:100], [*settings, *accepted], n=1, cutoff=0.65)
    return near[0] if near else ""
