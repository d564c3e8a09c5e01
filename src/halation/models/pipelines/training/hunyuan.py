"""HunyuanDiT in training: BERT and T5 side by side, rotary positions, sizes and style as conditions, a v to be predicted."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from diffusers.models.embeddings import get_2d_rotary_pos_embed
from diffusers.pipelines.hunyuandit.pipeline_hunyuandit import get_resize_crop_region_for_grid
from torch import Tensor, nn

from halation.flow.paths import TimeKind
from halation.models.denoiser import Condition, Guides
from halation.models.pipelines.paths import table_path

_LENGTHS = (77, 256)  # what the pipeline asks of its two tokenizers
_ORIGINAL = (1024, 1024)  # the size the pipeline takes every drawn picture to come from


class HunyuanFamily:
    """What is particular to HunyuanDiT."""

    pipelines: ClassVar[tuple[str, ...]] = ("HunyuanDiTPipeline",)
    lora_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")
    guides: Guides = "pair"
    told_guidance = 1.0
    time_sampling: ClassVar[TimeKind] = "uniform"
    time_shift = 1.0

    def __init__(self, pipe: Any) -> None:
        config = pipe.transformer.config
        self.path = table_path(pipe.scheduler)
        self.lengths = dict(zip(("tokenizer", "tokenizer_2"), _LENGTHS, strict=True))
        self._config = config
        self._sized = bool(config.use_style_cond_and_image_meta_size)
        self._variance = bool(config.learn_sigma)
        self._factor = int(pipe.vae_scale_factor)
        self._positions: dict[tuple[int, int, torch.device], tuple[Tensor, Tensor]] = {}

    def blank(self) -> Condition:
        first, second = _LENGTHS
        return {
            "bert": torch.zeros(1, first, self._config.cross_attention_dim),
            "bert_mask": torch.zeros(1, first, dtype=torch.bool),
            "t5": torch.zeros(1, second, self._config.cross_attention_dim_t5),
            "t5_mask": torch.zeros(1, second, dtype=torch.bool),
        }

    def encode(self, pipe: Any, text: str, device: torch.device) -> Condition:
        rows: Condition = {}
        for index, (name, length) in enumerate(zip(("bert", "t5"), _LENGTHS, strict=True)):
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

    def placed(self, condition: Condition, originals: Tensor, height: int, width: int) -> Condition:
        """Sizes of the file and of the picture, and where the picture's corner lies in the file at the picture's scale."""
        if not self._sized:
            return condition
        size = torch.tensor([height, width], dtype=torch.float64, device=originals.device)
        scale = (size / originals).amax(dim=1, keepdim=True)
        corner = ((originals * scale - size) / 2).round()
        sizes = torch.cat([originals.double(), size.expand(len(originals), 2), corner], dim=1)
        return {**condition, "sizes": sizes.to(torch.float32)}

    def answer(self, module: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        answer: Tensor = module(
            x,
            self.path.index(t).to(x.dtype),
            encoder_hidden_states=condition["bert"],
            text_embedding_mask=condition["bert_mask"],
            encoder_hidden_states_t5=condition["t5"],
            text_embedding_mask_t5=condition["t5_mask"],
            image_rotary_emb=self._rotary(x),
            return_dict=False,
            **self._extras(x, condition),
        )[0]
        return answer.chunk(2, dim=1)[0] if self._variance else answer

    def _extras(self, x: Tensor, condition: Condition) -> dict[str, Tensor]:
        if not self._sized:
            return {}
        sizes = condition.get("sizes")
        if sizes is None:
            height, width = (side * self._factor for side in x.shape[-2:])
            sizes = torch.tensor([[*_ORIGINAL, height, width, 0, 0]], device=x.device).repeat(len(x), 1)
        return {
            "image_meta_size": sizes.to(x.dtype),
            "style": torch.zeros(len(x), dtype=torch.int64, device=x.device),
        }

    def _rotary(self, x: Tensor) -> tuple[Tensor, Tensor]:
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

    def keywords(self, condition: Condition, null: Condition) -> dict[str, Any]:
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

    def unpacked(self, latents: Tensor, height: int, width: int) -> Tensor:
        return latents

    def units(self, module: nn.Module) -> list[nn.Module]:
        blocks: nn.ModuleList = module.blocks  # type: ignore[assignment]
        return list(blocks)
