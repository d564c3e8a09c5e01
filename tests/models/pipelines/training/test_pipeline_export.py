"""Exports of fine-tuned pipelines open in diffusers and Halation with the trained weights."""

from __future__ import annotations

import copy
import filecmp
import os
import shutil
import subprocess
import sys
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from halation.errors import HalationError
from halation.models.denoiser import SolverSettings
from halation.models.pipelines.folder_safety_check import inspect_pipeline_folder
from halation.models.pipelines.load import pipeline_modules
from halation.models.pipelines.training import export
from halation.models.pipelines.training.denoiser import PipelineDenoiser
from halation.models.pipelines.training.export import LORA_FILE, export_pipeline
from halation.models.pipelines.training.lora import LoraSettings
from halation.sample_specs import SampleBatch
from support import tiny_models
from support.tiny_models import drawn, plain, reopened, specs

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers' DPM-Solver


def opened(folder: Path, lora: LoraSettings | None = None, dtype: str = "fp32") -> PipelineDenoiser:
    return PipelineDenoiser.open(folder, dtype=dtype, weights_dtype="fp32", lora=lora, height=32, width=32)


def trained(denoiser: PipelineDenoiser, amount: float = 0.02) -> dict[str, Tensor]:
    """Move the trained weights, as an optimizer would, and hand them over."""
    generator = torch.Generator().manual_seed(5)
    weights = {name: weight for name, weight in denoiser.module.named_parameters() if weight.requires_grad}
    with torch.no_grad():
        for weight in weights.values():
            weight += amount * torch.randn(weight.shape, generator=generator)
    return {name: weight.detach().clone() for name, weight in weights.items()}


def image(denoiser: PipelineDenoiser, prompt: str = "a red cat") -> np.ndarray:
    batch = SampleBatch(specs=tuple(specs(prompt)), num_real=1)
    return denoiser.space.decode(
        denoiser.sample(denoiser.prepare(batch, "cpu"), SolverSettings(), lambda: None)
    ).numpy()


