"""Pinned host memory for copies of tensors, allocated once and kept between saves."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

import torch
from torch import Tensor

log = logging.getLogger(__name__)

_BLOCK_BYTES = 1 << 30  # torch rounds pinned memory up to a power of two
_ALIGNMENT_BYTES = 256


class PinnedCopies:
    """Copies by name, in memory that is kept; pinned where they come from a GPU, as pinning is slow."""

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}
        self._blocks: list[Tensor] = []
        self._used_bytes = 0
        self._reserve_thread: threading.Thread | None = None

    def reserve(self, sizes: Iterable[int]) -> None:
        """Allocate pinned memory for tensors of so many bytes in the background."""
        blocks, num_free = [], 0
        for size in sizes:
            size = _round_up(size)
            if size > num_free:
                blocks.append(max(_BLOCK_BYTES, size))
                num_free = blocks[-1]
            num_free -= size

        def allocate_blocks() -> None:
            try:
                for size in blocks:
                    self._blocks.append(torch.empty(size, dtype=torch.uint8, pin_memory=True))
            except (
                RuntimeError,
                MemoryError,
            ) as error:  # the first save then takes what it needs itself, or says that it cannot
                log.warning("no pinned memory ahead of the first checkpoint: %s", str(error).splitlines()[0])

        self._reserve_thread = threading.Thread(target=allocate_blocks, name="halation-host-memory", daemon=True)
        self._reserve_thread.start()

    def wait_reserved(self) -> None:
        """Until the memory is there that was asked for."""
        if self._reserve_thread is not None:
            self._reserve_thread.join()
            self._reserve_thread = None

    def copy(self, name: str, source: Tensor) -> Tensor:
        """Begin to copy; a GPU's copy is there when its stream has come so far."""
        self.wait_reserved()
        buffer = self.buffers.get(name)
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            buffer = self._allocate(source)
            self.buffers[name] = buffer
        buffer.copy_(source, non_blocking=True)
        return buffer

    def _allocate(self, source: Tensor) -> Tensor:
        size = source.numel() * source.element_size()
        while self._blocks and self._used_bytes + size > len(self._blocks[0]):
            self._blocks.pop(0)
            self._used_bytes = 0
        if not self._blocks or not source.is_cuda or not size:
            return torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        memory = self._blocks[0][self._used_bytes : self._used_bytes + size]
        self._used_bytes += _round_up(size)
        return memory.view(source.dtype).view(source.shape)


def _round_up(size: int) -> int:
    return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
