"""Tensors to a safetensors file in one pass: written and hashed straight from their memory, with no copy and hardly ever the GIL."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

_CHUNK = 1 << 26
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Write and return the SHA-256 of the file's bytes. The library's own writer copies every tensor first, and holds the GIL while
    a training waits for it; a hash taken afterwards reads everything once more."""
    digest = hashlib.sha256()
    with open(path, "wb", buffering=0) as file, ThreadPoolExecutor(1, thread_name_prefix="halation-hash") as threads:
        for chunk in _content(tensors, metadata):
            hashed = threads.submit(digest.update, chunk)
            rest = chunk
            while rest:
                rest = rest[os.write(file.fileno(), rest) :]
            hashed.result()
    return digest.hexdigest()


def _content(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[memoryview]:
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    start = 0
    for name, tensor in tensors.items():
        end = start + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    words = json.dumps(header, separators=(",", ":")).encode()
    words += b" " * (-len(words) % 8)  # numbers then lie where a mapped file can be read as numbers
    yield memoryview(len(words).to_bytes(8, "little") + words)
    for tensor in tensors.values():
        flat: memoryview = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        for at in range(0, len(flat), _CHUNK):
            yield flat[at : at + _CHUNK]
