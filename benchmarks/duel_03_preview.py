"""Duel 3: a preview of the EMA during training, against diffusers' eager DiTPipeline.

Ours is what `halation train` does at a checkpoint: swap the EMA with the weights, let the `DenoiserSampler` of all
ranks sample, decode, encode and publish PNG files, and swap back. The peer always has its EMA as a second model in
bf16, which costs it no time. Both use DiT-XL/2, 50 steps, guidance, the decoder of Stable Diffusion, random weights and
bf16.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import inputs, measure

GUIDANCE = 4.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One size of the duel."""

    model: str
    layers: int
    heads: int
    head_size: int
    image_size: int
    vae_channels: tuple[int, ...]
    vae_layers: int
    steps: int
    rounds: int
    dtype: str
    compiled: bool


XLARGE = Setting(
    model="xlarge", layers=28, heads=16, head_size=72, image_size=256, vae_channels=(128, 256, 512, 512), vae_layers=2, steps=50,
    rounds=5, dtype="bf16", compiled=True,
)  # fmt: skip
TINY = Setting(
    model="tiny", layers=5, heads=5, head_size=32, image_size=64, vae_channels=(8, 8, 8, 8), vae_layers=1, steps=4, rounds=3,
    dtype="fp32", compiled=False,
)  # fmt: skip


class Preview:
    """Our side: a denoiser in training, its EMA, and the sampler of training."""

    def __init__(self, setting: Setting, work: Path, device: torch.device) -> None:
        from halation.distributed.world import init_from_env
        from halation.flow.ema import Ema
        from halation.models.autoencoder import LatentSpace
        from halation.models.dit.denoiser import create_dit

        self.setting, self.work = setting, work
        self.world = init_from_env(device)
        vae = inputs.random_vae(setting.vae_channels, setting.vae_layers)
        self.denoiser = create_dit(
            setting.model,
            height=setting.image_size,
            width=setting.image_size,
            class_names=[f"class {number}" for number in range(1000)],
            space=LatentSpace(vae.to(device), path="random"),
        )
        self.denoiser.module.materialize(device)  # type: ignore[operator]
        fill(self.denoiser.module)
        self.ema = Ema(dict(self.denoiser.module.named_parameters()))
        self.folders = itertools.count()

    def compile(self) -> None:
        for unit in self.denoiser.shard_units():
            unit.compile(dynamic=False)

    def draw(self, num_images: int, batch_size: int) -> Path:
        from halation.sampling.all_rank_sampler import DenoiserSampler, SampleSettings
        from halation.sampling.sample_folder import SampleFolder

        setting = self.setting
        settings = SampleSettings(
            prompts=tuple(f"class {number}" for number in range(num_images)),
            height=setting.image_size, width=setting.image_size, steps=setting.steps, seed=0, same_seed=False,
            sampler="multistep", guidance_scale=GUIDANCE, batch_size=batch_size, dtype=setting.dtype,
        )  # fmt: skip
        folder = self.work / f"ours_{next(self.folders)}"
        drawing = DenoiserSampler(self.world, self.denoiser, settings, sharded=False, timeout_s=600, stop=lambda: 0)
        with self.ema.swap_during():
            rows = drawing.run(SampleFolder(folder=folder), folder.name)
        bad = [row["reason"] for row in rows if row["state"] != "done"]
        if bad:
            raise SystemExit(f"an image could not be sampled: {bad[0]}")
        return folder


