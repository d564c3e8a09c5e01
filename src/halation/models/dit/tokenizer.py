"""A tokenizer over the words of a data set's captions, with bytes for every other word; plain Python, stored as JSON."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PAD, BEGIN, END = 0, 1, 2
_FIRST_BYTE = 3
_FIRST_WORD = _FIRST_BYTE + 256
_SPACE = _FIRST_BYTE + ord(" ")
_WORD_PATTERN = re.compile(r"\w+|[^\w\s]")


def split_words(text: str) -> Iterator[str]:
    """Lower-cased words and single punctuation marks, in order; white space only separates."""
    return (match.group() for match in _WORD_PATTERN.finditer(text.lower()))


@dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    """A prompt as token ids padded to a fixed length, its mask, and whether some of it did not fit."""

    ids: tuple[int, ...]
    mask: tuple[bool, ...]
    truncated: bool


class WordTokenizer:
    """Known words are one token each, unknown ones their UTF-8 bytes, so that any text has an encoding."""

    def __init__(self, words: Sequence[str], max_tokens: int = 48) -> None:
        if max_tokens < 3:
            raise ValueError(f"a prompt takes at least begin, end and one token, not {max_tokens}")
        if len(set(words)) != len(words):
            raise ValueError("a vocabulary holds each word once")
        self.words = tuple(words)
        self.max_tokens = max_tokens
        self._ids = {word: _FIRST_WORD + index for index, word in enumerate(self.words)}

    @classmethod
    def from_captions(cls, captions: Iterable[str], *, max_words: int = 4096, max_tokens: int = 48) -> WordTokenizer:
        """The most frequent words of the captions; equally frequent ones in the order of their code points."""
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
                if after_bytes:  # two unknown words in a row would read as one
                    yield _SPACE
                # surrogatepass: half of an emoji is no valid text, and still no reason to lose a run.
                yield from (_FIRST_BYTE + byte for byte in piece.encode("utf-8", "surrogatepass"))
            after_bytes = known is None

    def encode(self, text: str) -> EncodedPrompt:
        """Begin, tokens, end, padding: always `max_tokens` long, whatever the neighbours are."""
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
        """`tokens` (int64) and `mask` (bool), one row a text."""
        rows = [self.encode(text) for text in texts]
        shape = (len(rows), self.max_tokens)
        return {
            "tokens": torch.tensor([row.ids for row in rows], dtype=torch.int64).reshape(shape),
            "mask": torch.tensor([row.mask for row in rows], dtype=torch.bool).reshape(shape),
        }

    def decode(self, ids: Iterable[int]) -> str:
        """The pieces with single spaces between them: what the model was told."""
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
