"""A small AutoencoderKL fitted to street scenes in closed form, without training.

It has eight latents per patch of 8 x 8 pixels and is a linear autoencoder in the architecture of diffusers. The encoder
computes the eight principal components of a patch, orthonormal. The decoder upsamples three times by 2, each time with
the least-squares 3 x 3 convolution to the finer image. Decoded images are blurred but recognizable streets. The
nonlinear parts are neutralized: residual branches are zero; before the last convolution each value x is present as x
and -x, because silu(x) - silu(-x) = x; and two channels of large constants make the group norm independent of the
image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn
from torch.nn import functional as F

from halation.data.streets import draw, scene

NUM_LATENTS = 8
NUM_FEATURES = 24
"""Components of a patch of 4 x 4 pixels, used in the encoder and as targets of the decoder."""
FITTED_TO = 16
SIZE = 256
ANCHOR = 300.0
RIDGE = 1e-4


def made() -> Any:
    """Build the autoencoder in float32; deterministic on one machine."""
    images = scenes(FITTED_TO, SIZE)
    quarter, quarter_mean = components(F.pixel_unshuffle(images, 4), NUM_FEATURES)
    features = projected(F.pixel_unshuffle(images, 4), quarter, quarter_mean)
    eighth, eighth_mean = components(F.pixel_unshuffle(features, 2), NUM_LATENTS)
    latents = projected(F.pixel_unshuffle(features, 2), eighth, eighth_mean)
    vae = blank(scaling=float(1.0 / latents.std()))
    with torch.no_grad():
        _set_encoder(vae.encoder, quarter, quarter_mean, eighth, eighth_mean)
        _set_decoder(vae.decoder, latents, (features, F.pixel_unshuffle(images, 2), images))
    return vae


def scenes(num: int, size: int) -> Tensor:
    """Return the first training scenes, NCHW in [-1, 1]."""
    pixels = [torch.from_numpy(draw(scene("train", index), size).copy()) for index in range(num)]
    return torch.stack(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1.0


def components(x: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Return the principal directions of the channels, one per row, and the mean."""
    rows = x.permute(0, 2, 3, 1).reshape(-1, x.shape[1]).double()
    mean = rows.mean(0)
    _, vectors = torch.linalg.eigh((rows - mean).T @ (rows - mean) / len(rows))
    vectors = vectors.flip(1)[:, :num].T
    # The sign of a direction is arbitrary; fix it by the largest entry, independent of the library.
    signs = vectors.gather(1, vectors.abs().argmax(1, keepdim=True)).sign()
    return (vectors * signs).float(), mean.float()


def projected(x: Tensor, directions: Tensor, mean: Tensor) -> Tensor:
    return torch.einsum("kc,nchw->nkhw", directions, x - mean[None, :, None, None])


def blank(*, scaling: float) -> Any:
    """Return the architecture with all convolutions zero and default norms."""
    vae: Any = AutoencoderKL(
        block_out_channels=(12, NUM_FEATURES, NUM_FEATURES, NUM_FEATURES),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=NUM_LATENTS,
        layers_per_block=1,
        norm_num_groups=1,
        sample_size=SIZE,
        scaling_factor=scaling,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )
    with torch.no_grad():
        for module in vae.modules():
            if isinstance(module, nn.Conv2d):
                module.weight.zero_()
                cast(Tensor, module.bias).zero_()
    return vae.eval()


