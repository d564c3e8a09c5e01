from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from halation.errors import InputError
from halation.models.autoencoder import PixelSpace
from halation.models.checkpoint_loading import build_dit, load_export, load_weights
from halation.models.dit.denoiser import DiTDenoiser

Make = Callable[..., DiTDenoiser]


def export(denoiser: DiTDenoiser, folder: Path, **wrapped: Any) -> Path:
    folder.mkdir(exist_ok=True)
    description = {"model": denoiser.describe(), **wrapped} if wrapped else denoiser.describe()
    (folder / "config.json").write_text(json.dumps(description))
    save_file(denoiser.module.state_dict(), folder / "model.safetensors")
    return folder


def predictions(denoiser: DiTDenoiser, prompt: str) -> torch.Tensor:
    x = torch.randn(1, *denoiser.sample_shape(16, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return denoiser.predict(x, torch.tensor([0.4]), denoiser.encode_prompts([prompt]))


@pytest.mark.parametrize("classes", [False, True])
@pytest.mark.parametrize("wrapped", [{}, {"steps": 10}])
def test_an_export_comes_back_as_the_same_model(
    make_denoiser: Make, tmp_path: Path, classes: bool, wrapped: dict[str, int]
) -> None:
    denoiser = make_denoiser(classes=classes, num_register_tokens=2)
    state = torch.get_rng_state()
    again = load_export(export(denoiser, tmp_path, **wrapped))
    assert torch.equal(torch.get_rng_state(), state)
    assert again.describe() == denoiser.describe()
    prompt = "dog" if classes else "a red unknownword"
    assert torch.equal(predictions(again, prompt), predictions(denoiser, prompt))


def test_raw_weights_can_be_asked_for_by_name(make_denoiser: Make, tmp_path: Path) -> None:
    export(make_denoiser(), tmp_path)
    raw = make_denoiser(seed=5)
    save_file(raw.module.state_dict(), tmp_path / "model_raw.safetensors")
    assert torch.equal(predictions(load_export(tmp_path, "model_raw.safetensors"), "a"), predictions(raw, "a"))


def test_a_loaded_space_is_used_instead_of_the_described_one(denoiser: DiTDenoiser) -> None:
    space = PixelSpace(0.5)
    assert build_dit(denoiser.describe(), space=space).space is space


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"family": "unet"}, "family 'unet'"),
        ({"version": 2}, "version 2"),
        ({"config": {}}, "an invalid model description"),
        ({"config": {"depth": "os.system"}}, "depth = 'os.system'"),
        ({"config": {"auto_map": 1}}, "auto_map"),
        ({"tokenizer": None}, "tokenizer"),
        ({"tokenizer": {"kind": "pickle"}}, "'pickle'"),
        ({"space": {"kind": "latents", "path": "nowhere"}}, "no autoencoder in nowhere"),
        ({"space": 3}, "an invalid model description"),
    ],
)
def test_a_description_that_makes_no_sense_is_refused(
    denoiser: DiTDenoiser, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        build_dit({**denoiser.describe(), **change})


def test_folders_that_are_no_export_are_refused_with_a_reason(denoiser: DiTDenoiser, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.json in"):
        load_export(tmp_path / "nowhere")
    folder = export(denoiser, tmp_path / "whole")
    with pytest.raises(InputError, match="no weights at"):
        load_export(folder, "other.safetensors")
    (folder / "model.pth").write_bytes(b"\x80\x04.")
    with pytest.raises(InputError, match="safetensors"):
        load_export(folder, "model.pth")
    for text, message in (("{", "is not JSON"), ("[]", "does not describe a model"), ("[" * 100_000, "is not JSON")):
        (folder / "config.json").write_text(text)
        with pytest.raises(InputError, match=message):
            load_export(folder)


@pytest.mark.parametrize("damage", ["cut", "header"])
def test_damaged_weights_are_refused(denoiser: DiTDenoiser, tmp_path: Path, damage: str) -> None:
    file = export(denoiser, tmp_path) / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-100] if damage == "cut" else (2**63).to_bytes(8, "little") + content[8:])
    with pytest.raises(InputError, match="cannot be read"):
        load_export(tmp_path)


def test_weights_of_another_model_are_refused_by_name_and_shape(make_denoiser: Make, denoiser: DiTDenoiser) -> None:
    with pytest.raises(InputError, match=r"1 tensors differ, first registers: \(4, 160\)[\s\S]*no such tensor"):
        load_weights(denoiser, make_denoiser(num_register_tokens=4).module.state_dict(), source="file")
    state = dict(denoiser.module.state_dict())
    state["head.bias"] = torch.zeros(1)
    with pytest.raises(InputError, match=r"head\.bias: \(1,\)"):
        load_weights(denoiser, state, source="file")
