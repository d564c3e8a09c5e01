"""A diffusion transformer with adaLN-Zero, registers, text or class conditioning.

Peebles and Xie 2023, with QK-norm.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halation.errors import InputError
from halation.input_files import check_numbers
from halation.models.denoiser import Condition

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"depth": 5, "hidden": 160, "heads": 5, "text_hidden": 96},
    "mini": {"depth": 9, "hidden": 192, "heads": 3, "text_hidden": 128},
    "small": {"depth": 12, "hidden": 384, "heads": 6, "text_hidden": 256},
    "base": {"depth": 12, "hidden": 768, "heads": 12, "text_hidden": 384},
    "large": {"depth": 24, "hidden": 1024, "heads": 16, "text_hidden": 512},
    "xlarge": {"depth": 28, "hidden": 1152, "heads": 16, "text_hidden": 512},
}
_TIME_CHANNELS = 256
TEXT_HEADS = 4
_MLP_RATIO = 4


MAX_TOKENS = 2**16
_RANGES = {
    "height": (1, 16_384), "width": (1, 16_384), "channels": (1, 1024), "patch_size": (1, 1024), "depth": (1, 512),
    "hidden": (4, 16_384), "heads": (1, 1024), "num_register_tokens": (0, 4096), "vocabulary_size": (0, 2**22),
    "max_tokens": (3, 8192), "text_hidden": (4, 16_384), "text_depth": (0, 128), "num_classes": (0, 10**6),
}  # fmt: skip
"""Accepted values; a model outside these ranges would exhaust memory when it is built."""


@dataclass(frozen=True, kw_only=True)
class DiTConfig:
    """The architecture of a DiT; height and width are those of its input, pixels or latents."""

    height: int
    width: int
    channels: int
    patch_size: int
    depth: int
    hidden: int
    heads: int
    num_register_tokens: int = 0
    conditioning: Literal["text", "class"] = "text"
    vocabulary_size: int = 0
    max_tokens: int = 48
    text_hidden: int = 256
    text_depth: int = 2
    num_classes: int = 0

    def __post_init__(self) -> None:
        check_numbers("the model's config", asdict(self), _RANGES)
        num_tokens = max(self.num_patches, self.num_register_tokens)
        check_numbers(
            "the model's config", {"the number of patches": num_tokens}, {"the number of patches": (0, MAX_TOKENS)}
        )
        if self.patch_size < 1 or self.height % self.patch_size or self.width % self.patch_size:
            patch = max(1, self.patch_size)
            height, width = (max(1, round(size / patch)) * patch for size in (self.height, self.width))
            raise InputError(
                f"a size of {self.height} x {self.width} that is not divisible by the patch size {self.patch_size}",
                f"height and width that are multiples of {self.patch_size}",
                f"use {height} x {width}, or another patch size",
            )
        if self.hidden % self.heads or self.hidden % 4 or self.text_hidden % TEXT_HEADS:
            raise InputError(
                f"hidden size {self.hidden} with {self.heads} heads, text size {self.text_hidden}",
                f"a hidden size divisible by 4 and by the heads, a text size divisible by {TEXT_HEADS}",
                "change hidden, heads or text_hidden",
            )
        known = self.vocabulary_size if self.conditioning == "text" else self.num_classes
        if self.conditioning not in ("text", "class") or known < 1:
            raise InputError(
                f"{self.conditioning} conditioning with {known} words or classes",
                "text with a vocabulary_size, or class with num_classes",
                "pass the captions or the classes of the data",
            )

    @classmethod
    def of_size(cls, name: str, **shape: Any) -> DiTConfig:
        """Return the config of a named size; the other fields are keyword arguments."""
        if name not in SIZES:
            raise InputError(f"model size {name!r}", f"one of {', '.join(SIZES)}", "pick one of these sizes")
        return cls(**{**SIZES[name], **shape})

    @property
    def num_patches(self) -> int:
        return (self.height // self.patch_size) * (self.width // self.patch_size)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def sincos_positions(height: int, width: int, channels: int) -> Tensor:
    """Return fixed 2-D positions: half the channels for rows, half for columns.

    Each half has the sines first, then the cosines.
    Computed in float64, returned in float32.
    """
    frequencies = 10000.0 ** -(torch.arange(channels // 4, dtype=torch.float64) / (channels // 4))
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    angles = [axis.reshape(-1, 1).to(torch.float64) * frequencies for axis in (rows, columns)]
    return torch.cat([wave for angle in angles for wave in (angle.sin(), angle.cos())], dim=1).to(torch.float32)


def _modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale) + shift


def _layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)


class Attention(nn.Module):
    """Multi-head attention of `x` over `context` or itself.

    Queries and keys have a learned RMS norm over each head.
    """

    def __init__(self, hidden: int, heads: int, context_hidden: int | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.is_cross_attention = context_hidden is not None
        if context_hidden is None:
            self.projections = nn.ModuleDict({"qkv": nn.Linear(hidden, 3 * hidden)})
        else:
            self.projections = nn.ModuleDict(
                {"q": nn.Linear(hidden, hidden), "kv": nn.Linear(context_hidden, 2 * hidden)}
            )
        self.q_scale = nn.Parameter(torch.empty(hidden // heads))
        self.k_scale = nn.Parameter(torch.empty(hidden // heads))
        self.out = nn.Linear(hidden, hidden)

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], self.heads, -1).transpose(1, 2)

    @staticmethod
    def _rms_norm(x: Tensor, scale: Tensor) -> Tensor:
        # Always in float32, also under autocast: a bf16 mean of squares is too inaccurate for QK-norm.
        return F.rms_norm(x.float(), x.shape[-1:], scale.float(), eps=1e-6).to(x.dtype)

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        if context is None:
            q, k, v = self.projections["qkv"](x).chunk(3, dim=-1)
        else:
            q = self.projections["q"](x)
            k, v = self.projections["kv"](context).chunk(2, dim=-1)
        q, k, v = self._split_heads(q), self._split_heads(k), self._split_heads(v)
        mixed = F.scaled_dot_product_attention(
            self._rms_norm(q, self.q_scale), self._rms_norm(k, self.k_scale), v, attn_mask=mask
        )
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class Mlp(nn.Module):
    """Two linear layers with a tanh-approximated GELU between them."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, _MLP_RATIO * hidden)
        self.down = nn.Linear(_MLP_RATIO * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return result


class DiTBlock(nn.Module):
    """One transformer layer, modulated by `c`, with cross-attention to `text` in text models.

    Gradient checkpointing is inside the block, so that sharding and `block.compile()` can wrap the whole block.
    """

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        self.modulation = nn.Linear(config.hidden, 6 * config.hidden)
        self.attention = Attention(config.hidden, config.heads)
        self.cross = (
            Attention(config.hidden, config.heads, config.text_hidden) if config.conditioning == "text" else None
        )
        self.mlp = Mlp(config.hidden)

    def _forward_block(self, x: Tensor, c: Tensor, text: Tensor | None, text_mask: Tensor | None) -> Tensor:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulation(F.silu(c)).unsqueeze(1).chunk(6, dim=-1)
        x = x + gate_a * self.attention(_modulate(_layer_norm(x), shift_a, scale_a))
        if self.cross is not None:
            x = x + self.cross(_layer_norm(x), text, text_mask)
        result: Tensor = x + gate_m * self.mlp(_modulate(_layer_norm(x), shift_m, scale_m))
        return result

    def forward(self, x: Tensor, c: Tensor, text: Tensor | None = None, text_mask: Tensor | None = None) -> Tensor:
        if self.gradient_checkpointing and torch.is_grad_enabled():
            result: Tensor = checkpoint(
                self._forward_block, x, c, text, text_mask, use_reentrant=False, preserve_rng_state=False
            )
            return result
        return self._forward_block(x, c, text, text_mask)


class TextLayer(nn.Module):
    """A pre-norm transformer layer over tokens."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.attention = Attention(hidden, TEXT_HEADS)
        self.mlp = Mlp(hidden)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(_layer_norm(x), None, mask)
        result: Tensor = x + self.mlp(_layer_norm(x))
        return result


class TextEncoder(nn.Module):
    """Encodes token ids to one state per token and one pooled vector; trained with the DiT."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary_size, config.text_hidden)
        self.positions = nn.Parameter(torch.empty(config.max_tokens, config.text_hidden))
        self.layers = nn.ModuleList(TextLayer(config.text_hidden) for _ in range(config.text_depth))
        self.pooled = nn.Linear(config.text_hidden, config.hidden)

    def forward(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(tokens) + self.positions
        keys = mask[:, None, None, :]
        for layer in self.layers:
            x = layer(x, keys)
        x = _layer_norm(x)
        weight = mask.unsqueeze(-1).to(x.dtype)
        mean = (x * weight).sum(dim=1) / weight.sum(dim=1)
        return x, self.pooled(mean)


class DiT(nn.Module):
    """The trained module: `module(x, t, condition)` returns the velocity.

    It is created on the meta device, without allocating memory or using a generator. Call `init_weights(seed)`, or
    `materialize()` and load a state dict.
    """

    positions: Tensor
    frequencies: Tensor

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config = config
        hidden, patch = config.hidden, config.patch_size
        with torch.device("meta"):
            self.patches = nn.Linear(config.channels * patch * patch, hidden)
            self.registers = (
                nn.Parameter(torch.empty(config.num_register_tokens, hidden)) if config.num_register_tokens else None
            )
            self.time = nn.Sequential(nn.Linear(_TIME_CHANNELS, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
            self.text = TextEncoder(config) if config.conditioning == "text" else None
            self.labels = nn.Embedding(config.num_classes + 1, hidden) if config.conditioning == "class" else None
            self.blocks = nn.ModuleList(DiTBlock(config) for _ in range(config.depth))
            self.head_modulation = nn.Linear(hidden, 2 * hidden)
            self.head = nn.Linear(hidden, config.channels * patch * patch)
            self.register_buffer("positions", torch.empty(config.num_patches, hidden), persistent=False)
            self.register_buffer("frequencies", torch.empty(_TIME_CHANNELS // 2), persistent=False)

    @property
    def gradient_checkpointing(self) -> bool:
        """True if blocks recompute their activations in the backward pass."""
        return any(getattr(block, "gradient_checkpointing", False) for block in self.blocks)

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, value: bool) -> None:
        for block in self.blocks:
            setattr(block, "gradient_checkpointing", value)  # noqa: B010  nn.Module types attributes as tensors

    @torch.no_grad()
    def materialize(self, device: torch.device | str = "cpu") -> DiT:
        """Allocate all tensors and fill the fixed buffers; parameters stay uninitialized."""
        config = self.config
        self.to_empty(device=device)
        rows, columns = config.height // config.patch_size, config.width // config.patch_size
        self.positions.copy_(sincos_positions(rows, columns, config.hidden))
        half = _TIME_CHANNELS // 2
        self.frequencies.copy_(torch.exp(-math.log(10000.0) * torch.arange(half, dtype=torch.float64) / half))
        return self

    @torch.no_grad()
    def init_weights(self, seed: int, device: torch.device | str = "cpu") -> DiT:
        """Initialize each parameter from the seed and its name only.

        Adding register tokens therefore changes no other weight.
        """
        self.materialize(device)
        for name, parameter in self.named_parameters():
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            parameter.copy_(_init_parameter(name, tuple(parameter.shape), generator))
        return self

    def _patchify(self, x: Tensor) -> Tensor:
        config, patch = self.config, self.config.patch_size
        x = x.reshape(-1, config.channels, config.height // patch, patch, config.width // patch, patch)
        return x.permute(0, 2, 4, 1, 3, 5).reshape(-1, config.num_patches, config.channels * patch * patch)

    def _unpatchify(self, tokens: Tensor) -> Tensor:
        config, patch = self.config, self.config.patch_size
        rows, columns = config.height // patch, config.width // patch
        x = tokens.reshape(-1, rows, columns, config.channels, patch, patch)
        return x.permute(0, 3, 1, 4, 2, 5).reshape(-1, config.channels, config.height, config.width)

    def _embed_time(self, t: Tensor) -> Tensor:
        angles = 1000.0 * t.to(torch.float32).unsqueeze(1) * self.frequencies
        result: Tensor = self.time(torch.cat([angles.cos(), angles.sin()], dim=1))
        return result

    def forward(self, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        c = self._embed_time(t)
        text: Tensor | None = None
        text_mask: Tensor | None = None
        if self.text is not None:
            text, pooled = self.text(condition["tokens"], condition["mask"])
            c = c + pooled
            text_mask = condition["mask"][:, None, None, :]
        elif self.labels is not None:
            c = c + self.labels(condition["label"])
        tokens = self.patches(self._patchify(x)) + self.positions
        num_registers = self.config.num_register_tokens
        if self.registers is not None:
            tokens = torch.cat([self.registers.to(tokens.dtype).expand(tokens.shape[0], -1, -1), tokens], dim=1)
        for block in self.blocks:
            tokens = block(tokens, c, text, text_mask)
        tokens = tokens[:, num_registers:]
        shift, scale = self.head_modulation(F.silu(c)).unsqueeze(1).chunk(2, dim=-1)
        return self._unpatchify(self.head(_modulate(_layer_norm(tokens), shift, scale)))

    def flops(self) -> int:
        """FLOPs of one forward of one image: twice the multiply-adds of all matrix products."""
        config = self.config
        d, tokens = config.hidden, config.num_patches + config.num_register_tokens
        patch_values = config.channels * config.patch_size**2
        block = 12 * d * d * tokens + 2 * tokens * tokens * d + 6 * d * d
        outside_blocks = 2 * config.num_patches * patch_values * d + _TIME_CHANNELS * d + d * d + 2 * d * d
        if config.conditioning == "text":
            e, length = config.text_hidden, config.max_tokens
            block += 2 * d * d * tokens + 2 * d * e * length + 2 * tokens * length * d
            outside_blocks += config.text_depth * (12 * e * e * length + 2 * length * length * e) + e * d
        return 2 * (config.depth * block + outside_blocks)


_ZERO_INIT = ("modulation.weight", "head_modulation.weight", "head.weight", "cross.out.weight")


def _init_parameter(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Initialize as in DiT: every block is the identity and the output is zero."""
    if name.endswith(("q_scale", "k_scale")):
        return torch.ones(shape)
    if name.endswith("bias") or name.endswith(_ZERO_INIT):
        return torch.zeros(shape)
    if name.startswith(("time.", "labels.")) or name.endswith(("registers", "tokens.weight", "positions")):
        return torch.randn(shape, generator=generator) * 0.02
    num_out, num_in = shape
    bound = math.sqrt(6.0 / (num_in + num_out))  # Xavier, uniform
    return (torch.rand(shape, generator=generator) * 2 - 1) * bound
