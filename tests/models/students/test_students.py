"""Students in pipelines: opened, described, exported, and sampled by diffusers alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from halation.errors import InputError
from halation.models.checkpoint_loading import build_denoiser, load_weights
from halation.models.denoiser import SolverSettings
from halation.models.dit.denoiser import DiTDenoiser
from halation.models.pipelines.training.denoiser import PipelineDenoiser
from halation.models.pipelines.training.export import export_pipeline
from halation.models.pipelines.training.lora import LoraSettings
from halation.models.students.build import open_student
from halation.models.students.config import StudentConfig
from halation.sample_specs import SampleBatch
from support import tiny_models
from support.tiny_models import plain, specs

FAMILIES = ["hunyuan", "pixart", "sd3", "flux", "wan"]
SOME = ["hunyuan", "wan", *(pytest.param(family, marks=pytest.mark.slow) for family in ("pixart", "sd3", "flux"))]
SMALLER: dict[str, dict[str, Any]] = {
    "hunyuan": {"width": 16, "heads": 2, "depth": 1, "family": "HunyuanDiT"},
    "pixart": {"width": 16, "heads": 4, "depth": 1},
    "sd3": {"width": 16, "heads": 2, "layers": (1,)},
    "flux": {"width": 16, "heads": 1, "family": "flux"},
    "wan": {"width": 24, "heads": 2, "depth": 1, "mlp_ratio": 2.0},
}
STEPS = 4
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers' DPM-Solver


def student_of(family: str | Path, shape: dict[str, Any] | None = None, **changes: Any) -> PipelineDenoiser:
    folder = family if isinstance(family, Path) else tiny_models.built(family)
    usual: dict[str, Any] = {
        "init": "teacher",
        "seed": 5,
        "dtype": "fp32",
        "weights_dtype": "fp32",
        "lora": None,
        "height": 32,
        "width": 32,
        "few_steps": STEPS,
    }
    student = open_student(folder, StudentConfig(**shape or {}), **{**usual, **changes})
    assert isinstance(student, PipelineDenoiser)
    return student


def weights_of(denoiser: PipelineDenoiser) -> dict[str, Tensor]:
    named = denoiser.module.named_parameters()
    return {name: weight.detach().clone() for name, weight in named if weight.requires_grad}


def latents(denoiser: PipelineDenoiser, steps: int = STEPS) -> Tensor:
    batch = SampleBatch(specs=tuple(specs("a red cat", steps=steps, guidance_scale=1.0)), num_real=1)
    return denoiser.sample(denoiser.prepare(batch, "cpu"), SolverSettings(), lambda: None)


@torch.no_grad()
def answer(denoiser: PipelineDenoiser) -> Tensor:
    """To a state and texts of which no text encoder knows."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, *denoiser.sample_shape(32, 32), generator=generator)
    blank = {name: row.repeat(2, *(1,) * (row.ndim - 1)) for name, row in denoiser.family.zero_condition().items()}
    texts = {
        name: row if row.dtype == torch.bool else torch.randn(row.shape, generator=generator)
        for name, row in blank.items()
    }
    return denoiser.forward(denoiser.module, x, torch.tensor([0.3, 0.9]), texts)


def images(denoiser: PipelineDenoiser, steps: int = STEPS) -> np.ndarray:
    return denoiser.space.decode(latents(denoiser, steps)).numpy()


