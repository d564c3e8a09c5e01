"""Reporting during training: log lines, metrics.jsonl, throughput, trackers such as wandb."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from halation.errors import InputError, format_count, install_command
from halation.logging_setup import ON_CONSOLE
from halation.progress import StepProgress
from halation.runs.run_folder import MetricsFile
from halation.training.config import TrainConfig

if TYPE_CHECKING:  # the command checks trackers, and the parent process of the ranks must not import torch
    from halation.distributed.engines.ddp_fsdp import Engine
    from halation.distributed.world import World
    from halation.sampling.all_rank_sampler import SampleSettings
    from halation.training.loop import StepReport
    from halation.training.training_task import TrainingTask

log = logging.getLogger(__name__)
MAX_PEAK_MEASUREMENTS = 5


class ThroughputWindow:
    """Throughput since the last pause, so that saves and samples do not count as training."""

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


def log_run_start(
    task: TrainingTask,
    config: TrainConfig,
    engine: Engine,
    settings: SampleSettings,
    global_batch: int,
    resumed_at: int | None,
) -> None:
    """Log model, data and ranks. `resumed_at` is the checkpoint's step, None for a new run."""
    world, source = task.world, task.source
    if world.device.type == "cuda" and settings.batch_size == 1 and len(settings.prompts) > 2 * world.size:
        log.info("sampling one image at a time; --sample_batch_size %d would be one batch", len(settings.prompts))
    log.info(
        "%s%s on %s: %s, %s, global batch %d, %s (%s, %s, %s)",
        "" if resumed_at is None else f"resuming from step {resumed_at}: ",
        task.title,
        source.name,
        describe_parameters(config, engine.num_trainable, engine.num_parameters),
        format_count(source.num_train, task.item_name),
        global_batch,
        format_count(world.size, "rank"),
        engine.name,
        world.device.type,
        config.dtype if config.weights_dtype == "fp32" else f"{config.dtype}, weights {config.weights_dtype}",
        extra=ON_CONSOLE,
    )
    layers = count_adapter_layers([name for name, _ in engine.named_parameters()])
    if layers:
        log.info("adapters on %s: %s", format_count(sum(layers.values()), "layer"), ", ".join(sorted(layers)))


def describe_parameters(config: TrainConfig, num_trained: int, num_parameters: int) -> str:
    """Describe the number of parameters, and with LoRA how many of them are trained."""
    total = f"{num_parameters / 1e6:.1f} M parameters"
    if not config.lora_rank:
        return total
    return f"adapters of rank {config.lora_rank} with {num_trained / 1e6:.3g} M of {total}"


def count_adapter_layers(names: Sequence[str]) -> Counter[str]:
    """Count the layers with adapters by their name within a block."""
    layers = [name.split(".lora_A.")[0].split(".") for name in names if ".lora_A." in name]
    return Counter(".".join(layer[-2:] if layer[-1].isdigit() else layer[-1:]) for layer in layers)


