"""Two transformers as one module: the split of rows, equal images, and no training."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from halation.errors import InputError
from halation.models.checkpoint_loading import build_denoiser
from halation.models.denoiser import SolverSettings
from halation.models.pipelines.training.denoiser import PipelineDenoiser
from halation.models.pipelines.wan_experts import ExpertPair
from halation.sample_specs import SampleBatch
from support import tiny_models
from support.tiny_models import plain_pipe, specs


def opened(folder: Path | None = None, **changes: Any) -> PipelineDenoiser:
    usual = {"dtype": "fp32", "weights_dtype": "fp32", "lora": None, "height": 32, "width": 32, "allow_experts": True}
    return PipelineDenoiser.open(folder or tiny_models.built("wan"), **{**usual, **changes})


def experts(denoiser: PipelineDenoiser) -> ExpertPair:
    assert isinstance(denoiser.module, ExpertPair)
    return denoiser.module


def rows(num: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {
        "hidden_states": torch.randn(num, 16, 1, 4, 4, generator=generator),
        "encoder_hidden_states": torch.randn(num, 512, tiny_models.TEXT_HIDDEN, generator=generator),
    }


@contextmanager
def counted(module: ExpertPair) -> Iterator[dict[str, list[int]]]:
    """How many rows each expert was asked for, forward by forward."""
    seen: dict[str, list[int]] = {"high": [], "low": []}

    def note(name: str) -> Any:
        return lambda _module, _args, kwargs: seen[name].append(len(kwargs["timestep"]))

    parts = {"high": module.high, "low": module.low}
    hooks = [part.register_forward_pre_hook(note(name), with_kwargs=True) for name, part in parts.items()]
    yield seen
    for hook in hooks:
        hook.remove()


@torch.no_grad()
def test_each_row_is_answered_by_the_expert_of_its_timestep() -> None:
    module, given = experts(opened()), rows(5)
    timestep = torch.tensor([874.9, 875.0, 3.0, 1000.0, 874.0])
    (answer,) = module(timestep=timestep, **given)
    for expert, own in ((module.high, [1, 3]), (module.low, [0, 2, 4])):
        picked = {name: value[own] for name, value in given.items()}
        assert torch.equal(answer[own], expert(timestep=timestep[own], **picked, return_dict=False)[0])
    for_tokens = timestep[:, None].expand(-1, 4)
    torch.testing.assert_close(module(timestep=for_tokens, **given)[0], answer)


@torch.no_grad()
@pytest.mark.parametrize(
    ("timestep", "alone", "in_step"),
    [
        ([900.0, 880.0], {"high": [2], "low": []}, {"high": [2], "low": [1]}),
        ([100.0, 0.0], {"high": [], "low": [2]}, {"high": [1], "low": [2]}),
        ([100.0, 900.0], {"high": [1], "low": [1]}, {"high": [1], "low": [1]}),
    ],
)
def test_in_step_both_experts_run_at_every_forward_and_the_answer_is_the_same(
    timestep: list[float], alone: dict[str, list[int]], in_step: dict[str, list[int]]
) -> None:
    module, given = experts(opened()), rows(2)
    with counted(module) as seen:
        (first,) = module(timestep=torch.tensor(timestep), **given)
    assert seen == alone
    module.always_run_both = True
    with counted(module) as seen:
        (second,) = module(timestep=torch.tensor(timestep), **given)
    assert seen == in_step
    assert torch.equal(first, second)


def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The transformers that are loaded from now on."""
    loaded: list[str] = []
    read = diffusers.WanTransformer3DModel.from_pretrained.__func__

    def from_pretrained(kind: Any, folder: str, **settings: Any) -> Any:
        loaded.append(Path(folder).name)
        return read(kind, folder, **settings)

    monkeypatch.setattr(diffusers.WanTransformer3DModel, "from_pretrained", classmethod(from_pretrained))
    return loaded


