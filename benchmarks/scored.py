"""Inputs and networks of duel 10: images with captions, random Inception and CLIP weights.

The networks have the real architectures.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.duel_06_png import photograph
from halation.images.png_codec import Pixels

NUM_PHOTOGRAPHS = 16
"""Photographs to synthesize; the others are derived from them, since synthesis takes longer than scoring."""
WORDS = ("a red car", "two birds", "the sea", "rain", "a house", "old boats")


@dataclass(frozen=True, kw_only=True)
class ClipShape:
    """Sizes of a CLIP; heads have 64 channels, and the text tower is narrower, as always."""

    name: str
    width: int
    layers: int
    patch: int
    text_width: int
    text_layers: int
    projection: int


LARGE = ClipShape(name="ViT-L/14", width=1024, layers=24, patch=14, text_width=768, text_layers=12, projection=768)
BASE = ClipShape(name="ViT-B/32", width=768, layers=12, patch=32, text_width=512, text_layers=12, projection=512)
LITTLE = ClipShape(
    name="a fifth of ViT-B/32", width=384, layers=6, patch=32, text_width=256, text_layers=4, projection=256
)


def images(num: int, size: int, roughness: float, seed: int) -> list[Pixels]:
    """Return shifted, mirrored and recoloured photographs, all different and hard to compress."""
    first = [photograph(size, size, roughness, 1.0, seed=seed + number) for number in range(min(num, NUM_PHOTOGRAPHS))]
    generator = np.random.default_rng(seed)
    found = []
    for number in range(num):
        shifted = np.roll(first[number % len(first)], tuple(generator.integers(0, size, 2)), (0, 1))
        mirrored = np.ascontiguousarray(shifted[:, :: 1 if number % 2 else -1])
        light = np.clip(generator.uniform(0.6, 1.1, 3)[:, None] * np.arange(256), 0, 255)
        found.append(np.array(Image.fromarray(mirrored).point(light.astype(int).ravel().tolist())))
    return found


def captions(num: int) -> list[str]:
    generator = np.random.default_rng(0)
    return [" and ".join(generator.choice(WORDS, 1 + number % 2)) for number in range(num)]


def inception_file(file: Path) -> Path:
    torch.save(inception_tensors(), file)
    return file


def inception_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return random weights of FID's Inception that keep the signal's scale in all layers.

    The normalisation is far from the identity.
    """
    from halation.evaluation.extractors.inception import InceptionV3

    generator = torch.Generator().manual_seed(seed)

    def uniform(like: torch.Tensor, low: float, high: float) -> torch.Tensor:
        return torch.rand(like.shape, generator=generator) * (high - low) + low

    with torch.device("meta"):
        empty = InceptionV3().state_dict()
    tensors = {}
    for name, tensor in empty.items():
        if name.endswith("num_batches_tracked"):
            tensors[name] = torch.tensor(0)
        elif tensor.ndim > 1:
            tensors[name] = torch.randn(tensor.shape, generator=generator) * (2 / tensor[0].numel()) ** 0.5
        elif name.endswith(("bn.weight", "running_var")):
            tensors[name] = uniform(tensor, 0.6, 1.4)
        else:
            tensors[name] = uniform(tensor, -0.3, 0.3)
    return tensors


def clip_folder(folder: Path, shape: ClipShape) -> Path:
    """Save a CLIP folder as on the Hub: model, tokenizer and image processor.

    The tokenizer encodes single letters, so that captions have the usual length.
    """
    import transformers
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    names = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer: Any = transformers.CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77)
    text = _tower(shape.text_width, shape.text_layers) | {
        "vocab_size": 49408,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    }
    vision = _tower(shape.width, shape.layers) | {"image_size": 224, "patch_size": shape.patch}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=shape.projection)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model: Any = transformers.CLIPModel(config)
        with torch.no_grad():
            # With the default initialization all images have similar embeddings, and these may be far from all texts,
            # which the score clamps to 0.
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(3)
            if _cosine(model) < 0:
                model.text_projection.weight.neg_()
        transformers.utils.logging.disable_progress_bar()
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    transformers.CLIPImageProcessorPil().save_pretrained(folder)
    return folder


def _tower(width: int, layers: int) -> dict[str, int]:
    return {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
    }


def _cosine(model: Any) -> float:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(4, 3, 224, 224, generator=generator)
    image = image.cumsum(2).cumsum(3)
    image = (image - image.mean()) / image.std()
    tokens = torch.tensor([[0, *range(40, 60), 1]])
    embedding = model.get_image_features(pixel_values=image).pooler_output
    text = model.get_text_features(input_ids=tokens).pooler_output
    return float(torch.cosine_similarity(embedding, text).mean())
