"""A model that stays loaded, or a pipeline of the caller, generates what a worker generates."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline

import halation
from halation.errors import InputError
from support import tiny_models

SETTINGS = {"height": 32, "width": 32, "num_inference_steps": 2, "batch_size": 2, "progress": "none"}
PROMPTS = ["a red cat", "two blue dogs", "a house at night"]
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def files(result: halation.GenerationResult) -> list[bytes]:
    return [path.read_bytes() for path in result.paths]


def weights(pipe: DiffusionPipeline) -> dict[str, torch.Tensor]:
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    return {f"{name}.{key}": tensor for name, part in parts.items() for key, tensor in part.state_dict().items()}


@pytest.mark.parametrize("model", ["streets-64", "pixart"])
def test_a_loaded_model_gives_the_bytes_of_a_worker_in_every_call(model: str, tmp_path: Path) -> None:
    path = model if model == "streets-64" else tiny_models.built(model)
    settings = SETTINGS | ({"height": 64, "width": 64} if model == "streets-64" else {})
    by_worker = halation.generate(prompts=PROMPTS, model_path=path, output_dir=tmp_path / "worker", nproc=1, **settings)
    num_threads = torch.get_num_threads()
    with halation.load_model(path) as loaded:
        first = halation.generate(prompts=PROMPTS, model_path=loaded, output_dir=tmp_path / "first", **settings)
        second = halation.generate(prompts=PROMPTS, model_path=loaded, output_dir=tmp_path / "second", **settings)
        assert files(by_worker) == files(first) == files(second)
        written = [path.stat().st_mtime_ns for path in first.paths]
        resumed = halation.generate(prompts=PROMPTS, model_path=path, output_dir=tmp_path / "first", **settings)
        assert [path.stat().st_mtime_ns for path in resumed.paths] == written, "a worker resumes its folder"
        with pytest.raises(InputError, match="dtype='bf16' with a model that was loaded with 'fp32'"):
            halation.generate(prompts=PROMPTS, model_path=loaded, output_dir=tmp_path / "third", dtype="bf16")
        with pytest.raises(InputError, match="a loaded model with several workers"):
            halation.generate(prompts=PROMPTS, model_path=loaded, output_dir=tmp_path / "third", nproc=2)
    assert torch.get_num_threads() == num_threads


def test_a_pipeline_of_the_caller_is_used_and_left_as_it_was(tmp_path: Path) -> None:
    pipe = tiny_models.plain_pipe("pixart")
    folder = tiny_models.built("pixart")
    before = {name: tensor.clone() for name, tensor in weights(pipe).items()}
    attributes = {name: set(vars(part)) for name, part in pipe.components.items() if hasattr(part, "__dict__")}
    scheduler, configuration = pipe.scheduler, copy.deepcopy(dict(pipe.scheduler.config))
    settings = SETTINGS | {"scheduler": "euler", "cfg_truncation_step": 1}
    ours = halation.generate(prompts=PROMPTS, model_path=pipe, output_dir=tmp_path / "pipe", **settings)
    by_worker = halation.generate(prompts=PROMPTS, model_path=folder, output_dir=tmp_path / "path", **settings)
    assert files(ours) == files(by_worker)
    assert pipe.scheduler is scheduler
    assert dict(pipe.scheduler.config) == configuration
    assert {name: set(vars(part)) for name, part in pipe.components.items() if hasattr(part, "__dict__")} == attributes
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(pipe).items())


def test_a_folder_of_a_pipeline_cannot_be_resumed_with_other_weights(tmp_path: Path) -> None:
    pipe = copy.deepcopy(tiny_models.plain_pipe("pixart"))
    halation.generate(prompts=PROMPTS[:1], model_path=pipe, output_dir=tmp_path / "out", **SETTINGS)
    with torch.no_grad():
        next(pipe.transformer.parameters()).add_(1e-3)
    with pytest.raises(InputError, match="model"):
        halation.generate(prompts=PROMPTS, model_path=pipe, output_dir=tmp_path / "out", **SETTINGS)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="model_path is a Linear"):
        halation.generate(prompts=PROMPTS, model_path=torch.nn.Linear(2, 2), output_dir=tmp_path / "out")
    pipe = tiny_models.plain_pipe("pixart")
    with pytest.raises(InputError, match="compile or offload with a pipeline"):
        halation.generate(prompts=PROMPTS, model_path=pipe, output_dir=tmp_path / "out", compile=True)
    assert not (tmp_path / "out").exists()


def test_a_failing_prompt_costs_only_its_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALATION_FAULT", "paint.000002:1+:raise")
    with halation.load_model("testcard") as loaded:
        result = halation.generate(prompts=PROMPTS, model_path=loaded, output_dir=tmp_path / "out", **SETTINGS)
    assert result.exit_code == 1
    assert [row.id for row in result.failures] == ["000002"]
    assert [row.index for row in result] == [0, 2]
