"""The space a denoiser works in: pixels, or the latents of a diffusers autoencoder."""

from __future__ import annotations

import copy
import hashlib
import logging
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from halation.errors import InputError, format_count
from halation.input_files import check_numbers
from halation.models.denoiser import ImageSpace, NonFiniteRowsError, non_finite_rows
from halation.models.pipelines.folder_safety_check import check_model_sizes, read_json

logger = logging.getLogger(__name__)
_FRAME_AXIS = 2
_VAE_RANGES = {"scaling_factor": (1e-6, 1e6), "shift_factor": (-1e6, 1e6), "latent_channels": (1, 65_536)}


def normalize_images(pixels: Tensor) -> Tensor:
    """Convert uint8 NHWC to float32 NCHW in [-1, 1]."""
    return pixels.permute(0, 3, 1, 2).to(torch.float32) / 127.5 - 1.0


def denormalize_images(x: Tensor) -> Tensor:
    """Convert float NCHW in [-1, 1] to uint8 NHWC: clamp, scale, round half to even.

    Raise NonFiniteRowsError for NaN or infinity.
    """
    rows = non_finite_rows(x)
    if rows:
        raise NonFiniteRowsError(f"images {', '.join(map(str, rows))} of the batch are not finite", rows)
    scaled = x.to(torch.float32).clamp(-1.0, 1.0) * 127.5 + 127.5
    return scaled.round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


class PixelSpace:
    """Pixels in [-scale, scale]."""

    downsampling_factor = 1
    channels = 3

    def __init__(self, scale: float = 1.0) -> None:
        if scale <= 0:
            raise ValueError(f"a pixel scale is positive, not {scale}")
        self.scale = scale

    def encode(self, pixels: Tensor) -> Tensor:
        return normalize_images(pixels) * self.scale

    def decode(self, x: Tensor) -> Tensor:
        return denormalize_images(x / self.scale)

    def describe(self) -> dict[str, Any]:
        return {"kind": "pixels", "scale": self.scale}

    def fingerprint(self) -> str:
        return f"pixels:{self.scale!r}"

    def to(self, device: torch.device | str) -> PixelSpace:
        return self


