"""A tuned plain script: trains HunyuanDiT's transformer in torch and diffusers.

It uses nothing of Halation: bf16 autocast, compiled blocks, fused AdamW, foreach EMA, v-prediction, and inputs that are
already on the device. It writes one line per step like `halation train`, so that both are read in the same way.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class PlainTraining:
    """Trains all weights of the transformer of a pipeline folder."""

    def __init__(self, model: Path, pixels: int, batch: int, *, bf16: bool, compiled: bool, recompute: bool) -> None:
        import diffusers
        from diffusers.models.embeddings import get_2d_rotary_pos_embed

        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.batch, self.bf16 = batch, bf16
        self.transformer: Any = diffusers.HunyuanDiT2DModel.from_pretrained(model / "transformer", dtype=torch.float32)
        self.transformer.to(self.device).train()
        if recompute:
            self._recompute()
        if compiled:
            for block in self.transformer.blocks:
                block.compile(dynamic=False)
        scheduler: Any = diffusers.DDPMScheduler.from_pretrained(model / "scheduler")
        self.kept = scheduler.alphas_cumprod.to(self.device)
        config = self.transformer.config
        side = pixels // 8 // config.patch_size
        rotary: Any = get_2d_rotary_pos_embed(
            config.attention_head_dim, ((0, 0), (side, side)), (side, side), output_type="pt"
        )
        with torch.device(self.device):
            self.rotary = tuple(part.to(self.device) for part in rotary)
            self.latents = torch.randn(128, config.in_channels, pixels // 8, pixels // 8)
            self.texts = {
                "encoder_hidden_states": torch.randn(batch, config.text_len, config.cross_attention_dim),
                "text_embedding_mask": torch.ones(batch, config.text_len, dtype=torch.int64),
                "encoder_hidden_states_t5": torch.randn(batch, config.text_len_t5, config.cross_attention_dim_t5),
                "text_embedding_mask_t5": torch.ones(batch, config.text_len_t5, dtype=torch.int64),
            }
        self.weights = list(self.transformer.parameters())
        self.average = [weight.detach().clone() for weight in self.weights]
        self.optimizer = torch.optim.AdamW(self.weights, lr=1e-5, fused=True)

    def _recompute(self) -> None:
        from torch.utils.checkpoint import checkpoint

        for block in self.transformer.blocks:
            plain = block.forward
            block.forward = lambda *args, plain=plain, **named: checkpoint(plain, *args, use_reentrant=False, **named)

    def step(self) -> Tensor:
        rows = torch.randint(len(self.latents), (self.batch,), device=self.device)
        x0 = self.latents[rows]
        noise = torch.randn_like(x0)
        t = torch.randint(len(self.kept), (self.batch,), device=self.device)
        signal = self.kept[t].sqrt()[:, None, None, None]
        rest = (1 - self.kept[t]).sqrt()[:, None, None, None]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            answer = self.transformer(
                signal * x0 + rest * noise, t.float(), image_rotary_emb=self.rotary, **self.texts, return_dict=False
            )[0]
        velocity = answer.float()[:, : x0.shape[1]]
        loss = (velocity - (signal * noise - rest * x0)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(self.average, self.weights, 1e-4)
        return loss.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--pixels", type=int, required=True)
    parser.add_argument("--batch_size", type=int, required=True)
    parser.add_argument("--n_steps", type=int, required=True)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--gradient_checkpointing", action="store_true")
    asked = parser.parse_args()
    asked.output_dir.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # like a rank of the command
    training = PlainTraining(
        asked.model, asked.pixels, asked.batch_size, bf16=asked.dtype == "bf16", compiled=asked.compile,
        recompute=asked.gradient_checkpointing,
    )  # fmt: skip
    began = time.monotonic()
    with (asked.output_dir / "metrics.jsonl").open("a") as file:
        for step in range(1, asked.n_steps + 1):
            loss = float(training.step())
            memory = torch.cuda.max_memory_allocated() / 2**30 if training.device.type == "cuda" else 0.0
            line = {
                "step": step,
                "time_s": time.monotonic() - began,
                "loss": loss,
                "memory_gb": round(memory, 3),
                "data_s": 0.0,
            }
            file.write(json.dumps(line) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
