"""How fast a run is, and could be: pictures a second, and the device's own matrix rate, against which MFU is counted."""

from __future__ import annotations

import time

import torch


class Window:
    """Throughput since the last pause, so that a save or a sampling does not look like slow training."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.began = time.perf_counter()
        self.pictures = 0
        self.recent: list[tuple[float, int]] = []

    def add(self, pictures: int) -> None:
        self.pictures += pictures
        self.recent = [*self.recent[-49:], (time.perf_counter(), self.pictures)]

    def pictures_per_s(self) -> float:
        then, before = self.recent[0] if len(self.recent) > 1 else (self.began, 0)
        now, pictures = self.recent[-1]
        return (pictures - before) / max(now - then, 1e-9)


def matrix_rate(device: torch.device, dtype: str) -> float:
    """Floating-point operations a second of a large matrix product in the training precision, on this device, now."""
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    size, repeats = (8192, 10) if device.type == "cuda" else (512, 3)
    # Not zeros, on which some devices run faster than on numbers; not random, to leave every generator alone.
    ramp = torch.arange(size * size, device=device, dtype=torch.float32).reshape(size, size).sin()
    matrix = ramp.to(kind)
    for _ in range(2):
        matrix @ matrix
    _finish(device)
    began = time.perf_counter()
    for _ in range(repeats):
        matrix @ matrix
    _finish(device)
    return 2 * size**3 * repeats / (time.perf_counter() - began)


def memory_gb(device: torch.device) -> float:
    """Most memory this rank has held so far: on a GPU what torch allocated, on a CPU the resident size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import psutil

    return float(psutil.Process().memory_info().rss) / 2**30


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
