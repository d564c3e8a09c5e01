"""HunyuanDiT in training: BERT and T5, rotary positions, size and style, v-prediction."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from diffusers.models.embeddings import get_2d_rotary_pos_embed
from diffusers.pipelines.hunyuandit.pipeline_hunyuandit import get_resize_crop_region_for_grid
from torch import Tensor, nn

from halation.flow.paths import TimeDistribution
from halation.models.denoiser import Condition, GuidanceKind
from halation.models.pipelines.schedulers import ddpm_path

_TOKEN_LENGTHS = (77, 256)  # of the pipeline's two tokenizers
_DEFAULT_ORIGINAL_SIZE = (1024, 1024)  # the original size that the pipeline passes for every image


class HunyuanFamily:
    """Implements TrainableFamily for HunyuanDiT."""

    pipelines: ClassVar[tuple[str, ...]] = ("HunyuanDiTPipeline",)
    lora_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")
    guidance_kind: GuidanceKind = "pair"
    embedded_guidance = 1.0
    learning_rates: ClassVar[tuple[float, float]] = (1e-4, 1e-5)
    time_sampling: ClassVar[TimeDistribution] = "uniform"
    time_shift = 1.0

    def __init__(self, pipe: Any) -> None:
        config = pipe.transformer.config
        self.noise_path = ddpm_path(pipe.scheduler)
        self.token_lengths = dict(zip(("tokenizer", "tokenizer_2"), _TOKEN_LENGTHS, strict=True))
        self._config = config
        self._has_size_condition = bool(config.use_style_cond_and_image_meta_size)
        self._predicts_variance = bool(config.learn_sigma)
        self._vae_scale_factor = int(pipe.vae_scale_factor)
        self._positions: dict[tuple[int, int, torch.device], tuple[Tensor, Tensor]] = {}

    def zero_condition(self) -> Condition:
        first, second = _TOKEN_LENGTHS
        return {
            "bert": torch.zeros(1, first, self._config.cross_attention_dim),
            "bert_mask": torch.zeros(1, first, dtype=torch.bool),
            "t5": torch.zeros(1, second, self._config.cross_attention_dim_t5),
            "t5_mask": torch.zeros(1, second, dtype=torch.bool),
        }

    def encode(self, pipe: Any, text: str, device: torch.device) -> Condition:
        rows: Condition = {}
        for index, (name, length) in enumerate(zip(("bert", "t5"), _TOKEN_LENGTHS, strict=True)):
            embeds, _, mask, _ = pipe.encode_prompt(
                [text],
                device=device,
                dtype=(pipe.text_encoder, pipe.text_encoder_2)[index].dtype,
                do_classifier_free_guidance=False,
                max_sequence_length=length,
                text_encoder_index=index,
            )
            rows |= {name: embeds, f"{name}_mask": mask.bool()}
        return rows

    def add_size_condition(self, condition: Condition, original_sizes: Tensor, height: int, width: int) -> Condition:
        """Add the sizes of file and image, and the image's corner in the rescaled file."""
        if not self._has_size_condition:
            return condition
        size = torch.tensor([height, width], dtype=torch.float64, device=original_sizes.device)
        scale = (size / original_sizes).amax(dim=1, keepdim=True)
        corner = ((original_sizes * scale - size) / 2).round()
        sizes = torch.cat([original_sizes.double(), size.expand(len(original_sizes), 2), corner], dim=1)
        return {**condition, "sizes": sizes.to(torch.float32)}

    def predict(self, module: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        answer: Tensor = module(
            x,
            self.noise_path.timestep_index(t).to(x.dtype),
            encoder_hidden_states=condition["bert"],
            text_embedding_mask=condition["bert_mask"],
            encoder_hidden_states_t5=condition["t5"],
            text_embedding_mask_t5=condition["t5_mask"],
            image_rotary_emb=self._rotary_embedding(x),
            return_dict=False,
            **self._size_arguments(x, condition),
        )[0]
        return answer.chunk(2, dim=1)[0] if self._predicts_variance else answer

    def _size_arguments(self, x: Tensor, condition: Condition) -> dict[str, Tensor]:
        if not self._has_size_condition:
            return {}
        sizes = condition.get("sizes")
        if sizes is None:
            height, width = (side * self._vae_scale_factor for side in x.shape[-2:])
            sizes = torch.tensor([[*_DEFAULT_ORIGINAL_SIZE, height, width, 0, 0]], device=x.device).repeat(len(x), 1)
        return {
            "image_meta_size": sizes.to(x.dtype),
            "style": torch.zeros(len(x), dtype=torch.int64, device=x.device),
        }

    def _rotary_embedding(self, x: Tensor) -> tuple[Tensor, Tensor]:
        patch = self._config.patch_size
        height, width = (side // patch for side in x.shape[-2:])
        key = (height, width, x.device)
        if key not in self._positions:
            region = get_resize_crop_region_for_grid((height, width), 512 // 8 // patch)
            with torch.no_grad():
                self._positions[key] = get_2d_rotary_pos_embed(
                    self._config.attention_head_dim, region, (height, width), device=x.device, output_type="pt"
                )
        return self._positions[key]

    def prompt_arguments(self, condition: Condition, null: Condition) -> dict[str, Any]:
        return {
            "prompt_embeds": condition["bert"],
            "prompt_attention_mask": condition["bert_mask"].long(),
            "prompt_embeds_2": condition["t5"],
            "prompt_attention_mask_2": condition["t5_mask"].long(),
            "negative_prompt_embeds": null["bert"],
            "negative_prompt_attention_mask": null["bert_mask"].long(),
            "negative_prompt_embeds_2": null["t5"],
            "negative_prompt_attention_mask_2": null["t5_mask"].long(),
            "use_resolution_binning": False,
        }

    def unpack_latents(self, latents: Tensor, height: int, width: int) -> Tensor:
        return latents

    def shard_units(self, module: nn.Module) -> list[nn.Module]:
        blocks: nn.ModuleList = module.blocks  # type: ignore[assignment]
        return list(blocks)
