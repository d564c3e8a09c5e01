"""Runs a model on one device: generates a batch while the last one is encoded and stored.

`run_batch` and `dry_run` use micro-batches of one size, and smaller ones if memory runs out. `ImageRunner` runs the
tasks of a worker with them; all calls of the model are made on one thread. A batch starts only after the batch before
the last is stored, so a kill loses at most the batch in progress and, while its files are written, the one before it.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from halation.distributed.launcher import describe_device
from halation.errors import RESOURCE_ERRNOS, HalationError, InputError, format_count
from halation.fault_injection import fault_point
from halation.generation.image_requests import BatchTask, ImageRequest
from halation.generation.ledger import ImageOutcome
from halation.generation.metadata_and_summary import combined_digest, file_names
from halation.images.mp4_writer import encode_mp4
from halation.images.png_codec import encode_png, get_coder, metadata_texts
from halation.input_files import RefusedFileError
from halation.models.async_image_result import DRY_RUN, Frames, ImageError, NonFiniteImageError, OnStep, PendingImages
from halation.models.model_folder import bundled_folder
from halation.models.test_pattern import PatternTiming, TestPatternModel
from halation.runs import run_folder as runs
from halation.runs.lock import WatchedPath
from halation.sample_specs import SampleBatch, SampleSpec

log = logging.getLogger(__name__)
MAX_ENCODER_THREADS = 4
RETRY_WAITS_S = (0.1, 0.5, 2.0)
Result = TypeVar("Result")


class ImageModel(Protocol):
    """A diffusers pipeline, a Halation checkpoint or the test card."""

    facts: dict[str, Any]
    """Facts about the model that the run records."""

    def check(self, spec: SampleSpec) -> None:
        """Raise InputError if the model does not support the spec."""

    def draw(self, specs: Sequence[SampleSpec], on_step: OnStep) -> PendingImages:
        """Generate images for specs of one shape and guidance scale.

        `on_step` is called after each step of the solver.
        """


def open_model(settings: Mapping[str, Any]) -> ImageModel:
    """Load the model of a worker on its device; called on the thread that will use it."""
    model = settings["model"]
    if model["kind"] == "testcard":
        return TestPatternModel(PatternTiming(**{name: value for name, value in model.items() if name != "kind"}))
    import torch

    device = settings["device"]
    if device == "cpu":
        torch.set_num_threads(settings["threads"])
    else:
        torch.cuda.set_device(device)
    try:
        loaded_model = _open_pipeline(settings) if model["kind"] == "pipeline" else _open_checkpoint(settings)
    except RefusedFileError as error:
        raise error.as_input_error() from error
    loaded_model.facts["computes on"] = describe_device(device)
    return loaded_model


def _open_pipeline(settings: Mapping[str, Any]) -> ImageModel:
    from halation.models.pipelines.pipeline_model import open_pipeline

    names = ("dtype", "device", "scheduler", "offload", "compile", "arguments", "cfg_truncation_step", "half_frame")
    return open_pipeline(Path(settings["model"]["path"]), **{name: settings[name] for name in names})


def _open_checkpoint(settings: Mapping[str, Any]) -> ImageModel:
    from halation.models.checkpoint_loading import load_denoiser
    from halation.models.denoiser import DiTModel

    model = settings["model"]
    # On another machine, the package with its bundled models may be installed elsewhere.
    folder = bundled_folder(model["embedded"] or "") or Path(model["path"])
    denoiser = load_denoiser(folder, raw=settings["raw"], checked=True).to(settings["device"])
    denoiser.keep_text_encoders()
    return DiTModel(
        denoiser,
        device=settings["device"],
        dtype=settings["dtype"],
        sampler=settings["scheduler"] or model["sampler"],
        time_shift=model["time_shift"],
        truncate_from=settings["cfg_truncation_step"],
        compile=settings["compile"],
        own_sampler=model["sampler"],
    )


# -- micro-batches, on the thread that opened the model


@dataclass(frozen=True, kw_only=True)
class MicroBatchResult:
    """The rows of a batch that were generated in one forward."""

    rows: range
    result: PendingImages
    micro_batch: int
    """The micro-batch size used, including padding entries."""

    def collect(self, run_on_model_thread: Callable[[Callable[[], Any]], Any]) -> list[Frames | ImageError]:
        """Wait for the images; decode those that overflowed in half precision again in float32."""
        results = self.result.collect()[: len(self.rows)]
        overflowed = [row for row, result in enumerate(results) if isinstance(result, NonFiniteImageError)]
        repair = self.result.decode_in_float32
        if overflowed and repair is not None:
            for row, result in zip(overflowed, run_on_model_thread(lambda: repair(overflowed)), strict=True):
                results[row] = result
        return results


def run_batch(
    model: ImageModel, batch: SampleBatch, micro_batch: int, rows: Sequence[int], on_step: OnStep
) -> list[MicroBatchResult]:
    """Run the micro-batches that contain these rows; smaller ones if memory runs out."""
    for spec in {batch.specs[row].id for row in rows}:
        fault_point(f"paint.{spec}")
    fault_point("paint")
    results: list[MicroBatchResult] = []
    for start in range(0, len(batch.specs), micro_batch):
        micro_rows = range(start, min(start + micro_batch, len(batch.specs)))
        if any(row in micro_rows for row in rows):
            results.extend(_run_micro_batch(model, batch, micro_rows, micro_batch, on_step))
    return results


def _run_micro_batch(
    model: ImageModel, batch: SampleBatch, rows: range, micro_batch: int, on_step: OnStep
) -> Iterator[MicroBatchResult]:
    """Run these rows, padded to `micro_batch`; halve the size if memory runs out, down to one."""
    specs = [batch.specs[row] for row in rows]
    padded = specs + [specs[-1]] * (micro_batch - len(specs))
    try:
        for name in ("draw", *dict.fromkeys(f"draw.{spec.id}" for spec in specs)):
            fault_point(name)
        yield MicroBatchResult(rows=rows, result=model.draw(padded, on_step), micro_batch=micro_batch)
        return
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        if micro_batch == 1:
            raise ImageError(f"out of memory with one image at a time: {error}") from error
    free_memory()
    half = -(-micro_batch // 2)
    log.warning("out of memory with a micro-batch of %d: using %d for this batch", micro_batch, half)
    for part in (rows[:half], rows[half:]):
        if len(part):
            yield from _run_micro_batch(model, batch, part, half, on_step)


def dry_run(model: ImageModel, examples: Sequence[SampleSpec], batch_size: int, micro_batch: int) -> int:
    """Check one example of each shape and return the micro-batch.

    If the micro-batch is not known (0), generate the largest shape to measure how many images fit into memory.
    """
    for spec in examples:
        try:
            model.check(spec)
        except InputError as error:
            raise InputError(f"image {spec.id}: {error.found}", error.expected, error.action) from error
    if micro_batch:
        return micro_batch
    fault_point("rehearse")
    largest = max(examples, key=lambda spec: spec.height * spec.width * spec.num_frames)
    try:
        return _find_micro_batch(model, replace(largest, steps=min(largest.steps, 2)), batch_size)
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, HalationError) or largest.steps <= 2:
            raise
    # Some solvers need more than two steps: retry with the requested number.
    return _find_micro_batch(model, largest, batch_size)


def _find_micro_batch(model: ImageModel, spec: SampleSpec, size: int) -> int:
    while True:
        try:
            with force_eager():
                model.draw([spec] * size, lambda: None).collect()
            return size
        except Exception as error:
            if not is_out_of_memory(error) or size == 1:
                raise
        free_memory()
        log.warning(
            "a micro-batch of %s of %d x %d does not fit into memory",
            format_count(size, "image"),
            spec.height,
            spec.width,
        )
        size = -(-size // 2)


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def free_memory() -> None:
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def force_eager() -> Iterator[None]:
    """Run compiled blocks in eager mode, so that a dry run does not wait for the compiler."""
    torch = sys.modules.get("torch")
    token = DRY_RUN.set(True)
    try:
        with torch.compiler.set_stance("force_eager") if torch is not None else contextlib.nullcontext():
            yield
    finally:
        DRY_RUN.reset(token)


# -- files: encoding and storing are separate, because a cluster encodes next to the GPU and stores next to the folder


class DiskWriteError(HalationError):
    """The disk does not accept images; other batches would fail too."""


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """Options for encoding images; fixed for a run because they affect the bytes of the files."""

    model: str
    sampler: str
    coder: str
    fps: int


@dataclass(frozen=True, kw_only=True)
class EncodedImage:
    """The names and bytes of the files of one image; frames of a video come before the video."""

    files: tuple[tuple[str, bytes], ...]
    sha256: str

    @property
    def num_bytes(self) -> int:
        return sum(len(data) for _, data in self.files)


def encode_image(request: ImageRequest, frames: object, options: EncodeOptions) -> EncodedImage:
    """Encode one image, or one video with all its frames."""
    assert isinstance(frames, np.ndarray)
    text = metadata_texts(request.spec.as_json(), model=options.model, sampler=options.sampler)
    compress = get_coder(options.coder)
    names = file_names(request.name, len(frames))
    if len(frames) == 1:
        data = encode_png(frames[0], text, compress)
        return EncodedImage(files=((names[0], data),), sha256=combined_digest([data]))
    video = encode_mp4(frames, options.fps, text)
    images = [encode_png(frame, text, compress) for frame in frames]
    # The video is published last: if it exists, its frames exist too.
    return EncodedImage(
        files=(*zip(names[1:], images, strict=True), (names[0], video)), sha256=combined_digest([video, *images])
    )


class ImageStore:
    """Publishes encoded images into a folder; retries a few times on temporary disk errors.

    A folder that was removed, moved, replaced or made read-only is not retried.
    """

    def __init__(self, folder: Path, identity: Sequence[int] | None = None) -> None:
        """`identity` is the device and inode of the folder when the command started; default: now."""
        self.folder = folder
        self.watched = WatchedPath(folder, (identity[0], identity[1]) if identity else None)
        self.has_given_up = False
        """True once the disk has failed permanently: no other thread retries, and the run ends."""

    def __call__(self, encoded_image: EncodedImage) -> None:
        for wait_s in (*RETRY_WAITS_S, None):
            self._check_folder()
            try:
                self._publish(encoded_image)
                return
            except OSError as error:
                self._check_folder()
                if error.errno not in RESOURCE_ERRNOS:
                    raise
                if wait_s is None or self.has_given_up:
                    self.has_given_up = True
                    path = error.filename or self.folder
                    raise DiskWriteError(
                        f"cannot write {path}: {error.strerror}; fix the cause (for a full disk, free some space) "
                        "and run the same command again"
                    ) from error
                time.sleep(wait_s)

    def _check_folder(self) -> None:
        problem = self.watched.find_problem()
        if problem:
            self.has_given_up = True
            raise DiskWriteError(problem)

    def _publish(self, encoded_image: EncodedImage) -> None:
        *frames, (name, data) = encoded_image.files
        if frames:
            self._publish_frames(frames)
        runs.write_atomic(self.folder / name, data, point="picture")

    def _publish_frames(self, files: list[tuple[str, bytes]]) -> None:
        """Publish all frames together; keep equal ones.

        Another command that shares the folder may have generated them.
        """
        target = self.folder / Path(files[0][0]).parent
        temporary = runs.temporary_path(target)
        temporary.mkdir()
        try:
            for name, data in files:
                (temporary / Path(name).name).write_bytes(data)
            if not _has_same_files(target, files):
                runs.publish_folder(temporary, target, "frames")
        finally:
            runs.remove_path(temporary)


def _has_same_files(target: Path, files: list[tuple[str, bytes]]) -> bool:
    """Return True if the folder already holds exactly these files."""
    try:
        return (
            not target.is_symlink()
            and len(os.listdir(target)) == len(files)
            and all((target / Path(name).name).read_bytes() == data for name, data in files)
        )
    except OSError:
        return False


# -- tasks: generate, encode and store, overlapped


class TaskDropped(Exception):
    """The task was taken back before it started."""


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """The outcomes of a finished task, and the seconds the device spent on it."""

    outcomes: list[ImageOutcome]
    busy_s: float


class ImageRunner:
    """Runs tasks with one model; calls of `run_task` from several threads overlap."""

    model: ImageModel

    def __init__(
        self,
        settings: Mapping[str, Any],
        store: Callable[[EncodedImage], None] | None = None,
        open_model: Callable[[Mapping[str, Any]], ImageModel] = open_model,
    ) -> None:
        """`store` receives the encoded images; by default it writes them into the run folder."""
        self._open_model = open_model
        self.settings = settings
        self.encode_options = EncodeOptions(**settings["style"])
        self.label: str = settings["label"]
        self.store = store or ImageStore(Path(settings["folder"]), settings.get("folder_identity"))
        self._model_thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        num_encoders = min(MAX_ENCODER_THREADS, os.cpu_count() or 1)
        self._encoder_threads = ThreadPoolExecutor(num_encoders, thread_name_prefix="encoding")
        self._unstored_batches = threading.Semaphore(2)
        self._lock = threading.Lock()
        self._dropped_tasks: set[int] = set()
        self._busy_until = 0.0

    def prepare(self) -> None:
        """Load the model on the thread that will use it."""
        self.model = self._run_on_model_thread(lambda: self._open_model(self.settings))

    def close(self) -> None:
        """End the threads; all tasks must be done."""
        self._model_thread.shutdown()
        self._encoder_threads.shutdown()

    def _run_on_model_thread(self, action: Callable[[], Result]) -> Result:
        return self._model_thread.submit(action).result()

    def dry_run(self, examples: list[SampleSpec], batch_size: int, micro_batch: int) -> int:
        return self._run_on_model_thread(lambda: dry_run(self.model, examples, batch_size, micro_batch))

    def drop(self, number: int | None) -> None:
        """Drop a task that has not started; None drops all current and later tasks."""
        with self._lock:
            self._dropped_tasks.add(-1 if number is None else number)

    def run_task(self, task: BatchTask, on_begin: Callable[[], None], on_step: OnStep) -> TaskResult:
        """Run the model, encode and store; a failed image has an outcome with its reason."""
        rows = [row for row, request in enumerate(task.requests) if request.spec.index in task.wanted]

        def run_model() -> tuple[float, list[MicroBatchResult]]:
            with self._lock:
                if self._dropped_tasks & {-1, task.number}:
                    self._dropped_tasks.discard(task.number)  # it may be submitted again if its new worker dies
                    raise TaskDropped
            on_begin()
            return time.perf_counter(), run_batch(self.model, task.batch, task.micro_batch, rows, on_step)

        with self._unstored_batches:
            start_time, micro_batch_results = self._run_on_model_thread(run_model)
            results: dict[int, tuple[Any, int]] = {}
            for each in micro_batch_results:
                for row, result in zip(each.rows, each.collect(self._run_on_model_thread), strict=True):
                    results[row] = (result, each.micro_batch)
            seconds = self._measure_busy_s(start_time)
            image_s = seconds / max(1, len(task.wanted))
            futures = [
                self._encoder_threads.submit(self._encode_and_store, task, task.requests[row], *results[row], image_s)
                for row in rows
            ]
            wait(futures)  # a failed batch may be retried immediately: no file of it may still be in flight
            return TaskResult(outcomes=[future.result() for future in futures], busy_s=seconds)

    def _measure_busy_s(self, start_time: float) -> float:
        """Return the seconds since `start_time` not yet counted for another batch.

        On a GPU, the times of two batches overlap.
        """
        with self._lock:
            now = time.perf_counter()
            seconds = now - max(start_time, self._busy_until)
            self._busy_until = now
            return seconds

    def _encode_and_store(
        self, task: BatchTask, request: ImageRequest, result: Any, size: int, seconds: float
    ) -> ImageOutcome:
        index = request.spec.index
        if isinstance(result, ImageError):
            return ImageOutcome(index=index, state="failed", worker=self.label, reason=str(result))
        try:
            fault_point("encode")
            encoded_image = encode_image(request, result, self.encode_options)
        except Exception as error:
            log.exception("image %s could not be encoded", request.spec.id)
            reason = f"could not be encoded: {type(error).__name__}: {error}"
            return ImageOutcome(index=index, state="failed", worker=self.label, reason=reason)
        self.store(encoded_image)
        return ImageOutcome(
            index=index,
            state="done",
            sha256=encoded_image.sha256,
            num_bytes=encoded_image.num_bytes,
            worker=self.label,
            seconds=round(seconds, 4),
            micro_batch=0 if size == task.micro_batch else size,
        )