def test_a_sample_is_what_the_pipeline_draws_with_its_two_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = copy.copy(plain_pipe("wan"))
    loaded = noted(monkeypatch)
    denoiser = opened()
    for name in ("transformer", "transformer_2"):
        setattr(pipe, name, copy.deepcopy(getattr(pipe, name)))
    wanted = SampleBatch(specs=tuple(specs("a red car")), num_real=1)
    with counted(experts(denoiser)) as seen:
        ours = denoiser.sample(denoiser.prepare(wanted, "cpu"), SolverSettings(), lambda: None)
    assert seen == {"high": [1, 1], "low": [1, 1, 1, 1]}
    assert sorted(loaded) == ["transformer", "transformer_2"], "reading a prompt takes the text encoder alone"
    reference = pipe(
        prompt=["a red car"],
        generator=[torch.Generator().manual_seed(7)],
        num_inference_steps=3,
        guidance_scale=4.0,
        height=32,
        width=32,
        num_frames=1,
        output_type="latent",
    )[0]
    assert torch.equal(ours, reference[:, :, 0])
    assert denoiser._pipe.transformer is experts(denoiser).high
    assert denoiser._pipe.transformer_2 is experts(denoiser).low


@torch.no_grad()
def test_a_time_decides_which_expert_answers_the_denoiser() -> None:
    denoiser, given = opened(), rows(2)
    condition = {"umt5": given["encoder_hidden_states"]}
    x, t = given["hidden_states"][:, :, 0], torch.tensor([0.9, 0.2])
    answer = denoiser.forward(denoiser.module, x, t, condition)
    for row, expert in enumerate((experts(denoiser).high, experts(denoiser).low)):
        own = slice(row, row + 1)
        said = denoiser.forward(expert, x[own], t[own], {name: value[own] for name, value in condition.items()})
        assert torch.equal(answer[own], said)
    assert len(denoiser.shard_units()) == 4
    assert denoiser.flops_per_image() < 2 * opened(tiny_models.built("wan_one")).flops_per_image()
    assert build_denoiser(json.loads(json.dumps(denoiser.describe()))).describe() == denoiser.describe()


@pytest.mark.parametrize(("dtype", "wide"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_frozen_experts_in_half_precision_keep_what_their_family_keeps_in_float32(
    dtype: str, wide: torch.dtype
) -> None:
    denoiser, exact = opened(dtype=dtype, weights_dtype=dtype), opened()
    kept = {name for name, weight in denoiser.module.named_parameters(remove_duplicate=False) if weight.dtype != wide}
    assert all("norm" in name or "scale_shift_table" in name or "time_embedder" in name for name in kept)
    assert kept
    condition = {"umt5": rows(2)["encoder_hidden_states"]}
    x, t = rows(2)["hidden_states"][:, :, 0], torch.tensor([0.9, 0.2])
    with torch.no_grad():
        narrow = denoiser.forward(denoiser.module, x, t, condition)
        reference = exact.forward(exact.module, x, t, condition)
    assert narrow.dtype == wide
    assert (narrow.float() - reference).abs().max() < 0.05 * reference.abs().max()


def without(folder: Path, target: Path, **changes: Any) -> Path:
    shutil.copytree(folder, target)
    index = json.loads((target / "model_index.json").read_text())
    (target / "model_index.json").write_text(json.dumps({**index, **changes}))
    return target


def test_two_experts_are_not_trained_and_the_message_says_what_is_done_instead() -> None:
    with pytest.raises(InputError, match="two transformers") as caught:
        opened(allow_experts=False)
    assert f"halation distill --teacher_path {tiny_models.built('wan')}" in caught.value.action


def test_a_second_transformer_that_the_pipeline_never_calls_is_left_alone(tmp_path: Path) -> None:
    denoiser = opened(without(tiny_models.built("wan"), tmp_path / "wan", boundary_ratio=None), allow_experts=False)
    assert not isinstance(denoiser.module, ExpertPair)
    assert denoiser._pipe.transformer_2 is None


def test_a_pipeline_without_a_transformer_is_refused(tmp_path: Path) -> None:
    folder = without(tiny_models.built("wan"), tmp_path / "wan", transformer=[None, None])
    with pytest.raises(InputError, match="has no transformer"):
        opened(folder)
