"""The peer of the training duel: a class-conditional DiT and its training step in torch.

It uses nothing of Halation. The model is DiT (adaLN-Zero, no QK-norm); the objective is rectified flow.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Depth, width, heads and the grid of latents."""

    depth: int
    hidden: int
    heads: int
    grid: int
    channels: int = 4
    patch: int = 2
    num_classes: int = 1000


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d = shape.hidden
        self.heads = shape.heads
        self.modulation = nn.Linear(d, 6 * d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        b, n, d = x.shape
        s1, k1, g1, s2, k2, g2 = self.modulation(F.silu(c)).unsqueeze(1).chunk(6, dim=-1)
        h = F.layer_norm(x, (d,), eps=1e-6) * (1 + k1) + s1
        q, k, v = self.qkv(h).reshape(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + g1 * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d))
        h = F.layer_norm(x, (d,), eps=1e-6) * (1 + k2) + s2
        result: Tensor = x + g2 * self.down(F.gelu(self.up(h), approximate="tanh"))
        return result


class PlainDiT(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        d, p = shape.hidden, shape.patch
        self.patches = nn.Conv2d(shape.channels, d, p, p)
        self.positions = nn.Parameter(torch.randn(1, (shape.grid // p) ** 2, d) * 0.02, requires_grad=False)
        self.time = nn.Sequential(nn.Linear(256, d), nn.SiLU(), nn.Linear(d, d))
        self.labels = nn.Embedding(shape.num_classes + 1, d)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.last_modulation = nn.Linear(d, 2 * d)
        self.last = nn.Linear(d, p * p * shape.channels)
        for linear in [self.last, self.last_modulation, *(block.modulation for block in self.blocks)]:
            for parameter in linear.parameters():  # type: ignore[union-attr]
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor, t: Tensor, label: Tensor) -> Tensor:
        frequencies = torch.exp(-math.log(10000.0) * torch.arange(128, device=x.device) / 128)
        angles = 1000.0 * t[:, None] * frequencies
        c = self.time(torch.cat([angles.cos(), angles.sin()], dim=1)) + self.labels(label)
        h = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            h = block(h, c)
        shift, scale = self.last_modulation(F.silu(c)).unsqueeze(1).chunk(2, dim=-1)
        h = self.last(F.layer_norm(h, h.shape[-1:], eps=1e-6) * (1 + scale) + shift)
        p, side = self.shape.patch, self.shape.grid // self.shape.patch
        h = h.reshape(-1, side, side, p, p, self.shape.channels).permute(0, 5, 1, 3, 2, 4)
        return h.reshape(x.shape)


class PlainTraining:
    """Trains the plain DiT on latents that are already on the device.

    `tuned`: bf16 autocast, compiled blocks, fused AdamW, foreach EMA. Otherwise like facebookresearch/DiT: TF32, eager,
    default AdamW, the EMA in a loop over parameters.
    """

    def __init__(self, shape: Shape, latents: Tensor, batch: int, *, tuned: bool, compiled: bool, bf16: bool) -> None:
        self.device = latents.device
        self.latents, self.batch, self.tuned, self.bf16 = latents, batch, tuned, bf16
        self.shape = shape
        with torch.device(self.device):
            self.model = PlainDiT(shape)
        if compiled:
            for block in self.model.blocks:
                block.compile()
        trained: list[Tensor] = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.trained = trained
        self.average = [parameter.detach().clone() for parameter in trained]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0, fused=True if tuned else None)

    def step(self) -> Tensor:
        rows = torch.randint(len(self.latents), (self.batch,), device=self.device)
        x0 = self.latents[rows]
        noise = torch.randn_like(x0)
        t = torch.randn(self.batch, device=self.device).sigmoid()
        label = torch.randint(self.shape.num_classes + 1, (self.batch,), device=self.device)
        mixed = torch.lerp(x0, noise, t[:, None, None, None])
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            velocity = self.model(mixed, t, label)
        loss = (velocity.float() - (noise - x0)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._average()
        return loss.detach()

    @torch.no_grad()
    def _average(self) -> None:
        if self.tuned:
            torch._foreach_lerp_(self.average, self.trained, 1e-4)
            return
        for average, parameter in zip(self.average, self.trained, strict=True):
            average.mul_(0.9999).add_(parameter.detach(), alpha=1e-4)

    def rate(self, steps: int) -> float:
        """Return images per second over some steps; only reading the last loss synchronizes."""
        began = time.perf_counter()
        for _ in range(steps):
            loss = self.step()
        self.loss = float(loss)
        return steps * self.batch / (time.perf_counter() - began)
