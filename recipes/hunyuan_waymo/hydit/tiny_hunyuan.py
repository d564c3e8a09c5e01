"""A tiny HunyuanDiT pipeline built from config, so that the recipe needs no download.

It has random weights from a fixed seed, tokenizers with the words of the street captions, and an autoencoder fitted to
street scenes. `python hydit/tiny_hunyuan.py FOLDER` writes it; the recipe does so itself if MODEL_PATH is not set.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

NUM_CAPTIONS = 2_000
TEXT_HIDDEN = 64
SEED = 7


def ensure(folder: Path) -> bool:
    """Write the pipeline if it is missing, and return True if it was.

    The write is atomic, also with several processes.
    """
    if (folder / "model_index.json").is_file():
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}_", dir=folder.parent) as scratch:
        write(Path(scratch) / "whole")
        # A folder without an index is incomplete. Another process may have been faster, which is fine.
        if folder.exists() and not (folder / "model_index.json").is_file():
            shutil.rmtree(folder)
        with contextlib.suppress(OSError):
            os.rename(Path(scratch) / "whole", folder)
    return True


def write(folder: Path) -> None:
    import transformers

    from halation.models.pipelines import load

    load.filter_library_warnings()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        pipeline().save_pretrained(folder, safe_serialization=True)


def pipeline() -> Any:
    """Build a `HunyuanDiTPipeline` of 2.8 million trained parameters for 256 x 256 pixels.

    Other sizes work too.
    """
    import diffusers

    from hydit import tiny_autoencoder

    found = words()
    first, second = bert_tokenizer(found), t5_tokenizer(found)
    return diffusers.HunyuanDiTPipeline(
        vae=tiny_autoencoder.made(),
        text_encoder=_seeded(lambda: _bert(len(first)), 1),
        tokenizer=first,
        text_encoder_2=_seeded(lambda: _t5(len(second)), 2),
        tokenizer_2=second,
        transformer=_seeded(lambda: _transformer(tiny_autoencoder.NUM_LATENTS), 3),
        scheduler=diffusers.DDPMScheduler(
            beta_start=0.00085,
            beta_end=0.018,
            beta_schedule="scaled_linear",
            prediction_type="v_prediction",
            steps_offset=1,
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def words() -> list[str]:
    """Return the words of street captions and driving prompts, with their case."""
    from halation.data.streets import DRIVING_PROMPTS, caption, scene

    texts = [*DRIVING_PROMPTS, *(caption(scene("train", index)) for index in range(NUM_CAPTIONS))]
    return sorted({word for text in texts for word in re.findall(r"[A-Za-z]+", text)})


def bert_tokenizer(words: list[str]) -> Any:
    """Build a tokenizer of known words, else single letters; other scripts are unknown."""
    from transformers import BertTokenizer

    letters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    known = sorted({word.lower() for word in words if len(word) > 1})
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters), *known]
    return BertTokenizer(vocab={name: index for index, name in enumerate(names)}, model_max_length=77)


def t5_tokenizer(words: list[str]) -> Any:
    import transformers

    scores = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -4.0)]
    scores += [(f"▁{word}", -2.0) for word in words] + [(chr(code), -5.0) for code in range(33, 127)]
    kind: Any = transformers.T5TokenizerFast  # type: ignore[attr-defined]
    return kind(vocab=scores, extra_ids=0, model_max_length=256)


def _bert(num_words: int) -> Any:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=num_words,
        hidden_size=TEXT_HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=77,
        initializer_range=0.3,
    )
    return BertModel(config)


def _t5(num_words: int) -> Any:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=num_words,
        d_model=TEXT_HIDDEN,
        d_kv=16,
        d_ff=128,
        num_layers=1,
        num_heads=4,
        feed_forward_proj="gated-gelu",
    )
    return T5EncoderModel(config)


def _transformer(num_latents: int) -> Any:
    import torch
    from diffusers import HunyuanDiT2DModel

    model: Any = HunyuanDiT2DModel(
        sample_size=32,
        patch_size=2,
        in_channels=num_latents,
        hidden_size=128,
        num_attention_heads=4,
        attention_head_dim=32,
        num_layers=6,
        cross_attention_dim=TEXT_HIDDEN,
        cross_attention_dim_t5=TEXT_HIDDEN,
        pooled_projection_dim=TEXT_HIDDEN,
        activation_fn="gelu-approximate",
    )
    with torch.no_grad():
        _begin_gently(model)
    return model


def _begin_gently(model: Any) -> None:
    """Scale the initial weights for faster learning than with the default ones."""
    # Most of the 333 text positions are padding; at full scale it would dominate the words.
    model.text_embedding_padding.mul_(0.05)
    model.proj_out.weight.mul_(0.1)
    for block in model.blocks:
        for last in (block.attn1.to_out[0], block.attn2.to_out[0], block.ff.net[2]):
            last.weight.mul_(0.2)
            last.bias.zero_()
        if block.skip_linear is not None:
            # Pass the block's input through; the skip connection is learned.
            block.skip_linear.weight.mul_(0.1)
            block.skip_linear.weight.diagonal().add_(1.0)
            block.skip_linear.bias.zero_()


def _seeded(build: Callable[[], Any], offset: int) -> Any:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED + offset)
        return build().eval()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: tiny_hunyuan.py FOLDER")
    made = ensure(Path(sys.argv[1]))
    print(f"{sys.argv[1]}: {'created a tiny HunyuanDiT' if made else 'already exists'}")
