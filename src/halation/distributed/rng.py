"""Global random states of a rank, as JSON; Halation itself draws from none of them."""

from __future__ import annotations

import base64
import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def seed_all(seed: int, rank: int) -> None:
    """Give the states of a fresh run a beginning of their own, or python's and numpy's would come from the clock."""
    words = np.random.SeedSequence((seed, rank)).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.manual_seed(int(words[2]))


def seed_for_image(seed: int) -> None:
    """Seed the global states alike on every rank, for samplers that ignore the generator they are given.

    Not by torch.manual_seed, which would also seed a GPU that is not in use yet.
    """
    words = np.random.SeedSequence(seed).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.default_generator.manual_seed(int(words[2]))
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(int(words[2]))


@contextlib.contextmanager
def fork_rng() -> Iterator[None]:
    """Restore the states of python, numpy, torch and of every GPU in use at the end."""
    python, arrays, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
        torch.set_rng_state(cpu)
        if gpus:
            torch.cuda.set_rng_state_all(gpus)


def capture(device: torch.device) -> dict[str, Any]:
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [kind, _encode(np.asarray(keys).tobytes()), int(position), int(has_gauss), float(cached)],
        "torch": _encode(torch.get_rng_state().numpy().tobytes()),
    }
    if device.type == "cuda":
        state["cuda"] = _encode(torch.cuda.get_rng_state(device).numpy().tobytes())
    return state


def restore(state: dict[str, Any], device: torch.device) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.frombuffer(_decode(keys), np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_decode_tensor(state["torch"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_decode_tensor(state["cuda"]), device)


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _decode(text: str) -> bytes:
    return base64.b64decode(text)


def _decode_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(_decode(text)), dtype=torch.uint8)
