"""Extractors prepare and embed images as transformers does; errors say what to do."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from halation.errors import InputError
from halation.evaluation.extractors import open_extractor, streets_classifier
from halation.evaluation.extractors.extractor import Extractor
from halation.evaluation.extractors.resize import resize_to_square
from halation.evaluation.extractors.transformers import ClipExtractor
from halation.input_files import file_sha256
from support import tiny_models

SHAPES = [(64, 64), (40, 90), (300, 20), (33, 32), (32, 257), (5, 5), (1, 70), (480, 640)]


def images(shapes: list[tuple[int, int]] = SHAPES) -> list[npt.NDArray[np.uint8]]:
    generator = np.random.default_rng(5)
    return [generator.integers(0, 256, (*shape, 3), dtype=np.uint8) for shape in shapes]


def batch(extractor: Extractor, chosen: list[npt.NDArray[np.uint8]]) -> torch.Tensor:
    return torch.from_numpy(np.stack([extractor.transform(image) for image in chosen]))


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.clip_model(tmp_path_factory.mktemp("models") / "small-clip")


@pytest.fixture(scope="module")
def dinov2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.dinov2_model(tmp_path_factory.mktemp("models") / "small-dinov2")


def opened(name: str, folder: Path | str = "", dtype: str = "fp32", **settings: Any) -> Any:
    return open_extractor(name, device="cpu", dtype=dtype, weights=str(folder), **settings)


@pytest.fixture(scope="module")
def clip(clip_folder: Path) -> ClipExtractor:
    extractor = opened("clip", clip_folder)
    assert isinstance(extractor, ClipExtractor)
    return extractor


# What holds for every extractor


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["clip", "dinov2", "streets"])
def test_features_do_not_depend_on_neighbours_or_place(
    name: str, dtype: str, clip_folder: Path, dinov2_folder: Path
) -> None:
    extractor = opened(name, {"clip": clip_folder, "dinov2": dinov2_folder, "streets": ""}[name], dtype)
    inputs = batch(extractor, images())
    whole, turned = extractor(inputs), extractor(inputs.flip(0))
    alone = extractor(torch.cat([inputs[3:4], torch.zeros_like(inputs[1:])]))
    assert whole["features"].shape == (len(SHAPES), extractor.num_features)
    assert whole["features"].std(0).mean() > 1e-3 * whole["features"].abs().mean()
    for key, output in whole.items():
        assert output.dtype == torch.float32
        assert torch.equal(turned[key].flip(0), output)
        assert torch.equal(alone[key][0], output[3])


@pytest.mark.parametrize("name", ["clip", "dinov2", "streets"])
def test_facts_are_json_and_name_the_weights(name: str, clip_folder: Path, dinov2_folder: Path) -> None:
    folder = {"clip": clip_folder, "dinov2": dinov2_folder, "streets": Path(streets_classifier.WEIGHTS_FILE).parent}[
        name
    ]
    extractor = opened(name, "" if name == "streets" else folder, "bf16")
    facts = json.loads(json.dumps(extractor.facts))
    file = folder / ("streets_net.safetensors" if name == "streets" else "model.safetensors")
    assert facts["weights_sha256"] == file_sha256(file)
    assert facts["dtype"] == "bf16"
    assert facts["input_size"] == list(extractor.transform.shape[:2])
    assert (extractor.fd_title, extractor.kid_title) == {
        "clip": ("FD-CLIP", "KID-CLIP"),
        "dinov2": ("FD-DINOv2", "KID-DINOv2"),
        "streets": ("FD-streets", "KID-streets"),
    }[name]


def test_weights_in_several_files_are_hashed_in_the_order_of_their_names(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_bytes(b"one")
    second.write_bytes(b"two")
    assert file_sha256(first, second) != file_sha256(second, first)
    (tmp_path / "c").write_bytes(b"onetwo")
    assert file_sha256(first, second) == file_sha256(tmp_path / "c")


def test_a_batch_of_another_shape_is_our_own_mistake(clip: ClipExtractor) -> None:
    with pytest.raises(AssertionError, match="is not a batch of clip"):
        clip(torch.zeros(2, 3, 32, 32))


def test_decode_processes_prepare_images_without_torch(clip: ClipExtractor, dinov2_folder: Path) -> None:
    """A preparation travels as a pickle, and neither opening nor using it imports torch or transformers."""
    program = (
        "import pickle, sys, numpy\n"
        "prepare = pickle.load(sys.stdin.buffer)\n"
        "result = prepare(numpy.zeros((50, 40, 3), numpy.uint8))\n"
        "assert result.shape == prepare.shape\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    for preparation in (clip.transform, opened("dinov2", dinov2_folder).transform):
        done = subprocess.run([sys.executable, "-c", program], input=pickle.dumps(preparation), check=False)
        assert done.returncode == 0


# CLIP


def processor_says(folder: Path, chosen: list[npt.NDArray[np.uint8]]) -> torch.Tensor:
    processor = transformers.CLIPImageProcessorPil.from_pretrained(folder)
    pixels: torch.Tensor = processor(chosen, return_tensors="pt", input_data_format="channels_last")["pixel_values"]
    return pixels


@pytest.mark.parametrize(
    "preprocessing",
    [
        {},
        {"resample": 2},
        {"resample": 1, "size": {"shortest_edge": 40}},
        {"size": {"height": 48, "width": 36}},
        {"size": {"height": 32, "width": 32}, "do_center_crop": False},
        {"size": {"shortest_edge": 20}},
        {"size": {"shortest_edge": 25}, "crop_size": {"height": 32, "width": 32}},
        {"do_rescale": False},
        {"do_normalize": False},
        {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]},
    ],
)
def test_clip_sees_the_bits_that_transformers_would_show_it(tmp_path: Path, preprocessing: dict[str, Any]) -> None:
    folder = tiny_models.clip_model(tmp_path, **preprocessing)
    extractor = opened("clip", folder)
    pixels = extractor.pixel_values(batch(extractor, images()))
    assert torch.equal(pixels, processor_says(folder, images()))


def test_clip_features_are_those_of_transformers(clip: ClipExtractor, clip_folder: Path) -> None:
    model = transformers.CLIPModel.from_pretrained(clip_folder).eval()
    with torch.inference_mode():
        expected = model.get_image_features(pixel_values=processor_says(clip_folder, images())).pooler_output
    found = clip(batch(clip, images()))["features"]
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_text_embeddings_are_those_of_transformers_padded_to_the_models_length(
    clip: ClipExtractor, clip_folder: Path
) -> None:
    texts = ["a red car at night", "", "two dogs", "a " * 200]
    tokenizer = transformers.AutoTokenizer.from_pretrained(clip_folder)
    tokens = tokenizer(texts, padding="max_length", max_length=77, truncation=True, return_tensors="pt")
    model = transformers.CLIPModel.from_pretrained(clip_folder).eval()
    with torch.inference_mode():
        expected = model.get_text_features(**tokens).pooler_output
    found = clip.embed_texts(texts)
    assert found.shape == (4, clip.num_features)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    assert (found[0] - found[2]).abs().max() > 1e-2 * found.abs().max()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_text_does_not_depend_on_its_neighbours_or_their_number(dtype: str, clip_folder: Path) -> None:
    extractor = opened("clip", clip_folder, dtype)
    texts = [f"a photo of {number} cats" for number in range(70)]
    whole = extractor.embed_texts(texts)
    assert whole.dtype == torch.float32
    for index in (0, 5, 64, 69):
        assert torch.equal(extractor.embed_texts([texts[index]])[0], whole[index])


def test_texts_that_do_not_fit_are_named(clip: ClipExtractor) -> None:
    assert clip.find_truncated(["short", "x " * 75, "x " * 76, "", "y" * 500]) == [2, 4]
    assert clip.find_truncated([]) == []
    assert clip.embed_texts([]).shape == (0, clip.num_features)


def test_the_processor_may_be_nested_in_processor_config(tmp_path: Path) -> None:
    """As the processors of transformers 5 are saved; the nested entry wins, as it does there."""
    folder = tiny_models.clip_model(tmp_path, resample=2)
    plain = folder / "preprocessor_config.json"
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": json.loads(plain.read_text())}))
    plain.write_text(json.dumps({**json.loads(plain.read_text()), "resample": 0}))
    extractor = opened("clip", folder)
    assert torch.equal(extractor.pixel_values(batch(extractor, images())), processor_says(folder, images()))
    plain.unlink()
    assert opened("clip", folder).transform == extractor.transform


def test_older_files_give_sizes_as_numbers(tmp_path: Path) -> None:
    folder = tiny_models.clip_model(tmp_path)
    (folder / "preprocessor_config.json").write_text(json.dumps({"crop_size": 32, "size": 32, "resample": 3}))
    extractor = opened("clip", folder)
    assert torch.equal(extractor.pixel_values(batch(extractor, images())), processor_says(folder, images()))


def test_clip_says_that_a_resize_rule_does_not_apply(clip_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    extractor = opened("clip", clip_folder, resize="tf")
    assert "--resize tf does not apply to CLIP" in caplog.text
    assert extractor.facts["resize"] == "as the model's preprocessor_config.json"


# DINOv2


@pytest.mark.parametrize("rule", ["clean", "tf"])
def test_dinov2_features_are_the_class_token_after_the_last_norm(dinov2_folder: Path, rule: Any) -> None:
    extractor = opened("dinov2", dinov2_folder, resize=rule)
    values = np.stack([resize_to_square(image, 224, rule) for image in images()]) / np.float32(255)
    mean, std = np.array([0.485, 0.456, 0.406], np.float32), np.array([0.229, 0.224, 0.225], np.float32)
    pixels = torch.from_numpy(((values - mean) / std).transpose(0, 3, 1, 2).copy())
    model = transformers.Dinov2Model.from_pretrained(dinov2_folder).eval()
    with torch.inference_mode():
        expected = model(pixels).last_hidden_state[:, 0]
    found = extractor(batch(extractor, images()))["features"]
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert extractor.facts["resize"] == rule


def test_dinov2_with_registers_is_opened_too(tmp_path: Path) -> None:
    folder = tiny_models.dinov2_model(tmp_path / "registers", num_registers=3)
    extractor = opened("dinov2", folder)
    assert extractor(batch(extractor, images()[:2]))["features"].shape == (2, extractor.num_features)


# Folders, names and errors


@pytest.mark.parametrize("family", ["clip", "dinov2"])
def test_a_folder_is_an_extractor_and_names_its_distances(family: str, clip_folder: Path, dinov2_folder: Path) -> None:
    folder = {"clip": clip_folder, "dinov2": dinov2_folder}[family]
    extractor, named = opened(str(folder)), opened(family, folder)
    assert (extractor.name, extractor.fd_title) == (f"small-{family}", f"FD-small-{family}")
    inputs = batch(extractor, images())
    assert torch.equal(extractor(inputs)["features"], named(inputs)["features"])


def test_the_streets_network_gives_its_heads() -> None:
    extractor = opened("streets", resize="tf")
    outputs = extractor(batch(extractor, images()))
    assert {name: tuple(output.shape[1:]) for name, output in outputs.items()} == {
        "features": (streets_classifier.NUM_FEATURES,),
        **{name: (num,) for name, num in streets_classifier.HEADS.items()},
    }
    assert extractor.facts["resize"] == "clean"


def copied(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target / "copy"))


def test_unknown_names_rules_and_types_are_refused(tmp_path: Path, clip_folder: Path) -> None:
    cases: list[tuple[str, str, dict[str, Any], str]] = [
        ("resnet", "", {}, "neither a known name nor a folder"),
        ("streets", "", {"resize": "lanczos"}, "the resize rule 'lanczos'"),
        ("streets", "", {"dtype": "fp8"}, "dtype 'fp8'"),
        ("streets", "file.pth", {}, "--weights file.pth for the streets extractor"),
        ("dinov2", str(clip_folder), {}, "is a model of type 'clip'"),
        (str(clip_folder), str(clip_folder), {}, "one of them"),
        (str(tmp_path), "", {}, "has no config.json"),
    ]
    for name, weights, settings, message in cases:
        with pytest.raises(InputError) as caught:
            opened(name, weights, **settings)
        assert message in str(caught.value)


def test_messages_name_the_flag_that_gave_the_weights(tmp_path: Path, clip_folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HALATION_CACHE", str(tmp_path / "cache"))
    cases: list[tuple[str, str | Path]] = [
        ("streets", "file.pth"),
        ("dinov2", clip_folder),
        (str(clip_folder), clip_folder),
        ("clip", tmp_path / "no such folder"),
        ("inception", tmp_path / "nowhere.pth"),
        ("inception", ""),
    ]
    for name, weights in cases:
        with pytest.raises(InputError) as caught:
            opened(name, weights, flag="--other_weights")
        assert "--other_weights" in str(caught.value)
        assert "--weights" not in str(caught.value)


def test_a_folder_of_another_family_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="is a model of type 'vit'"):
        opened(str(tmp_path))


def test_a_name_that_cannot_be_downloaded_says_how_to_bring_it_here(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name, default in (("clip", "openai/clip-vit-large-patch14"), ("dinov2", "facebook/dinov2-large")):
        with pytest.raises(InputError, match="HF_HUB_OFFLINE is set") as caught:
            opened(name)
        assert f"hf download {default}" in caught.value.action
        assert "--weights FOLDER" in caught.value.action
        with pytest.raises(InputError, match="HF_HUB_OFFLINE is set") as caught:
            opened(name, flag="--clip_model")
        assert "--clip_model FOLDER" in caught.value.action
        assert "--weights" not in str(caught.value)
    with pytest.raises(InputError, match="neither a folder nor a name on the Hub"):
        opened("clip", tmp_path / "no such folder")


def test_pickled_weights_are_refused(clip_folder: Path, tmp_path: Path) -> None:
    folder = copied(clip_folder, tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"weights only as pytorch_model\.bin, a pickle"):
        opened("clip", folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(InputError, match="has no weights"):
        opened("clip", folder)


def test_missing_and_damaged_weights_are_refused(clip_folder: Path, tmp_path: Path) -> None:
    folder = copied(clip_folder, tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "visual_projection.weight"
    save_file({key: value for key, value in tensors.items() if key != name}, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match="lacks 1 weights, first visual_projection.weight"):  # noqa: RUF043
        opened("clip", folder)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(InputError, match="in a file of 1000"):
        opened("clip", folder)


def test_a_folder_without_its_preprocessor_or_tokenizer_is_refused(clip_folder: Path, tmp_path: Path) -> None:
    folder = copied(clip_folder, tmp_path)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    extractor = opened("clip", folder)
    with pytest.raises(InputError, match="has no vocabulary: the model could not distinguish texts"):
        extractor.embed_texts(["a"])
    for content, message in (("{", "the tokenizer of .* cannot be opened"), ("{}", "tokenizer")):
        (folder / "tokenizer.json").write_text(content)
        with pytest.raises(InputError, match=message):
            extractor.embed_texts(["a"])
    (folder / "preprocessor_config.json").write_text(json.dumps({"do_center_crop": False}))
    with pytest.raises(InputError, match="images would keep different shapes"):
        opened("clip", folder)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(InputError, match=r"has no preprocessor_config\.json"):
        opened("clip", folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(InputError, match="is not a JSON object"):
        opened("clip", folder)


def test_code_beside_the_weights_is_never_run(clip_folder: Path, tmp_path: Path) -> None:
    folder = copied(clip_folder, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "hostile.Model", "AutoConfig": "hostile.Config"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hostile.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit(3)\n")
    extractor = opened(str(folder))
    extractor.embed_texts(["a"])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("file", "change", "found"),
    [
        ("config.json", {"num_hidden_layers": 200_000}, "num_hidden_layers is 200000"),
        ("config.json", {"num_attention_heads": 0}, "cannot be opened as a Dinov2Model: ZeroDivisionError"),
        ("config.json", {"hidden_size": [10**9]}, "hidden_size is 1000000000"),
    ],
)
def test_a_config_with_absurd_numbers_is_refused(
    dinov2_folder: Path, tmp_path: Path, file: str, change: dict[str, object], found: str
) -> None:
    folder = copied(dinov2_folder, tmp_path)
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | change))
    with pytest.raises(InputError, match=found):
        opened("dinov2", folder)


@pytest.mark.parametrize("side", [0, 10**9, 1e400, "wide"])
def test_a_preparation_to_an_absurd_size_is_refused(clip_folder: Path, tmp_path: Path, side: object) -> None:
    folder = copied(clip_folder, tmp_path)
    file = folder / "preprocessor_config.json"
    values = json.loads(file.read_text()) | {"crop_size": {"height": side, "width": 32}}
    file.write_text(json.dumps(values))
    with pytest.raises(InputError, match="has unsupported image preprocessing"):
        opened("clip", folder)


def test_weights_and_vocabularies_without_end_are_refused(clip_folder: Path, tmp_path: Path) -> None:
    folder = copied(clip_folder, tmp_path)
    (folder / "merges.txt").touch()
    os.truncate(folder / "merges.txt", 3 << 30)
    with pytest.raises(InputError, match="limit is 16 MiB"):
        opened("clip", folder)
    (folder / "merges.txt").unlink()
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(InputError, match="a named pipe"):
        opened("clip", folder)
