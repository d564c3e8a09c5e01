"""Resizing gives the numbers of clean-fid, torch-fidelity and torch for any shape."""

from __future__ import annotations

import subprocess
import sys
import warnings

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F

from halation.evaluation.extractors.resize import RESIZE_RULES, ResizeRule, resize_to_square
from support import oracles

SHAPES = [(1, 1), (1, 50), (2, 3), (64, 64), (40, 640), (700, 33), (299, 299), (298, 300), (480, 832)]


def image(height: int, width: int, *, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Noise has every overshoot and every phase a resize can get wrong."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def channels_first(pixels: npt.NDArray[np.uint8]) -> torch.Tensor:
    return torch.from_numpy(pixels.astype(np.float32)).permute(2, 0, 1)[None].contiguous()


@pytest.mark.parametrize("size", [299, 224, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_clean_has_the_bits_of_clean_fid(shape: tuple[int, int], size: int) -> None:
    resize = oracles.clean_fid("resize").make_resizer("PIL", False, "bicubic", (size, size))
    pixels = image(*shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = resize(pixels)
    found = resize_to_square(pixels, size, "clean")
    assert found.dtype == np.float32
    assert np.array_equal(found, expected)


def test_clean_is_what_clean_fid_builds_by_that_name() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = oracles.clean_fid("resize").build_resizer("clean")(image(100, 80))
    assert np.array_equal(resize_to_square(image(100, 80), 299, "clean"), expected)


@pytest.mark.parametrize("size", [299, 224])
@pytest.mark.parametrize("shape", SHAPES)
def test_tf_has_the_bits_of_torch_fidelity(shape: tuple[int, int], size: int) -> None:
    oracle = oracles.torch_fidelity("interpolate_compat_tensorflow").interpolate_bilinear_2d_like_tensorflow1x
    pixels = image(*shape)
    expected = oracle(channels_first(pixels), size=(size, size), align_corners=False)
    assert np.array_equal(resize_to_square(pixels, size, "tf"), expected[0].permute(1, 2, 0).numpy())


@pytest.mark.parametrize("size", [299, 224])
@pytest.mark.parametrize("shape", SHAPES)
def test_torch_is_interpolate_within_one_rounding(shape: tuple[int, int], size: int) -> None:
    pixels = image(*shape)
    expected = F.interpolate(channels_first(pixels), size=(size, size), mode="bilinear", align_corners=False)
    found = resize_to_square(pixels, size, "torch")
    assert np.abs(found - expected[0].permute(1, 2, 0).numpy()).max() <= 1e-4


@pytest.mark.parametrize("rule", RESIZE_RULES)
def test_a_grey_image_stays_grey_and_every_value_a_image_can_hold(rule: ResizeRule) -> None:
    grey = np.repeat(image(37, 51)[:, :, :1], 3, axis=2)
    found = resize_to_square(grey, 299, rule)
    assert np.array_equal(found[..., 0], found[..., 1])
    assert np.array_equal(found[..., 0], found[..., 2])
    assert found.min() >= 0
    assert found.max() <= 255


@pytest.mark.parametrize("rule", RESIZE_RULES)
def test_a_image_of_the_right_size_stays_as_it_is(rule: ResizeRule) -> None:
    assert np.array_equal(resize_to_square(image(64, 64), 64, rule), image(64, 64).astype(np.float32))


@pytest.mark.parametrize("rule", RESIZE_RULES)
def test_the_view_of_a_larger_array_is_resized_as_its_copy(rule: ResizeRule) -> None:
    view = image(90, 90)[10:70:2, ::-1]
    assert np.array_equal(resize_to_square(view, 32, rule), resize_to_square(view.copy(), 32, rule))


def test_the_rules_differ_where_a_image_shrinks() -> None:
    results = [resize_to_square(image(512, 512), 299, rule) for rule in RESIZE_RULES]
    assert np.abs(results[0] - results[1]).mean() > 10
    assert np.abs(results[1] - results[2]).mean() > 10


@pytest.mark.parametrize(
    "pixels",
    [
        np.zeros((4, 4), np.uint8),
        np.zeros((4, 4, 4), np.uint8),
        np.zeros((4, 4, 3), np.float32),
        np.zeros((0, 4, 3), np.uint8),
    ],
)
def test_what_is_no_image_is_refused(pixels: npt.NDArray[np.uint8]) -> None:
    with pytest.raises(ValueError, match="expected a non-empty"):
        resize_to_square(pixels, 8, "clean")


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="clean, tf, torch"):
        resize_to_square(image(4, 4), 8, "lanczos")  # type: ignore[arg-type]


def test_decode_processes_need_no_torch() -> None:
    program = "import sys, halation.evaluation.extractors.resize; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
