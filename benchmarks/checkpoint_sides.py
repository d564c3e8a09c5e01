"""The sides of the checkpoint duel: three ways to put the same tensors on a disk while somebody wants to go on training."""

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
        """Returns when training may go on."""

    def busy(self) -> bool:
        return False

    def before_update(self) -> None:
        """Called before the weights change."""
        return

    def finish(self) -> None:
        """Until everything is written; then there is room for the next."""
        return


class Ours(Side):
    """`world.checkpoint` as a run of one rank uses it; only the newest stays on disk."""

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
    """One file, written before training goes on."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.file = folder / "state.pt"

    def save(self, state: State) -> None:
        torch.save(state, self.file)


class Dcp(Side):
    """`async_save` by thread, as it comes."""

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
