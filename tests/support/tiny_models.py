"""Tiny real pipelines and feature extractors, built from config with random weights.

Every pipeline builder writes a complete folder for `DiffusionPipeline.from_pretrained`: a few megabytes, safetensors,
fixed seeds. Heads and gates that initialisation leaves at zero are filled, so that prompt, seed, steps and guidance all
reach the pixels.
"""

from __future__ import annotations

import functools
import inspect
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from diffusers.pipelines.sana.pipeline_sana import SanaPipeline
from safetensors.torch import save_file
from torch import Tensor, nn

from halation.models.async_image_result import Frames
from halation.models.pipelines.pipeline_model import PipelineModel, open_pipeline
from halation.sample_specs import SampleSpec

HIDDEN = 32
TEXT_HIDDEN = 32
WORDS = (
    *("a", "an", "the", "of", "on", "in", "at", "with", "and", "two", "three", "red", "green", "blue", "cat", "dog"),
    *("car", "tree", "house", "street", "night", "day", "photo", "painting"),
)
PROMPTS = (
    "a red cat on the street",
    "two blue houses at night, a painting",
    "dog",
    "three green trees and a car by day",
)
needs_inductor = pytest.mark.skipif(
    " " in torch.__file__, reason="inductor's call of the C++ compiler breaks at a space in torch's path"
)


def awaken(module: nn.Module, std: float = 0.1, seed: int = 0) -> nn.Module:
    """Small random numbers wherever initialisation left zeros: zeros hide what is not connected."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return module.eval()


def _seeded(build: Callable[[], Any], seed: int, gain: float = 1.0) -> Any:
    """`gain` multiplies the matrices, where the family's own initialisation is so small that two prompts look alike."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = awaken(build(), seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(gain)
    return model


# Tokenizers


def bert_tokenizer() -> Any:
    characters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    pieces = [*characters, *(f"##{character}" for character in characters), *(word for word in WORDS if len(word) > 1)]
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces]
    return transformers.BertTokenizer(vocab={name: index for index, name in enumerate(names)}, model_max_length=77)


def clip_tokenizer() -> Any:
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    names = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    vocabulary = {name: index for index, name in enumerate(names)}
    return transformers.CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77)


def t5_tokenizer(max_length: int = 256) -> Any:
    characters = [chr(code) for code in range(33, 127)]
    scores = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -4.0)]
    scores += [(f"▁{word}", -2.0) for word in WORDS] + [(character, -5.0) for character in characters]
    return transformers.T5TokenizerFast(vocab=scores, extra_ids=0, model_max_length=max_length)


def gemma_tokenizer() -> Any:
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256))]
    learner = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    learner.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    learner.pre_tokenizer = tokenizers.pre_tokenizers.Split("▁", "merged_with_next")
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=special,
        show_progress=False,
        initial_alphabet=[chr(code) for code in range(33, 127)],
    )
    learner.train_from_iterator([*_instruction(), " ".join(WORDS)], trainer)
    with tempfile.TemporaryDirectory() as folder:
        learner.model.save(folder)
        merges = (Path(folder) / "merges.txt").read_text(encoding="utf-8").splitlines()[1:]
    pairs = [tuple(line.split(" ")) for line in merges]
    return transformers.GemmaTokenizerFast(vocab=learner.get_vocab(), merges=pairs, model_max_length=4096)


def _instruction() -> list[str]:
    """Sana's pipeline puts a long instruction before each prompt; the tokenizer knows its words."""
    return list(inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default)


# Text encoders


def _t5(vocabulary: int, *, kind: str = "T5", hidden: int = TEXT_HIDDEN, seed: int = 11) -> Any:
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=vocabulary,
        d_model=hidden,
        d_kv=8,
        d_ff=64,
        num_layers=1,
        num_heads=4,
        feed_forward_proj="gated-gelu",
    )
    return _seeded(lambda: getattr(transformers, f"{kind}EncoderModel")(config), seed)


