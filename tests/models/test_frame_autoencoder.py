"""Images as one frame of Wan's autoencoder, with the normalisation of the pipeline."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderKLWan
from torch import Tensor

from halation.models.autoencoder import LatentSpace, WanLatentSpace, make_latent_space
from support import tiny_models
from support.tiny_models import plain_pipe


@pytest.fixture(scope="module")
def vae() -> Any:
    return AutoencoderKLWan.from_pretrained(str(tiny_models.built("wan_one") / "vae"))


def latents(num: int = 2) -> Tensor:
    return torch.randn(num, 16, 4, 6, generator=torch.Generator().manual_seed(2))


def images() -> Tensor:
    return torch.randint(0, 256, (2, 32, 48, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


def test_a_images_latents_are_normalised_channel_by_channel(vae: Any) -> None:
    space = make_latent_space(vae, "vae")
    assert (space.channels, space.downsampling_factor) == (16, 8)
    with torch.no_grad():
        mean = vae.encode((images().permute(0, 3, 1, 2) / 127.5 - 1)[:, :, None]).latent_dist.mode()
    shape = (1, 16, 1, 1, 1)
    channel, spread = (torch.tensor(vae.config[name]).view(shape) for name in ("latents_mean", "latents_std"))
    assert torch.equal(space.encode(images()), ((mean - channel) * (1 / spread))[:, :, 0])
    assert space.encode(images()).shape == (2, 16, 4, 6)


def test_latents_are_decoded_to_what_the_pipeline_makes_of_them(vae: Any) -> None:
    pipe = plain_pipe("wan_one")
    videos = pipe(
        prompt_embeds=torch.zeros(2, 512, tiny_models.TEXT_HIDDEN),
        latents=latents()[:, :, None],
        num_inference_steps=1,
        guidance_scale=1.0,
        height=32,
        width=48,
        num_frames=1,
        output_type="np",
        callback_on_step_end=lambda *_: {"latents": latents()[:, :, None]},  # as though the last step had ended there
    ).frames
    decoded = make_latent_space(vae, "vae").decode(latents())
    assert torch.equal(decoded, torch.from_numpy((videos * 255).round().astype("uint8"))[:, 0])
    assert decoded.float().std() > 5, "not a grey image"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close_and_leaves_the_float32_autoencoder_whole(vae: Any, dtype: torch.dtype) -> None:
    space = make_latent_space(vae, "vae")
    before, encoded = space.decode(latents()), space.encode(images())
    narrow = space.decode(latents(), dtype)
    assert (narrow.to(torch.int16) - before.to(torch.int16)).abs().float().mean() < 2
    assert torch.equal(space.decode(latents()), before)
    assert torch.equal(space.encode(images()), encoded)


def test_a_fingerprint_names_the_weights_and_the_numbers_around_them(vae: Any, tmp_path: Path) -> None:
    space = make_latent_space(vae, "vae")
    space.save(tmp_path / "copy")
    again = AutoencoderKLWan.from_pretrained(str(tmp_path / "copy"))
    assert make_latent_space(again, "copy").fingerprint() == space.fingerprint()
    other = copy.deepcopy(again)
    other.register_to_config(latents_std=[1.0] * 16)
    assert make_latent_space(other, "copy").fingerprint() != space.fingerprint()
    with torch.no_grad():
        next(again.decoder.parameters()).add_(1)
    assert make_latent_space(again, "copy").fingerprint() != space.fingerprint()


def test_the_autoencoder_of_a_pipeline_decides_which_space_it_is(vae: Any) -> None:
    still = AutoencoderKL.from_pretrained(str(tiny_models.built("sd3") / "vae"))
    assert type(make_latent_space(still, "vae")) is LatentSpace
    assert type(make_latent_space(vae, "vae")) is WanLatentSpace
    assert type(make_latent_space(vae, "vae").to("cpu")) is WanLatentSpace
