"""Small real feature extractors, made from config with random weights: CLIP and DINOv2 folders, and weights for FID's Inception."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from benchmarks import scored
from support.tiny_pipelines import awaken, clip_tokenizer


@functools.cache
def _inception(seed: int) -> dict[str, Tensor]:
    return scored.inception_tensors(seed)


def inception_tensors(seed: int = 0) -> dict[str, Tensor]:
    """Random weights of FID's Inception."""
    return dict(_inception(seed))


def inception_pth(file: Path, seed: int = 0, *, zipped: bool = True) -> Path:
    """As pytorch-fid's release: a state dict by torch.save; not `zipped` is the format of releases before torch 1.6."""
    torch.save(inception_tensors(seed), file, _use_new_zipfile_serialization=zipped)
    return file


def inception_safetensors(file: Path, seed: int = 0) -> Path:
    save_file(inception_tensors(seed), str(file))
    return file


def clip(folder: Path, *, seed: int = 0, image_size: int = 32, **preprocessing: Any) -> Path:
    """A CLIP folder as the hub's: model, tokenizer, preprocessor_config.json; `preprocessing` overrides entries of the last."""
    tokenizer = clip_tokenizer()
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": image_size,
        "patch_size": 8,
    }
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)
    _save(transformers.CLIPModel, config, folder, seed)
    tokenizer.save_pretrained(folder)
    crop = {"height": image_size, "width": image_size}
    settings = {"size": {"shortest_edge": image_size}, "crop_size": crop, **preprocessing}
    transformers.CLIPImageProcessorPil(**settings).save_pretrained(folder)
    return folder


def dinov2(folder: Path, *, seed: int = 0, num_registers: int = 0) -> Path:
    """A DINOv2 folder that was made for 56 x 56 and, like the real ones, is used at another size."""
    size: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 56}
    if num_registers:
        registers = transformers.Dinov2WithRegistersConfig(patch_size=14, num_register_tokens=num_registers, **size)
        return _save(transformers.Dinov2WithRegistersModel, registers, folder, seed)
    return _save(transformers.Dinov2Model, transformers.Dinov2Config(patch_size=14, **size), folder, seed)


def _save(kind: Any, config: Any, folder: Path, seed: int) -> Path:
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        model = awaken(kind(config), seed=seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(6)  # the families' own initialisation is so small that two images look alike
        transformers.utils.logging.disable_progress_bar()
        model.save_pretrained(folder)
    return folder
