from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halation.models.dit.tokenizer import BEGIN, END, PAD, WordTokenizer, split_words

CAPTIONS = ["A red car, at night.", "a red house", "a RED tree at dusk"]
TOKENIZER = WordTokenizer.from_captions(CAPTIONS, max_tokens=48)
WIDE = WordTokenizer.from_captions(CAPTIONS, max_tokens=4000)


def test_words_are_ranked_by_how_often_they_occur_and_ties_by_spelling() -> None:
    assert TOKENIZER.words == ("a", "red", "at", ",", ".", "car", "dusk", "house", "night", "tree")
    assert WordTokenizer.from_captions(reversed(CAPTIONS)).words == TOKENIZER.words
    assert WordTokenizer.from_captions(CAPTIONS, max_words=2).words == ("a", "red")


def test_known_words_are_one_token_each_and_padding_fills_the_rest() -> None:
    """Known words are one token each between begin and end, and padding fills the rest."""
    encoded = TOKENIZER.encode("A red CAR")
    assert len(encoded.ids) == len(encoded.mask) == 48
    assert encoded.ids[0] == BEGIN
    assert encoded.ids[4] == END
    assert set(encoded.ids[5:]) == {PAD}
    assert encoded.mask == (True,) * 5 + (False,) * 43
    assert not encoded.truncated


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "a zebra crossing",
        "\U0001f697\U0001f3fd car \U0001f468\u200d\U0001f469\u200d\U0001f467",
        "سيارة حمراء في الليل",
        "Ünïcödé naïve cafe\u0301",
        "half an emoji \ud83d",
        "nul \x00 and tab\tand newline\n",
        "unknown words next to each other",
        "汽车在夜里",
    ],
)
def test_odd_text_encodes_and_reads_back_as_its_pieces(text: str) -> None:
    encoded = WIDE.encode(text)
    assert not encoded.truncated
    expected = " ".join(split_words(text)).encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    assert WIDE.decode(encoded.ids) == expected
    assert max(encoded.ids) < WIDE.vocabulary_size


@given(st.text(max_size=200))
def test_any_text_reads_back_as_its_pieces(text: str) -> None:
    assert WIDE.decode(WIDE.encode(text).ids) == " ".join(split_words(text))


def test_a_prompt_too_long_is_cut_and_says_so_and_the_longest_that_fits_does_not() -> None:
    fits, over = "car " * 46, "car " * 47
    assert not TOKENIZER.encode(fits).truncated
    encoded = TOKENIZER.encode(over)
    assert encoded.truncated
    assert encoded.ids == TOKENIZER.encode(fits).ids
    assert encoded.ids[-1] == END
    assert TOKENIZER.encode("x" * 10_000).truncated


def test_different_prompts_have_different_tokens() -> None:
    texts = ["a red car", "a red cart", "red a car", "a redcar", "a red car.", "zz yy", "zzyy", ""]
    assert len({TOKENIZER.encode(text).ids for text in texts}) == len(texts)


def test_a_batch_has_one_fixed_length_row_a_text_whatever_the_neighbours() -> None:
    both = TOKENIZER.encode_batch(["a red car", "x" * 500])
    alone = TOKENIZER.encode_batch(["a red car"])
    assert both["tokens"].shape == both["mask"].shape == (2, 48)
    assert both["tokens"][0].equal(alone["tokens"][0])
    assert TOKENIZER.encode_batch([])["tokens"].shape == (0, 48)


def test_a_tokenizer_goes_through_json_unchanged() -> None:
    odd = WordTokenizer.from_captions([*CAPTIONS, "سيارة \U0001f697"], max_tokens=20)
    again = WordTokenizer.from_json(json.loads(json.dumps(odd.as_json())))
    assert again.words == odd.words
    assert again.encode("a سيارة \U0001f697 car") == odd.encode("a سيارة \U0001f697 car")


def test_tokenizers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="duplicate words"):
        WordTokenizer(["a", "a"])
    with pytest.raises(ValueError, match="at least 3"):
        WordTokenizer(["a"], max_tokens=2)
    with pytest.raises(ValueError, match="'words' was expected"):
        WordTokenizer.from_json({"kind": "bpe"})
