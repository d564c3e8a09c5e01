"""Unsafe or inconsistent pipeline folders are refused with a reason; nothing in them runs."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from halation.errors import InputError
from halation.models.pipelines.folder_safety_check import check_component_sizes
from support import tiny_models
from support.tiny_models import drawn, opened, reopened, specs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_models.built("stable_diffusion"), tmp_path / "model"))


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


def code(canary: Path) -> str:
    return f"open({str(canary)!r}, 'w').close()\nclass Evil:\n    pass\n"


class Payload:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return (open, (str(self.canary), "w"))


def edit(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def test_the_canaries_would_sing(canary: Path) -> None:
    pickle.loads(pickle.dumps(Payload(canary))).close()
    assert canary.exists()
    canary.unlink()
    exec(code(canary))
    assert canary.exists()


def pipeline_code(folder: Path, canary: Path) -> None:
    (folder / "evil.py").write_text(code(canary))
    edit(folder / "model_index.json", lambda index: index.update(_class_name=["evil", "Evil"]))


def component_code(folder: Path, canary: Path) -> None:
    (folder / "unet" / "evil.py").write_text(code(canary))
    edit(folder / "model_index.json", lambda index: index.update(unet=["evil", "Evil"]))


def component_that_shadows_a_library(folder: Path, canary: Path) -> None:
    (folder / "unet" / "diffusers.py").write_text(code(canary))


def component_of_the_standard_library(folder: Path, canary: Path) -> None:
    edit(folder / "model_index.json", lambda index: index.update(unet=["subprocess", "Popen"]))


def component_with_a_path(folder: Path, canary: Path) -> None:
    (folder / "evil.py").write_text(code(canary))
    edit(folder / "model_index.json", lambda index: index.update(unet=["../evil", "Evil"]))


def tokenizer_code(folder: Path, canary: Path) -> None:
    (folder / "tokenizer" / "evil.py").write_text(code(canary))
    edit(
        folder / "tokenizer" / "tokenizer_config.json",
        lambda config: config.update(auto_map={"AutoTokenizer": ["evil.Evil", None]}),
    )


def text_encoder_code(folder: Path, canary: Path) -> None:
    (folder / "text_encoder" / "evil.py").write_text(code(canary))
    edit(
        folder / "text_encoder" / "config.json",
        lambda config: config.update(text_config={"auto_map": {"AutoModel": "evil.Evil"}}),
    )


def attention_code(folder: Path, canary: Path) -> None:
    edit(
        folder / "text_encoder" / "config.json", lambda config: config.update(_attn_implementation="someone/attention")
    )


def pickled_weights(folder: Path, canary: Path) -> None:
    for component in ("unet", "vae", "text_encoder"):
        for file in (folder / component).glob("*.safetensors"):
            file.unlink()
            file.with_suffix(".bin").write_bytes(pickle.dumps(Payload(canary)))
    (folder / "text_encoder" / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(canary)))


def shard_that_is_a_pickle(folder: Path, canary: Path) -> None:
    (folder / "evil.bin").write_bytes(pickle.dumps(Payload(canary)))
    index = {"metadata": {}, "weight_map": {"conv_in.weight": "../evil.bin"}}
    (folder / "unet" / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))


def endless_header(folder: Path, canary: Path) -> None:
    file = folder / "unet" / "diffusion_pytorch_model.safetensors"
    file.write_bytes((2**63).to_bytes(8, "little") + file.read_bytes()[8:])


def pickle_named_safetensors(folder: Path, canary: Path) -> None:
    (folder / "unet" / "diffusion_pytorch_model.safetensors").write_bytes(pickle.dumps(Payload(canary)))


def nonsense_header(folder: Path, canary: Path) -> None:
    file = folder / "unet" / "diffusion_pytorch_model.safetensors"
    file.write_bytes((8).to_bytes(8, "little") + b"[1, 2,  ]")


def cut_weights(folder: Path, canary: Path) -> None:
    file = folder / "unet" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-12])


def lacking(folder: Path, file: str, name: str) -> None:
    tensors = load_file(folder / file)
    del tensors[name]
    save_file(tensors, folder / file, metadata={"format": "pt"})


def denoiser_that_lacks_a_weight(folder: Path, canary: Path) -> None:
    lacking(folder, "unet/diffusion_pytorch_model.safetensors", "conv_in.bias")


def text_encoder_that_lacks_a_weight(folder: Path, canary: Path) -> None:
    file = "text_encoder/model.safetensors"
    lacking(folder, file, next(name for name in load_file(folder / file) if name.endswith("q_proj.weight")))


def weight_of_another_shape(folder: Path, canary: Path) -> None:
    file = folder / "text_encoder/model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    save_file({**tensors, name: tensors[name][:, :-1].contiguous()}, file, metadata={"format": "pt"})


def no_weights(folder: Path, canary: Path) -> None:
    (folder / "unet" / "diffusion_pytorch_model.safetensors").unlink()


def no_component(folder: Path, canary: Path) -> None:
    shutil.rmtree(folder / "unet")


def no_index(folder: Path, canary: Path) -> None:
    (folder / "model_index.json").unlink()


def broken_index(folder: Path, canary: Path) -> None:
    (folder / "model_index.json").write_text("{")


def list_as_index(folder: Path, canary: Path) -> None:
    (folder / "model_index.json").write_text("[]")


def empty_index(folder: Path, canary: Path) -> None:
    (folder / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')


def odd_component(folder: Path, canary: Path) -> None:
    edit(folder / "model_index.json", lambda index: index.update(unet=["diffusers"]))


def unknown_class(folder: Path, canary: Path) -> None:
    edit(folder / "model_index.json", lambda index: index.update(_class_name="NobodysPipeline"))


def class_that_is_no_pipeline(folder: Path, canary: Path) -> None:
    edit(folder / "model_index.json", lambda index: index.update(_class_name="UNet2DModel"))


def unknown_component(folder: Path, canary: Path) -> None:
    edit(folder / "model_index.json", lambda index: index.update(unet=["diffusers", "NobodysModel"]))


def other_model(folder: Path, canary: Path) -> None:
    edit(folder / "model_index.json", lambda index: index.update(unet=["diffusers", "AutoencoderKL"]))


def class_labels(folder: Path, canary: Path) -> None:
    edit(folder / "model_index.json", lambda index: index.update(_class_name="DiTPipeline"))


def from_an_image(folder: Path, canary: Path) -> None:
    edit(folder / "model_index.json", lambda index: index.update(_class_name="StableDiffusionImg2ImgPipeline"))


def needs_an_image(folder: Path, canary: Path) -> None:
    edit(folder / "model_index.json", lambda index: index.update(_class_name="WanImageToVideoPipeline"))


def no_prompt(folder: Path, canary: Path) -> None:
    edit(folder / "model_index.json", lambda index: index.update(_class_name="DDPMPipeline"))


REFUSALS: dict[Callable[[Path, Path], None], str] = {
    pipeline_code: "whose code comes with the folder",
    component_code: "whose code does not come from diffusers",
    component_that_shadows_a_library: "whose code does not come from diffusers",
    component_of_the_standard_library: "whose code does not come from diffusers",
    component_with_a_path: "whose code does not come from diffusers",
    tokenizer_code: "auto_map",
    text_encoder_code: "auto_map",
    attention_code: "external attention code",
    pickled_weights: r"a pickle[\s\S]*save_pretrained",
    shard_that_is_a_pickle: "not a safetensors file beside it",
    endless_header: "header of 9223372036854775808 bytes",
    pickle_named_safetensors: "safetensors header",
    nonsense_header: "damaged safetensors header",
    cut_weights: "but its header requires",
    denoiser_that_lacks_a_weight: "lacks 1 weights, first conv_in.bias",
    text_encoder_that_lacks_a_weight: "lacks 1 weights, first .*q_proj.weight",
    weight_of_another_shape: "cannot be opened",
    no_weights: "has no weights",
    no_component: "has no folder 'unet'",
    no_index: "has no model_index.json",
    broken_index: "cannot be read as JSON",
    list_as_index: "is not a JSON object",
    empty_index: "lists no components",
    odd_component: "describes the component 'unet'",
    unknown_class: "does not have",
    class_that_is_no_pipeline: "does not have",
    unknown_component: "NobodysModel",
    other_model: "cannot be opened",
    class_labels: "generates from class labels",
    from_an_image: "StableDiffusionImg2ImgPipeline needs image",
    needs_an_image: "WanImageToVideoPipeline needs image",
    no_prompt: "takes no prompt",
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(("spoil", "message"), list(REFUSALS.items()), ids=lambda value: getattr(value, "__name__", ""))
def test_a_folder_is_refused_and_nothing_in_it_runs(
    spoil: Callable[[Path, Path], None], message: str, folder: Path, canary: Path
) -> None:
    spoil(folder, canary)
    with pytest.raises(InputError, match=message) as refusal:
        reopened(folder)
    assert not canary.exists()
    assert str(folder) in str(refusal.value) or "Pipeline" in refusal.value.found


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a folder"):
        reopened(tmp_path / "nothing")


def test_pickles_beside_safetensors_are_left_alone(folder: Path, canary: Path) -> None:
    (folder / "unet" / "diffusion_pytorch_model.bin").write_bytes(pickle.dumps(Payload(canary)))
    image = drawn(reopened(folder), specs("a dog"))[0]
    assert (image == drawn(opened("stable_diffusion"), specs("a dog"))[0]).all()
    assert not canary.exists()


def test_weights_that_exist_only_as_a_variant_are_found(folder: Path) -> None:
    for file in folder.glob("*/*.safetensors"):
        file.rename(file.with_name(f"{file.stem}.fp16.safetensors"))
    image = drawn(reopened(folder), specs("a dog"))[0]
    assert (image == drawn(opened("stable_diffusion"), specs("a dog"))[0]).all()


ABSURD_NUMBERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "timesteps": ("scheduler/scheduler_config.json", {"num_train_timesteps": 300_000_000}, "num_train_timesteps is 3"),
    "layers of a block": ("unet/config.json", {"layers_per_block": 100_000}, "layers_per_block is 100000"),
    "layers in a list": ("unet/config.json", {"transformer_layers_per_block": [1, 10**5]}, "per_block is 100000"),
    "layers in layers": (
        "unet/config.json", {"layers_per_block": 100, "transformer_layers_per_block": 100}, "number of layers is 20000",
    ),
    "blocks": ("vae/config.json", {"block_out_channels": [8] * 100_000}, "block_out_channels has 100000 entries"),
    "channels in a list": ("vae/config.json", {"block_out_channels": [10**9] * 2}, "block_out_channels is 1000000000"),
    "a hidden size": ("text_encoder/config.json", {"hidden_size": -(10**10)}, "hidden_size is -10000000000"),
    "a number of tokens": ("tokenizer/tokenizer_config.json", {"model_max_length": "x"}, 'model_max_length is "x"'),
    "an endless number": ("tokenizer/tokenizer_config.json", {"model_max_length": float("inf")}, "is inf"),
}  # fmt: skip


@pytest.mark.parametrize("name", ABSURD_NUMBERS)
def test_absurd_numbers_in_a_components_config_are_refused_before_it_is_opened(folder: Path, name: str) -> None:
    file, numbers, found = ABSURD_NUMBERS[name]
    edit(folder / file, lambda config: config.update(numbers))
    for look in (check_component_sizes, reopened):
        with pytest.raises(InputError, match=found):
            look(folder)


def test_large_numbers_that_published_models_have_are_let_through(folder: Path) -> None:
    large = {"rope_theta": 10**9, "rope_scaling": {"original_max_position_embeddings": 131_072}}
    edit(folder / "text_encoder" / "config.json", lambda config: config.update(large))
    edit(folder / "tokenizer" / "tokenizer_config.json", lambda config: config.update(model_max_length=int(1e30)))
    (folder / "unet" / "notes.onnx").touch()
    os.truncate(folder / "unet" / "notes.onnx", 3 << 30)
    check_component_sizes(folder)


@pytest.mark.parametrize(
    ("file", "found"), [("tokenizer/merges.txt", "limit is 16 MiB"), ("tokenizer/vocab.json", "limit is 64 MiB")]
)
def test_a_file_of_a_tokenizer_without_end_is_refused(folder: Path, file: str, found: str) -> None:
    (folder / file).touch()
    os.truncate(folder / file, 3 << 30)
    with pytest.raises(InputError, match=found):
        check_component_sizes(folder)
    (folder / file).unlink()
    os.mkfifo(folder / file)
    for look in (check_component_sizes, reopened):
        with pytest.raises(InputError, match="a named pipe"):
            look(folder)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("number", [0, "x", [4]])
def test_what_a_library_stumbles_over_is_told_in_a_sentence(folder: Path, number: object) -> None:
    edit(folder / "unet" / "config.json", lambda config: config.update(norm_num_groups=number))
    with pytest.raises(InputError, match="cannot be opened as a StableDiffusionPipeline"):
        reopened(folder)


@pytest.mark.parametrize("text", ["{}", '{"model": {"vocab": {"a": "b"}}}'])
def test_a_broken_tokenizer_is_told_in_a_sentence(folder: Path, text: str) -> None:
    (folder / "tokenizer" / "tokenizer.json").write_text(text)
    with pytest.raises(InputError):
        reopened(folder)


def aura_flow(folder: Path, num_positions: int, num_stored: int) -> Path:
    shutil.copytree(tiny_models.built("aura_flow"), folder)
    edit(folder / "transformer" / "config.json", lambda config: config.update(pos_embed_max_size=num_positions))
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    stored = tensors["pos_embed.pos_embed"][:, :1].repeat(1, num_stored, 1)
    save_file({**tensors, "pos_embed.pos_embed": stored}, file, metadata={"format": "pt"})
    return folder


def test_positions_that_are_stored_are_counted_in_all(tmp_path: Path) -> None:
    """AuraFlow 0.3 has 9216."""
    reopened(aura_flow(tmp_path / "model", 9216, 9216))


def test_positions_that_are_not_stored_are_counted_by_their_side(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="pos_embed_max_size is 1048576"):
        check_component_sizes(aura_flow(tmp_path / "model", 2**20, 9216))
    folder = Path(shutil.copytree(tiny_models.built("sd3"), tmp_path / "sd3"))
    edit(folder / "transformer" / "config.json", lambda config: config.update(pos_embed_max_size=9216))
    with pytest.raises(InputError, match="pos_embed_max_size is 9216"):
        check_component_sizes(folder)


@pytest.mark.parametrize("family", tiny_models.FAMILIES | tiny_models.MORE_FAMILIES | tiny_models.VARIANTS)
def test_every_family_is_let_through(family: str) -> None:
    check_component_sizes(tiny_models.built(family))
