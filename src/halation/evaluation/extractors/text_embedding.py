"""CLIP's embedding of texts, each the same whatever its neighbours are, and which texts are longer than the model reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor

from halation.errors import InputError
from halation.evaluation.extractors.extractor import full_precision

UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, OSError, ImportError, RuntimeError, SafetensorError)
"""What transformers raises over a folder that is not whole."""
_TEXTS_AT_ONCE = 64
_VOCABULARIES = (("tokenizer.json",), ("vocab.json", "merges.txt"))


class TextEmbedder:
    """A CLIP model's text tower with its tokenizer; a text's embedding does not depend on its neighbours or their number."""

    def __init__(self, model: Any, folder: Path) -> None:
        self._model = model
        self._tokenizer = _tokenizer(folder, num_known=int(model.config.text_config.vocab_size))
        self.max_tokens = int(model.config.text_config.max_position_embeddings)
        """How long a text may be, its begin and end included; several at once are padded to this."""
        self._num_rows = 1 if model.device.type == "cpu" else _TEXTS_AT_ONCE

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """(N, D) float32 on the CPU, projected and not normalised; a text that is too long loses its end."""
        starts = range(0, len(texts), self._num_rows)
        parts = [self._embedded(texts[start : start + self._num_rows]) for start in starts]
        return torch.cat(parts) if parts else torch.empty(0, int(self._model.config.projection_dim))

    def truncated(self, texts: Sequence[str]) -> list[int]:
        """The indices of texts that are longer than the model reads."""
        if not texts:
            return []
        tokens = self._tokenizer(list(texts), truncation=False, padding=False, verbose=False)["input_ids"]
        return [index for index, ids in enumerate(tokens) if len(ids) > self.max_tokens]

    def _embedded(self, texts: Sequence[str]) -> Tensor:
        # Always the same number of rows: other shapes may take other kernels, and then a text would depend on its neighbours.
        padded = [*texts, *[""] * (self._num_rows - len(texts))]
        # A text alone has none, so nothing is padded there: a third of the time.
        padding = "max_length" if self._num_rows > 1 else False
        tokens = self._tokenizer(
            padded, padding=padding, truncation=True, max_length=self.max_tokens, return_tensors="pt"
        ).to(self._model.device)
        with torch.inference_mode(), full_precision():
            output = self._model.get_text_features(
                input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]
            )
        embeddings: Tensor = output.pooler_output
        return embeddings[: len(texts)].float().cpu()


def _tokenizer(folder: Path, *, num_known: int) -> Any:
    # transformers opens a tokenizer without its vocabulary, and every text is then the same few tokens.
    if not any(all((folder / name).is_file() for name in names) for names in _VOCABULARIES):
        raise InputError(
            f"{folder} has no vocabulary: every text would be the same to the model",
            "tokenizer.json, or vocab.json and merges.txt, beside the weights",
            "download the whole model",
        )
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except UNREADABLE as error:
        raise InputError(
            f"{folder} has no tokenizer that can be opened: {type(error).__name__}: {error}",
            "tokenizer files beside the weights",
            "download the whole model",
        ) from error
    one, other = (tokenizer(text, verbose=False)["input_ids"] for text in ("a red car", "two blue birds"))
    if one == other or max(*one, *other) >= num_known:
        raise InputError(
            f"{folder}: the tokenizer does not tell texts apart, or has more tokens than the model's {num_known}",
            "the tokenizer the model was trained with",
            "download the whole model",
        )
    return tokenizer