def fill(module: torch.nn.Module) -> None:
    """Fill with random weights: a new DiT predicts zero, which would hide a difference."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
            parameter.normal_(0.0, 0.02, generator=generator)
            if name.endswith(("q_scale", "k_scale")):
                parameter.add_(1.0)


def diffusers_preview(setting: Setting, work: Path, device: torch.device) -> Callable[[int], Path]:
    """Return the peer: a pipeline with the EMA copy, and `image.save` for each image."""
    from diffusers import DDIMScheduler, DiTPipeline, DiTTransformer2DModel

    dtype = torch.bfloat16 if setting.dtype == "bf16" else torch.float32
    with device:
        transformer: Any = DiTTransformer2DModel(
            num_attention_heads=setting.heads, attention_head_dim=setting.head_size, in_channels=4, out_channels=8,
            num_layers=setting.layers, sample_size=setting.image_size // 8, num_embeds_ada_norm=1000,
        )  # fmt: skip
    fill(transformer)
    vae = inputs.random_vae(setting.vae_channels, setting.vae_layers)
    pipeline: Any = DiTPipeline(transformer=transformer.to(dtype), vae=vae.to(device, dtype), scheduler=DDIMScheduler())
    pipeline.set_progress_bar_config(disable=True)
    folders = itertools.count()

    def draw(num_images: int) -> Path:
        folder = work / f"peer_{next(folders)}"
        folder.mkdir()
        generator = torch.Generator(device).manual_seed(0)
        labels = list(range(num_images))
        images = pipeline(
            labels, guidance_scale=GUIDANCE, generator=generator, num_inference_steps=setting.steps
        ).images
        for number, image in enumerate(images):
            image.save(folder / f"{number}.png")
        return folder

    return draw


def psnr(one: Path, other: Path) -> float:
    """Return the lowest PSNR over the images of two folders, in dB; 99 if they are equal."""
    from halation.images.png_codec import read_png

    lowest = 99.0
    for path in sorted(one.glob("sample_*.png")):
        a, b = (read_png(folder / path.name)[0].astype(np.float64) for folder in (one, other))
        error = float(np.square(a - b).mean())
        lowest = min(lowest, 10 * np.log10(255**2 / error)) if error else lowest
    return lowest


def duel(setting: Setting, work: Path) -> measure.Report:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    measure.say(f"building {setting.model} twice")
    ours = Preview(setting, work, device)
    peer = diffusers_preview(setting, work, device)
    try:
        return _duel(setting, ours, peer)
    finally:
        ours.world.close()


def _duel(setting: Setting, ours: Preview, peer: Callable[[int], Path]) -> measure.Report:
    eager_folder = ours.draw(4, 4)
    eager = measure.medians(measure.interleaved(_turns(ours, peer, 1, 1), setting.rounds))
    measure.say(f"eager, 1 image: ours {eager['ours']:.3f} s, DiTPipeline {eager['peer']:.3f} s")
    if setting.compiled:
        ours.compile()
    cases = {"1 image": (1, 1), "4 images in one batch": (4, 4), "4 images, a batch each (default)": (4, 1)}
    peak = measure.matrix_peak()
    rows = []
    check = ""
    for case, (num, batch) in cases.items():
        measure.say(f"{case}: {measure.seconds(lambda n=num, s=batch: ours.draw(n, s)):.1f} s the first time")  # type: ignore[misc]
        if batch == 4:
            check = f"PSNR {psnr(eager_folder, ours.draw(4, 4)):.1f} dB to our eager drawing"
        found = measure.medians(measure.interleaved(_turns(ours, peer, num, batch), setting.rounds))
        limit = setting.steps * 2 * num * ours.denoiser.flops_per_image() / peak
        rows.append(_row(case, found, limit, ""))
    rows.append(_row("1 image, ours eager too", eager, rows[0].limit or 0.0, "without --compile"))
    facts = measure.machine() | {
        "matrix_tflops": round(peak / 1e12, 2),
        "steps": setting.steps,
        "compile": setting.compiled,
    }
    finished = tuple(measure.Row(**{**_fields(row), "check": check}) for row in rows)
    return measure.Report(name="duel_03_preview", rows=finished, facts=facts)


def _fields(row: measure.Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__dataclass_fields__}


def _row(case: str, found: dict[str, float], limit: float, note: str) -> measure.Row:
    return measure.Row(
        case=case, ours=found["ours"], peer=found["peer"], unit="s", limit=limit, check="", equality="E1", note=note
    )


def _turns(ours: Preview, peer: Callable[[int], Path], num: int, batch: int) -> dict[str, Callable[[], float]]:
    return {
        "ours": lambda: measure.seconds(lambda: ours.draw(num, batch)),
        "peer": lambda: measure.seconds(lambda: peer(num)),
    }


def main(arguments: list[str] | None = None) -> measure.Report:
    return measure.play(__doc__ or "", XLARGE, TINY, duel, arguments)


if __name__ == "__main__":
    main()
