"""Text encoders of a pipeline in training: loaded on demand, with cached embeddings."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from halation.models.denoiser import Condition
from halation.models.dtypes import DTYPES
from halation.models.model_folder import components_fingerprint
from halation.models.pipelines.capabilities import call_parameters
from halation.models.pipelines.family_quirks import get_family
from halation.models.pipelines.folder_safety_check import PipelineFiles
from halation.models.pipelines.load import load_components
from halation.models.pipelines.tokenizer_checks import PromptLengthCheck, check_tokenizers
from halation.models.pipelines.training.trainable_family import TrainableFamily

_MAX_CACHED_TEXTS = 64
EncodeTexts = Callable[[Sequence[str]], Condition]


class TextStore(Protocol):
    """Embeddings by text."""

    def __contains__(self, text: str) -> bool: ...

    def read(self, texts: Sequence[str]) -> Mapping[str, Tensor]: ...


class PipelineTextEncoder:
    """Returns text embeddings from a store, from memory, or from temporarily loaded encoders."""

    def __init__(self, *, files: PipelineFiles, pipe: Any, family: TrainableFamily, dtype: str) -> None:
        self._files = files
        self._pipe = pipe
        self._family = family
        self._dtype = dtype
        self._encoder_names = tuple(name for name in files.components if name.startswith("text_encoder"))
        defaults = {name: parameter.default for name, parameter in call_parameters(type(pipe)).items()}
        self._length_check = PromptLengthCheck(pipe, get_family(files.class_name), defaults, self._encoder_names)
        self._fingerprint = ""
        self._cache: dict[str, Condition] = {}
        self._loaded_encode: EncodeTexts | None = None
        self._exit_stack = ExitStack()
        self.store: TextStore | None = None

    def encode(self, texts: Sequence[str], device: torch.device) -> Condition:
        """Return one row per text, on the CPU; missing texts are encoded on the device and cached."""
        missing = [text for text in dict.fromkeys(texts) if not self._has_encoded(text)]
        if missing:
            with (
                self.load_encoders(device)
                if self._loaded_encode is None
                else nullcontext(self._loaded_encode) as encode_texts
            ):
                for text in missing:
                    self._cache[text] = encode_texts([text])
        if self.store is not None and not any(text in self._cache for text in texts):
            return dict(self.store.read(list(texts)))
        each = [self._read_row(text) for text in texts]
        while self._loaded_encode is not None and len(self._cache) > _MAX_CACHED_TEXTS:
            del self._cache[next(iter(self._cache))]
        return {name: torch.cat([row[name] for row in each]) for name in each[0]}

    def keep_loaded(self, device: torch.device) -> None:
        """Keep the encoders on the device, for prompts that are encoded one after the other."""
        if self._loaded_encode is None:
            self._loaded_encode = self._exit_stack.enter_context(self.load_encoders(device))

    def _has_encoded(self, text: str) -> bool:
        return text in self._cache or (self.store is not None and text in self.store)

    def _read_row(self, text: str) -> Mapping[str, Tensor]:
        if text in self._cache:
            return self._cache[text]
        assert self.store is not None
        return self.store.read([text])

    def truncates(self, text: str) -> bool:
        return self._length_check.truncates(text)

    @contextmanager
    def load_encoders(self, device: torch.device | str) -> Iterator[EncodeTexts]:
        """Load the text encoders to a device; they are freed when the context exits.

        Texts are encoded one at a time, so that an embedding depends on nothing else. One text of hundreds of tokens is
        enough to keep a text encoder busy.
        """
        pipe, place = self._pipe, torch.device(device)
        loaded = load_components(
            self._files, dtype=DTYPES[self._dtype], absent=other_components(self._files, self._encoder_names)
        )
        try:
            for name in self._encoder_names:
                setattr(pipe, name, getattr(loaded, name).to(place))
            check_tokenizers(self._files.path, pipe, get_family(self._files.class_name))
            del loaded

            @torch.no_grad()
            def encode(texts: Sequence[str]) -> Condition:
                rows = []
                for text in texts:
                    with torch.autocast(place.type, enabled=False):
                        row = self._family.encode(pipe, text, place)
                    rows.append({name: tensor.cpu() for name, tensor in row.items()})
                return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

            yield encode
        finally:
            for name in self._encoder_names:
                setattr(pipe, name, None)
            gc.collect()
            if place.type == "cuda":
                torch.cuda.empty_cache()

    def fingerprint(self) -> str:
        """Return a string that is equal if the same texts have the same embeddings."""
        if not self._fingerprint:
            tokenizers = tuple(name for name in self._files.components if name.startswith("tokenizer"))
            facts = [self._files.class_name, self._dtype, dict(self._family.token_lengths)]
            digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
            digest.update(components_fingerprint(self._files.path, (*self._encoder_names, *tokenizers)).encode())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint


def other_components(files: PipelineFiles, wanted: Collection[str]) -> list[str]:
    """Return the components with weights (not tokenizers, schedulers) other than `wanted`."""
    light = ("tokenizer", "scheduler")
    return [name for name in files.components if name not in wanted and not name.startswith(light)]