@dataclass(kw_only=True)
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
    measure_peak_flops: Callable[[], float]
    peak_memory_gib: Callable[[], float]
    num_train: int
    """Images in an epoch."""
    start_time: float
    """On the monotonic clock, shifted back by the time that earlier sessions of the run took."""

    num_peak_measurements: int = 1

    def write(
        self, report: StepReport, images_per_s: float, mean_loss: float, num_images: int, is_saved: bool = False
    ) -> None:
        """Update the bar at every step; metrics.jsonl and the trackers every `log_every` steps.

        They also get each step that is saved, so that the last row of a stopped run is the step it resumes from.
        `num_images` counts the images since the start of the run.
        """
        config = self.config
        numbers = {"loss": report.loss, "lr": report.lr, "pictures_per_s": round(images_per_s, 2)}
        self.progress.update(report.step, f"mean loss {mean_loss:.4f}", numbers, images_per_s=images_per_s)
        if report.step % config.log_every and report.step not in (1, config.n_steps) and not is_saved:
            return
        # One forward and two backward products; the frozen weights under adapters need only one backward product.
        passes = 2 if config.lora_rank else 3
        flops = passes * self.flops_per_image * images_per_s / self.world.size
        values = {
            "loss": report.loss,
            "lr": report.lr,
            "grad_norm": report.grad_norm,
            "pictures_per_s": round(images_per_s, 3),
            "mfu": self._mfu(flops),
            "memory_gb": round(self.peak_memory_gib(), 3),
            "data_s": round(report.data_s, 5),
            "epoch": round(num_images / self.num_train, 4),
        }
        self.metrics.append({"step": report.step, "time_s": round(time.monotonic() - self.start_time, 3), **values})
        for tracker in self.trackers:
            known = {f"train/{name}": value for name, value in values.items() if value is not None}
            tracker.log_scalars(report.step, known)

    def _mfu(self, flops: float) -> float | None:
        """Return FLOP/s as a share of the matrix rate, or None if that rate cannot be right.

        No model is faster than the matrix products it consists of. If this one seems to be, the device was busy with
        other work when its rate was measured.
        """
        if flops > self.peak_flops and self.num_peak_measurements < MAX_PEAK_MEASUREMENTS:
            self.num_peak_measurements += 1
            self.peak_flops = max(self.peak_flops, self.measure_peak_flops())
        return round(flops / self.peak_flops, 4) if flops <= self.peak_flops else None


class Tracker(Protocol):
    """A logger of scalars and images by step."""

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None: ...

    def log_images(self, step: int, images: Mapping[str, np.ndarray]) -> None: ...

    def close(self) -> None: ...


class TensorBoardTracker:
    """Event files in the run folder; a resumed run hides events after its checkpoint."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        # A new run has nothing to hide, and purging from 0 writes a marker that some readers show as a restart.
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def log_images(self, step: int, images: Mapping[str, np.ndarray]) -> None:
        for name, image in images.items():
            self.writer.add_image(name, image, step, dataformats="HWC")
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What trackers are told of a run: its folder, names and settings."""

    folder: Path
    step: int
    """Step that the run resumes from."""
    project: str
    entity: str
    run_name: str
    config: Mapping[str, Any]

    def name_for(self, *variables: str) -> str:
        """Return the run's name: the flag, else one of these variables, else the folder's name."""
        return self.run_name or _first_set(*variables) or self.folder.resolve().name

    def project_for(self, *variables: str) -> str:
        return self.project or _first_set(*variables) or "halation"

    def saved_id(self, tracker: str, new: str) -> str:
        """Return the id of the tracker's run, the same for the same folder, so that a resumed run continues it."""
        file = self.folder / f".{tracker}_id"
        if new and not file.exists():
            file.write_text(new)
        return file.read_text().strip() if file.exists() else ""


def _first_set(*variables: str) -> str:
    return next((os.environ[name] for name in variables if os.environ.get(name)), "")


class WandbTracker:
    """wandb, offline unless WANDB_MODE is set; files under wandb/ in the current directory."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        mode: Any = None if "WANDB_MODE" in os.environ else "offline"
        self.run = wandb.init(
            project=run.project_for("WANDB_PROJECT"),
            entity=run.entity or None,
            name=run.name_for("WANDB_NAME"),
            id=run.saved_id("wandb", os.urandom(8).hex()),
            resume="allow",
            mode=mode,
            config=dict(run.config),
        )

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def log_images(self, step: int, images: Mapping[str, np.ndarray]) -> None:
        import wandb

        self.run.log({name: wandb.Image(image) for name, image in images.items()}, step=step)

    def close(self) -> None:
        self.run.finish()


class TrackioTracker:
    """trackio's local dashboard."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self.trackio = trackio
        trackio.init(
            project=run.project_for("TRACKIO_PROJECT"), name=run.name_for("TRACKIO_NAME"), config=dict(run.config)
        )

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.trackio.log(dict(values), step=step)

    def log_images(self, step: int, images: Mapping[str, np.ndarray]) -> None:
        self.trackio.log({name: self.trackio.Image(image) for name, image in images.items()}, step=step)

    def close(self) -> None:
        self.trackio.finish()


