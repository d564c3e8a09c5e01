"""A pipeline folder as a trainable model: refusals, text encoders, description."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from halation.errors import InputError
from halation.models.checkpoint_loading import build_denoiser
from halation.models.denoiser import Condition, null_condition
from halation.models.pipelines.training.denoiser import PipelineDenoiser
from halation.models.pipelines.training.lora import LoraSettings
from halation.sample_specs import SampleBatch
from support import tiny_models
from support.tiny_models import specs


def opened(folder: Path, **changes: Any) -> PipelineDenoiser:
    usual = {"dtype": "fp32", "weights_dtype": "fp32", "lora": None, "height": 32, "width": 32}
    return PipelineDenoiser.open(folder, **{**usual, **changes})


def test_a_pipeline_of_another_family_is_refused_with_the_list() -> None:
    with pytest.raises(InputError, match="contains a StableDiffusionPipeline") as caught:
        opened(tiny_models.built("stable_diffusion"))
    for name in ("HunyuanDiT", "PixArt", "SD3", "FLUX", "Wan"):
        assert name in caught.value.expected


def test_a_folder_that_is_no_pipeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"model_index\.json"):
        opened(tmp_path)


@pytest.mark.parametrize(("family", "size"), [("hunyuan", (40, 64)), ("flux", (40, 64))])
def test_a_size_that_does_not_divide_is_refused_with_the_nearest(family: str, size: tuple[int, int]) -> None:
    with pytest.raises(InputError, match="--height 40 --width 64") as caught:
        opened(tiny_models.built(family), height=size[0], width=size[1])
    assert "--height 32 --width 64" in caught.value.action
    denoiser = opened(tiny_models.built(family))
    assert denoiser.sample_shape(64, 96) == (4, 8, 12)
    with pytest.raises(InputError, match="--height 30 --width 32"):
        denoiser.sample_shape(30, 32)


def test_weights_that_the_files_lack_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_models.built("hunyuan"), tmp_path / "model")
    file = tmp_path / "model" / "transformer" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    del weights["proj_out.weight"]
    save_file(weights, file)
    with pytest.raises(InputError, match=r"proj_out\.weight"):
        opened(tmp_path / "model")


@pytest.mark.parametrize(
    ("family", "scheduler"),
    [("hunyuan", diffusers.FlowMatchEulerDiscreteScheduler()), ("flux", diffusers.DDPMScheduler())],
)
def test_a_scheduler_that_the_family_is_not_trained_with_is_refused(
    family: str, scheduler: Any, tmp_path: Path
) -> None:
    shutil.copytree(tiny_models.built(family), tmp_path / "model")
    scheduler.save_pretrained(tmp_path / "model" / "scheduler")
    index = json.loads((tmp_path / "model" / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", type(scheduler).__name__]
    (tmp_path / "model" / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=type(scheduler).__name__):
        opened(tmp_path / "model")


def test_what_cannot_be_drawn_is_refused_before_the_module_runs() -> None:
    denoiser = opened(tiny_models.built("flux"))
    wanted = specs("a cat", "a dog")
    with pytest.raises(InputError, match="negative prompt"):
        denoiser.prepare(SampleBatch(specs=(replace(wanted[0], negative_prompt="blue"),), num_real=1), "cpu")
    with pytest.raises(ValueError, match="one guidance scale"):
        denoiser.prepare(SampleBatch(specs=(wanted[0], replace(wanted[1], guidance_scale=1.5)), num_real=2), "cpu")


class Noted(dict[str, Condition]):
    """A store that notes what is read."""

    def read(self, texts: Sequence[str]) -> Condition:
        return {name: torch.cat([self[text][name] for text in texts]) for name in self[texts[0]]}


def test_texts_come_from_the_store_and_what_it_lacks_is_encoded_once() -> None:
    denoiser = opened(tiny_models.built("hunyuan"))
    with denoiser.load_text_encoders("cpu") as encode:
        assert denoiser._pipe.text_encoder is not None
        both = encode(["a red car", "a dog"])
        alone = encode(["a dog"])
    assert denoiser._pipe.text_encoder is None
    assert denoiser._pipe.text_encoder_2 is None
    assert {name: row.shape[1:] for name, row in both.items()} == {
        name: row.shape[1:] for name, row in denoiser.family.zero_condition().items()
    }
    for name, row in alone.items():
        assert torch.equal(both[name][1:], row)
        assert row.device.type == "cpu"
    marked = {name: torch.ones_like(row) for name, row in alone.items()}
    denoiser.set_text_store(Noted({"a dog": marked}))
    rows = denoiser.encode_captions(["a dog", "a red car"], [0, 0])
    assert torch.equal(rows["t5"][0], marked["t5"][0])
    assert torch.equal(rows["t5"][1], both["t5"][0])
    assert null_condition(denoiser, 3)["bert"].shape == (3, 77, 32)
    assert denoiser.truncation_flags(["a dog", "a dog " * 300]) == [False, True]
    assert torch.equal(denoiser.encode_prompts(["a dog"])["t5"], marked["t5"])


def test_other_text_encoders_or_another_dtype_have_another_fingerprint(tmp_path: Path) -> None:
    base = tiny_models.built("hunyuan")
    first = opened(base).text_fingerprint()
    assert opened(base).text_fingerprint() == first
    assert opened(base, dtype="bf16").text_fingerprint() != first
    shutil.copytree(base, tmp_path / "model")
    assert opened(tmp_path / "model").text_fingerprint() == first
    file = tmp_path / "model" / "text_encoder" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)
    assert opened(tmp_path / "model").text_fingerprint() != first


def test_a_description_makes_the_same_denoiser_again_and_another_base_is_refused(tmp_path: Path) -> None:
    shutil.copytree(tiny_models.built("pixart"), tmp_path / "model")
    denoiser = opened(tmp_path / "model", lora=LoraSettings(rank=2, targets=("to_q",)))
    description = json.loads(json.dumps(denoiser.describe()))
    again = build_denoiser(description)
    assert again.describe() == description
    assert again.module.state_dict().keys() == denoiser.module.state_dict().keys()
    with pytest.raises(InputError, match="an invalid pipeline description"):
        PipelineDenoiser.from_description({"family": "pipeline", "version": 1})
    other = diffusers.PixArtTransformer2DModel.from_pretrained(str(tmp_path / "model" / "transformer"))
    with torch.no_grad():
        other.proj_out.weight += 1
    other.save_pretrained(tmp_path / "model" / "transformer")
    with pytest.raises(InputError, match="is not the one this run was trained from"):
        build_denoiser(description)


def test_a_forward_costs_what_its_matrices_say() -> None:
    small, large = opened(tiny_models.built("hunyuan")), opened(tiny_models.built("hunyuan"), height=64, width=64)
    weights = sum(weight.numel() for block in small.shard_units() for weight in block.parameters() if weight.ndim == 2)
    assert small.flops_per_image() > 2 * 4 * weights  # four tokens, a multiply-add each
    assert small.flops_per_image() < large.flops_per_image() < 4 * small.flops_per_image()
    assert (small.hidden_size, small.num_blocks) == (32, 2)
    assert (small.space.channels, small.space.downsampling_factor) == (4, 8)
    assert small.default_size == (32, 32)
    assert small.defaults.guidance_scale == 5.0
    assert opened(tiny_models.built("flux")).defaults.guidance_scale == 3.5
    assert opened(tiny_models.built("sd3")).defaults.time_shift == 3.0