def _clip(tokenizer: Any, *, projection: bool, seed: int) -> Any:
    config = transformers.CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_HIDDEN,
        intermediate_size=64,
        projection_dim=TEXT_HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    kind = transformers.CLIPTextModelWithProjection if projection else transformers.CLIPTextModel
    return _seeded(lambda: kind(config), seed, gain=8)


def _vae(latent_channels: int = 4, *, seed: int = 21, shift: float | None = None) -> Any:
    return _seeded(
        lambda: diffusers.AutoencoderKL(
            block_out_channels=(8, 8, 16, 16),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            latent_channels=latent_channels,
            norm_num_groups=4,
            layers_per_block=1,
            sample_size=32,
            scaling_factor=0.5,
            shift_factor=shift,
            use_quant_conv=shift is None,
            use_post_quant_conv=shift is None,
        ),
        seed,
    )


# Pipelines


def hunyuan(folder: Path, *, hidden: int = HIDDEN, num_layers: int = 2) -> Path:
    """HunyuanDiT: BERT and T5, a DDPM scheduler, guidance by one doubled batch; `hidden` sets the size."""
    first, second = bert_tokenizer(), t5_tokenizer()
    bert = transformers.BertConfig(
        vocab_size=len(first),
        hidden_size=TEXT_HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=77,
    )
    transformer = _seeded(
        lambda: diffusers.HunyuanDiT2DModel(
            sample_size=4,
            num_layers=num_layers,
            patch_size=2,
            attention_head_dim=hidden // 4,
            num_attention_heads=4,
            hidden_size=hidden,
            in_channels=4,
            cross_attention_dim=TEXT_HIDDEN,
            cross_attention_dim_t5=TEXT_HIDDEN,
            pooled_projection_dim=TEXT_HIDDEN,
            activation_fn="gelu-approximate",
        ),
        31,
    )
    pipe = diffusers.HunyuanDiTPipeline(
        vae=_vae(),
        text_encoder=_seeded(lambda: transformers.BertModel(bert), 12),
        tokenizer=first,
        text_encoder_2=_t5(len(second)),
        tokenizer_2=second,
        transformer=transformer,
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
    return _saved(pipe, folder)


def pixart(folder: Path) -> Path:
    """PixArt-Alpha: T5, DPM-Solver++, a denoiser that predicts noise and variance."""
    tokenizer = t5_tokenizer(120)
    transformer = _seeded(
        lambda: diffusers.PixArtTransformer2DModel(
            sample_size=4,
            num_layers=2,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=4,
            cross_attention_dim=HIDDEN,
            caption_channels=TEXT_HIDDEN,
            in_channels=4,
            out_channels=8,
            use_additional_conditions=False,
        ),
        32,
    )
    pipe = diffusers.PixArtAlphaPipeline(
        tokenizer=tokenizer,
        text_encoder=_t5(len(tokenizer)),
        vae=_vae(),
        transformer=transformer,
        scheduler=diffusers.DPMSolverMultistepScheduler(),
    )
    return _saved(pipe, folder)


def pixart_sigma(folder: Path) -> Path:
    """PixArt-Sigma: as Alpha, with more tokens."""
    return _saved(diffusers.PixArtSigmaPipeline.from_pretrained(str(built("pixart"))), folder)


def sd3(folder: Path) -> Path:
    """Stable Diffusion 3: two CLIPs and T5, flow matching."""
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    transformer = _seeded(
        lambda: diffusers.SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_projection_dim=HIDDEN,
            joint_attention_dim=2 * TEXT_HIDDEN,
            pooled_projection_dim=2 * TEXT_HIDDEN,
            pos_embed_max_size=16,
        ),
        33,
    )
    pipe = diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_vae(shift=0.05),
        text_encoder=_clip(clip, projection=True, seed=13),
        tokenizer=clip,
        text_encoder_2=_clip(clip, projection=True, seed=14),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=_t5(len(t5), hidden=2 * TEXT_HIDDEN),
        tokenizer_3=t5,
    )
    return _saved(pipe, folder)


