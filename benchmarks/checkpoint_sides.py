"""The sides of the checkpoint duel: three ways to save the same tensors during training."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

State = dict[str, dict[str, Tensor]]


class Side(Protocol):
    """A way to save."""

    def save(self, state: State) -> None:
        """Save; return when training may continue."""

    def busy(self) -> bool:
        return False

    def before_update(self) -> None:
        """Wait until the weights may change."""
        return

    def finish(self) -> None:
        """Wait until everything is written, and make room for the next save."""
        return


class Ours(Side):
    """`CheckpointWriter` as in a run with one rank; only the newest checkpoint stays on disk."""

    def __init__(self, world: Any, folder: Path, state: State) -> None:
        from halation.distributed.checkpoint.writer import CheckpointWriter

        self.checkpoints = CheckpointWriter(world, folder, keep_last=1, sharded=False)
        self.checkpoints.reserve(tensor.nbytes for tensors in state.values() for tensor in tensors.values())
        self.checkpoints.copies.wait_reserved()  # a run does this while it compiles
        self.folder, self.step = folder, 0

    def save(self, state: State) -> None:
        from halation.distributed.engines.ddp_fsdp import local_shard

        self.step += 1
        parts = {
            part: {name: local_shard(tensor) for name, tensor in tensors.items()} for part, tensors in state.items()
        }
        self.checkpoints.save(self.step, "latest", parts, {}, {})

    def before_update(self) -> None:
        self.checkpoints.wait_for_copy()

    def busy(self) -> bool:
        pending = self.checkpoints.pending
        return pending is not None and pending.is_alive()

    def finish(self) -> None:
        self.checkpoints.wait()
        self.checkpoints.raise_if_failed()


class TorchSave(Side):
    """`torch.save` to one file, written before training continues."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.file = folder / "state.pt"

    def save(self, state: State) -> None:
        torch.save(state, self.file)


class Dcp(Side):
    """DCP's `async_save` in a thread, with its defaults."""

    def __init__(self, folder: Path, group: Any) -> None:
        self.folder, self.group = folder, group
        self.written: Any = None

    def save(self, state: State) -> None:
        from torch.distributed.checkpoint import async_save

        found: Any = async_save(state, checkpoint_id=self.folder, process_group=self.group)
        self.written = getattr(found, "upload_completion", found)

    def busy(self) -> bool:
        return self.written is not None and not self.written.done()

    def finish(self) -> None:
        if self.written is not None:
            self.written.result()
            self.written = None
        shutil.rmtree(self.folder, ignore_errors=True)