def _set_encoder(encoder: Any, quarter: Tensor, quarter_mean: Tensor, eighth: Tensor, eighth_mean: Tensor) -> None:
    _pass_on(encoder.conv_in, 3)
    halving, second, third = (encoder.down_blocks[block].downsamplers[0].conv for block in range(3))
    # A convolution of stride 2 whose third row and column of taps are zero reads each 2 x 2 square alone.
    halving.weight[:12, :3, :2, :2] = torch.eye(12).reshape(12, 3, 2, 2)
    _pass_on(encoder.down_blocks[1].resnets[0].conv_shortcut, 12)
    # Order channels and positions of a 4 x 4 patch as two nested 2 x 2 unshuffles do, inner one first.
    nested = quarter.reshape(-1, 3, 2, 2, 2, 2).permute(0, 1, 3, 5, 2, 4).reshape(-1, 12, 2, 2)
    second.weight[:NUM_FEATURES, :12, :2, :2] = nested
    second.bias[:NUM_FEATURES] = -quarter @ quarter_mean
    third.weight[:, :, :2, :2] = _doubled(eighth.reshape(-1, NUM_FEATURES, 2, 2), third)
    third.bias.copy_(_anchored(-eighth @ eighth_mean, third))
    _read_out(encoder.conv_norm_out, encoder.conv_out, NUM_LATENTS)
    encoder.conv_out.bias[NUM_LATENTS:] = -20.0  # log variance: a sample of the posterior is its mean


def _set_decoder(decoder: Any, latents: Tensor, targets: Sequence[Tensor]) -> None:
    _pass_on(decoder.conv_in, NUM_LATENTS)
    _pass_on(decoder.up_blocks[3].resnets[0].conv_shortcut, 8)
    x = latents
    for block, target in enumerate(targets):
        weight, bias = nearest_doubling(x, target)
        x = F.conv2d(F.interpolate(x, scale_factor=2.0), weight, bias, padding=1)
        convolution = decoder.up_blocks[block].upsamplers[0].conv
        if block == len(targets) - 1:
            convolution.weight[:, : weight.shape[1]] = _doubled(weight, convolution)
            convolution.bias.copy_(_anchored(bias, convolution))
        else:
            convolution.weight[: len(weight), : weight.shape[1]] = weight
            convolution.bias[: len(bias)] = bias
    _read_out(decoder.conv_norm_out, decoder.conv_out, 3)


def nearest_doubling(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Fit a 3 x 3 convolution from `x`, upsampled by 2, to `target`; return weight and bias."""
    num = x.shape[1] * 9 + 1
    gram = torch.zeros(num, num, dtype=torch.float64)
    moment = torch.zeros(num, target.shape[1], dtype=torch.float64)
    for image, wanted in zip(F.interpolate(x, scale_factor=2.0), target, strict=True):
        columns = F.unfold(image[None], 3, padding=1)[0]
        columns = torch.cat([columns, torch.ones(1, columns.shape[1])])
        gram += (columns @ columns.T).double()
        moment += (columns @ wanted.flatten(1).T).double()
    # Repeated pixels are linearly dependent; without the ridge, huge weights would cancel each other.
    gram += RIDGE * gram.diagonal().mean() * torch.eye(num, dtype=torch.float64)
    solution = torch.linalg.solve(gram, moment).T.float()
    return solution[:, :-1].reshape(target.shape[1], x.shape[1], 3, 3), solution[:, -1]


def _pass_on(convolution: nn.Conv2d, num: int) -> None:
    """Make the convolution the identity on the first channels."""
    middle = convolution.kernel_size[0] // 2
    for channel in range(num):
        convolution.weight[channel, channel, middle, middle] = 1.0


def _doubled(weight: Tensor, convolution: nn.Conv2d) -> Tensor:
    """Return rows for x, then rows for -x, then zeros."""
    rest = torch.zeros(convolution.out_channels - 2 * len(weight), *weight.shape[1:])
    return torch.cat([weight, -weight, rest])


def _anchored(bias: Tensor, convolution: nn.Conv2d) -> Tensor:
    rest = torch.zeros(convolution.out_channels - 2 * len(bias))
    rest[:2] = torch.tensor([ANCHOR, -ANCHOR])
    return torch.cat([bias, -bias, rest])


def _read_out(norm: nn.GroupNorm, convolution: nn.Conv2d, num: int) -> None:
    """Undo the norm, whose deviation the two anchors set, and compute silu(x) - silu(-x)."""
    norm.weight.fill_(ANCHOR * (2.0 / norm.num_channels) ** 0.5)
    for channel in range(num):
        convolution.weight[channel, channel, 1, 1] = 1.0
        convolution.weight[channel, num + channel, 1, 1] = -1.0
