"""Checks a pipeline's tokenizers: vocabulary, text encoder, length of prompts.

transformers loads a tokenizer without its vocabulary and encodes every text as the same few tokens. A run would then
generate the same image for all prompts, without any message.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from halation.errors import InputError
from halation.models.pipelines.family_quirks import PipelineFamily
from halation.models.pipelines.folder_safety_check import read_json
from halation.sample_specs import SampleSpec

log = logging.getLogger(__name__)
_VOCABULARY_PATTERNS = ("*.json", "*.txt", "*.model", "*.tiktoken")
_NOT_VOCABULARY_FILES = (
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "config.json",
)
# Three words each, so that a tokenizer that only detects word boundaries encodes all of them alike.
_PROBE_TEXTS = ("a red car", "two blue birds", "wooden houses burning", "一 只 猫", "три белых кота")
_NO_LIMIT = 10**9  # transformers uses a number of thirty digits for "no limit"


def check_has_vocabulary(folder: Path, kind: Any) -> None:
    """Reject a tokenizer folder without a vocabulary, before gigabytes of weights are read."""
    if not isinstance(kind, type) or not issubclass(kind, PreTrainedTokenizerBase) or not kind.vocab_files_names:
        return  # a byte-level tokenizer has no vocabulary
    named = {str(name) for name in kind.vocab_files_names.values()}
    files = {file.name for pattern in _VOCABULARY_PATTERNS for file in folder.glob(pattern) if file.stat().st_size}
    files -= set(_NOT_VOCABULARY_FILES)
    merges = folder / "merges.txt"
    if files == {"vocab.json"} and merges.name in named and not (merges.is_file() and merges.stat().st_size):
        files.clear()  # without merges, tokens are single letters, unlike in training
    if not files:
        raise InputError(
            f"{folder} has no vocabulary: all prompts would be encoded alike",
            f"the files of a {kind.__name__} ({', '.join(sorted(named))})",
            "download the whole model",
        )
    if "tokenizer.json" in files:
        file = folder / "tokenizer.json"
        content = read_json(file)
        model = content.get("model") if isinstance(content, dict) else None
        if not isinstance(model, dict) or not model.get("vocab"):
            raise InputError(f"{file} has no vocabulary", "the tokenizer as it was saved", "download the whole model")


def check_tokenizers(path: Path, pipe: Any, family: PipelineFamily) -> None:
    """Reject tokenizers that encode all texts alike or do not match their text encoders."""
    for name, component in pipe.components.items():
        tokenizer = getattr(component, "tokenizer", component)  # a processor has one inside
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            continue
        unknown = tokenizer.unk_token_id
        texts = {tuple(token for token in _token_ids(tokenizer, text) if token != unknown) for text in _PROBE_TEXTS}
        if len(texts) == 1:
            raise InputError(
                f"{path}: the component {name!r} encodes different texts as the same tokens",
                f"a complete {type(tokenizer).__name__} with the vocabulary the model was trained with",
                "download the whole model",
            )
        _check_embeddings(path, pipe, name, tokenizer)
        if family.token_limits.get(name) == "model_max_length" and tokenizer.model_max_length > _NO_LIMIT:
            raise InputError(
                f"{path}: the component {name!r} does not define how many tokens the model reads",
                "a tokenizer_config.json with model_max_length",
                "download the whole model",
            )


def _token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _check_embeddings(path: Path, pipe: Any, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    encoder = getattr(pipe, name.replace("tokenizer", "text_encoder"), None)
    try:
        num_rows = int(encoder.get_input_embeddings().weight.shape[0])  # type: ignore[union-attr]
    except (AttributeError, NotImplementedError):
        return  # no encoder of that name, or one without get_input_embeddings
    # Some published vocabularies have added tokens that only other models with the same vocabulary use.
    added = tokenizer.get_added_vocab()
    largest = max((number for token, number in tokenizer.get_vocab().items() if token not in added), default=0)
    written = max([*tokenizer(_PROBE_TEXTS[0], verbose=False)["input_ids"], tokenizer.pad_token_id or 0])
    if max(largest, written) >= num_rows:
        raise InputError(
            f"{path}: the component {name!r} has token ids up to {max(largest, written)}, but its text encoder "
            f"{type(encoder).__name__} has {num_rows} embeddings",
            "a tokenizer and a text encoder of one model",
            "download the whole model",
        )


@dataclass(frozen=True, kw_only=True)
class _TokenLimit:
    tokenizer: PreTrainedTokenizerBase
    max_tokens: int
    """Tokens that it passes on, including special tokens."""
    max_prompt_tokens: int
    """Tokens of the prompt among them."""
    instruction: str = ""
    """Text that a family puts before each prompt; it does not count against the limit."""

    def truncates(self, text: str) -> bool:
        # A token is rarely shorter than a byte, so most prompts need no tokenization.
        if len(text.encode()) < self.max_prompt_tokens:
            return False
        own = len(_token_ids(self.tokenizer, self.instruction)) if self.instruction else 0
        return len(_token_ids(self.tokenizer, self.instruction + text)) - own > self.max_prompt_tokens


class PromptLengthCheck:
    """Warns once about a prompt that is longer than every text encoder of the pipeline reads."""

    def __init__(
        self, pipe: Any, family: PipelineFamily, arguments: Mapping[str, Any], encoders: Collection[str] | None = None
    ) -> None:
        """`encoders` are the names of the text encoders, if the pipeline does not have them."""
        self._clean_text = getattr(pipe, "_text_preprocessing", None)
        self._limits: list[_TokenLimit] = []
        for name, limit in family.token_limits.items():
            tokenizer, encoder = getattr(pipe, name, None), name.replace("tokenizer", "text_encoder")
            is_there = getattr(pipe, encoder, None) is not None if encoders is None else encoder in encoders
            if tokenizer is None or not is_there:
                continue
            if isinstance(limit, str):
                limit = int(tokenizer.model_max_length if limit == "model_max_length" else arguments[limit])
            instruction = "\n".join(arguments.get("complex_human_instruction") or ())
            own = 2 if instruction else tokenizer.num_special_tokens_to_add()  # Sana always subtracts two
            self._limits.append(
                _TokenLimit(
                    tokenizer=tokenizer, max_tokens=limit, max_prompt_tokens=limit - own, instruction=instruction
                )
            )

    def truncates(self, prompt: str) -> bool:
        """Return True if no text encoder reads the end of this prompt."""
        text = prompt if self._clean_text is None else self._clean_text(prompt, clean_caption=False)[0]
        return bool(self._limits) and all(reader.truncates(text) for reader in self._limits)

    def warn_once(self, specs: Sequence[SampleSpec]) -> None:
        """Warn about the first prompt whose end no text encoder reads; later calls do not warn."""
        for spec in specs:
            if self.truncates(spec.prompt):
                log.warning(
                    "the prompt of image %s is longer than the model reads (%d tokens): its end is cut off; "
                    "this warning is shown once",
                    spec.id,
                    max(reader.max_tokens for reader in self._limits),
                )
                self._limits = []
                return
