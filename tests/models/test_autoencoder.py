from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn

from halation.errors import InputError
from halation.models.autoencoder import LatentSpace, PixelSpace, denormalize_images, load_space
from halation.models.denoiser import NonFiniteRowsError


def images(num: int = 3, size: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (num, size, size, 3), generator=generator, dtype=torch.uint8)


def tiny_vae(seed: int = 0, **settings: object) -> AutoencoderKL:
    state = torch.get_rng_state()
    torch.manual_seed(seed)  # diffusers initialises from the global generator and from nothing else
    vae = AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=4,
        sample_size=16,
        **settings,
    )
    torch.set_rng_state(state)
    return vae


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("autoencoder") / "vae"
    tiny_vae(scaling_factor=0.5, shift_factor=0.25).save_pretrained(path, safe_serialization=True)
    return path


@pytest.mark.parametrize("scale", [1.0, 0.5, 2.0])
def test_every_byte_survives_the_way_into_pixel_space_and_back(scale: float) -> None:
    every = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16, 1).expand(1, 16, 16, 3)
    space = PixelSpace(scale)
    x = space.encode(every)
    assert x.shape == (1, 3, 16, 16)
    assert x.aminmax().min == -scale
    assert x.aminmax().max == scale
    assert torch.equal(space.decode(x), every)


def test_values_outside_are_clamped_and_values_between_are_rounded() -> None:
    x = torch.tensor([-7.0, -1.0, 0.0, 0.001, 1.0, 3.0]).reshape(1, 1, 1, 6)
    assert denormalize_images(x).flatten().tolist() == [0, 0, 128, 128, 255, 255]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_image_that_is_not_finite_is_refused_by_row_and_never_drawn_black(bad: float) -> None:
    x = torch.zeros(4, 3, 2, 2)
    x[1, 0, 0, 0] = x[3, 2, 1, 1] = bad
    with pytest.raises(NonFiniteRowsError, match="1, 3") as caught:
        PixelSpace().decode(x)
    assert caught.value.rows == (1, 3)


def test_latents_are_the_mean_shifted_and_scaled_as_the_autoencoder_says(folder: Path) -> None:
    space = LatentSpace.load(folder)
    vae = AutoencoderKL.from_pretrained(folder)
    assert (space.channels, space.downsampling_factor) == (4, 2)
    pixels = images()
    with torch.no_grad():
        mean = vae.encode(pixels.permute(0, 3, 1, 2) / 127.5 - 1).latent_dist.mean
        latents = space.encode(pixels)
        decoded = vae.decode(mean).sample
    assert latents.shape == (3, 4, 8, 8)
    assert torch.allclose(latents, (mean - 0.25) * 0.5, atol=1e-6)
    assert torch.equal(space.encode(pixels), latents), "the mean, not a draw"
    expected = denormalize_images(decoded).to(torch.int16)
    assert (space.decode(latents).to(torch.int16) - expected).abs().max() <= 1


def overflowing(folder: Path) -> LatentSpace:
    """Weights whose activations pass float16's 65504 for large latents and come back into range after the last norm."""
    space = LatentSpace.load(folder)
    with torch.no_grad():
        space._vae.decoder.conv_in.weight.mul_(3e4)
    return space


def test_what_overflows_in_half_precision_is_decoded_again_in_float32_image_by_image(folder: Path) -> None:
    space = overflowing(folder)
    latents = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(1)) * 1e-3
    latents[1] *= 1e4
    alone = space._decode_in_dtype(latents / space.scaling + space.shift, torch.float16)
    assert [bool(torch.isfinite(image).all()) for image in alone] == [True, False, True], "the fault fired"
    decoded = space.decode(latents, torch.float16)
    exact = space.decode(latents)
    assert torch.equal(decoded[1], space.decode(latents[1:2])[0])
    assert decoded[1].float().std() > 1, "not a black image"
    assert (decoded.to(torch.int16) - exact.to(torch.int16)).abs().max() <= 4
    neighbours = torch.stack([latents[1], latents[1], latents[0]])
    assert torch.equal(space.decode(neighbours, torch.float16)[0], decoded[1])


def test_what_is_not_finite_in_float32_either_is_an_error(folder: Path) -> None:
    latents = torch.zeros(2, 4, 8, 8)
    latents[1, 0, 0, 0] = float("nan")
    for dtype in (torch.float16, torch.float32):
        with pytest.raises(NonFiniteRowsError) as caught:
            LatentSpace.load(folder).decode(latents, dtype)
        assert caught.value.rows == (1,)