def flux(folder: Path, *, guidance_embeds: bool = True) -> Path:
    """FLUX with distilled guidance (`guidance_embeds`), as the dev model has it; without, as schnell."""
    clip, t5 = clip_tokenizer(), t5_tokenizer(512)
    transformer = _seeded(
        lambda: diffusers.FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=TEXT_HIDDEN,
            pooled_projection_dim=TEXT_HIDDEN,
            axes_dims_rope=(4, 4, 8),
            guidance_embeds=guidance_embeds,
        ),
        34,
    )
    pipe = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=_vae(shift=0.05),
        text_encoder=_clip(clip, projection=False, seed=15),
        tokenizer=clip,
        text_encoder_2=_t5(len(t5)),
        tokenizer_2=t5,
        transformer=transformer,
    )
    return _saved(pipe, folder)


def wan(folder: Path, *, two_experts: bool = True) -> Path:
    """Wan 2.2: UMT5, a causal video VAE, and by default two experts that meet at `boundary_ratio`."""
    tokenizer = t5_tokenizer(512)

    def expert(seed: int) -> Any:
        config = {"num_attention_heads": 2, "attention_head_dim": 16, "ffn_dim": 64, "num_layers": 2, "freq_dim": 32}
        return _seeded(
            lambda: diffusers.WanTransformer3DModel(text_dim=TEXT_HIDDEN, rope_max_seq_len=32, **config), seed, 3
        )

    vae = _seeded(lambda: diffusers.AutoencoderKLWan(base_dim=4, dim_mult=[1, 1, 2, 2], num_res_blocks=1), 22, 1.7)
    pipe = diffusers.WanPipeline(
        tokenizer=tokenizer,
        text_encoder=_t5(len(tokenizer), kind="UMT5"),
        vae=vae,
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
        ),
        transformer=expert(35),
        transformer_2=expert(36) if two_experts else None,
        boundary_ratio=0.875 if two_experts else None,
    )
    return _saved(pipe, folder)


def sana(folder: Path) -> Path:
    """Sana: Gemma as text encoder, a deep-compression autoencoder, linear attention."""
    tokenizer = gemma_tokenizer()
    gemma = transformers.Gemma2Config(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_HIDDEN,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    transformer = _seeded(
        lambda: diffusers.SanaTransformer2DModel(
            in_channels=4,
            out_channels=4,
            num_layers=1,
            num_attention_heads=2,
            attention_head_dim=16,
            num_cross_attention_heads=2,
            cross_attention_head_dim=16,
            cross_attention_dim=HIDDEN,
            caption_channels=TEXT_HIDDEN,
            sample_size=4,
        ),
        37,
    )
    channels: dict[str, Any] = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in {
            "block_out_channels": (8, 8, 16, 16),
            "layers_per_block": (1, 1, 1, 1),
            "qkv_multiscales": ((), (), (), ()),
        }.items()
    }
    vae = _seeded(lambda: diffusers.AutoencoderDC(latent_channels=4, attention_head_dim=2, **channels), 23)
    pipe = SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=_seeded(lambda: transformers.Gemma2Model(gemma), 16),
        vae=vae,
        transformer=transformer,
        scheduler=diffusers.DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
    )
    return _saved(pipe, folder)


def _unet(seed: int, **settings: Any) -> Any:
    """A UNet of two resolutions with attention in the lower one."""
    return _seeded(
        lambda: diffusers.UNet2DConditionModel(
            block_out_channels=(16, 32),
            layers_per_block=1,
            sample_size=4,
            in_channels=4,
            out_channels=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            norm_num_groups=4,
            **settings,
        ),
        seed,
    )


