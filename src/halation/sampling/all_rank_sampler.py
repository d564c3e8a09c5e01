"""Batches of specs drawn by all ranks of a world, round by round; how one batch is drawn is a subclass's, never this file's.

No collective is open while ranks draw (unless the model is sharded, where every forward is one), so a slow sampler cannot run
into a timeout, and a rank that fails tells the others in a word instead of leaving them at a barrier.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch

from halation import work_division
from halation.distributed import rng
from halation.distributed.world import HeartbeatMonitor, World
from halation.sample_specs import SampleBatch, SampleSpec
from halation.sampling.sample_folder import SampleFolder, SampleRow, is_drawn

log = logging.getLogger(__name__)

ShareMode = Literal["round", "contiguous"]


class BatchClaims:
    """Batches for this rank, one after the other, for as long as any is left in its own share or in another's.

    Each share has a counter in the store, which hands out every batch but the first to whoever asks first. The first is its
    owner's without asking: however late a rank begins, it draws.
    """

    def __init__(self, world: World, name: str, num_batches: int) -> None:
        self.world = world
        self.prefix = f"claims/{name}"
        self.can_steal = True
        self.shares = [work_division.rank_range(num_batches, world.size, rank) for rank in range(world.size)]

    def __iter__(self) -> Iterator[int]:
        rank = self.world.rank
        yield from self.shares[rank][:1]
        while (batch := self._claim(rank)) is not None:
            yield batch
        while self.can_steal and (owner := work_division.most_loaded_rank(self._count_unclaimed())) is not None:
            batch = self._claim(owner)
            if batch is not None:  # else somebody was faster
                yield batch

    def stop_stealing(self) -> None:
        """Help nobody from now on: a rank whose images fail at once would take everybody's."""
        self.can_steal = False

    def close(self) -> None:
        """Leave nothing to claim, to anybody."""
        for owner, share in enumerate(self.shares):
            self._add_to_counter(owner, len(share))

    def _claim(self, owner: int) -> int | None:
        share = self.shares[owner]
        number = self._add_to_counter(owner, 1) if len(share) > 1 else 1
        return share[number] if number < len(share) else None

    def _count_unclaimed(self) -> list[int]:
        return [
            len(share) - 1 - self._add_to_counter(owner, 0) if len(share) > 1 else 0
            for owner, share in enumerate(self.shares)
        ]

    def _add_to_counter(self, owner: int, increment: int) -> int:
        number: int = self.world.store.add(f"{self.prefix}/{owner}", increment)
        return number


_UNREADABLE = object()


