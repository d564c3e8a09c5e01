"""Known irrelevant messages of libraries are hidden, and no others."""

from __future__ import annotations

import logging

import pytest

from halation.models.pipelines.load import filter_library_warnings


@pytest.mark.parametrize(
    ("logger", "text", "passes"),
    [
        (
            "DeepSpeed",
            "Setting accelerator to CPU. If you have GPU or other accelerator, we were unable to detect it.",
            False,
        ),
        ("DeepSpeed", "[Rank 0] a parameter is missing", True),
        ("transformers", "`CLIPImageProcessor` requires torchvision (not installed)", False),
        ("transformers", "Some weights were not initialised", True),
    ],
)  # fmt: skip
def test_known_words_are_kept_back_and_others_pass(logger: str, text: str, passes: bool) -> None:
    filter_library_warnings()
    filter_library_warnings()  # a second call changes nothing
    words = logging.getLogger(logger)
    record = words.makeRecord(logger, logging.WARNING, __file__, 1, text, (), None)
    places: list[logging.Filterer] = [words] if logger == "DeepSpeed" else [*words.handlers]
    assert places
    assert all(bool(place.filter(record)) == passes for place in places)
    assert len(places[0].filters) == 1