def stable_diffusion(folder: Path) -> Path:
    """Stable Diffusion 1: CLIP and a UNet."""
    clip = clip_tokenizer()
    unet = _unet(38, cross_attention_dim=TEXT_HIDDEN, attention_head_dim=4)
    pipe = diffusers.StableDiffusionPipeline(
        vae=_vae(),
        text_encoder=_clip(clip, projection=False, seed=17),
        tokenizer=clip,
        unet=unet,
        scheduler=diffusers.PNDMScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", skip_prk_steps=True, steps_offset=1
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    return _saved(pipe, folder)


def stable_diffusion_xl(folder: Path) -> Path:
    """Stable Diffusion XL: two CLIPs, a UNet conditioned on sizes, no negative prompt if none is given."""
    clip = clip_tokenizer()
    unet = _unet(
        39,
        cross_attention_dim=2 * TEXT_HIDDEN,
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 2),
        projection_class_embeddings_input_dim=6 * 8 + TEXT_HIDDEN,
    )
    pipe = diffusers.StableDiffusionXLPipeline(
        vae=_vae(),
        text_encoder=_clip(clip, projection=False, seed=18),
        text_encoder_2=_clip(clip, projection=True, seed=19),
        tokenizer=clip,
        tokenizer_2=clip_tokenizer(),
        unet=unet,
        scheduler=diffusers.EulerDiscreteScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1
        ),
    )
    return _saved(pipe, folder)


def aura_flow(folder: Path) -> Path:
    """AuraFlow, a family that Halation has no table entry for."""
    tokenizer = t5_tokenizer()
    transformer = _seeded(
        lambda: diffusers.AuraFlowTransformer2DModel(
            sample_size=8,
            patch_size=2,
            num_mmdit_layers=1,
            num_single_dit_layers=1,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=TEXT_HIDDEN,
            caption_projection_dim=HIDDEN,
            pos_embed_max_size=64,
        ),
        40,
        2,
    )
    pipe = diffusers.AuraFlowPipeline(
        tokenizer=tokenizer,
        text_encoder=_t5(len(tokenizer), kind="UMT5"),
        vae=_vae(),
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=1.7),
    )
    return _saved(pipe, folder)


def _saved(pipe: Any, folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.utils.logging.disable_progress_bar()
        pipe.save_pretrained(folder, safe_serialization=True)
    return folder


FAMILIES: dict[str, Callable[[Path], Path]] = {
    "hunyuan": hunyuan,
    "pixart": pixart,
    "sd3": sd3,
    "flux": flux,
    "wan": wan,
    "sana": sana,
    "stable_diffusion": stable_diffusion,
}
MORE_FAMILIES: dict[str, Callable[[Path], Path]] = {
    "pixart_sigma": pixart_sigma,
    "stable_diffusion_xl": stable_diffusion_xl,
    "aura_flow": aura_flow,
}
VARIANTS: dict[str, Callable[[Path], Path]] = {"wan_one": functools.partial(wan, two_experts=False)}


# -- families that Halation knows only by their signature and configs

FLOW = {"shift": 3.0}


def chroma(folder: Path) -> Path:
    """Chroma: FLUX's blocks with real guidance and a negative prompt."""
    tokenizer = t5_tokenizer(512)
    transformer = _seeded(
        lambda: diffusers.ChromaTransformer2DModel(
            patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=TEXT_HIDDEN, axes_dims_rope=(4, 4, 8),
            approximator_num_channels=8, approximator_hidden_dim=32, approximator_layers=1,
        ),
        50,
        2,
    )  # fmt: skip
    pipe = diffusers.ChromaPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=_vae(shift=0.05), text_encoder=_t5(len(tokenizer)), tokenizer=tokenizer, transformer=transformer,
    )  # fmt: skip
    return _saved(pipe, folder)


def qwen_tokenizer() -> Any:
    words = clip_tokenizer().get_vocab()
    letters = [name for name in words if not name.endswith("</w>") and not name.startswith("<|")]
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    names = {name: index for index, name in enumerate([*special, *letters])}
    tokenizer = transformers.Qwen2Tokenizer(
        vocab=names, merges=[], unk_token="<|endoftext|>", pad_token="<|endoftext|>", eos_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>"], model_max_length=4096,
    )  # fmt: skip
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}<|im_start|>"
    )
    return tokenizer


