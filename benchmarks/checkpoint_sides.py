"""The sides of the checkpoint duel: four ways to put the same tensors on a disk while somebody wants to go on training."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

State = dict[str, dict[str, Tensor]]


class Side:
    """A way to save; `save` returns when training may go on."""

    def save(self, state: State) -> None:
        raise NotImplementedError

    def busy(self) -> bool:
        return False

    def before_update(self) -> None:
        """Called before the weights change."""

    def finish(self) -> None:
        """Until everything is written; then there is room for the next."""


class Ours(Side):
    """`world.checkpoint` as a run of one rank uses it; only the newest stays on disk."""

    def __init__(self, world: Any, folder: Path) -> None:
        from halation.world.checkpoint import Checkpoints

        self.checkpoints = Checkpoints(world, folder, keep_last=1, sharded=False)
        self.folder, self.step = folder, 0

    def save(self, state: State) -> None:
        from halation.world.engines import piece

        self.step += 1
        parts = {part: {name: piece(tensor) for name, tensor in tensors.items()} for part, tensors in state.items()}
        self.checkpoints.save(self.step, "latest", parts, {}, {})

    def busy(self) -> bool:
        pending = self.checkpoints.pending
        return pending is not None and pending.is_alive()

    def finish(self) -> None:
        self.checkpoints.wait()
        self.checkpoints.raise_error()


class TorchSave(Side):
    """One file, written before training goes on."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.file = folder / "state.pt"

    def save(self, state: State) -> None:
        torch.save(state, self.file)


class Dcp(Side):
    """`async_save` by thread: as it comes, or with a stager of pinned memory that is kept between saves.

    `hidden` copies on a stream of its own while the next step computes, and the update of the weights waits for it.
    """

    def __init__(self, folder: Path, group: Any, *, pinned: bool = False, hidden: bool = False) -> None:
        from torch.distributed.checkpoint import staging

        self.folder, self.group, self.hidden = folder, group, hidden
        self.stager: Any = None
        if pinned or hidden:
            self.stager = staging.DefaultStager(
                staging.StagingOptions(
                    use_pinned_memory=True,
                    use_shared_memory=False,
                    use_async_staging=hidden,
                    use_non_blocking_copy=True,
                )
            )
        self.written: Any = None
        self.staged: Any = None

    def save(self, state: State) -> None:
        from torch.distributed.checkpoint import async_save

        options: dict[str, Any] = {} if self.stager is None else {"async_stager": self.stager}
        if self.hidden:
            torch.cuda.current_stream().synchronize()  # its stream does not know what is still being computed
        found: Any = async_save(state, checkpoint_id=self.folder, process_group=self.group, **options)
        self.staged = getattr(found, "staging_completion", None)
        self.written = getattr(found, "upload_completion", found)

    def busy(self) -> bool:
        return self.written is not None and not self.written.done()

    def before_update(self) -> None:
        if self.staged is not None:
            self.staged.result()
            self.staged = None

    def finish(self) -> None:
        if self.written is not None:
            self.written.result()
            self.written = None
        shutil.rmtree(self.folder, ignore_errors=True)
