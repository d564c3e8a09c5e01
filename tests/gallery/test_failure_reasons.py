"""Laws of grouped failure reasons: nothing is lost, only the differing part is omitted."""

from __future__ import annotations

import time

import pytest

from halation.gallery.generation_rows import WILDCARD, group_reasons


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        (("cannot read /a/b.png: 3", "cannot read /a/c.png: 3"), {f"cannot read {WILDCARD}: 3": 2}),
        (("[Errno 21] no: 'a b'", "[Errno 21] no: 'c'"), {f"[Errno 21] no: {WILDCARD}": 2}),
        (("step 1 of 9", "step 2.5 of 9"), {f"step {WILDCARD} of 9": 2}),
        (("out of memory at 64", "out of memory near 64"), {"out of memory at 64": 1, "out of memory near 64": 1}),
        (("alone at 64 in /x",), {"alone at 64 in /x": 1}),
        (("it's 3", "it's 4", ""), {f"it's {WILDCARD}": 2, "": 1}),
    ],
)
def test_reasons_that_differ_in_paths_numbers_or_quoted_words_are_one(
    texts: tuple[str, ...], told: dict[str, int]
) -> None:
    assert group_reasons(dict.fromkeys(texts, 1)) == told


def test_a_long_word_takes_no_time() -> None:
    began = time.process_time()
    assert group_reasons({"x" * 100_000: 7, "'" * 99_999: 1}).total() == 8
    assert time.process_time() - began < 2.0