def qwen_image(folder: Path) -> Path:
    """Qwen-Image: guidance by `true_cfg_scale`, a vision-language model as text encoder."""
    tokenizer = qwen_tokenizer()
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "hidden_size": TEXT_HIDDEN, "intermediate_size": 64, "num_hidden_layers": 1, "max_window_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 2, "vocab_size": len(tokenizer),
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1000000.0},
        },
        vision_config={
            "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": TEXT_HIDDEN,
        },
    )  # fmt: skip
    transformer = _seeded(
        lambda: diffusers.QwenImageTransformer2DModel(
            patch_size=2, in_channels=16, out_channels=4, num_layers=1, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=TEXT_HIDDEN, axes_dims_rope=(4, 4, 8),
        ),
        51,
        2,
    )  # fmt: skip
    vae = _seeded(
        lambda: diffusers.AutoencoderKLQwenImage(
            base_dim=4, z_dim=4, dim_mult=[1, 1, 2, 2], num_res_blocks=1,
            latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
        ),
        24,
        1.7,
    )  # fmt: skip
    pipe = diffusers.QwenImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), vae=vae,
        text_encoder=_seeded(lambda: transformers.Qwen2_5_VLForConditionalGeneration(config), 25),
        tokenizer=tokenizer, transformer=transformer,
    )  # fmt: skip
    return _saved(pipe, folder)


def z_image(folder: Path) -> Path:
    """Z-Image: guidance runs above 0, not above 1; the embeddings of a chat model."""
    tokenizer = qwen_tokenizer()
    config = transformers.Qwen3Config(
        hidden_size=TEXT_HIDDEN, intermediate_size=64, num_hidden_layers=2, max_window_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, vocab_size=len(tokenizer), max_position_embeddings=1024,
    )  # fmt: skip
    transformer = _seeded(
        lambda: diffusers.ZImageTransformer2DModel(
            all_patch_size=(2,), all_f_patch_size=(1,), in_channels=4, dim=32, n_layers=1, n_refiner_layers=1,
            n_heads=2, n_kv_heads=2, cap_feat_dim=TEXT_HIDDEN, axes_dims=[8, 4, 4], axes_lens=[1024, 64, 64],
        ),
        52,
    )  # fmt: skip
    pipe = diffusers.ZImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**FLOW), vae=_vae(shift=0.05),
        text_encoder=_seeded(lambda: transformers.Qwen3Model(config), 26), tokenizer=tokenizer, transformer=transformer,
    )  # fmt: skip
    return _saved(pipe, folder)


def lumina2(folder: Path) -> Path:
    """Lumina 2: Gemma as text encoder, a system prompt before each prompt."""
    sana = diffusers.SanaPipeline.from_pretrained(str(built("sana")))
    transformer = _seeded(
        lambda: diffusers.Lumina2Transformer2DModel(
            sample_size=4, patch_size=2, in_channels=4, hidden_size=32, num_layers=1, num_refiner_layers=1,
            num_attention_heads=2, num_kv_heads=1, multiple_of=16, axes_dim_rope=(8, 4, 4), axes_lens=(300, 64, 64),
            cap_feat_dim=TEXT_HIDDEN,
        ),
        53,
        2,
    )  # fmt: skip
    pipe = diffusers.Lumina2Pipeline(
        transformer=transformer, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**FLOW), vae=_vae(shift=0.05),
        text_encoder=sana.text_encoder, tokenizer=sana.tokenizer,
    )  # fmt: skip
    return _saved(pipe, folder)


def ltx(folder: Path) -> Path:
    """LTX-Video: an autoencoder that shrinks each side by 32."""
    tokenizer = t5_tokenizer(256)
    transformer = _seeded(
        lambda: diffusers.LTXVideoTransformer3DModel(
            in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32,
            num_layers=1, caption_channels=TEXT_HIDDEN,
        ),
        54,
        2,
    )  # fmt: skip
    vae = _seeded(
        lambda: diffusers.AutoencoderKLLTXVideo(
            latent_channels=8, block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 8, 8, 8),
            layers_per_block=(1, 1, 1, 1, 1), decoder_layers_per_block=(1, 1, 1, 1, 1),
        ),
        27,
        1.7,
    )  # fmt: skip
    pipe = diffusers.LTXPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), vae=vae,
        text_encoder=_t5(len(tokenizer)), tokenizer=tokenizer, transformer=transformer,
    )  # fmt: skip
    return _saved(pipe, folder)


