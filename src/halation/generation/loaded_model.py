"""A model that stays loaded in this process, for generations from Python."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halation.errors import InputError
from halation.generation.config import GenerateConfig
from halation.generation.image_requests import BatchTask
from halation.generation.workers import local_pool
from halation.generation.workers.image_runner import ImageModel, ImageRunner, open_model
from halation.generation.workers.local_pool import TaskHandler, WorkerEvent, WorkerPool, WorkerSlot
from halation.models.model_path_resolver import ModelRef, pipeline_defaults, resolve_model
from halation.sample_specs import SampleSpec

if TYPE_CHECKING:
    from halation.models.pipelines.pipeline_model import LoadedPipeline

OPEN_SETTINGS = (
    "dtype",
    "scheduler",
    "offload",
    "compile",
    "arguments",
    "cfg_truncation_step",
    "half_frame",
    "threads",
)
"""Settings of a worker with which its model is opened; a loaded model is opened again if one of them changes."""


def load_model(model_path: str | Path, *, dtype: str = "", device: str = "", raw: bool = False) -> LoadedModel:
    """Return a model that stays loaded, for `halation.generate(model_path=...)`.

    `device` is one of torch, such as `cuda:1`; by default the first GPU, or the CPU. The images are those of a
    generation with the model's path and the same `dtype`, by default bf16 on a GPU and fp32 on a CPU. The first
    generation loads the weights.
    """
    model_ref = resolve_model(str(model_path), raw=raw)
    device = device or local_pool.list_local_slots(GenerateConfig(nproc=1))[0].device
    return LoadedModel(model_ref, device=device, dtype=dtype, raw=raw)


class LoadedModel:
    """A model in this process; as a context manager, it is freed at the end."""

    def __init__(
        self,
        model_ref: ModelRef,
        *,
        device: str,
        dtype: str = "",
        raw: bool = False,
        pipe: LoadedPipeline | None = None,
    ) -> None:
        self.name = model_ref.name
        self.device = device
        self.dtype = dtype or ("fp32" if device == "cpu" else "bf16")
        self.raw = raw
        self._model_ref = model_ref
        self._pipe = pipe
        self._model: ImageModel | None = None
        self._opened_with: dict[str, Any] = {}

    @classmethod
    def of(cls, model: Any) -> LoadedModel:
        """Return a loaded model itself, or the one that a diffusers pipeline is."""
        if isinstance(model, LoadedModel):
            return model
        from halation.models.pipelines.pipeline_model import describe_pipeline

        found = describe_pipeline(model)
        defaults = pipeline_defaults(found.call_settings)
        load_args = {"kind": "pipeline", "path": found.name}
        model_ref = ModelRef(load_args=load_args, name=found.name, digest=found.digest, **defaults)
        return cls(model_ref, device=found.device, dtype=found.dtype, pipe=found)

    def __enter__(self) -> LoadedModel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the weights."""
        self._model = self._pipe = None
        self._opened_with = {}

    def resolve(self, config: GenerateConfig) -> tuple[GenerateConfig, ModelRef]:
        """Return the config with the settings that the model decides, and the reference to it."""
        for name, found in (("dtype", config.dtype and config.dtype != self.dtype), ("raw", config.raw != self.raw)):
            if found:
                raise InputError(
                    f"{name}={getattr(config, name)!r} with a model that was loaded with {getattr(self, name)!r}",
                    "the setting that the model was loaded with",
                    f"leave {name} out, or load the model with it",
                )
        if config.cluster != "local" or config.nproc > 1 or config.gpu_ids:
            raise InputError(
                "a loaded model with several workers, chosen GPUs or a cluster",
                "one model in this process",
                "give the path of the model, so that each worker loads it; or leave nproc, gpu_ids and cluster out",
            )
        if self._pipe is not None and (config.compile or config.offload != "none"):
            raise InputError(
                "compile or offload with a pipeline that is already loaded",
                "the pipeline as it is",
                "compile or offload it before the call, or give the path of its folder",
            )
        chosen: dict[str, Any] = {"dtype": self.dtype}
        return dataclasses.replace(config, **chosen), self._model_ref

    @contextlib.contextmanager
    def open_pool(
        self, config: GenerateConfig
    ) -> Iterator[tuple[Sequence[WorkerSlot], Callable[[Mapping[str, Any]], WorkerPool]]]:
        """Yield the only worker slot and a function that creates the pool; restore the process at the end."""
        import torch

        slot = WorkerSlot(label=self.device.removeprefix("cuda:") if self.device != "cpu" else "0", device=self.device)
        num_threads = torch.get_num_threads()
        with contextlib.ExitStack() as stack:
            stack.callback(torch.set_num_threads, num_threads)
            yield [slot], lambda settings: InProcessPool(slot, settings, functools.partial(self._open, stack))

    def _open(self, stack: contextlib.ExitStack, settings: Mapping[str, Any]) -> ImageModel:
        """Return the model for the settings of a worker, on the thread that will use it."""
        import torch

        torch.set_num_threads(settings["threads"])
        if self._pipe is not None:
            from halation.models.pipelines.pipeline_model import borrow_pipeline

            names = ("dtype", "device", "scheduler", "arguments", "cfg_truncation_step", "half_frame")
            return stack.enter_context(borrow_pipeline(self._pipe, **{name: settings[name] for name in names}))
        opened_with = {name: settings[name] for name in OPEN_SETTINGS}
        if self._model is None or opened_with != self._opened_with:
            self._model = None  # free it first
            self._model, self._opened_with = open_model(settings), opened_with
        return self._model


