"""A tiny Wan 2.2 pipeline built from config, so that the recipe needs no download.

It has two experts, UMT5 and a causal autoencoder, all with random weights from a fixed seed. `python tiny_wan.py
FOLDER` writes it; the recipe does so itself for `--teacher_path tiny`.
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

PROMPTS = Path(__file__).parent / "data" / "static_prompts.txt"
MORE_WORDS = ("cat", "dog", "bird", "fish")
TEXT_WIDTH = 64
WIDTH = 64
SEED = 22


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
            shutil.rmtree(folder, ignore_errors=True)
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
    """Build a `WanPipeline` with two experts and boundary 0.875, as in Wan 2.2.

    Image sides must be multiples of 16.
    """
    import diffusers

    words = tokenizer()
    return diffusers.WanPipeline(
        tokenizer=words,
        text_encoder=_seeded(lambda: _text_encoder(len(words)), 1),
        vae=_seeded(_autoencoder, 2),
        transformer=_seeded(_expert, 3),
        transformer_2=_seeded(_expert, 4),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
        ),
        boundary_ratio=0.875,
    )


def tokenizer() -> Any:
    """Build a tokenizer with the words of the recipe's prompts; others are spelled in letters."""
    import transformers

    known = sorted({*re.findall(r"[A-Za-z]+", PROMPTS.read_text(encoding="utf-8")), *MORE_WORDS})
    scores = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -4.0)]
    scores += [(f"▁{word}", -2.0) for word in known] + [(chr(code), -5.0) for code in range(33, 127)]
    kind: Any = transformers.T5TokenizerFast  # type: ignore[attr-defined]
    return kind(vocab=scores, extra_ids=0, model_max_length=512)


def _text_encoder(num_words: int) -> Any:
    import torch
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(
        vocab_size=num_words,
        d_model=TEXT_WIDTH,
        d_kv=16,
        d_ff=128,
        num_layers=1,
        num_heads=4,
        feed_forward_proj="gated-gelu",
    )
    model: Any = UMT5EncoderModel(config)
    with torch.no_grad():  # a prompt has a few words in 512 positions; they must be stronger than the padding
        model.encoder.final_layer_norm.weight.mul_(20.0)
    return model


def _autoencoder() -> Any:
    """Build an autoencoder that decodes to random colours in soft shapes.

    Its decoder mixes channels at random and smooths between positions.
    """
    import torch
    from diffusers import AutoencoderKLWan

    model: Any = AutoencoderKLWan(base_dim=8, dim_mult=[1, 1, 2, 2], num_res_blocks=1)
    soft = torch.tensor([0.25, 0.5, 0.25])
    soft = soft[:, None] * soft
    decoder = model.decoder
    with torch.no_grad():
        for block in [decoder.mid_block, *decoder.up_blocks]:
            for resnet in block.resnets:
                resnet.conv2.weight.zero_()
                resnet.conv2.bias.zero_()
            for upsampler in getattr(block, "upsamplers", None) or ():
                convolution = upsampler.resample[1]
                mixture = torch.empty(convolution.weight.shape[:2])
                torch.nn.init.orthogonal_(mixture)
                convolution.weight.copy_(mixture[:, :, None, None] * soft * 1.5)
        for convolution in (decoder.conv_in, decoder.conv_out):
            mixture = torch.empty(convolution.weight.shape[:2])
            torch.nn.init.orthogonal_(mixture)
            convolution.weight.zero_()
            convolution.weight[:, :, -1] = mixture[:, :, None, None] * soft
        decoder.conv_out.weight.mul_(1.6)
        decoder.conv_out.bias.zero_()
    return model


def _expert() -> Any:
    """Build an expert that predicts about its input, modified by prompt and surroundings.

    Its trajectories therefore turn noise into structured images.
    """
    import torch
    from diffusers import WanTransformer3DModel

    model: Any = WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        ffn_dim=192,
        num_layers=4,
        freq_dim=64,
        text_dim=TEXT_WIDTH,
        rope_max_seq_len=64,
    )
    with torch.no_grad():
        basis = torch.empty(WIDTH, WIDTH)
        torch.nn.init.orthogonal_(basis)
        basis = basis.reshape(WIDTH, 16, 1, 2, 2)
        model.patch_embedding.weight.copy_(basis)
        model.patch_embedding.bias.zero_()
        model.proj_out.weight.copy_(basis.permute(2, 3, 4, 1, 0).reshape(WIDTH, WIDTH))
        for block in model.blocks:
            for matrix in (block.attn1.to_out[0], block.ffn.net[2]):
                matrix.weight.mul_(1.5)
            for matrix in (block.attn2.to_v, block.attn2.to_out[0]):
                matrix.weight.mul_(2.0)
    return model


def _seeded(build: Callable[[], Any], offset: int) -> Any:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED + offset)
        return build().eval()


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: tiny_wan.py FOLDER")
    made = ensure(Path(sys.argv[1]))
    print(f"{sys.argv[1]}: {'created a tiny Wan' if made else 'already exists'}")