def cogview3(folder: Path) -> Path:
    """CogView3-Plus: conditioned on the size, as SDXL."""
    tokenizer = t5_tokenizer(224)
    transformer = _seeded(
        lambda: diffusers.CogView3PlusTransformer2DModel(
            patch_size=2, in_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=4, out_channels=4,
            text_embed_dim=TEXT_HIDDEN, time_embed_dim=8, condition_dim=2, pos_embed_max_size=8, sample_size=4,
        ),
        55,
        2,
    )  # fmt: skip
    pipe = diffusers.CogView3PlusPipeline(
        tokenizer=tokenizer, text_encoder=_t5(len(tokenizer)), vae=_vae(), transformer=transformer,
        scheduler=diffusers.CogVideoXDDIMScheduler(),
    )  # fmt: skip
    return _saved(pipe, folder)


def cogvideox(folder: Path) -> Path:
    """CogVideoX: a video model whose config names height and width of a sample."""
    tokenizer = t5_tokenizer(226)
    transformer = _seeded(
        lambda: diffusers.CogVideoXTransformer3DModel(
            num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=8,
            text_embed_dim=TEXT_HIDDEN, num_layers=1, sample_width=6, sample_height=4, sample_frames=9,
            max_text_seq_length=226, use_rotary_positional_embeddings=True,
        ),
        56,
        2,
    )  # fmt: skip
    vae = _seeded(
        lambda: diffusers.AutoencoderKLCogVideoX(
            block_out_channels=(8, 8, 8, 8), latent_channels=4, layers_per_block=1, norm_num_groups=2,
            sample_height=32, sample_width=48,
        ),
        28,
        1.7,
    )  # fmt: skip
    pipe = diffusers.CogVideoXPipeline(
        tokenizer=tokenizer, text_encoder=_t5(len(tokenizer)), vae=vae, transformer=transformer,
        scheduler=diffusers.CogVideoXDDIMScheduler(),
    )  # fmt: skip
    return _saved(pipe, folder)


def latte(folder: Path) -> Path:
    """Latte: a video model that calls its number of frames `video_length`."""
    tokenizer = t5_tokenizer(120)
    transformer = _seeded(
        lambda: diffusers.LatteTransformer3DModel(
            sample_size=4,
            num_layers=1,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_channels=TEXT_HIDDEN,
            in_channels=4,
            out_channels=8,
            cross_attention_dim=32,
            attention_bias=True,
            activation_fn="gelu-approximate",
            num_embeds_ada_norm=1000,
            norm_type="ada_norm_single",
            norm_elementwise_affine=False,
            video_length=1,
        ),
        61,
        2,
    )
    pipe = diffusers.LattePipeline(
        tokenizer=tokenizer,
        text_encoder=_t5(len(tokenizer)),
        vae=_vae(),
        transformer=transformer,
        scheduler=diffusers.DDIMScheduler(),
    )
    return _saved(pipe, folder)


def mochi(folder: Path) -> Path:
    """Mochi: a video model whose constructor holds its size."""
    tokenizer = t5_tokenizer(256)
    transformer = _seeded(
        lambda: diffusers.MochiTransformer3DModel(
            num_attention_heads=2, attention_head_dim=16, num_layers=2, pooled_projection_dim=16, in_channels=12,
            text_embed_dim=TEXT_HIDDEN, time_embed_dim=16, max_sequence_length=256,
        ),
        60,
        2,
    )  # fmt: skip
    vae = _seeded(
        lambda: diffusers.AutoencoderKLMochi(
            encoder_block_out_channels=(32, 32, 32, 32), decoder_block_out_channels=(32, 32, 32, 32),
            latent_channels=12, layers_per_block=(1, 1, 1, 1, 1),
        ),
        29,
        1.7,
    )  # fmt: skip
    pipe = diffusers.MochiPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), vae=vae, text_encoder=_t5(len(tokenizer)),
        tokenizer=tokenizer, transformer=transformer, force_zeros_for_empty_prompt=True,
    )  # fmt: skip
    return _saved(pipe, folder)