class InProcessPool(TaskHandler):
    """A pool of one worker in this process: it cannot be killed, and its crash ends the process."""

    def __init__(
        self, slot: WorkerSlot, settings: Mapping[str, Any], open_model: Callable[[Mapping[str, Any]], ImageModel]
    ) -> None:
        self.labels: Sequence[str] = [slot.label]
        self.names: Sequence[str] = ["this process"]
        self._runner = ImageRunner({**settings, "device": slot.device, "label": slot.label}, open_model=open_model)
        self._executor = ThreadPoolExecutor(local_pool.QUEUE_DEPTH, thread_name_prefix="task")
        self._events: queue.Queue[WorkerEvent] = queue.Queue()

    def send_event(self, kind: Any, task: int = -1, **body: Any) -> None:
        self._events.put(WorkerEvent(worker=0, kind=kind, task=task, body=body))

    def start(self, worker: int) -> None:
        self._executor.submit(self.open_runner, self._runner)

    def dry_run(self, worker: int, examples: Sequence[SampleSpec], batch_size: int, micro_batch: int) -> None:
        settings = {"examples": [spec.as_json() for spec in examples], "batch_size": batch_size}
        self._executor.submit(self.check_plan, self._runner, settings | {"micro_batch": micro_batch})

    def submit(self, worker: int, task: BatchTask) -> None:
        self._executor.submit(self.run_task, self._runner, task)

    def drop(self, worker: int, number: int) -> None:
        self._runner.drop(number)

    def stop(self, worker: int) -> None:
        self._runner.drop(None)

    def kill(self, worker: int) -> None:
        """End the generation: a thread cannot be killed."""
        self._runner.drop(None)
        message = "the model in this process does not respond; give its path, so that a worker process can be replaced"
        self.send_event("refused", message=message, exit_code=1)

    def events(self, timeout_s: float) -> list[WorkerEvent]:
        try:
            events = [self._events.get(timeout=timeout_s)]
        except queue.Empty:
            return []
        while not self._events.empty():
            events.append(self._events.get())
        return events

    def shutdown(self, *, at_once: bool) -> None:
        self._runner.drop(None)
        self._executor.shutdown(wait=True)
        self._runner.close()
