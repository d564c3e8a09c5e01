"""An error inside a pipeline stays with its row, and what can be repaired is repaired."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from halation.models.async_image_result import ImageError, NonFiniteImageError
from halation.models.pipelines.pipeline_model import PipelineModel
from support import tiny_models
from support.tiny_models import drawn, opened, reopened, specs

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers' DPM-Solver


def edited(family: str, folder: Path, weights: str, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a family's folder with other numbers in one weights file."""
    shutil.copytree(tiny_models.built(family), folder)
    tensors = load_file(folder / weights)
    change(tensors)
    save_file(tensors, folder / weights, metadata={"format": "pt"})
    return folder


def overflowing(tensors: dict[str, torch.Tensor]) -> None:
    """Weights whose values overflow float16 after the decoder's first layer; harmless in float32."""
    tensors["decoder.conv_in.weight"] *= 2e5
    tensors["decoder.conv_in.bias"] *= 2e5


def dtypes(model: PipelineModel) -> list[torch.dtype]:
    return [tensor.dtype for tensor in model._pipe.vae.state_dict().values()]


@pytest.mark.parametrize("family", ["hunyuan", "sd3"])
def test_an_autoencoder_that_overflows_in_half_precision_decodes_again_in_float32(family: str, tmp_path: Path) -> None:
    folder = edited(family, tmp_path / "p", "vae/diffusion_pytorch_model.safetensors", overflowing)
    model = reopened(folder, dtype="fp16")
    assert model.facts["vae_dtype"] == "float16"
    before = dtypes(model)
    wanted = specs("a dog", "two cats", "a car")
    painting = model.draw(wanted, lambda: None)
    assert [type(result) for result in painting.collect()] == [NonFiniteImageError] * 3
    assert painting.decode_in_float32 is not None
    repaired = painting.decode_in_float32([2, 0])
    pipe = diffusers.DiffusionPipeline.from_pretrained(str(folder), dtype=torch.float16, use_safetensors=True)
    pipe.set_progress_bar_config(disable=True)
    for row, image in zip([2, 0], repaired, strict=True):
        np.testing.assert_array_equal(image, _by_hand(pipe, wanted, row))
    assert dtypes(model) == before
    assert [type(result) for result in model.draw(wanted, lambda: None).collect()] == [NonFiniteImageError] * 3


def _by_hand(pipe: Any, wanted: list[Any], row: int) -> Any:
    extra = {"use_resolution_binning": False} if isinstance(pipe, diffusers.HunyuanDiTPipeline) else {}
    latents = pipe(
        prompt=[spec.prompt for spec in wanted],
        negative_prompt=[""] * len(wanted),
        generator=[torch.Generator().manual_seed(spec.seed) for spec in wanted],
        num_inference_steps=3,
        guidance_scale=4.0,
        height=32,
        width=32,
        output_type="latent",
        **extra,
    )[0]
    config = pipe.vae.config
    scaled = latents / config.scaling_factor + (config.shift_factor or 0)
    with torch.no_grad():
        decoded = pipe.vae.to(torch.float32).decode(scaled.float()[[2, 0]], return_dict=False)[0]
    pipe.vae.to(torch.float16)
    images = pipe.image_processor.postprocess(decoded, output_type="pil")
    return np.asarray(images[[2, 0].index(row)])[None]


def test_images_that_were_drawn_one_by_one_are_repaired_as_if_together(tmp_path: Path) -> None:
    folder = edited("aura_flow", tmp_path / "p", "vae/diffusion_pytorch_model.safetensors", overflowing)
    config = folder / "vae" / "config.json"  # this pipeline would decode in float32 by itself
    config.write_text(config.read_text().replace('"force_upcast": true', '"force_upcast": false'))
    model = reopened(folder, dtype="fp16")
    wanted = specs("a dog", "two cats", "a car")
    painting = model.draw(wanted, lambda: None)
    assert [type(result) for result in painting.collect()] == [NonFiniteImageError] * 3
    assert painting.decode_in_float32 is not None
    for row, image in zip([2, 0], painting.decode_in_float32([2, 0]), strict=True):
        alone = model.draw([wanted[row]], lambda: None)
        assert alone.decode_in_float32 is not None
        np.testing.assert_array_equal(image, alone.decode_in_float32([0])[0])


