"""The texts of a pipeline in training: encoders that come and go, embeddings that stay, and a name for what decides them."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from halation.models.denoiser import Condition
from halation.models.pipelines.arguments import call_parameters
from halation.models.pipelines.families import family_of
from halation.models.pipelines.folder_check import PipelineFiles
from halation.models.pipelines.load import load_parts
from halation.models.pipelines.options import DTYPES
from halation.models.pipelines.tokenizers import TextLimit, check_tokenizers
from halation.models.pipelines.training.family import TrainedFamily

_MOST_KEPT = 64
_NUM_WINDOWS, _WINDOW = 64, 1 << 14
Encode = Callable[[Sequence[str]], Condition]


class TextStore(Protocol):
    """Embeddings by text."""

    def __contains__(self, text: str) -> bool: ...

    def read(self, texts: Sequence[str]) -> Mapping[str, Tensor]: ...


class PipelineTexts:
    """Texts to embeddings: from a store, from memory, or from encoders that are loaded for a moment."""

    def __init__(self, *, files: PipelineFiles, pipe: Any, family: TrainedFamily, dtype: str) -> None:
        self._files = files
        self._pipe = pipe
        self._family = family
        self._dtype = dtype
        self._encoders = tuple(name for name in files.components if name.startswith("text_encoder"))
        defaults = {name: parameter.default for name, parameter in call_parameters(type(pipe)).items()}
        self._limit = TextLimit(pipe, family_of(files.class_name), defaults, self._encoders)
        self._fingerprint = ""
        self._kept: dict[str, Condition] = {}
        self._held: Encode | None = None
        self._staying = ExitStack()
        self.store: TextStore | None = None

    def rows(self, texts: Sequence[str], device: torch.device) -> Condition:
        """One row a text, on the CPU; what nobody has encoded yet is encoded now, on the device, and kept."""
        missing = [text for text in dict.fromkeys(texts) if not self._knows(text)]
        if missing:
            with self.encoders(device) if self._held is None else nullcontext(self._held) as encode:
                for text in missing:
                    self._kept[text] = encode([text])
        if self.store is not None and not any(text in self._kept for text in texts):
            return dict(self.store.read(list(texts)))
        each = [self._one(text) for text in texts]
        while self._held is not None and len(self._kept) > _MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        return {name: torch.cat([row[name] for row in each]) for name in each[0]}

    def hold(self, device: torch.device) -> None:
        """Keep the encoders on the device, for whoever draws prompts that come one after the other."""
        if self._held is None:
            self._held = self._staying.enter_context(self.encoders(device))

    def _knows(self, text: str) -> bool:
        return text in self._kept or (self.store is not None and text in self.store)

    def _one(self, text: str) -> Mapping[str, Tensor]:
        if text in self._kept:
            return self._kept[text]
        assert self.store is not None
        return self.store.read([text])

    def cuts(self, text: str) -> bool:
        return self._limit.cuts(text)

    @contextmanager
    def encoders(self, device: torch.device | str) -> Iterator[Encode]:
        """The text encoders on a device; when this ends they are gone.

        Each text goes through alone, so that its embedding depends on nothing else; a text encoder that reads hundreds of tokens
        is busy enough with one.
        """
        pipe, place = self._pipe, torch.device(device)
        loaded = load_parts(self._files, dtype=DTYPES[self._dtype], absent=others(self._files, self._encoders))
        try:
            for name in self._encoders:
                setattr(pipe, name, getattr(loaded, name).to(place))
            check_tokenizers(self._files.path, pipe, family_of(self._files.class_name))
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
            for name in self._encoders:
                setattr(pipe, name, None)
            gc.collect()
            if place.type == "cuda":
                torch.cuda.empty_cache()

    def fingerprint(self) -> str:
        """Equal where the same texts become the same embeddings."""
        if not self._fingerprint:
            tokenizers = tuple(name for name in self._files.components if name.startswith("tokenizer"))
            facts = [self._files.class_name, self._dtype, dict(self._family.lengths)]
            digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
            digest.update(fingerprint_of(self._files, (*self._encoders, *tokenizers)).encode())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint


def others(files: PipelineFiles, wanted: Collection[str]) -> list[str]:
    """The components that hold weights, besides those wanted; tokenizers and schedulers weigh nothing."""
    light = ("tokenizer", "scheduler")
    return [name for name in files.components if name not in wanted and not name.startswith(light)]


def fingerprint_of(files: PipelineFiles, names: Collection[str]) -> str:
    """A hash over components' files: small ones whole, weights by size and many windows, the first over their header.

    Other weights differ nearly everywhere, so windows tell them apart in a moment where reading tens of gigabytes takes minutes; a
    single damaged byte they may miss.
    """
    digest = hashlib.sha256()
    for name in sorted(names):
        for file in sorted(path for path in (files.path / name).iterdir() if path.is_file()):
            if file.suffix in (".safetensors", ".json", ".txt", ".model", ".tiktoken"):
                digest.update(f"{name}/{file.name} {file.stat().st_size}\n".encode())
                _add(digest, file)
    return digest.hexdigest()


def _add(digest: Any, file: Path) -> None:
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= 4 * _NUM_WINDOWS * _WINDOW:
            digest.update(stream.read())
            return
        for place in range(_NUM_WINDOWS):
            stream.seek((size - _WINDOW) * place // (_NUM_WINDOWS - 1))
            digest.update(stream.read(_WINDOW))
