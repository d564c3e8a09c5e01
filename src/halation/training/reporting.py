"""What rank 0 reports of a training: its beginning, its steps, and how fast it is."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from halation.distributed.engines.ddp_fsdp import Engine
from halation.distributed.world import World
from halation.runs.folder import Metrics
from halation.sampling.denoiser_sampler import SampleSettings
from halation.step_progress import Progress
from halation.training.config import TrainConfig
from halation.training.loop import StepReport
from halation.training.task import Task
from halation.training.trackers import Tracker

log = logging.getLogger(__name__)


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


def of_beginning(
    task: Task, config: TrainConfig, engine: Engine, settings: SampleSettings, global_batch: int, resumed_at: int | None
) -> None:
    """Log what is trained on what, and on which ranks; `resumed_at` is the step of the checkpoint, None for a new run."""
    world, source = task.world, task.source
    if world.device.type == "cuda" and settings.sheet_size == 1 and len(settings.prompts) > 2 * world.size:
        log.info("samples are drawn one by one; --sample_batch_size %d would draw them at once", len(settings.prompts))
    log.warning(
        "%s%s on %s: %s, %d %s%s, global batch %d, %d rank%s (%s, %s, %s)",
        "" if resumed_at is None else f"going on from step {resumed_at}: ",
        task.title,
        source.name,
        in_words(config, engine.num_trained, engine.num_parameters),
        source.num_train,
        task.item,
        "s" if source.num_train > 1 else "",
        global_batch,
        world.size,
        "s" if world.size > 1 else "",
        engine.name,
        world.device.type,
        config.dtype if config.weights_dtype == "fp32" else f"{config.dtype}, weights {config.weights_dtype}",
    )
    layers = adapted([name for name, _ in engine.named_parameters()])
    if layers:
        log.info("adapters on %d layers: %s", sum(layers.values()), ", ".join(sorted(layers)))


def in_words(config: TrainConfig, num_trained: int, num_parameters: int) -> str:
    """What is trained of a model."""
    total = f"{num_parameters / 1e6:.1f} M parameters"
    if not config.lora_rank:
        return total
    return f"adapters of rank {config.lora_rank}, {num_trained / 1e6:.3g} M parameters beside the {total} of all"


def adapted(names: Sequence[str]) -> Counter[str]:
    """How the layers with adapters are called in their blocks, and how many there are of each."""
    layers = [name.split(".lora_A.")[0].split(".") for name in names if ".lora_A." in name]
    return Counter(".".join(layer[-2:] if layer[-1].isdigit() else layer[-1:]) for layer in layers)


@dataclass(frozen=True, kw_only=True)
class StepLog:
    """Writes the numbers of every step: to the progress bar, metrics.jsonl and the trackers."""

    world: World
    config: TrainConfig
    progress: Progress
    metrics: Metrics
    trackers: Sequence[Tracker]
    flops_per_picture: float
    peak: float
    """Matrix rate of the device in FLOP/s."""
    num_train: int
    """Pictures in an epoch."""
    began: float
    """On the monotonic clock; the time of earlier calls of the run is counted in."""

    def write(self, report: StepReport, rate: float, mean_loss: float, pictures: int) -> None:
        """The bar at every step; metrics.jsonl and the trackers at every `log_every`th.

        `rate` is in pictures a second, `pictures` counts those since the run began.
        """
        config = self.config
        numbers = {"loss": report.loss, "lr": report.lr, "pictures_per_s": round(rate, 2)}
        self.progress.update(report.step, f"mean loss {mean_loss:.4f}  {rate:.0f} pictures/s", numbers)
        if report.step % config.log_every and report.step not in (1, config.n_steps):
            return
        # Forward and two products backward; the frozen weights under adapters need only one.
        passes = 2 if config.lora_rank else 3
        flops = passes * self.flops_per_picture * rate / self.world.size
        values = {
            "loss": report.loss,
            "lr": report.lr,
            "grad_norm": report.grad_norm,
            "pictures_per_s": round(rate, 3),
            "mfu": round(flops / self.peak, 4),
            "memory_gb": round(memory_gb(self.world.device), 3),
            "data_s": round(report.data_s, 5),
            "epoch": round(pictures / self.num_train, 4),
        }
        self.metrics.append({"step": report.step, "time_s": round(time.monotonic() - self.began, 3), **values})
        for tracker in self.trackers:
            tracker.scalars(report.step, {f"train/{name}": value for name, value in values.items()})