def latent_consistency(folder: Path) -> Path:
    """A latent consistency model: the guidance scale is an input of the UNet, and there is no negative prompt."""
    clip = clip_tokenizer()
    unet = _unet(57, cross_attention_dim=TEXT_HIDDEN, attention_head_dim=4, time_cond_proj_dim=32)
    pipe = diffusers.LatentConsistencyModelPipeline(
        vae=_vae(), text_encoder=_clip(clip, projection=False, seed=17), tokenizer=clip, unet=unet,
        scheduler=diffusers.LCMScheduler(), safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    return _saved(pipe, folder)


def sana_sprint(folder: Path) -> Path:
    """Sana-Sprint: guidance is an input of the transformer."""
    base = diffusers.SanaPipeline.from_pretrained(str(built("sana")))
    config = {**base.transformer.config, "guidance_embeds": True, "qk_norm": "rms_norm_across_heads"}
    transformer = _seeded(lambda: diffusers.SanaTransformer2DModel.from_config(config), 58, 2)
    pipe = diffusers.SanaSprintPipeline(
        tokenizer=base.tokenizer, text_encoder=base.text_encoder, vae=base.vae, transformer=transformer,
        scheduler=diffusers.SCMScheduler(),
    )  # fmt: skip
    return _saved(pipe, folder)


def _same_parts(class_name: str, base: str, **more: Any) -> Callable[[Path], Path]:
    """A class that takes the components of another one."""

    def build(folder: Path) -> Path:
        plain = diffusers.DiffusionPipeline.from_pretrained(str(built(base)))
        kind = getattr(diffusers, class_name)
        taken = inspect.signature(kind.__init__).parameters
        parts = {name: part for name, part in plain.components.items() if name in taken}
        return _saved(kind(**parts, **more), folder)

    return build


def bria(folder: Path) -> Path:
    """Bria: FLUX's layout with T5 alone and real guidance."""
    tokenizer = t5_tokenizer(128)
    transformer = _seeded(
        lambda: diffusers.BriaTransformer2DModel(
            in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=TEXT_HIDDEN, axes_dims_rope=[4, 4, 8],
        ),
        59,
        2,
    )  # fmt: skip
    pipe = diffusers.BriaPipeline(
        transformer=transformer, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=_vae(shift=0.05), text_encoder=_t5(len(tokenizer)), tokenizer=tokenizer,
    )  # fmt: skip
    return _saved(pipe, folder)


SIGNATURE_FAMILIES: dict[str, Callable[[Path], Path]] = {
    "flux_schnell": functools.partial(flux, guidance_embeds=False),
    "chroma": chroma,
    "qwen_image": qwen_image,
    "z_image": z_image,
    "lumina2": lumina2,
    "ltx": ltx,
    "cogview3": cogview3,
    "cogvideox": cogvideox,
    "mochi": mochi,
    "latte": latte,
    "bria": bria,
    "latent_consistency": latent_consistency,
    "sana_sprint": sana_sprint,
    "stable_diffusion_pag": _same_parts(
        "StableDiffusionPAGPipeline", "stable_diffusion", requires_safety_checker=False
    ),
    "stable_diffusion_xl_pag": _same_parts("StableDiffusionXLPAGPipeline", "stable_diffusion_xl"),
    "stable_diffusion_3_pag": _same_parts("StableDiffusion3PAGPipeline", "sd3"),
    "pixart_sigma_pag": _same_parts("PixArtSigmaPAGPipeline", "pixart_sigma"),
}


@functools.cache
def _session_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tiny_pipelines_")


@functools.cache
def built(family: str) -> Path:
    """The family's folder, built once a process and shared: read it, never write into it."""
    return {**FAMILIES, **MORE_FAMILIES, **SIGNATURE_FAMILIES, **VARIANTS}[family](
        Path(_session_folder().name) / family
    )


# Images of a pipeline: by Halation, and by the pipeline alone


def specs(*prompts: str, **changes: Any) -> list[SampleSpec]:
    common = {"height": 32, "width": 32, "steps": 3, "guidance_scale": 4.0, **changes}
    first = int(common.pop("seed", 7))
    return [
        SampleSpec(index=index, id=str(index), prompt=prompt, seed=first + index, **common)
        for index, prompt in enumerate(prompts)
    ]


@functools.cache
def opened(family: str) -> PipelineModel:
    """One model of each family, shared by tests that do not change it."""
    return open_pipeline(built(family), dtype="fp32", device="cpu")


@functools.cache
def plain_pipe(family: str) -> Any:
    pipe = diffusers.DiffusionPipeline.from_pretrained(str(built(family)), use_safetensors=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def drawn(model: PipelineModel, wanted: Sequence[SampleSpec]) -> list[Frames]:
    images = model.draw(wanted, lambda: None).collect()
    for image in images:
        assert isinstance(image, np.ndarray), image
    return images  # type: ignore[return-value]


def plain(pipe: Any, wanted: Sequence[SampleSpec], **arguments: Any) -> list[Frames]:
    """The images that the pipeline itself returns."""
    first = wanted[0]
    name = type(pipe).__name__
    if name in ("HunyuanDiTPipeline", "PixArtAlphaPipeline", "PixArtSigmaPipeline", "SanaPipeline"):
        arguments["use_resolution_binning"] = False
    zeroed = name == "StableDiffusionXLPipeline" and not any(spec.negative_prompt for spec in wanted)
    if (name != "FluxPipeline" or "true_cfg_scale" in arguments) and not zeroed:
        arguments["negative_prompt"] = [spec.negative_prompt for spec in wanted]
    if name == "WanPipeline":
        arguments["num_frames"] = first.num_frames
    output = pipe(
        prompt=[spec.prompt for spec in wanted],
        generator=[torch.Generator("cpu").manual_seed(spec.seed) for spec in wanted],
        num_inference_steps=first.steps,
        guidance_scale=first.guidance_scale,
        height=first.height,
        width=first.width,
        output_type="pil",
        **arguments,
    )[0]
    videos = [video if isinstance(video, list) else [video] for video in output]
    return [np.stack([np.asarray(frame) for frame in video]) for video in videos]


def reopened(path: Path, **options: Any) -> PipelineModel:
    return open_pipeline(path, **{"dtype": "fp32", "device": "cpu", **options})


# Feature extractors


@functools.cache
def _inception(seed: int) -> dict[str, Tensor]:
    from benchmarks import scored

    return scored.inception_tensors(seed)


def inception_tensors(seed: int = 0) -> dict[str, Tensor]:
    """Random weights of FID's Inception."""
    return dict(_inception(seed))


def inception_pth(file: Path, seed: int = 0, *, zipped: bool = True) -> Path:
    """A state dict by torch.save, as released by pytorch-fid; not `zipped` is the format before torch 1.6."""
    torch.save(inception_tensors(seed), file, _use_new_zipfile_serialization=zipped)
    return file


def inception_safetensors(file: Path, seed: int = 0) -> Path:
    save_file(inception_tensors(seed), str(file))
    return file


def clip_model(folder: Path, *, seed: int = 0, image_size: int = 32, **preprocessing: Any) -> Path:
    """A CLIP folder with model, tokenizer and preprocessor_config.json, which `preprocessing` overrides."""
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
    _save_extractor(transformers.CLIPModel, config, folder, seed)
    tokenizer.save_pretrained(folder)
    crop = {"height": image_size, "width": image_size}
    settings = {"size": {"shortest_edge": image_size}, "crop_size": crop, **preprocessing}
    transformers.CLIPImageProcessorPil(**settings).save_pretrained(folder)
    return folder


def dinov2_model(folder: Path, *, seed: int = 0, num_registers: int = 0) -> Path:
    """A DINOv2 folder made for 56 x 56 pixels and, like the real ones, used at another size."""
    size: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 56}
    if num_registers:
        registers = transformers.Dinov2WithRegistersConfig(patch_size=14, num_register_tokens=num_registers, **size)
        return _save_extractor(transformers.Dinov2WithRegistersModel, registers, folder, seed)
    return _save_extractor(transformers.Dinov2Model, transformers.Dinov2Config(patch_size=14, **size), folder, seed)


def _save_extractor(kind: Any, config: Any, folder: Path, seed: int) -> Path:
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
