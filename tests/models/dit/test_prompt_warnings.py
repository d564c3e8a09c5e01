"""Prompt words unknown to a model are logged once before sampling, by every command."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from halation.data.streets import DRIVING_PROMPTS, caption, scene
from halation.generation.config import GenerateConfig
from halation.generation.ledger import LEDGER_FILE, Ledger
from halation.generation.session import GenerationSession
from halation.generation.workers.local_pool import WorkerSlot
from halation.logging_setup import ConsoleWarningHandler, log_to_folder
from halation.models.dit.tokenizer import MAX_PROMPTS, WordTokenizer, find_prompt_warnings
from halation.models.model_folder import FOLDER
from halation.models.model_path_resolver import resolve_model
from halation.prompt_files import PromptFile

MODEL = FOLDER / "streets-64"
STRANGE = ("A neon alley", "A rural road with a unicorn, at night.", "A rural road")


def said(*prompts: str) -> list[str]:
    return list(find_prompt_warnings(MODEL, "streets-64", prompts))


def test_captions_of_its_own_data_and_their_punctuation_are_known() -> None:
    captions = [caption(scene("heldout", index)) for index in range(100)]
    assert said(*DRIVING_PROMPTS, *captions, "A rural road: (wet roads) at night!", "") == []


def test_unknown_words_are_named_once_with_the_number_of_prompts_that_have_one() -> None:
    (words,) = said(*STRANGE, "A Neon street")
    assert words.startswith("streets-64 does not know: neon, alley, unicorn (in 3 of 4 prompts)")


def test_of_many_words_and_of_long_ones_a_few_are_shown_and_images_are_words_too() -> None:
    (words,) = said(" ".join(f"word{number}" for number in range(4)) + " \U0001f697\ufe0f\U0001f3d9\ufe0f", "x" * 45)
    shown = f"word0, word1, word2, word3, \U0001f697, \U0001f3d9, {'x' * 24} (in 2 of 2 prompts)"
    assert shown in words
    many = said(" ".join("abcdefghijk"))[0]
    assert "does not know: b, c, d, e, f, g, h, i and 2 more (in 1 of 1 prompt)" in many


def test_a_prompt_that_is_longer_than_the_model_reads_is_counted() -> None:
    assert said("A rural road " * 20, "A rural road") == [
        "1 of 2 prompts is longer than streets-64 reads: the end is cut off"
    ]
    assert list(find_prompt_warnings(MODEL, "streets-64", ["A rural road " * 20], check_lengths=False)) == []


def test_of_a_million_prompts_the_first_are_looked_at() -> None:
    def prompts() -> Iterator[str]:
        yield "A unicorn"
        for _row in range(MAX_PROMPTS):
            yield "A road"
        raise AssertionError("it looked further")

    began = time.process_time()
    (words,) = find_prompt_warnings(MODEL, "streets-64", prompts())
    assert "unicorn (in 1 of the first 10,000 prompts)" in words
    assert time.process_time() - began < 2


def test_a_checkpoint_is_asked_too_and_a_model_without_a_word_list_says_nothing(tmp_path: Path) -> None:
    tokenizer = WordTokenizer(["cat"]).as_json()
    (tmp_path / "COMMIT.json").write_text("{}")
    for description, expected in (({"tokenizer": tokenizer}, ["dog"]), ({"tokenizer": None}, []), ({}, [])):
        (tmp_path / "state.json").write_text(json.dumps({"denoiser": description}))
        found = list(find_prompt_warnings(tmp_path, "mine", ["cat dog"]))
        assert [words.split(": ")[1].split(" (")[0] for words in found] == expected
    assert list(find_prompt_warnings(tmp_path / "nothing", "mine", ["cat dog"])) == []


@pytest.mark.parametrize(
    ("model", "num_samples", "expected"),
    [
        ("streets-64", 0, "neon, alley, unicorn (in 2 of 3 prompts)"),
        ("streets-64", 1, "neon, alley (in 1 of 1 prompt)"),
        ("testcard", 0, ""),
    ],
)
def test_generate_says_it_before_a_worker_starts_and_keeps_it_in_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, num_samples: int, expected: str
) -> None:
    (tmp_path / "prompts.txt").write_text("\n".join(STRANGE))
    subject, places = resolve_model(model, raw=False), [WorkerSlot(label="0", device="cpu")]
    asked = GenerateConfig(model_path=model, output_dir=tmp_path, num_samples=num_samples)
    with log_to_folder(tmp_path / "logs") as echo, Ledger(tmp_path / LEDGER_FILE) as ledger:
        session = GenerationSession(asked, subject, ledger, echo)
        session.prepare(PromptFile.open(str(tmp_path / "prompts.txt")), places)
    for text in (capsys.readouterr().err, (tmp_path / "logs/generate.log").read_text()):
        assert text.count("does not know") == bool(expected)
        assert expected in text


def test_a_warning_is_told_once_also_after_a_job_of_this_process_left_its_echo(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger, left = logging.getLogger("halation"), ConsoleWarningHandler()
    logger.addHandler(left)
    try:
        with log_to_folder(tmp_path):
            logger.warning("no room")
        assert left in logger.handlers
    finally:
        logger.removeHandler(left)
    assert capsys.readouterr().err == "halation: no room\n"