def test_an_export_draws_what_the_training_draws_and_everything_else_is_a_copy(tmp_path: Path) -> None:
    base = tiny_models.built("hunyuan")
    denoiser = opened(base)
    before = image(denoiser)
    weights = trained(denoiser)
    raw = {name: weight + 1 for name, weight in weights.items()}
    export_pipeline(denoiser, tmp_path / "export", averaged=weights, raw=raw)
    inspect_pipeline_folder(tmp_path / "export", pipeline_modules())
    after = image(denoiser)
    assert np.abs(after.astype(int) - before.astype(int)).max() > 3
    np.testing.assert_array_equal(drawn(reopened(tmp_path / "export"), specs("a red cat"))[0], after)
    pipe = diffusers.DiffusionPipeline.from_pretrained(str(tmp_path / "export"), use_safetensors=True)
    assert torch.equal(pipe.transformer.state_dict()["proj_out.weight"], weights["proj_out.weight"])
    raw_model = diffusers.HunyuanDiT2DModel.from_pretrained(str(tmp_path / "export" / "transformer_raw"))
    assert torch.equal(raw_model.state_dict()["proj_out.weight"], raw["proj_out.weight"])
    for name in ("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "scheduler"):
        same = filecmp.dircmp(base / name, tmp_path / "export" / name)
        assert same.same_files
        assert (same.left_only, same.right_only, same.diff_files) == ([], [], [])
    assert not any(path.is_symlink() for path in (tmp_path / "export").rglob("*"))


def test_an_export_of_wan_draws_with_its_own_call_what_the_training_draws(tmp_path: Path) -> None:
    denoiser = opened(tiny_models.built("wan_one"))
    before = image(denoiser)
    export_pipeline(denoiser, tmp_path / "export", averaged=trained(denoiser), raw=None)
    after = image(denoiser)
    assert np.abs(after.astype(int) - before.astype(int)).max() > 3
    pipe = diffusers.DiffusionPipeline.from_pretrained(str(tmp_path / "export"), use_safetensors=True)
    pipe.set_progress_bar_config(disable=True)
    # As in training, the weights lie in memory of their own: where they begin decides how a single row is rounded.
    pipe.transformer = copy.deepcopy(pipe.transformer)
    np.testing.assert_array_equal(plain(pipe, specs("a red cat"))[0], after)
    rounded = drawn(reopened(tmp_path / "export"), specs("a red cat"))[0]
    assert np.abs(rounded.astype(int) - after.astype(int)).max() <= 1


@pytest.mark.parametrize(
    "family", ["sd3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("flux", "wan_one"))]
)
def test_adapters_are_merged_and_also_what_load_lora_weights_takes(family: str, tmp_path: Path) -> None:
    denoiser = opened(tiny_models.built(family), LoraSettings(rank=2, alpha=6.0))
    weights = trained(denoiser, 0.2)
    export_pipeline(denoiser, tmp_path / "export", averaged=weights, raw=None)
    after = image(denoiser)
    merged = image(opened(tmp_path / "export"))
    assert np.abs(after.astype(int) - image(opened(tiny_models.built(family))).astype(int)).max() > 3
    assert np.abs(merged.astype(int) - after.astype(int)).max() <= 1
    pipe = diffusers.DiffusionPipeline.from_pretrained(str(tiny_models.built(family)), use_safetensors=True)
    pipe.load_lora_weights(str(tmp_path / "export" / LORA_FILE))
    pipe.set_progress_bar_config(disable=True)
    output = pipe(
        prompt=["a red cat"],
        generator=[torch.Generator().manual_seed(7)],
        num_inference_steps=3,
        guidance_scale=4.0,
        height=32,
        width=32,
        output_type="pil",
        **({"num_frames": 1} if family == "wan_one" else {}),
    )[0]
    assert (
        np.abs(np.asarray(output[0] if family != "wan_one" else output[0][0]).astype(int) - after[0].astype(int)).max()
        <= 1
    )


def test_adapters_that_are_exported_again_have_the_same_bytes(tmp_path: Path) -> None:
    denoiser = opened(tiny_models.built("sd3"), LoraSettings(rank=2))
    weights = trained(denoiser, 0.2)
    found = set()
    for _again in range(8):
        export_pipeline(denoiser, tmp_path / "export", averaged=weights, raw=None)
        found.add((tmp_path / "export" / LORA_FILE).read_bytes())
    assert len(found) == 1


def test_merged_weights_keep_the_base_dtype_and_hunyuan_keeps_adapters_apart(tmp_path: Path) -> None:
    """Merged weights keep the dtype of the base; Hunyuan's export has its adapters beside it."""
    base = tmp_path / "half"
    diffusers.DiffusionPipeline.from_pretrained(
        str(tiny_models.built("hunyuan")), dtype=torch.bfloat16
    ).save_pretrained(base)
    denoiser = opened(base, LoraSettings(rank=2), dtype="bf16")
    export_pipeline(denoiser, tmp_path / "export", averaged=trained(denoiser, 0.3), raw=None)
    weights = load_file(tmp_path / "export" / "transformer" / "diffusion_pytorch_model.safetensors")
    before = load_file(base / "transformer" / "diffusion_pytorch_model.safetensors")
    assert weights.keys() == before.keys()
    changed = {name for name in weights if not torch.equal(weights[name], before[name])}
    assert changed
    assert all(".attn" in name for name in changed)
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert len(load_file(tmp_path / "export" / LORA_FILE)) == 2 * len(changed)


@pytest.mark.slow
def test_a_base_in_one_variant_is_exported_under_plain_names(tmp_path: Path) -> None:
    pipe = diffusers.DiffusionPipeline.from_pretrained(str(tiny_models.built("pixart")), dtype=torch.float16)
    pipe.save_pretrained(tmp_path / "base", variant="fp16", max_shard_size="20KB")
    (tmp_path / "base" / "vae" / "diffusion_pytorch_model.bin").write_bytes(b"a pickle")
    (tmp_path / "base" / "LICENSE.md").write_text("Be kind.")
    shutil.move(tmp_path / "base" / "vae", tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", tmp_path / "base" / "vae")
    denoiser = opened(tmp_path / "base")
    export_pipeline(denoiser, tmp_path / "export", averaged=trained(denoiser), raw=None)
    np.testing.assert_array_equal(image(opened(tmp_path / "export")), image(denoiser))
    diffusers.DiffusionPipeline.from_pretrained(str(tmp_path / "export"), use_safetensors=True)
    names = {path.name for path in (tmp_path / "export").rglob("*")}
    assert not any(".fp16" in name or name.endswith(".bin") for name in names)
    assert "LICENSE.md" in names


@pytest.mark.slow
def test_weights_over_the_limit_lie_in_shards_that_diffusers_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "_MAX_SHARD", 60_000)
    denoiser = opened(tiny_models.built("pixart"))
    export_pipeline(denoiser, tmp_path / "export", averaged=trained(denoiser), raw=None)
    assert len(list((tmp_path / "export" / "transformer").glob("*-of-*.safetensors"))) > 2
    np.testing.assert_array_equal(image(opened(tmp_path / "export")), image(denoiser))


def test_a_second_export_replaces_the_first_and_a_failed_one_leaves_it(tmp_path: Path) -> None:
    denoiser = opened(tiny_models.built("pixart"))
    first = trained(denoiser)
    export_pipeline(denoiser, tmp_path / "export", averaged=first, raw=None)
    lacking = dict(first)
    del lacking["proj_out.weight"]
    files = denoiser.files
    empty = tmp_path / "empty"
    shutil.copytree(files.path, empty)
    other = opened(empty)
    (empty / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(HalationError, match=r"the tensor proj_out\.weight is neither"):
        export_pipeline(other, tmp_path / "export", averaged=lacking, raw=None)
    kept = load_file(tmp_path / "export" / "transformer" / "diffusion_pytorch_model.safetensors")
    assert torch.equal(kept["proj_out.weight"], first["proj_out.weight"])
    export_pipeline(
        denoiser, tmp_path / "export", averaged={**first, "proj_out.weight": kept["proj_out.weight"] + 1}, raw=None
    )
    newer = load_file(tmp_path / "export" / "transformer" / "diffusion_pytorch_model.safetensors")
    assert torch.equal(newer["proj_out.weight"], first["proj_out.weight"] + 1)
    assert {path.name for path in tmp_path.iterdir()} == {"export", "empty"}


_KILLED = """
import sys
from pathlib import Path
from halation.models.pipelines.training.denoiser import PipelineDenoiser
from halation.models.pipelines.training.export import export_pipeline
denoiser = PipelineDenoiser.open(Path(sys.argv[1]), dtype="fp32", weights_dtype="fp32", lora=None, height=32, width=32)
export_pipeline(denoiser, Path(sys.argv[2]), averaged=dict(denoiser.module.named_parameters()), raw=None)
"""


@pytest.mark.slow
@pytest.mark.parametrize("point", ["export.component:2", "export.weights:1", "export.written:1"])
def test_a_killed_export_leaves_no_folder_and_the_next_one_sweeps(point: str, tmp_path: Path) -> None:
    base = tiny_models.built("pixart")
    environment = {**os.environ, "HALATION_FAULT": f"{point}:kill"}
    command = [sys.executable, "-c", _KILLED, str(base), str(tmp_path / "export")]
    assert subprocess.run(command, env=environment, check=False, capture_output=True).returncode == -9
    assert not (tmp_path / "export").exists()
    assert len(list(tmp_path.iterdir())) == 1
    denoiser = opened(base)
    export_pipeline(denoiser, tmp_path / "export", averaged=trained(denoiser), raw=None)
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