class AccelerateTracker:
    """A tracker of `accelerate.tracking`; it runs on rank 0 alone, offline unless an account is configured."""

    def __init__(self, name: str, run: TrackedRun) -> None:
        tracking: Any = importlib.import_module("accelerate.tracking")
        # accelerate's own logger works only in programs that use its Accelerator.
        tracking.logger = _AccelerateLogger(logging.getLogger("accelerate.tracking"), {})
        self.name = name
        self.tracker: Any = getattr(self, f"_create_{name}")(tracking, run)
        self.tracker.main_process_only = False
        self.tracker.start()
        values = {
            key: value if isinstance(value, str | int | float) else str(value) for key, value in run.config.items()
        }
        if name == "mlflow":
            run.saved_id("mlflow", self.tracker.tracker.info.run_id)
        # MLflow refuses other values of a parameter, and a resumed run may have other free settings.
        if name != "mlflow" or not self.tracker.run_id:
            self.tracker.store_init_configuration(values)

    def _create_mlflow(self, tracking: Any, run: TrackedRun) -> Any:
        mlflow: Any = importlib.import_module("mlflow")
        location = None
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            mlflow.set_tracking_uri(f"sqlite:///{run.folder.resolve() / 'mlflow.db'}")
            location = (run.folder.resolve() / "mlflow_artifacts").as_uri()
        tracker = tracking.MLflowTracker(
            logging_dir=location, run_id=run.saved_id("mlflow", "") or None, run_name=run.name_for("MLFLOW_RUN_NAME")
        )
        tracker.experiment_name = run.project_for("MLFLOW_EXPERIMENT_NAME")  # the flag wins over the environment
        return tracker

    def _create_swanlab(self, tracking: Any, run: TrackedRun) -> Any:
        return tracking.SwanLabTracker(
            run.project_for("SWANLAB_PROJECT", "SWANLAB_PROJ_NAME"),
            name=run.name_for("SWANLAB_NAME", "SWANLAB_EXP_NAME"),
            workspace=run.entity or _first_set("SWANLAB_WORKSPACE") or None,
            mode=_first_set("SWANLAB_MODE") or "offline",
            log_dir=_first_set("SWANLAB_LOG_DIR") or str(run.folder / "swanlab"),
        )

    def _create_comet_ml(self, tracking: Any, run: TrackedRun) -> Any:
        comet_ml: Any = importlib.import_module("comet_ml")
        has_account = bool(_first_set("COMET_API_KEY")) or Path("~/.comet.config").expanduser().exists()
        folder = _first_set("COMET_OFFLINE_DIRECTORY") or str(run.folder / "comet")
        return tracking.CometMLTracker(
            run.project_for("COMET_PROJECT_NAME"),
            workspace=run.entity or _first_set("COMET_WORKSPACE") or None,
            online=None if has_account else False,
            experiment_config=comet_ml.ExperimentConfig(
                name=run.name_for("COMET_EXPERIMENT_NAME"), offline_directory=folder, log_code=False
            ),
        )

    def _create_clearml(self, tracking: Any, run: TrackedRun) -> Any:
        task: Any = importlib.import_module("clearml").Task
        if (
            not _first_set("CLEARML_API_ACCESS_KEY", "CLEARML_CONFIG_FILE")
            and not Path("~/clearml.conf").expanduser().exists()
        ):
            task.set_offline(offline_mode=True)
        task.set_random_seed(None)  # otherwise Task.init seeds the generators of Python, numpy and torch
        return tracking.ClearMLTracker(
            project_name=run.project_for("CLEARML_PROJECT"),
            task_name=run.name_for("CLEARML_TASK"),
            auto_connect_arg_parser=False,
            auto_connect_frameworks=False,
            auto_resource_monitoring=False,
        )

    def _create_aim(self, tracking: Any, run: TrackedRun) -> Any:
        repository = _first_set("AIM_REPO") or str(run.folder)
        return tracking.AimTracker(
            run.name_for("AIM_RUN_NAME"), repository, experiment=run.project_for("AIM_EXPERIMENT")
        )

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.tracker.log(dict(values), step=step)

    def log_images(self, step: int, images: Mapping[str, np.ndarray]) -> None:
        from PIL import Image

        if self.name == "mlflow":
            mlflow: Any = importlib.import_module("mlflow")
            for name, image in images.items():
                file = re.sub(r"[^\w ./-]", "_", name)
                mlflow.log_image(image, artifact_file=f"step_{step:07d}/{file[:150]}.png")
        elif self.name == "comet_ml":
            for name, image in images.items():
                self.tracker.tracker.log_image(image, name=name, step=step)
        elif self.name == "swanlab":
            self.tracker.log_images({name: [image] for name, image in images.items()}, step=step)
        else:
            self.tracker.log_images({name: Image.fromarray(image) for name, image in images.items()}, step=step)

    def close(self) -> None:
        self.tracker.finish()


