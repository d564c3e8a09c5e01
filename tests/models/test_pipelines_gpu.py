"""The laws of pipelines on a CUDA device: the same as on the CPU, and offloading, which only makes sense there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_pipelines
from halation.models.painting import NotFinite
from halation.models.pipelines import PipelineModel
from pipeline_specs import PROMPTS, drawn, plain, reopened, specs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
FAMILIES = list(tiny_pipelines.FAMILIES)


def reopen(family: str, **options: Any) -> PipelineModel:
    return reopened(tiny_pipelines.built(family), **{"device": "cuda:0", "dtype": "bf16", **options})


def on_gpu(family: str, dtype: torch.dtype) -> Any:
    pipe = diffusers.DiffusionPipeline.from_pretrained(
        str(tiny_pipelines.built(family)), dtype=dtype, use_safetensors=True
    ).to("cuda")
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("family", FAMILIES)
def test_our_pictures_are_the_pipelines_own_on_a_gpu(family: str, name: str, dtype: torch.dtype) -> None:
    model = reopen(family, dtype=name)
    pipe = on_gpu(family, dtype)
    for seed in (7, 30):
        wanted = specs(*PROMPTS, seed=seed)
        np.testing.assert_array_equal(drawn(model, wanted), plain(pipe, wanted))


@pytest.mark.parametrize("family", FAMILIES)
def test_neighbours_and_position_do_not_matter_on_a_gpu(family: str) -> None:
    model = reopen(family)
    mine = specs("a red cat")[0]
    others = specs("a", ", ".join(PROMPTS * 2), "dog", seed=50)
    reference = drawn(model, [mine, *others[:2]])[0]
    np.testing.assert_array_equal(reference, drawn(model, [others[2], others[0], mine])[2])


@pytest.mark.parametrize("offload", ["model", "layers"])
@pytest.mark.parametrize("family", FAMILIES)
def test_offloading_changes_no_pixel(family: str, offload: str) -> None:
    wanted = specs(*PROMPTS[:2], steps=4)
    reference = drawn(reopen(family), wanted)
    model = reopen(family, offload=offload, cfg_truncation_step=None if family == "flux" else 100)
    for _ in range(2):
        np.testing.assert_array_equal(drawn(model, wanted), reference)


@pytest.mark.parametrize("offload", ["none", "model", "layers"])
def test_steering_works_under_offloading(offload: str) -> None:
    model = reopen("wan", offload=offload, cfg_truncation_step=2, half_frame=True)
    videos = [drawn(model, specs("a dog", num_frames=9, steps=6))[0] for _ in range(2)]
    assert videos[0].shape == (9, 32, 32, 3)
    np.testing.assert_array_equal(*videos)
    np.testing.assert_array_equal(
        videos[0],
        drawn(reopen("wan", cfg_truncation_step=2, half_frame=True), specs("a dog", num_frames=9, steps=6))[0],
    )


@pytest.mark.parametrize("offload", ["none", "model", "layers"])
def test_an_overflow_is_repaired_on_a_gpu(offload: str, tmp_path: Path) -> None:
    folder = tiny_pipelines.sd3(tmp_path / "p")
    file = folder / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors["decoder.conv_in.weight"] *= 2e5
    save_file(tensors, file, metadata={"format": "pt"})
    model = reopened(folder, device="cuda:0", dtype="fp16", offload=offload)
    for _ in range(2):
        painting = model.draw(specs("a dog", "two cats"), lambda: None)
        assert [type(result) for result in painting.collect()] == [NotFinite] * 2
        assert painting.repair is not None
        (picture,) = painting.repair([1])
        assert isinstance(picture, np.ndarray)
        assert picture.std() > 5


def test_pixels_arrive_on_another_thread_while_the_next_sheet_is_drawn() -> None:
    model = reopen("hunyuan")
    sheets = [specs(*PROMPTS, seed=seed) for seed in range(0, 60, 10)]
    alone = [drawn(model, sheet) for sheet in sheets]
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(model.draw(sheet, lambda: None).collect) for sheet in sheets]
        np.testing.assert_array_equal([future.result() for future in futures], alone)


@pytest.mark.parametrize("family", ["hunyuan", "flux", "wan"])
def test_compiled_blocks_draw_the_same_picture_within_rounding_on_a_gpu(family: str) -> None:
    wanted = specs(*PROMPTS[:2])
    pictures = drawn(reopen(family, compile=True, dtype="fp32"), wanted)
    reference = drawn(reopen(family, dtype="fp32"), wanted)
    assert np.abs(np.asarray(pictures, int) - np.asarray(reference, int)).mean() < 2