class LatentSpace:
    """Mean latents of a diffusers `AutoencoderKL`, with the shift and scale of its config."""

    kind: ClassVar[str] = "autoencoder_kl"
    channels: int
    downsampling_factor: int
    scaling: float | Tensor
    shift: float | Tensor

    def __init__(self, vae: Any, *, path: str, half_dtype: torch.dtype = torch.float16) -> None:
        self._vae = vae.requires_grad_(False).eval()
        self._half_vae: Any = None
        self._fingerprint: str | None = None
        self._half_dtype = half_dtype
        self.path = path
        self._read_config(vae.config)

    def _read_config(self, config: Any) -> None:
        self.channels = config.latent_channels
        self.downsampling_factor = 2 ** (len(config.block_out_channels) - 1)
        self.scaling = config.scaling_factor
        self.shift = config.shift_factor or 0.0

    @classmethod
    def load(cls, folder: str | Path, *, half_dtype: torch.dtype = torch.float16) -> LatentSpace:
        """Load from a local folder with `config.json` and safetensors.

        Nothing is downloaded, no pickle is loaded and no code of the folder is run.
        """
        path = Path(folder)
        if not (path / "config.json").is_file():
            raise InputError(
                f"no autoencoder in {path}",
                "a folder with config.json and diffusion_pytorch_model.safetensors",
                "give the folder of a diffusers AutoencoderKL (often named vae)",
            )
        check_model_sizes(path)
        # Check the values that scale latents; diffusers checks the rest of the config.
        config = read_json(path / "config.json")
        if not isinstance(config, dict):
            raise InputError(
                f"{path / 'config.json'} is not a JSON object", "an autoencoder's config", "copy the model again"
            )
        given = {name: value for name, value in config.items() if value is not None or name != "shift_factor"}
        check_numbers(str(path / "config.json"), given, _VAE_RANGES)
        from diffusers import AutoencoderKL  # slow to import, and pixel models do not need it

        try:
            from_pretrained: Any = AutoencoderKL.from_pretrained
            vae = from_pretrained(str(path), use_safetensors=True, local_files_only=True, torch_dtype=torch.float32)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise InputError(
                f"the autoencoder in {path} cannot be read: {type(error).__name__}: {error}",
                "config.json of an AutoencoderKL and its weights as safetensors",
                "convert the weights to safetensors, or fetch the folder again",
            ) from error
        return cls(vae, path=str(path.resolve()), half_dtype=half_dtype)

    @property
    def num_bytes(self) -> int:
        """Size of the weights."""
        return sum(parameter.nbytes for parameter in self._vae.parameters())

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self._vae.parameters()).device
        return device

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        with torch.autocast(self.device.type, enabled=False):  # latents must not depend on the caller's autocast
            mean = self._encode_mean(normalize_images(pixels.to(self.device)))
        latents: Tensor = (mean - self.shift) * self.scaling
        return latents.to(pixels.device)

    def _encode_mean(self, images: Tensor) -> Tensor:
        mean: Tensor = self._vae.encode(images).latent_dist.mode()
        return mean

    @torch.no_grad()
    def decode(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Decode to uint8; images that overflow in half precision are decoded again in float32.

        The default `dtype` is half precision on a GPU and float32 on a CPU. The second attempt decodes one image at a
        time, so that the result does not depend on which other images overflowed.
        """
        if dtype is None:
            dtype = self._half_dtype if self.device.type == "cuda" else torch.float32
        latents = x.to(self.device, torch.float32) / self.scaling + self.shift
        images = self._decode_in_dtype(latents, dtype)
        overflowed = non_finite_rows(images) if dtype != torch.float32 else ()
        if overflowed:
            logger.info("%s overflowed in %s; decoding again in float32", format_count(len(overflowed), "image"), dtype)
            for row in overflowed:
                images[row] = self._decode_in_dtype(latents[row : row + 1], torch.float32)[0]
        return denormalize_images(images)

    def _decode_in_dtype(self, latents: Tensor, dtype: torch.dtype) -> Tensor:
        vae = self._vae if dtype == torch.float32 else self._make_half_vae(dtype)
        with torch.autocast(self.device.type, enabled=False):
            return self._run_decoder(vae, latents.to(dtype)).to(torch.float32)

    def _run_decoder(self, vae: Any, latents: Tensor) -> Tensor:
        decoded: Tensor = vae.decode(latents).sample
        return decoded

    def _make_half_vae(self, dtype: torch.dtype) -> Any:
        """Return a half-precision copy of the decoder, made at first use and cached."""
        if self._half_vae is None or self._half_vae.dtype != dtype or self._half_vae.device != self.device:
            encoder, self._vae.encoder = self._vae.encoder, None
            try:
                self._half_vae = copy.deepcopy(self._vae).to(dtype)
            finally:
                self._vae.encoder = encoder
        return self._half_vae

    def describe(self) -> dict[str, Any]:
        return {"kind": "latents", "path": self.path, "fingerprint": self.fingerprint()}

    def fingerprint(self) -> str:
        """Hash of the weights, the scale and the shift."""
        if self._fingerprint is None:
            digest = hashlib.sha256(self._scaling_text().encode())
            for name, tensor in sorted(self._vae.state_dict().items()):
                digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
                digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            self._fingerprint = f"{self.kind}:{digest.hexdigest()}"
        return self._fingerprint

    def _scaling_text(self) -> str:
        return f"{self.scaling!r} {self.shift!r}"

    def save(self, folder: str | Path) -> None:
        """Save the autoencoder in the diffusers layout, as safetensors."""
        self._vae.save_pretrained(str(folder), safe_serialization=True)

    def to(self, device: torch.device | str) -> LatentSpace:
        self._vae.to(device)
        self._half_vae = None
        return self


def load_space(description: dict[str, Any], folder: Path | None = None) -> ImageSpace:
    """Load the space of a description; `folder` is the base of a relative autoencoder path."""
    if description.get("kind") == "pixels":
        check_numbers("the image space of the model's config", description, {"scale": (1e-6, 1e6)})
        return PixelSpace(scale=float(description.get("scale", 1.0)))
    if description.get("kind") != "latents":
        raise InputError(
            f"a space of kind {description.get('kind')!r}", "pixels or latents", "check the model's config.json"
        )
    path = Path(str(description["path"]))
    if folder is not None and not path.is_absolute():
        path = folder / path
    space = LatentSpace.load(path)
    expected = description.get("fingerprint")
    if expected is not None and space.fingerprint() != expected:
        raise InputError(
            f"the autoencoder in {path} is not the one this model was trained with",
            f"fingerprint {expected}",
            "put the original autoencoder back, or train with this one",
        )
    return space


class WanLatentSpace(LatentSpace):
    """Mean latents of one frame of Wan's causal autoencoder.

    They are normalised by the mean and standard deviation of its config.
    """

    kind: ClassVar[str] = "autoencoder_kl_wan"
    scaling: Tensor
    shift: Tensor

    def _read_config(self, config: Any) -> None:
        self.channels = config.z_dim
        self.downsampling_factor = config.scale_factor_spatial
        # Take the reciprocal first and multiply later, as the pipeline does; dividing later rounds differently.
        self.scaling = 1.0 / torch.tensor(config.latents_std).reshape(1, -1, 1, 1)
        self.shift = torch.tensor(config.latents_mean).reshape(1, -1, 1, 1)

    def _encode_mean(self, images: Tensor) -> Tensor:
        return super()._encode_mean(images.unsqueeze(_FRAME_AXIS)).squeeze(_FRAME_AXIS)

    def _run_decoder(self, vae: Any, latents: Tensor) -> Tensor:
        return super()._run_decoder(vae, latents.unsqueeze(_FRAME_AXIS)).squeeze(_FRAME_AXIS)

    def _scaling_text(self) -> str:
        return f"{self.scaling.flatten().tolist()} {self.shift.flatten().tolist()}"

    def to(self, device: torch.device | str) -> WanLatentSpace:
        super().to(device)
        self.scaling, self.shift = self.scaling.to(device), self.shift.to(device)
        return self


def make_latent_space(vae: Any, path: str) -> LatentSpace:
    """Return the latent space of a pipeline's autoencoder."""
    return (WanLatentSpace if isinstance(vae, AutoencoderKLWan) else LatentSpace)(vae, path=path)
