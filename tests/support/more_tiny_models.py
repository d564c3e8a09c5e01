"""More tiny pipelines, of families that Halation knows only by their signature and configs."""

from __future__ import annotations

import functools
import inspect
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import transformers

from support import tiny_models
from support.tiny_models import TEXT_HIDDEN, _clip, _saved, _seeded, _t5, _unet, _vae, t5_tokenizer

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
    words = tiny_models.clip_tokenizer().get_vocab()
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
    sana = diffusers.SanaPipeline.from_pretrained(str(tiny_models.built("sana")))
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
    clip = tiny_models.clip_tokenizer()
    unet = _unet(57, cross_attention_dim=TEXT_HIDDEN, attention_head_dim=4, time_cond_proj_dim=32)
    pipe = diffusers.LatentConsistencyModelPipeline(
        vae=_vae(), text_encoder=_clip(clip, projection=False, seed=17), tokenizer=clip, unet=unet,
        scheduler=diffusers.LCMScheduler(), safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    return _saved(pipe, folder)


def sana_sprint(folder: Path) -> Path:
    """Sana-Sprint: guidance is an input of the transformer."""
    base = diffusers.SanaPipeline.from_pretrained(str(tiny_models.built("sana")))
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
        plain = diffusers.DiffusionPipeline.from_pretrained(str(tiny_models.built(base)))
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


BUILDERS: dict[str, Callable[[Path], Path]] = {
    "flux_schnell": functools.partial(tiny_models.flux, guidance_embeds=False),
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
    return tempfile.TemporaryDirectory(prefix="more_tiny_pipelines_")


@functools.cache
def built(name: str) -> Path:
    """The folder of a family, built once a process and shared: read it, never write into it."""
    if name not in BUILDERS:
        return tiny_models.built(name)
    return BUILDERS[name](Path(_session_folder().name) / name)
