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
from halation.progress import StepProgress
from halation.runs.run_folder import MetricsFile
from halation.sampling.denoiser_sampler import SampleSettings
from halation.training.config import TrainConfig
from halation.training.loop import StepReport
from halation.training.trackers import Tracker
from halation.training.training_task import TrainingTask

log = logging.getLogger(__name__)


class ThroughputWindow:
    """Throughput since the last pause, so that a save or a sampling does not look like slow training."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.start_time = time.perf_counter()
        self.num_images = 0
        self.recent: list[tuple[float, int]] = []

    def add(self, num_images: int) -> None:
        self.num_images += num_images
        self.recent = [*self.recent[-49:], (time.perf_counter(), self.num_images)]

    def images_per_s(self) -> float:
        then, before = self.recent[0] if len(self.recent) > 1 else (self.start_time, 0)
        now, images = self.recent[-1]
        return (images - before) / max(now - then, 1e-9)


def measure_peak_flops(device: torch.device, dtype: str) -> float:
    """Floating-point operations a second of a large matrix product in the training precision, on this device, now."""
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    size, repeats = (8192, 10) if device.type == "cuda" else (512, 3)
    # Not zeros, on which some devices run faster than on numbers; not random, to leave every generator alone.
    ramp = torch.arange(size * size, device=device, dtype=torch.float32).reshape(size, size).sin()
    matrix = ramp.to(kind)
    for _ in range(2):
        matrix @ matrix
    _synchronize(device)
    start_time = time.perf_counter()
    for _ in range(repeats):
        matrix @ matrix
    _synchronize(device)
    return 2 * size**3 * repeats / (time.perf_counter() - start_time)


def peak_memory_gib(device: torch.device) -> float:
    """Most memory this rank has held so far: on a GPU what torch allocated, on a CPU the resident size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import psutil

    return float(psutil.Process().memory_info().rss) / 2**30


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def log_run_start(
    task: TrainingTask,
    config: TrainConfig,
    engine: Engine,
    settings: SampleSettings,
    global_batch: int,
    resumed_at: int | None,
) -> None:
    """Log what is trained on what, and on which ranks; `resumed_at` is the step of the checkpoint, None for a new run."""
    world, source = task.world, task.source
    if world.device.type == "cuda" and settings.batch_size == 1 and len(settings.prompts) > 2 * world.size:
        log.info("samples are drawn one by one; --sample_batch_size %d would draw them at once", len(settings.prompts))
    log.warning(
        "%s%s on %s: %s, %d %s, global batch %d, %d rank%s (%s, %s, %s)",
        "" if resumed_at is None else f"going on from step {resumed_at}: ",
        task.title,
        source.name,
        describe_parameters(config, engine.num_trainable, engine.num_parameters),
        source.num_train,
        _plural(task.item_name) if source.num_train > 1 else task.item_name,
        global_batch,
        world.size,
        "s" if world.size > 1 else "",
        engine.name,
        world.device.type,
        config.dtype if config.weights_dtype == "fp32" else f"{config.dtype}, weights {config.weights_dtype}",
    )
    layers = count_adapter_layers([name for name, _ in engine.named_parameters()])
    if layers:
        log.info("adapters on %d layers: %s", sum(layers.values()), ", ".join(sorted(layers)))


def _plural(noun: str) -> str:
    return f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"


def describe_parameters(config: TrainConfig, num_trained: int, num_parameters: int) -> str:
    """What is trained of a model."""
    total = f"{num_parameters / 1e6:.1f} M parameters"
    if not config.lora_rank:
        return total
    return f"adapters of rank {config.lora_rank}, {num_trained / 1e6:.3g} M parameters beside the {total} of all"


def count_adapter_layers(names: Sequence[str]) -> Counter[str]:
    """How the layers with adapters are called in their blocks, and how many there are of each."""
    layers = [name.split(".lora_A.")[0].split(".") for name in names if ".lora_A." in name]
    return Counter(".".join(layer[-2:] if layer[-1].isdigit() else layer[-1:]) for layer in layers)


@dataclass(frozen=True, kw_only=True)
class StepLogger:
    """Writes the numbers of every step: to the progress bar, metrics.jsonl and the trackers."""

    world: World
    config: TrainConfig
    progress: StepProgress
    metrics: MetricsFile
    trackers: Sequence[Tracker]
    flops_per_image: float
    peak_flops: float
    """Matrix rate of the device in FLOP/s."""
    num_train: int
    """Images in an epoch."""
    start_time: float
    """On the monotonic clock; the time of earlier calls of the run is counted in."""

    def write(self, report: StepReport, images_per_s: float, mean_loss: float, num_images: int) -> None:
        """The bar at every step; metrics.jsonl and the trackers at every `log_every`th.

        `images_per_s` is in images a second, `num_images` counts those since the run began.
        """
        config = self.config
        numbers = {"loss": report.loss, "lr": report.lr, "pictures_per_s": round(images_per_s, 2)}
        self.progress.update(report.step, f"mean loss {mean_loss:.4f}  {images_per_s:.0f} images/s", numbers)
        if report.step % config.log_every and report.step not in (1, config.n_steps):
            return
        # Forward and two products backward; the frozen weights under adapters need only one.
        passes = 2 if config.lora_rank else 3
        flops = passes * self.flops_per_image * images_per_s / self.world.size
        values = {
            "loss": report.loss,
            "lr": report.lr,
            "grad_norm": report.grad_norm,
            "pictures_per_s": round(images_per_s, 3),
            "mfu": round(flops / self.peak_flops, 4),
            "memory_gb": round(peak_memory_gib(self.world.device), 3),
            "data_s": round(report.data_s, 5),
            "epoch": round(num_images / self.num_train, 4),
        }
        self.metrics.append({"step": report.step, "time_s": round(time.monotonic() - self.start_time, 3), **values})
        for tracker in self.trackers:
            tracker.log_scalars(report.step, {f"train/{name}": value for name, value in values.items()})