@pytest.mark.parametrize("family", SOME)
def test_a_smaller_student_is_exported_and_diffusers_draws_the_same_image(family: str, tmp_path: Path) -> None:
    denoiser = student_of(family, SMALLER[family])
    export_pipeline(denoiser, tmp_path / "export", averaged=weights_of(denoiser), raw=None)
    pipe = diffusers.DiffusionPipeline.from_pretrained(str(tmp_path / "export"), use_safetensors=True)
    pipe.set_progress_bar_config(disable=True)
    assert not hasattr(pipe, "transformer_2") or pipe.transformer_2 is None
    assert type(pipe.scheduler) is type(denoiser.scheduler)
    assert dict(pipe.transformer.config) == {**denoiser.config, "_name_or_path": pipe.transformer.config._name_or_path}
    assert sum(weight.numel() for weight in pipe.transformer.parameters()) == sum(
        weight.numel() for weight in denoiser.module.parameters()
    )
    mine = images(denoiser)
    theirs = plain(pipe, specs("a red cat", steps=STEPS, guidance_scale=1.0))[0]
    assert np.abs(mine[0].astype(int) - theirs[0].astype(int)).max() <= 1
    assert mine.std() > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_description_and_the_trained_weights_make_the_same_student_again(family: str) -> None:
    denoiser = student_of(family, SMALLER[family], init="random")
    description = json.loads(json.dumps(denoiser.describe()))
    again = build_denoiser(description)
    assert isinstance(again, PipelineDenoiser)
    assert again.describe() == description
    load_weights(again, weights_of(denoiser), source="a checkpoint")
    assert torch.equal(answer(again), answer(denoiser))
    assert type(again.scheduler) is type(denoiser.scheduler)
    assert again.times(STEPS, 32, 32, 1.0) == denoiser.times(STEPS, 32, 32, 1.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_student_of_the_teachers_shape_begins_with_its_weights_to_the_bit(family: str) -> None:
    folder, student = tiny_models.built(family), student_of(family, few_steps=0)
    component = "transformer_2" if family == "wan" else "transformer"
    file = load_file(folder / component / "diffusion_pytorch_model.safetensors")
    found = student.module.state_dict()
    assert found.keys() == file.keys()
    assert all(torch.equal(found[name], file[name]) for name in file)
    scheduler = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
    assert type(student.scheduler).__name__ == scheduler["_class_name"], "drawn as the teacher is"


def test_random_students_differ_by_seed_alone_and_leave_the_global_generator() -> None:
    before = torch.get_rng_state()
    first, second, third = (weights_of(student_of("pixart", init="random", seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["proj_out.weight"], third["proj_out.weight"])
    teacher = load_file(tiny_models.built("pixart") / "transformer" / "diffusion_pytorch_model.safetensors")
    assert not torch.equal(first["proj_out.weight"], teacher["proj_out.weight"])


@pytest.mark.parametrize("family", ["wan", pytest.param("sd3", marks=pytest.mark.slow)])
def test_adapters_learn_over_a_copy_of_the_teacher_and_are_merged_in_the_export(family: str, tmp_path: Path) -> None:
    denoiser = student_of(family, lora=LoraSettings(rank=2))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in denoiser.module.named_parameters():
            assert weight.requires_grad == ("lora_" in name)
            if weight.requires_grad:
                weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    again = build_denoiser(json.loads(json.dumps(denoiser.describe())))
    assert isinstance(again, PipelineDenoiser)
    load_weights(again, weights_of(denoiser), source="a checkpoint")
    assert torch.equal(answer(again), answer(denoiser))
    export_pipeline(denoiser, tmp_path / "export", averaged=weights_of(denoiser), raw=None)
    assert not (tmp_path / "export" / "transformer_2").exists()
    pipe = diffusers.DiffusionPipeline.from_pretrained(str(tmp_path / "export"), use_safetensors=True)
    pipe.set_progress_bar_config(disable=True)
    theirs = plain(pipe, specs("a red cat", steps=STEPS, guidance_scale=1.0))[0]
    assert np.abs(images(denoiser)[0].astype(int) - theirs[0].astype(int)).max() <= 1


def test_an_export_of_a_student_of_two_experts_knows_no_second_one(tmp_path: Path) -> None:
    denoiser = student_of("wan", SMALLER["wan"])
    export_pipeline(denoiser, tmp_path / "export", averaged=weights_of(denoiser), raw=weights_of(denoiser))
    index = json.loads((tmp_path / "export" / "model_index.json").read_text())
    assert "transformer_2" not in index
    assert "boundary_ratio" not in index
    assert index["scheduler"] == ["diffusers", "FlowMatchEulerDiscreteScheduler"]
    config = json.loads((tmp_path / "export" / "transformer" / "config.json").read_text())
    assert (config["num_attention_heads"], config["attention_head_dim"], config["num_layers"]) == (2, 12, 1)
    assert config["ffn_dim"] == 48
    assert (tmp_path / "export" / "transformer_raw" / "config.json").read_text() == json.dumps(config, indent=2) + "\n"
    # And it can teach again.
    grandchild = student_of(tmp_path / "export", {"layers": (0,)}, few_steps=0)
    assert torch.equal(answer(grandchild), answer(denoiser))
    assert grandchild.times(STEPS, 32, 32, 1.0) == denoiser.times(STEPS, 32, 32, 1.0)


def test_what_cannot_be_a_student_is_refused(denoiser: DiTDenoiser) -> None:
    with pytest.raises(InputError, match="--student_init random"):
        student_of("sd3", lora=LoraSettings(rank=2), init="random")
    with pytest.raises(InputError, match=r"another architecture \(width 16, heads 2\)"):
        student_of("sd3", {"width": 16, "heads": 2}, lora=LoraSettings(rank=2))
    with pytest.raises(InputError, match="the student has 16 latent channels, the teacher 4"):
        student_of("sd3", {"latent_channels": 16})
    with pytest.raises(InputError, match="cannot be trained"):
        student_of("sana")
    with pytest.raises(InputError, match=r"model_index\.json"):
        student_of(Path("/nowhere"))
    common: dict[str, Any] = {"init": "teacher", "seed": 0, "dtype": "fp32", "weights_dtype": "fp32"}
    with pytest.raises(InputError, match="DiT of Halation"):
        open_student(denoiser, StudentConfig(), lora=LoraSettings(rank=2), height=16, width=16, **common)
    with pytest.raises(InputError, match="32 x 16"):
        open_student(denoiser, StudentConfig(), lora=None, height=32, width=16, **common)
    with pytest.raises(TypeError, match="number of steps"):
        open_student(denoiser, StudentConfig(), lora=None, height=16, width=16, few_steps=True, **common)


def test_folders_that_cannot_have_such_a_student_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_models.built("wan"), folder)
    index = json.loads((folder / "model_index.json").read_text())

    def refused(changes: dict[str, Any], shape: dict[str, Any]) -> str:
        (folder / "model_index.json").write_text(json.dumps({**index, **changes}))
        with pytest.raises(InputError) as caught:
            student_of(folder, shape)
        return caught.value.found

    assert "patches of 4, the teacher 2" in refused({"expand_timesteps": True}, {"patch_size": 4})
    assert "WanTransformer9DModel" in refused({"transformer": ["diffusers", "WanTransformer9DModel"]}, {})
    assert "has no transformer" in refused({"transformer": [None, None]}, {})


def test_a_number_of_steps_that_a_students_scheduler_cannot_make_is_refused() -> None:
    denoiser = student_of("sd3")
    batch = SampleBatch(specs=tuple(specs("a red cat", steps=1, guidance_scale=1.0)), num_real=1)
    with pytest.raises(InputError, match="--num_inference_steps 1 with FlowMatchEulerDiscreteScheduler"):
        denoiser.prepare(batch, "cpu")


def test_a_student_of_a_dit_describes_itself_whole(denoiser: DiTDenoiser) -> None:
    student = open_student(
        denoiser,
        StudentConfig(width=80, depth=2, text_width=48),
        init="teacher",
        seed=0,
        dtype="fp32",
        weights_dtype="fp32",
        lora=None,
        height=16,
        width=16,
        few_steps=STEPS,
    )
    again = build_denoiser(json.loads(json.dumps(student.describe())))
    load_weights(again, dict(student.module.named_parameters()), source="a checkpoint")
    assert isinstance(again, DiTDenoiser)
    assert isinstance(student, DiTDenoiser)
    x, t = torch.zeros(1, 3, 16, 16), torch.ones(1)
    condition = denoiser.encode_prompts(["a red car"])
    assert torch.equal(again.predict(x, t, condition), student.predict(x, t, condition))
    assert student.flops_per_image() < denoiser.flops_per_image() / 4
