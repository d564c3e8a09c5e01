from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from halation.errors import InputError
from halation.models.autoencoder import PixelSpace
from halation.models.denoiser import Denoiser, null_condition
from halation.models.dit.denoiser import DiTDenoiser, create_dit
from halation.models.dit.network import DiTConfig
from halation.models.dit.tokenizer import WordTokenizer

Make = Callable[..., DiTDenoiser]


def test_a_dit_fulfils_the_protocol(denoiser: DiTDenoiser) -> None:
    family: Denoiser = denoiser
    assert family.config.channels == 3
    assert family.sample_shape(16, 16) == (3, 16, 16)
    assert family.to("cpu") is denoiser


def test_the_null_condition_is_the_empty_prompt_for_text_and_no_class_for_classes(make_denoiser: Make) -> None:
    text, classes = make_denoiser(), make_denoiser(classes=True)
    assert torch.equal(null_condition(text, 2)["tokens"], text.encode_prompts(["", "  "])["tokens"])
    assert null_condition(classes, 2)["label"].tolist() == [3, 3]


def test_classes_are_found_by_name_then_by_number(make_denoiser: Make) -> None:
    denoiser = make_denoiser(classes=True)
    assert denoiser.encode_prompts(["dog", " cat ", "7", "1"])["label"].tolist() == [1, 0, 2, 1]
    assert denoiser.encode_captions(["whatever"] * 2, [2, 0])["label"].tolist() == [2, 0]
    assert denoiser.truncation_flags(["x" * 999]) == [False]
    with pytest.raises(InputError, match=r"prompt 'dogs'[\s\S]*such as dog"):
        denoiser.encode_prompts(["dogs"])
    with pytest.raises(InputError, match="a number below 3"):
        denoiser.encode_prompts(["3"])


def test_captions_become_tokens_where_the_model_reads_text(denoiser: DiTDenoiser) -> None:
    found = denoiser.encode_captions(["a red car"], [-1])
    assert torch.equal(found["tokens"], denoiser.encode_prompts(["a red car"])["tokens"])


def test_another_size_than_the_model_s_is_refused_with_the_right_one(denoiser: DiTDenoiser) -> None:
    with pytest.raises(InputError, match=r"32 x 32[\s\S]*16 x 16, the size of this model"):
        denoiser.sample_shape(32, 32)


def test_pixels_go_into_the_model_s_space_and_back(denoiser: DiTDenoiser) -> None:
    pixels = torch.randint(0, 256, (2, 16, 16, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    assert torch.equal(denoiser.space.decode(denoiser.space.encode(pixels)), pixels)


@pytest.mark.parametrize(("size", "num_patches"), [(32, 64), (64, 256), (128, 256)])
def test_the_default_patch_keeps_the_sequence_short(size: int, num_patches: int) -> None:
    assert create_dit("tiny", height=size, width=size, captions=["a"]).config.num_patches == num_patches


def test_a_image_the_autoencoder_cannot_divide_is_refused() -> None:
    class Halving(PixelSpace):
        downsampling_factor = 8

    with pytest.raises(InputError, match="multiples of 8"):
        create_dit("tiny", height=36, width=32, captions=["a"], space=Halving())


def test_parts_that_do_not_belong_together_are_refused() -> None:
    tokenizer = WordTokenizer(["a"])
    shape = {"height": 8, "width": 8, "patch_size": 4}
    text = DiTConfig.of_size("tiny", channels=3, vocabulary_size=260, **shape)
    for tokens in (None, WordTokenizer(["a", "b"])):
        with pytest.raises(ValueError, match="tokenizer"):
            DiTDenoiser(config=text, space=PixelSpace(), tokenizer=tokens)
    with pytest.raises(ValueError, match="class names"):
        DiTDenoiser(
            config=DiTConfig.of_size("tiny", channels=3, conditioning="class", num_classes=2, **shape),
            space=PixelSpace(),
        )
    with pytest.raises(ValueError, match="channels"):
        DiTDenoiser(
            config=DiTConfig.of_size("tiny", channels=4, vocabulary_size=260, **shape),
            space=PixelSpace(),
            tokenizer=tokenizer,
        )
