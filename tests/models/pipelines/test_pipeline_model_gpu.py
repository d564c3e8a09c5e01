"""Laws of pipelines on a CUDA device: as on the CPU, and offloading."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from halation.models.async_image_result import NonFiniteImageError
from halation.models.pipelines.pipeline_hooks import DENOISER_COMPONENTS, NUM_WARM_UPS, CudaGraphForward
from halation.models.pipelines.pipeline_model import PipelineModel
from support import tiny_models
from support.tiny_models import PROMPTS, drawn, plain, reopened, specs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
FAMILIES = list(tiny_models.FAMILIES)


def reopen(family: str, **options: Any) -> PipelineModel:
    return reopened(tiny_models.built(family), **{"device": "cuda:0", "dtype": "bf16", **options})


def on_gpu(family: str, dtype: torch.dtype) -> Any:
    pipe = diffusers.DiffusionPipeline.from_pretrained(
        str(tiny_models.built(family)), dtype=dtype, use_safetensors=True
    ).to("cuda")
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("family", FAMILIES)
def test_our_images_are_the_pipelines_own_on_a_gpu(family: str, name: str, dtype: torch.dtype) -> None:
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
    folder = tiny_models.sd3(tmp_path / "p")
    file = folder / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors["decoder.conv_in.weight"] *= 2e5
    save_file(tensors, file, metadata={"format": "pt"})
    model = reopened(folder, device="cuda:0", dtype="fp16", offload=offload)
    for _ in range(2):
        painting = model.draw(specs("a dog", "two cats"), lambda: None)
        assert [type(result) for result in painting.collect()] == [NonFiniteImageError] * 2
        assert painting.decode_in_float32 is not None
        (image,) = painting.decode_in_float32([1])
        assert isinstance(image, np.ndarray)
        assert image.std() > 5


def test_pixels_arrive_on_another_thread_while_the_next_batch_is_drawn() -> None:
    model = reopen("hunyuan")
    batches = [specs(*PROMPTS, seed=seed) for seed in range(0, 60, 10)]
    alone = [drawn(model, batch) for batch in batches]
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(model.draw(batch, lambda: None).collect) for batch in batches]
        np.testing.assert_array_equal([future.result() for future in futures], alone)


@pytest.mark.parametrize("family", ["hunyuan", "flux", "wan"])
def test_compiled_blocks_draw_the_same_image_within_rounding_on_a_gpu(family: str) -> None:
    wanted = specs(*PROMPTS[:2])
    images = drawn(reopen(family, compile=True, dtype="fp32"), wanted)
    reference = drawn(reopen(family, dtype="fp32"), wanted)
    assert np.abs(np.asarray(images, int) - np.asarray(reference, int)).mean() < 2


def recorders(model: PipelineModel) -> list[CudaGraphForward]:
    """What stands between the steering and the denoisers' own forwards."""
    modules = [getattr(model._pipe, name, None) for name in DENOISER_COMPONENTS]
    return [module.forward.__wrapped__ for module in modules if module is not None]


@pytest.mark.parametrize(
    ("family", "options", "changes"),
    [
        ("sd3", {}, {}),
        ("sd3", {"cfg_truncation_step": 2}, {}),
        ("flux", {}, {}),
        ("flux", {"arguments": {"true_cfg_scale": 3.0}, "cfg_truncation_step": 2}, {"negative_prompt": "blue"}),
        ("wan", {}, {"num_frames": 5}),
        ("wan", {"cfg_truncation_step": 2}, {"num_frames": 5}),
    ],
)
def test_a_forward_replayed_as_a_graph_draws_the_very_image_it_drew_before(
    family: str, options: dict[str, Any], changes: dict[str, Any]
) -> None:
    model = reopen(family, compile=True, **options)
    found = recorders(model)
    assert all(isinstance(recorder, CudaGraphForward) for recorder in found)
    batches = [specs(*PROMPTS[:2], seed=seed, steps=4, **changes) for seed in (7, 30)]
    for recorder in found:
        recorder.is_disabled = True
    called = [drawn(model, batch) for batch in batches]
    assert not any(recorder.graphs for recorder in found)
    for recorder in found:
        recorder.is_disabled = False
    # Warm-up, recording and replaying all happen within these; the batches alternate, so that what a recording keeps
    # would show.
    for _ in range(NUM_WARM_UPS + 2):
        for batch, images in zip(batches, called, strict=True):
            np.testing.assert_array_equal(drawn(model, batch), images)
    assert all(recorder.graphs and not recorder.is_disabled for recorder in found)
    num_shapes = 2 if family == "sd3" and options else 1  # the conditional half alone is another shape
    assert all(len(recorder.graphs) >= num_shapes for recorder in found)
    for batch, images in zip(batches, called, strict=True):
        np.testing.assert_array_equal(drawn(model, batch), images)