def test_the_half_precision_copy_leaves_the_float32_autoencoder_whole(folder: Path) -> None:
    space = LatentSpace.load(folder)
    latents = space.encode(images())
    before = space.decode(latents)
    space.decode(latents, torch.float16)
    assert torch.equal(space.encode(images()), latents)
    assert torch.equal(space.decode(latents), before)


def test_latents_do_not_depend_on_the_caller_s_autocast(folder: Path) -> None:
    space = LatentSpace.load(folder)
    latents = space.encode(images())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(space.encode(images()), latents)
        assert torch.equal(space.decode(latents), space.decode(latents))


def test_a_fingerprint_names_the_weights_and_a_description_is_held_to_it(folder: Path, tmp_path: Path) -> None:
    space = LatentSpace.load(folder)
    description = json.loads(json.dumps(space.describe()))
    assert isinstance(load_space(description), LatentSpace)
    space.save(tmp_path / "copy")
    assert LatentSpace.load(tmp_path / "copy").fingerprint() == space.fingerprint()
    tiny_vae(seed=1, scaling_factor=0.5, shift_factor=0.25).save_pretrained(tmp_path / "other", safe_serialization=True)
    assert LatentSpace.load(tmp_path / "other").fingerprint() != space.fingerprint()
    with pytest.raises(InputError, match="not the one this model was trained with"):
        load_space({**description, "path": str(tmp_path / "other")})
    tiny_vae(scaling_factor=0.6, shift_factor=0.25).save_pretrained(tmp_path / "scaled", safe_serialization=True)
    assert LatentSpace.load(tmp_path / "scaled").fingerprint() != space.fingerprint()


def test_a_relative_autoencoder_is_looked_up_beside_the_description(folder: Path) -> None:
    assert isinstance(load_space({"kind": "latents", "path": folder.name}, folder.parent), LatentSpace)


def test_a_pixel_space_goes_through_its_description() -> None:
    space = load_space(json.loads(json.dumps(PixelSpace(0.5).describe())))
    assert isinstance(space, PixelSpace)
    assert space.fingerprint() == PixelSpace(0.5).fingerprint() != PixelSpace().fingerprint()


def test_pickled_weights_missing_folders_and_unknown_spaces_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no autoencoder in"):
        LatentSpace.load(tmp_path / "nowhere")
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text((folder / "config.json").read_text())
    canary = tmp_path / "canary"

    class Payload:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (canary,))

    torch.save(Payload(), pickled / "diffusion_pytorch_model.bin")
    with pytest.raises(InputError, match="cannot be read"):
        LatentSpace.load(pickled)
    assert not canary.exists()
    with pytest.raises(InputError, match="pixels or latents"):
        load_space({"kind": "sound"})
    with pytest.raises(ValueError, match="positive"):
        PixelSpace(0.0)


def test_the_autoencoder_is_frozen(folder: Path) -> None:
    vae: nn.Module = LatentSpace.load(folder)._vae
    assert not any(parameter.requires_grad for parameter in vae.parameters())
    assert not vae.training


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"scaling_factor": "x"}, 'scaling_factor is "x"'),
        ({"scaling_factor": None}, "scaling_factor is null"),
        ({"scaling_factor": float("nan")}, "scaling_factor is nan"),
        ({"shift_factor": [1]}, "shift_factor is \\[1\\]"),
        ({"latent_channels": "4"}, 'latent_channels is "4"'),
        ({"layers_per_block": 100_000}, "layers_per_block is 100000"),
        ({"block_out_channels": [10**9, 10**9]}, "block_out_channels is 1000000000"),
        ({"block_out_channels": 8}, "cannot be read"),
        ({"norm_num_groups": 0}, "cannot be read: ZeroDivisionError"),
    ],
)
def test_a_config_with_absurd_values_is_refused(
    folder: Path, tmp_path: Path, change: dict[str, object], found: str
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "vae"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(InputError, match=found):
        LatentSpace.load(copy)


def test_weights_that_are_a_pipe_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    os.mkfifo(tmp_path / "diffusion_pytorch_model.safetensors")
    with pytest.raises(InputError, match="a named pipe"):
        LatentSpace.load(tmp_path)