class _TorchSetting(NamedTuple):
    """A state of torch that the whole process, or this thread, shares."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


def _attribute(owner: Any, name: str) -> _TorchSetting:
    return _TorchSetting(lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def _autocast_settings(kind: str) -> tuple[_TorchSetting, _TorchSetting]:
    return (
        _TorchSetting(lambda: torch.is_autocast_enabled(kind), lambda on: torch.set_autocast_enabled(kind, on)),
        _TorchSetting(lambda: torch.get_autocast_dtype(kind), lambda dtype: torch.set_autocast_dtype(kind, dtype)),
    )


def _autocast_depth() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _set_autocast_depth(depth: int) -> None:
    """Regions that were entered and never left: torch would never again drop its casts of weights that steps change."""
    while _autocast_depth() < depth:
        torch.autocast_increment_nesting()
    while _autocast_depth() > depth:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def _set_autocast_cache(enabled: bool) -> None:
    torch.clear_autocast_cache()  # with the other setting it may hold casts that were made without gradients
    torch.set_autocast_cache_enabled(enabled)


def _default_device() -> torch.device | None:
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _current_gpu() -> tuple[int, Any]:
    return (torch.cuda.current_device(), torch.cuda.current_stream()) if torch.cuda.is_initialized() else (0, None)


def _set_current_gpu(state: tuple[int, Any]) -> None:
    device, stream = state
    torch.cuda.set_device(device)
    if stream is not None:
        torch.cuda.set_stream(stream)


def _flushes_denormals() -> bool:
    smallest = sys.float_info.min
    return smallest / 2 == 0.0


def _torch_settings() -> list[_TorchSetting]:
    """What a forward, a backward or a step of training may depend on besides weights, modes and random states."""
    backends: Any = torch.backends
    cudnn, mkldnn = backends.cudnn, backends.mkldnn
    precisions = (backends, cudnn, backends.cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn)
    return [
        _TorchSetting(_default_device, torch.set_default_device),
        _TorchSetting(torch.get_default_dtype, torch.set_default_dtype),
        _TorchSetting(torch.get_num_threads, torch.set_num_threads),
        _TorchSetting(_flushes_denormals, torch.set_flush_denormal),
        *_autocast_settings("cpu"),
        *_autocast_settings("cuda"),
        _TorchSetting(torch.is_autocast_cache_enabled, _set_autocast_cache),
        _TorchSetting(_autocast_depth, _set_autocast_depth),
        _TorchSetting(
            lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            lambda state: torch.set_anomaly_enabled(*state),
        ),
        _TorchSetting(
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            lambda state: torch.use_deterministic_algorithms(state[0], warn_only=state[1]),
        ),
        _attribute(torch.utils.deterministic, "fill_uninitialized_memory"),
        *(_attribute(cudnn, name) for name in ("enabled", "benchmark", "deterministic", "allow_tf32")),
        *(_attribute(mkldnn, name) for name in ("enabled", "deterministic")),
        _TorchSetting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        *(
            _attribute(backends.cuda.matmul, f"allow_{name}")
            for name in (
                "tf32",
                "fp16_reduced_precision_reduction",
                "bf16_reduced_precision_reduction",
                "fp16_accumulation",
            )
        ),
        # After the older names of the same numbers: setting those changes these.
        *(_attribute(owner, "fp32_precision") for owner in precisions),
        _TorchSetting(backends.cuda.flash_sdp_enabled, backends.cuda.enable_flash_sdp),
        _TorchSetting(backends.cuda.mem_efficient_sdp_enabled, backends.cuda.enable_mem_efficient_sdp),
        _TorchSetting(backends.cuda.math_sdp_enabled, backends.cuda.enable_math_sdp),
        _TorchSetting(backends.cuda.cudnn_sdp_enabled, backends.cuda.enable_cudnn_sdp),
        _TorchSetting(
            backends.cuda.fp16_bf16_reduction_math_sdp_allowed, backends.cuda.allow_fp16_bf16_reduction_math_sdp
        ),
        _TorchSetting(backends.mha.get_fastpath_enabled, backends.mha.set_fastpath_enabled),
        _TorchSetting(_current_gpu, _set_current_gpu),
    ]


def _read_setting(setting: _TorchSetting) -> Any:
    """torch refuses the older name of a setting that was made by its newer name; that one is read too."""
    try:
        return setting.read()
    except RuntimeError:
        return _UNREADABLE


@contextlib.contextmanager
def preserve_torch_settings() -> Iterator[None]:
    """Restore how torch computes: precision, threads, algorithms, autocast, default dtype, devices, gradients."""
    before = [(setting, _read_setting(setting)) for setting in _torch_settings()]
    has_gradients = torch.is_grad_enabled()
    try:
        with torch.inference_mode(torch.is_inference_mode_enabled()), torch.set_grad_enabled(has_gradients):
            yield
    finally:
        for _ in range(2):  # older and newer names of one precision: writing the one may change what the other says
            for setting, value in before:
                if value is not _UNREADABLE and _read_setting(setting) != value:
                    setting.write(value)


class ImageSink(Protocol):
    """Where the images of a batch go; what it raises costs that batch and nothing else."""

    def put(self, batch: SampleBatch, images: Mapping[int, np.ndarray], rows: Sequence[SampleRow]) -> None:
        """Take what was drawn, by its place in the batch; a place without an image has failed."""

    def finish(self) -> None: ...


class SpecSampler(ABC):
    """One drawing of a list of specs by all ranks of a world.

    Batches go round the ranks, or are shared out contiguously; then, unless every forward is a collective, a rank that is done takes
    over what others have not begun.
    """

    def __init__(
        self,
        world: World,
        *,
        sharded: bool,
        timeout_s: float,
        stop: Callable[[], int],
        share_mode: ShareMode = "round",
    ) -> None:
        self.world = world
        self.sharded = sharded
        self.timeout_s = timeout_s
        self.stop = stop
        self.share_mode = share_mode

    @abstractmethod
    def _draw_batch(
        self, batch: SampleBatch | None, template: SampleBatch, sink: ImageSink, monitor: HeartbeatMonitor
    ) -> list[SampleRow]:
        """One batch, or the company that a rank without one keeps to the others, of the batch `template`'s shape."""

    @abstractmethod
    def _preserve_training_state(self) -> AbstractContextManager[None]:
        """What stands around the drawing, so that whoever trains does not notice it."""

    def find_missing(self, sample_folder: SampleFolder, batches: Sequence[SampleBatch]) -> list[int]:
        """The batches of which an image is not there, the same list on every rank."""
        found: list[int] = self.world.broadcast_from_rank_zero(
            self._find_missing(sample_folder, batches) if self.world.is_rank_zero else None
        )
        return found

    def draw_batches(
        self, batches: Sequence[SampleBatch], todo: Sequence[int], sink: ImageSink, label: str
    ) -> list[SampleRow]:
        """Draw these batches, the same list on every rank; every rank returns the rows of all images that were drawn or failed."""
        rows: list[SampleRow] = []
        with (
            HeartbeatMonitor(self.world, label, self.timeout_s) as monitor,
            rng.fork_rng(),
            self._preserve_training_state(),
        ):
            try:
                can_claim = self.share_mode == "contiguous" and not self.sharded
                turns = self._iter_claims(len(todo), label, rows) if can_claim else self._iter_rounds(len(todo))
                for batch_index in turns:
                    monitor.check_peers()
                    batch = None if batch_index is None else batches[todo[batch_index]]
                    with preserve_torch_settings():
                        rows.extend(self._draw_batch(batch, batches[0], sink, monitor))
            finally:
                sink.finish()
            rows_by_rank = monitor.gather_results(rows)
        rows = [row for word in rows_by_rank for row in word]
        self._log_remote_failures([row for row in rows if row["state"] == "failed" and row["rank"] != self.world.rank])
        return rows

    def _iter_rounds(self, num_batches: int) -> Iterator[int | None]:
        """The batches of this rank, in rounds; sharded ranks take a filler where they have none, to keep the others company."""
        assign = work_division.round_robin_batch if self.share_mode == "round" else work_division.contiguous_batch
        for turn in range(work_division.num_rounds(num_batches, self.world.size)):
            if self._should_stop():
                return
            batch_index = assign(turn, self.world.rank, self.world.size, num_batches)
            if batch_index is None and not self.sharded:
                return
            yield batch_index

    def _iter_claims(self, num_batches: int, label: str, rows: Sequence[SampleRow]) -> Iterator[int]:
        """The batches of this rank's share, and of others' for as long as everything it drew (`rows`) went well."""
        claims = BatchClaims(self.world, label, num_batches)
        for batch_index in claims:
            if self._should_stop():
                claims.close()
                return
            yield batch_index
            if any(row["state"] == "failed" for row in rows):
                claims.stop_stealing()

    def _find_missing(self, sample_folder: SampleFolder, batches: Sequence[SampleBatch]) -> list[int]:
        with contextlib.suppress(OSError):  # a disk that cannot be written costs the samples, not the training
            sample_folder.create()
        return [
            number
            for number, batch in enumerate(batches)
            if not all(is_drawn(sample_folder, spec) for spec in batch.real_specs)
        ]

    def _should_stop(self) -> bool:
        """Between batches a person's wish to stop is granted; sharded ranks must all grant it at once."""
        if not self.sharded:
            return self.stop() != 0
        return any(self.world.all_gather_object(self.stop()))

    def _run_phase(self, rows: list[SampleRow], action: Callable[[], Any]) -> Any:
        """Run one phase of one batch; an error costs this batch's images and nothing else."""
        try:
            return action()
        except Exception as error:  # noqa: BLE001 - whatever an image dies of, the others are drawn
            log.debug("while sampling:\n%s", traceback.format_exc())
            self._mark_failed(rows, f"{type(error).__name__}: {error}")
            return None

    def _log_remote_failures(self, rows: Sequence[SampleRow]) -> None:
        """What failed on other ranks, into this rank's log."""
        for row in rows:
            log.error("Error during sampling on GPU %d: %s", row["rank"], row["reason"])

    def _mark_failed(self, rows: list[SampleRow], reason: str) -> None:
        log.error("Error during sampling on GPU %d: %s", self.world.rank, reason)
        for row in rows:
            row |= {"state": "failed", "reason": reason}


def make_row(spec: SampleSpec, rank: int) -> SampleRow:
    return {
        "index": spec.index,
        "prompt": spec.prompt,
        "seed": spec.seed,
        "rank": rank,
        "seconds": 0.0,
        "state": "done",
        "reason": "",
    }


def complete_rows(
    specs: Sequence[SampleSpec], rows: Sequence[SampleRow], sample_folder: SampleFolder
) -> list[SampleRow]:
    """One row a spec, in order: what was drawn now, what was there already, and what is still open."""
    by_index = {row["index"]: row for row in rows}
    result = []
    for spec in specs:
        row = by_index.get(spec.index) or make_row(spec, -1) | {
            "state": "done" if is_drawn(sample_folder, spec) else "open"
        }
        result.append(row | {"file": sample_folder.image_path(spec).name})
    return result
