"""A folder without a complete vocabulary is refused; a truncated prompt is logged once."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import transformers

from halation.errors import InputError
from halation.models.pipelines.tokenizer_checks import check_has_vocabulary
from support import tiny_models
from support.tiny_models import drawn, opened, reopened, specs

FAMILIES = [*tiny_models.FAMILIES, *tiny_models.MORE_FAMILIES]
TOKENIZERS = [
    (family, name)
    for family, names in {
        "hunyuan": ("tokenizer", "tokenizer_2"),
        "pixart": ("tokenizer",),
        "sd3": ("tokenizer", "tokenizer_2", "tokenizer_3"),
        "flux": ("tokenizer", "tokenizer_2"),
        "wan": ("tokenizer",),
        "sana": ("tokenizer",),
        "stable_diffusion": ("tokenizer",),
    }.items()
    for name in names
]
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers' DPM-Solver


def copied(family: str, folder: Path) -> Path:
    """A pipeline folder of its own, whose weights are links: only what a test writes is a file of its own."""
    return Path(shutil.copytree(tiny_models.built(family), folder, copy_function=linked))


def linked(source: str, target: str) -> None:
    if source.endswith(".safetensors"):
        Path(target).symlink_to(source)
    else:
        shutil.copyfile(source, target)


def emptied(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_pipeline_opens(family: str) -> None:
    assert opened(family).facts["pipeline"]


@pytest.mark.parametrize(("family", "name"), TOKENIZERS)
def test_a_tokenizer_without_its_vocabulary_is_refused(family: str, name: str, tmp_path: Path) -> None:
    folder = copied(family, tmp_path / "model")
    (folder / name / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=rf"{name} has no vocabulary[\s\S]*tokenizer.json[\s\S]*download the whole"):
        reopened(folder)
    emptied(folder / name)
    with pytest.raises(InputError, match=f"{name} has no vocabulary"):
        reopened(folder)


@pytest.mark.parametrize(("family", "name"), TOKENIZERS)
def test_a_vocabulary_that_knows_no_word_is_refused(family: str, name: str, tmp_path: Path) -> None:
    """The files are there, and hold what transformers makes up where they are missing."""
    folder = copied(family, tmp_path / "model")
    kind = getattr(transformers, json.loads((folder / "model_index.json").read_text())[name][1])
    (folder / name / "tokenizer.json").unlink()
    kind.from_pretrained(folder / name, local_files_only=True).save_pretrained(folder / name)
    message = rf"{name}'? encodes different texts as the same tokens|{name}/tokenizer.json has no vocabulary"
    with pytest.raises(InputError, match=message):
        reopened(folder)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model": {"vocab": {}}}'])
def test_a_damaged_vocabulary_is_refused(content: str, tmp_path: Path) -> None:
    folder = copied("pixart", tmp_path / "model")
    (folder / "tokenizer" / "tokenizer.json").write_text(content)
    with pytest.raises(InputError, match=r"has no vocabulary|cannot be read as JSON"):
        reopened(folder)


def test_any_form_of_vocabulary_will_do_but_half_a_one_will_not(tmp_path: Path) -> None:
    clip, t5, bert = transformers.CLIPTokenizer, transformers.T5Tokenizer, transformers.BertTokenizer
    whole = [(clip, ("vocab.json", "merges.txt")), (clip, ("tokenizer.model",)), (t5, ("spiece.model",))]
    whole += [(bert, ("vocab.txt",)), (transformers.ByT5Tokenizer, ())]
    half = [(clip, ("vocab.json",)), (clip, ("merges.txt",)), (t5, ()), (bert, ("added_tokens.json",))]
    for number, (kind, names) in enumerate([*whole, *half]):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in ("tokenizer_config.json", "special_tokens_map.json", *names):
            (folder / name).write_text("{}")
        if number < len(whole):
            check_has_vocabulary(folder, kind)
        else:
            with pytest.raises(InputError, match=r"has no vocabulary"):
                check_has_vocabulary(folder, kind)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = copied("pixart", tmp_path / "model")
    file = folder / "tokenizer" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"].append(["▁bird", -3.0])
    file.write_text(json.dumps(content))
    with pytest.raises(
        InputError, match=r"'tokenizer' has token ids up to 122, but its text encoder .* has 122 embeddings"
    ):
        reopened(folder)


@pytest.mark.parametrize("family", ["stable_diffusion", "sd3", "flux"])
def test_a_tokenizer_that_does_not_say_how_much_is_read_is_refused(family: str, tmp_path: Path) -> None:
    folder = copied(family, tmp_path / "model")
    (folder / "tokenizer" / "tokenizer_config.json").unlink()
    with pytest.raises(InputError, match=r"'tokenizer' does not define how many tokens[\s\S]*model_max_length"):
        reopened(folder)


# How much of a prompt is read

LIMITS = {"hunyuan": 256, "pixart": 120, "pixart_sigma": 300, "sd3": 256, "flux": 512, "wan": 512, "sana": 300}
LIMITS |= {"stable_diffusion": 77, "stable_diffusion_xl": 77}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("halation")]


def longest_read(family: str) -> int:
    """How often "dog" fits: one token each, but three for the tiny CLIP; Sana joins the first with a space."""
    room = {"hunyuan": 255, "pixart": 119, "pixart_sigma": 299, "sd3": 255, "flux": 511, "wan": 511, "sana": 299}
    return room.get(family, 25)


@pytest.mark.parametrize("family", list(LIMITS))
def test_the_first_prompt_that_is_cut_is_named_once(family: str, caplog: pytest.LogCaptureFixture) -> None:
    model = reopened(tiny_models.built(family))
    fitting = " ".join(["dog"] * longest_read(family))
    wanted = specs(fitting, f"{fitting} dog", f"{fitting} cat", steps=2)
    with caplog.at_level(logging.WARNING, logger="halation"):
        for spec in wanted:
            drawn(model, [spec])
    assert warnings_of(caplog) == [
        f"the prompt of image 1 is longer than the model reads ({LIMITS[family]} tokens): its end is cut off; "
        "this warning is shown once"
    ]


@pytest.mark.parametrize("family", list(LIMITS))
def test_what_is_said_to_have_no_effect_has_none_and_what_is_read_has(family: str) -> None:
    model = opened(family)
    words = ["dog"] * longest_read(family)
    first, other, cut = (
        drawn(model, [spec])[0]
        for prompt in (words, [*words[:-1], "cat"], [*words, "cat"])
        for spec in specs(" ".join(prompt), steps=2)
    )
    np.testing.assert_array_equal(first, cut)
    assert not np.array_equal(first, other)


def test_a_limit_that_is_asked_for_is_the_one_that_counts(caplog: pytest.LogCaptureFixture) -> None:
    model = reopened(tiny_models.built("wan"), arguments={"max_sequence_length": 16})
    with caplog.at_level(logging.WARNING, logger="halation"):
        drawn(model, specs(" ".join(["dog"] * 15)))
        assert not warnings_of(caplog)
        drawn(model, specs(" ".join(["dog"] * 16)))
    assert "(16 tokens)" in warnings_of(caplog)[0]
