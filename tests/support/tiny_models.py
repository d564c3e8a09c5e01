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


@functools.cache
def _session_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tiny_pipelines_")


@functools.cache
def built(family: str) -> Path:
    """The family's folder, built once a process and shared: read it, never write into it."""
    return {**FAMILIES, **MORE_FAMILIES, **VARIANTS}[family](Path(_session_folder().name) / family)


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