class _AccelerateLogger(logging.LoggerAdapter[logging.Logger]):
    """A plain logger with the one method that accelerate adds."""

    def warning_once(self, text: str) -> None:
        self.warning(text)


class OptionalTracker:
    """A tracker that is switched off after its first failure: training goes on without it."""

    def __init__(self, name: str, create: Callable[[], Tracker]) -> None:
        self.name = name
        self.tracker: Tracker | None = None
        self._call(lambda: setattr(self, "tracker", create()))

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        if self.tracker is not None:
            self._call(partial(self.tracker.log_scalars, step, values))

    def log_images(self, step: int, images: Mapping[str, np.ndarray]) -> None:
        if self.tracker is not None:
            self._call(partial(self.tracker.log_images, step, images))

    def close(self) -> None:
        if self.tracker is not None:
            self._call(self.tracker.close)

    def _call(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - the libraries have errors of their own, without a common class
            self.tracker = None
            words = (str(error).splitlines() or [""])[0]
            log.warning(
                "--report_to %s failed and is switched off, training goes on: %s: %s",
                self.name,
                type(error).__name__,
                words,
            )


TRACKER_PACKAGES = {
    "tensorboard": ("tensorboard", "train"),
    "wandb": ("wandb", "wandb"),
    "trackio": ("trackio", "trackio"),
    "mlflow": ("mlflow", "mlflow"),
    "swanlab": ("swanlab", "swanlab"),
    "comet_ml": ("comet_ml", "comet"),
    "clearml": ("clearml", "clearml"),
    "aim": ("aim", "aim"),
}


def select_trackers(names: Sequence[str], required: bool) -> tuple[str, ...]:
    """Return the installed trackers of `names`.

    A tracker that is not installed is an error if `required` (given by a flag), and is left out otherwise.
    """
    usable = []
    for name in names:
        if name == "none":
            continue
        package, extra = TRACKER_PACKAGES[name]
        spec = importlib.util.find_spec(package)
        # Without an origin it is only a folder, such as the `wandb/` that wandb writes its runs to.
        if spec is not None and spec.origin is not None:
            usable.append(name)
        elif required:
            raise InputError(
                f"--report_to {name}, but {package} is not installed",
                "an installed tracker",
                install_command(extra, package),
            )
        else:
            command = install_command(extra, package)
            log.info("%s is not installed, so only metrics.jsonl is written (%s)", package, command)
    return tuple(usable)


def open_trackers(names: Sequence[str], run: TrackedRun) -> list[Tracker]:
    factories: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoardTracker(run.folder, run.step),
        "wandb": lambda: WandbTracker(run),
        "trackio": lambda: TrackioTracker(run),
    }
    return [OptionalTracker(name, factories.get(name, partial(AccelerateTracker, name, run))) for name in names]
