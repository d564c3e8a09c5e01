"""Builds a HunyuanDiT pipeline folder of any size with random weights.

The classes and shapes are the real ones, and therefore the speed too.
"""

from __future__ import annotations

import importlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

WORDS = ("a", "the", "of", "red", "bear", "street", "rain", "table", "woman", "big", "dog", "house", "night")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Size of each component."""

    layers: int
    heads: int
    head_size: int
    text_width: int
    text_layers: int
    t5_width: int
    t5_layers: int
    vae_channels: tuple[int, ...]
    vae_layers: int
    mlp_ratio: float = 4.0
    sizes_and_style: bool = True
    """True if the transformer is conditioned on image sizes and a style, as before version 1.2."""


REAL = Shape(
    layers=40, heads=16, head_size=88, text_width=1024, text_layers=24, t5_width=2048, t5_layers=24,
    vae_channels=(128, 256, 512, 512), vae_layers=2,
)  # fmt: skip
TINY = Shape(
    layers=4, heads=2, head_size=16, text_width=32, text_layers=1, t5_width=32, t5_layers=1, vae_channels=(8, 8, 8, 8),
    vae_layers=1,
)  # fmt: skip


def build(folder: Path, shape: Shape, dtype: torch.dtype, device: str) -> Path:
    """Build and save the pipeline in the diffusers layout; nothing is downloaded."""
    import diffusers

    from benchmarks.inputs import random_vae

    tokenizer, tokenizer_2 = _tokenizers()
    with torch.device(device):
        transformer: Any = diffusers.HunyuanDiT2DModel(
            num_layers=shape.layers,
            num_attention_heads=shape.heads,
            attention_head_dim=shape.head_size,
            hidden_size=shape.heads * shape.head_size,
            in_channels=4,
            patch_size=2,
            sample_size=128,
            activation_fn="gelu-approximate",
            cross_attention_dim=shape.text_width,
            cross_attention_dim_t5=shape.t5_width,
            pooled_projection_dim=shape.text_width,
            mlp_ratio=shape.mlp_ratio,
            use_style_cond_and_image_meta_size=shape.sizes_and_style,
        )
        encoders = _encoders(shape, len(tokenizer), len(tokenizer_2))
    _fill(transformer)
    pipe: Any = diffusers.HunyuanDiTPipeline(
        vae=random_vae(shape.vae_channels, shape.vae_layers).to(dtype),
        text_encoder=encoders[0].to(dtype),
        tokenizer=tokenizer,
        transformer=transformer.to(dtype),
        scheduler=diffusers.DDPMScheduler(
            beta_start=0.00085,
            beta_end=0.03,
            beta_schedule="scaled_linear",
            prediction_type="v_prediction",
            steps_offset=1,
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
        text_encoder_2=encoders[1].to(dtype),
        tokenizer_2=tokenizer_2,
    )
    pipe.save_pretrained(str(folder), safe_serialization=True)
    return folder


def _encoders(shape: Shape, vocabulary: int, vocabulary_2: int) -> tuple[Any, Any]:
    import transformers

    bert = transformers.BertConfig(
        vocab_size=vocabulary,
        hidden_size=shape.text_width,
        num_hidden_layers=shape.text_layers,
        num_attention_heads=max(1, shape.text_width // 64),
        intermediate_size=4 * shape.text_width,
        max_position_embeddings=77,
    )
    t5 = transformers.T5Config(
        vocab_size=vocabulary_2,
        d_model=shape.t5_width,
        d_kv=64,
        d_ff=shape.t5_width * 5 // 2,
        num_layers=shape.t5_layers,
        num_heads=max(1, shape.t5_width // 64),
        feed_forward_proj="gated-gelu",
    )
    return transformers.BertModel(bert), transformers.T5EncoderModel(t5)


def _tokenizers() -> tuple[Any, Any]:
    import tokenizers

    transformers: Any = importlib.import_module("transformers")  # its stubs lack the class

    with tempfile.TemporaryDirectory() as folder:
        vocabulary = Path(folder) / "vocab.txt"
        vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")
        bert = transformers.BertTokenizer(str(vocabulary), model_max_length=77)
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((f"\u2581{word}", -1.0) for word in WORDS)]
    model = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=2))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    t5 = transformers.T5TokenizerFast(
        tokenizer_object=model,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=256,
        extra_ids=0,
    )
    return bert, t5


def _fill(module: torch.nn.Module) -> None:
    """Fill the weights randomly: a new HunyuanDiT predicts zero, which would prove nothing."""
    generators = {
        device: torch.Generator(device).manual_seed(0) for device in {value.device for value in module.parameters()}
    }
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02, generator=generators[parameter.device])
            elif name.endswith("bias"):
                parameter.zero_()
