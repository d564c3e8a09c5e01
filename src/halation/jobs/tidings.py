"""What rank 0 tells of a training while it runs: its beginning, and the numbers of its steps, to people, files and trackers."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from halation.config.train import TrainConfig
from halation.training.loop import StepReport
from halation.training.speed import memory_gb

if TYPE_CHECKING:
    from halation.jobs.session import Session

log = logging.getLogger(__name__)


def of_beginning(session: Session, fresh: bool) -> None:
    """What is trained on what, by whom."""
    world, config, settings = session.world, session.config, session.drawn_settings()
    if world.device.type == "cuda" and settings.sheet_size == 1 and len(settings.prompts) > 2 * world.size:
        log.info("samples are drawn one by one; --sample_batch_size %d would draw them at once", len(settings.prompts))
    how = "" if fresh else f"going on from step {session.position.step}: "
    log.warning(
        "%s%s on %s: %s, %d %s%s, global batch %d, %d rank%s (%s, %s, %s)",
        how,
        session.task.title,
        session.source.name,
        in_words(config, session.engine.num_trained, session.engine.num_parameters),
        session.source.num_train,
        session.task.item,
        "s" if session.source.num_train > 1 else "",
        session.global_batch,
        world.size,
        "s" if world.size > 1 else "",
        session.engine.name,
        world.device.type,
        config.dtype if config.weights_dtype == "fp32" else f"{config.dtype}, weights {config.weights_dtype}",
    )
    layers = adapted([name for name, _ in session.engine.named_parameters()])
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


def of_step(session: Session, report: StepReport, rate: float) -> None:
    """The bar at every step; metrics.jsonl and the trackers at every `log_every`th."""
    config, world = session.config, session.world
    numbers = {"loss": report.loss, "lr": report.lr, "pictures_per_s": round(rate, 2)}
    session.progress.update(report.step, f"mean loss {session.last_loss:.4f}  {rate:.0f} pictures/s", numbers)
    if report.step % config.log_every and report.step not in (1, config.n_steps):
        return
    # Forward and two products backward; the frozen weights under adapters need only one.
    passes = 2 if config.lora_rank else 3
    flops = passes * session.denoiser.flops_per_picture() * rate / world.size
    values = {
        "loss": report.loss,
        "lr": report.lr,
        "grad_norm": report.grad_norm,
        "pictures_per_s": round(rate, 3),
        "mfu": round(flops / session.peak, 4),
        "memory_gb": round(memory_gb(world.device), 3),
        "data_s": round(report.data_s, 5),
        "epoch": round(session.position.pictures / session.source.num_train, 4),
    }
    session.metrics.append({"step": report.step, "time_s": round(time.monotonic() - session.began, 3), **values})
    for tracker in session.trackers:
        tracker.scalars(report.step, {f"train/{name}": value for name, value in values.items()})
