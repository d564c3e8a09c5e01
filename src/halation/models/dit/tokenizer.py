"""A word-level tokenizer for captions, and warnings about unknown words in prompts.

Unknown words are encoded as bytes. The tokenizer is stored as JSON. torch is imported only to create tensors.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halation.input_files import read_json
from halation.runs.run_folder import COMMIT_FILE

if TYPE_CHECKING:
    from torch import Tensor

MAX_PROMPTS = 10_000
"""Number of prompts to check; checking a million would take too long."""
MAX_WORDS = 8
MAX_WORD_LENGTH = 24
PAD, BEGIN, END = 0, 1, 2
_FIRST_BYTE = 3
_FIRST_WORD = _FIRST_BYTE + 256
_SPACE = _FIRST_BYTE + ord(" ")
_WORD_PATTERN = re.compile(r"\w+|[^\w\s]")


def split_words(text: str) -> Iterator[str]:
    """Split into lower-cased words and single punctuation marks, without white space."""
    return (match.group() for match in _WORD_PATTERN.finditer(text.lower()))


@dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    """Token ids padded to a fixed length, their mask, and whether the prompt was truncated."""

    ids: tuple[int, ...]
    mask: tuple[bool, ...]
    truncated: bool


class WordTokenizer:
    """Encodes known words as one token each, and unknown words as their UTF-8 bytes."""

    def __init__(self, words: Sequence[str], max_tokens: int = 48) -> None:
        if max_tokens < 3:
            raise ValueError(f"max_tokens must be at least 3 (begin, one token, end), not {max_tokens}")
        if len(set(words)) != len(words):
            raise ValueError("the vocabulary has duplicate words")
        self.words = tuple(words)
        self.max_tokens = max_tokens
        self._ids = {word: _FIRST_WORD + index for index, word in enumerate(self.words)}

    @classmethod
    def from_captions(cls, captions: Iterable[str], *, max_words: int = 4096, max_tokens: int = 48) -> WordTokenizer:
        """Build the vocabulary from the most frequent words; ties are in code point order."""
        counts = Counter(piece for caption in captions for piece in split_words(caption))
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        return cls(ranked[:max_words], max_tokens)

    @property
    def vocabulary_size(self) -> int:
        return _FIRST_WORD + len(self.words)

    def _token_ids(self, text: str) -> Iterator[int]:
        after_bytes = False
        for piece in split_words(text):
            known = self._ids.get(piece)
            if known is not None:
                yield known
            else:
                if after_bytes:  # two unknown words in a row would otherwise be one
                    yield _SPACE
                # surrogatepass: a lone surrogate (half of an emoji) is not valid text but must not end a run.
                yield from (_FIRST_BYTE + byte for byte in piece.encode("utf-8", "surrogatepass"))
            after_bytes = known is None

    def encode(self, text: str) -> EncodedPrompt:
        """Encode as begin, tokens, end, padding; the length is always `max_tokens`."""
        max_body_tokens = self.max_tokens - 2
        body: list[int] = []
        for token in self._token_ids(text):
            if len(body) == max_body_tokens:
                truncated = True
                break
            body.append(token)
        else:
            truncated = False
        ids = [BEGIN, *body, END]
        padding = self.max_tokens - len(ids)
        return EncodedPrompt(
            ids=(*ids, *[PAD] * padding), mask=(*[True] * len(ids), *[False] * padding), truncated=truncated
        )

    def encode_batch(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Return `tokens` (int64) and `mask` (bool), one row per text."""
        import torch

        rows = [self.encode(text) for text in texts]
        shape = (len(rows), self.max_tokens)
        return {
            "tokens": torch.tensor([row.ids for row in rows], dtype=torch.int64).reshape(shape),
            "mask": torch.tensor([row.mask for row in rows], dtype=torch.bool).reshape(shape),
        }

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids, with single spaces between words."""
        words: list[str] = []
        unknown = bytearray()

        def flush() -> None:
            if unknown:
                words.append(unknown.decode("utf-8", "replace"))
                unknown.clear()

        for token in ids:
            if _FIRST_BYTE <= token < _FIRST_WORD and token != _SPACE:
                unknown.append(token - _FIRST_BYTE)
                continue
            flush()
            if token >= _FIRST_WORD:
                words.append(self.words[token - _FIRST_WORD])
        flush()
        return " ".join(words)

    def as_json(self) -> dict[str, Any]:
        return {"kind": "words", "words": list(self.words), "max_tokens": self.max_tokens}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> WordTokenizer:
        kind = value.get("kind") if isinstance(value, dict) else value
        if kind != "words":
            raise ValueError(f"a tokenizer of kind 'words' was expected, not {kind!r}")
        return cls([str(word) for word in value["words"]], int(value["max_tokens"]))

    @classmethod
    def of_model(cls, folder: Path) -> WordTokenizer | None:
        """Return the tokenizer of a checkpoint or an export, or None.

        Unreadable files also give None; the loader reports them.
        """
        committed = (folder / COMMIT_FILE).exists()
        try:
            value = read_json(folder / ("state.json" if committed else "config.json"))
            description = (value["denoiser"] if committed else value).get("tokenizer")
            return cls.from_json(description) if description else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None

    def find_unknown_words(self, prompts: Iterable[str]) -> tuple[list[str], int]:
        """Return unknown words, most frequent first, and the number of prompts with one.

        Punctuation does not count as a word.
        """
        known, counts, num_affected = set(self.words), Counter[str](), 0
        for prompt in prompts:
            # Marks and joiners inside an emoji and lone surrogates do not count either.
            found = {
                piece
                for piece in split_words(prompt)
                if piece not in known and unicodedata.category(piece[0])[0] not in "PMC"
            }
            counts.update(sorted(found, key=prompt.lower().find))
            num_affected += bool(found)
        return [word for word, _number in counts.most_common()], num_affected


def find_prompt_warnings(
    folder: Path, name: str, prompts: Iterable[str], *, check_lengths: bool = True
) -> Iterator[str]:
    """Warn about unknown words and, with `check_lengths`, about prompts that are too long."""
    tokenizer = WordTokenizer.of_model(folder)
    if tokenizer is None:
        return
    checked = list(islice(prompts, MAX_PROMPTS + 1))
    is_limited = len(checked) > MAX_PROMPTS
    checked = checked[:MAX_PROMPTS]
    total = f"{'the first ' if is_limited else ''}{len(checked):,} prompt{'s' if len(checked) != 1 else ''}"
    unknown, num_affected = tokenizer.find_unknown_words(checked)
    if unknown:
        rest = f" and {len(unknown) - MAX_WORDS} more" if len(unknown) > MAX_WORDS else ""
        shown = ", ".join(word[:MAX_WORD_LENGTH] for word in unknown[:MAX_WORDS])
        yield f"{name} does not know: {shown}{rest} (in {num_affected:,} of {total}); expect it to ignore them"
    num_long = sum(tokenizer.encode(prompt).truncated for prompt in checked) if check_lengths else 0
    if num_long:
        verb = "is" if num_long == 1 else "are"
        yield f"{num_long:,} of {total} {verb} longer than {name} reads: the end is cut off"