def test_nothing_is_offered_for_repair_where_the_autoencoder_is_already_in_float32() -> None:
    assert opened("sd3").draw(specs("a dog"), lambda: None).decode_in_float32 is None


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_prompt_that_gives_nan_fails_alone(dtype: str, tmp_path: Path) -> None:
    token = tiny_models.bert_tokenizer().convert_tokens_to_ids("cat")

    def poison(tensors: dict[str, torch.Tensor]) -> None:
        tensors["embeddings.word_embeddings.weight"][token] = float("nan")

    folder = edited("hunyuan", tmp_path / "p", "text_encoder/model.safetensors", poison)
    wanted = specs("a dog", "a cat", "a car")
    painting = reopened(folder, dtype=dtype).draw(wanted, lambda: None)
    first, second, third = painting.collect()
    assert isinstance(second, NonFiniteImageError)
    healthy = drawn(reopened(tiny_models.built("hunyuan"), dtype=dtype), wanted)
    np.testing.assert_array_equal(first, healthy[0])
    np.testing.assert_array_equal(third, healthy[2])
    if painting.decode_in_float32 is not None:
        (failed,) = painting.decode_in_float32([1])
        assert isinstance(failed, ImageError)
        assert "denoiser" in str(failed)


def test_an_infinity_is_not_clamped_to_a_white_pixel(tmp_path: Path) -> None:
    def endless(tensors: dict[str, torch.Tensor]) -> None:
        tensors["decoder.conv_out.bias"][0] = float("inf")

    folder = edited("sd3", tmp_path / "p", "vae/diffusion_pytorch_model.safetensors", endless)
    (result,) = reopened(folder).draw(specs("a dog"), lambda: None).collect()
    assert isinstance(result, NonFiniteImageError)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("family", ["hunyuan", "sd3", "flux", "wan"])
def test_half_precision_draws_a_finite_image_near_the_float32_one(family: str, dtype: str) -> None:
    model = reopened(tiny_models.built(family), dtype=dtype)
    images = drawn(model, specs("a dog", "two cats"))
    reference = drawn(opened(family), specs("a dog", "two cats"))
    assert np.abs(np.asarray(images, int) - np.asarray(reference, int)).mean() < 12
    assert all(image.std() > 10 for image in images)


def test_a_image_the_safety_checker_withholds_is_an_error_and_not_a_black_square() -> None:
    model = reopened(tiny_models.built("stable_diffusion"))
    draw = type(model._pipe).run_safety_checker

    def flag_the_second(image: torch.Tensor, device: Any, dtype: Any) -> tuple[torch.Tensor, list[bool]]:
        image, _ = draw(model._pipe, image, device, dtype)
        return image, [False, True]

    model._pipe.run_safety_checker = flag_the_second
    first, second = model.draw(specs("a dog", "a cat"), lambda: None).collect()
    np.testing.assert_array_equal(first, drawn(opened("stable_diffusion"), specs("a dog", "a cat"))[0])
    assert isinstance(second, ImageError)
    assert "withheld by the model's safety checker" in str(second)


def test_a_image_of_another_size_than_asked_is_an_error_that_says_both_sizes() -> None:
    model = reopened(tiny_models.built("hunyuan"))
    (result,) = model.draw(specs("a dog", height=40), lambda: None).collect()  # without check, which refuses it
    assert isinstance(result, ImageError)
    assert "32 x 32" in str(result)
    assert "40 x 32" in str(result)


def test_running_out_of_memory_in_the_decoder_is_not_swallowed() -> None:
    model = reopened(tiny_models.built("sana"))
    handle = model._pipe.vae.decoder.register_forward_pre_hook(_no_memory)
    with pytest.warns(UserWarning, match="tiling"), pytest.raises(torch.OutOfMemoryError):
        model.draw(specs("a dog"), lambda: None)
    handle.remove()
    np.testing.assert_array_equal(drawn(model, specs("a dog")), drawn(opened("sana"), specs("a dog")))


def _no_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("no memory left for the decoder")


def test_an_interrupted_draw_leaves_nothing_behind() -> None:
    model = reopened(tiny_models.built("wan"), half_frame=True, cfg_truncation_step=2)
    wanted = specs("a dog", num_frames=9, steps=6)
    reference = drawn(model, wanted)
    num_steps = 0

    def stop_in_the_second_step() -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.draw(wanted, stop_in_the_second_step)
    np.testing.assert_array_equal(drawn(model, wanted), reference)
