"""What of its prompts a model with a list of words cannot read, said before it draws: a stranger takes the result for a broken installation."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from halation.input_files import read_json
from halation.runs.run_folder import COMMIT_FILE

if TYPE_CHECKING:
    from halation.models.dit.tokenizer import WordTokenizer

MAX_PROMPTS = 10_000
"""Looked at: the beginning of a long list tells enough, and a million rows are not to wait for it."""
MAX_WORDS = 8
MAX_WORD_LENGTH = 24


def find_prompt_warnings(
    folder: Path, name: str, prompts: Iterable[str], *, check_lengths: bool = True
) -> Iterator[str]:
    """A sentence about unknown words and, unless somebody else says so, one about prompts that are too long, where there are such."""
    tokenizer = _load_tokenizer(folder)
    if tokenizer is None:
        return
    checked = list(islice(prompts, MAX_PROMPTS + 1))
    is_limited = len(checked) > MAX_PROMPTS
    checked = checked[:MAX_PROMPTS]
    total = f"{'the first ' if is_limited else ''}{len(checked):,} prompt{'s' if len(checked) != 1 else ''}"
    unknown, num_affected = _find_unknown_words(tokenizer, checked)
    if unknown:
        rest = f" and {len(unknown) - MAX_WORDS} more" if len(unknown) > MAX_WORDS else ""
        shown = ", ".join(word[:MAX_WORD_LENGTH] for word in unknown[:MAX_WORDS])
        yield f"{name} does not know: {shown}{rest} (in {num_affected:,} of {total}); it cannot draw what they mean"
    num_long = sum(tokenizer.encode(prompt).truncated for prompt in checked) if check_lengths else 0
    if num_long:
        yield f"{num_long:,} of {total} {'is' if num_long == 1 else 'are'} longer than {name} reads: the end has no effect"


def _find_unknown_words(tokenizer: WordTokenizer, prompts: Iterable[str]) -> tuple[list[str], int]:
    """The words, the most frequent first, and the number of prompts that have one; a mark between words is none."""
    from halation.models.dit.tokenizer import split_words

    known, counts, num_affected = set(tokenizer.words), Counter[str](), 0
    for prompt in prompts:
        # The parts of an emoji that nobody sees (marks, joiners) and half of one are no words either.
        found = {
            piece
            for piece in split_words(prompt)
            if piece not in known and unicodedata.category(piece[0])[0] not in "PMC"
        }
        counts.update(sorted(found, key=prompt.lower().find))
        num_affected += bool(found)
    return [word for word, _number in counts.most_common()], num_affected


def _load_tokenizer(folder: Path) -> WordTokenizer | None:
    """Of a checkpoint or an export; None for models that read otherwise. What cannot be read is for the loader to refuse."""
    committed = (folder / COMMIT_FILE).exists()
    try:
        value = read_json(folder / ("state.json" if committed else "config.json"))
        description = (value["denoiser"] if committed else value).get("tokenizer")
        if not description:
            return None
        # Whoever looked at a checkpoint has torch already; who draws with anything else never comes here.
        from halation.models.dit.tokenizer import WordTokenizer

        return WordTokenizer.from_json(description)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
