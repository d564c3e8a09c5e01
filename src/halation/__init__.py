"""Halation: train, sample, distil, batch-generate with and score diffusion transformers.

Each command is a function. Its settings have the names of the flags (`halation train --help`), as keywords or as one
config object; it returns an object with the paths and numbers of its output folder, and raises
`halation.errors.HalationError` on errors.

    import halation
    halation.train(data="streets", model="tiny", image_size=(32, 32), n_steps=100, output_dir="runs/first")
    halation.distill(teacher_path="runs/first", data_path="streets", objective="trajectory", output_dir="runs/fast")
    halation.sample(checkpoint="runs/first", prompts=["A rainy street at night"], output_dir="outputs/rain").paths
    many = halation.generate(prompts=["a red car", "a blue car"], model_path="streets-64", output_dir="outputs/many")
    scores = halation.evaluate(generated="outputs/many", reference="data/val2017", metrics=("fid", "kid"))
    scores.value("fid"), many.rows[0].seed, many.failures

    config = halation.TrainConfig(data="photos", model="small", n_steps=1000, output_dir="runs/photos")
    run = halation.train(config, on_progress=lambda event: print(event.done, event.values.get("loss")))

`generate` starts a process per GPU. To keep a model in this process between calls, load it once, or pass a diffusers
pipeline that you have loaded:

    with halation.load_model("streets-64") as model:
        halation.generate(prompts=["a red car"], model_path=model, output_dir="outputs/one").rows[0].open()

In your own training loop, on every rank:

    sampler = halation.RankSampler(draw, ["a red car", "a blue car"], "runs/mine", seed=0, model=model, every=100)
    sampler(step)  # draw(prompt, generator) returns an image; docs/own_trainer.md has an example for each trainer
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halation.distillation.config import DistillConfig
    from halation.evaluation.config import EvaluateConfig
    from halation.generation.config import GenerateConfig
    from halation.generation.loaded_model import load_model
    from halation.progress import ProgressEvent
    from halation.results import GenerationResult, ImageResult, SamplingResult, Scores, TrainingResult, WatchResult
    from halation.sampling.config import SampleConfig
    from halation.sampling.user_training_loop_sampler import RankSampler, Sample
    from halation.training.config import TrainConfig
    from halation.watcher.config import WatchConfig

__version__ = "0.1.0"
_SOURCES = {
    "halation.distillation.config": ("DistillConfig",),
    "halation.evaluation.config": ("EvaluateConfig",),
    "halation.generation.config": ("GenerateConfig",),
    "halation.generation.loaded_model": ("LoadedModel", "load_model"),
    "halation.progress": ("ProgressEvent",),
    "halation.results": (
        *("GenerationResult", "ImageResult", "SamplingResult", "Scores", "TrainingResult", "WatchResult"),
    ),
    "halation.sampling.config": ("SampleConfig",),
    "halation.sampling.user_training_loop_sampler": ("RankSampler", "Sample"),
    "halation.training.config": ("TrainConfig",),
    "halation.watcher.config": ("WatchConfig",),
}
"""Modules that are imported on first use: some need torch, which is slow to import."""
__all__ = [
    "DistillConfig",
    "EvaluateConfig",
    "GenerateConfig",
    "GenerationResult",
    "ImageResult",
    "ProgressEvent",
    "RankSampler",
    "Sample",
    "SampleConfig",
    "SamplingResult",
    "Scores",
    "TrainConfig",
    "TrainingResult",
    "WatchConfig",
    "WatchResult",
    "__version__",
    "distill",
    "evaluate",
    "generate",
    "load_model",
    "sample",
    "train",
    "watch",
]
Callback = Callable[["ProgressEvent"], object]


def __getattr__(name: str) -> Any:
    for module, names in _SOURCES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def train(
    config: TrainConfig | None = None, /, *, on_progress: Callback | None = None, **settings: Any
) -> TrainingResult:
    """Run `halation train`."""
    return _train("train", "training", "TrainConfig", config, settings, on_progress)


def distill(
    config: DistillConfig | None = None, /, *, on_progress: Callback | None = None, **settings: Any
) -> TrainingResult:
    """Run `halation distill`."""
    return _train("distill", "distillation", "DistillConfig", config, settings, on_progress)


def sample(
    config: SampleConfig | None = None, /, *, on_progress: Callback | None = None, **settings: Any
) -> SamplingResult:
    """Run `halation sample`."""
    config = _as_config("sample", "SampleConfig", config, settings)
    folder = _call("sampling", "sample", on_progress, config)
    return __getattr__("SamplingResult")(output_dir=folder)


def generate(
    config: GenerateConfig | None = None, /, *, on_progress: Callback | None = None, **settings: Any
) -> GenerationResult:
    """Run `halation generate`.

    `prompts` is a file, a list of texts, or a list of dicts with the columns of a prompt list. `model_path` may be a
    `LoadedModel` or a diffusers pipeline; it then generates in this process, one batch at a time.
    """
    rows = settings["prompts"] if isinstance(settings.get("prompts"), (list, tuple)) else None
    model = settings.get("model_path")
    model = None if model is None or isinstance(model, str | os.PathLike) else __getattr__("LoadedModel").of(model)
    if rows is not None:
        settings["prompts"] = "-"
    if model is not None:
        settings["model_path"] = model.name
    config = _as_config("generate", "GenerateConfig", config, settings)
    code = _call("generation", "generate", on_progress, config, rows, model)
    return __getattr__("GenerationResult")(output_dir=config.output_dir, exit_code=code)


def evaluate(
    config: EvaluateConfig | None = None, /, *, on_progress: Callback | None = None, **settings: Any
) -> Scores:
    """Run `halation evaluate` and return the object that `--json` prints."""
    config = _as_config("evaluate", "EvaluateConfig", config, settings)
    return __getattr__("Scores")(_call("evaluation", "evaluate", on_progress, config))


def watch(config: WatchConfig | None = None, /, *, on_progress: Callback | None = None, **settings: Any) -> WatchResult:
    """Run `halation watch`; with `once` it returns when all existing checkpoints are scored."""
    config = _as_config("watch", "WatchConfig", config, settings)
    code = _call("watcher", "run", on_progress, config)
    return __getattr__("WatchResult")(output_dir=config.output_dir or config.run / "watch", exit_code=code)


def _train(name: str, package: str, config_name: str, config: Any, settings: Any, on_progress: Callback | None) -> Any:
    config = _as_config(name, config_name, config, settings)
    code = _call(package, "run", on_progress, config)
    return __getattr__("TrainingResult")(output_dir=config.output_dir, exit_code=code)


def _call(package: str, function: str, on_progress: Callback | None, *arguments: Any) -> Any:
    """Call a function of a command's module, imported now because most commands import torch."""
    command = importlib.import_module(f"halation.{package}.command")
    with importlib.import_module("halation.progress").observe(on_progress):
        return getattr(command, function)(*arguments)


def _as_config(name: str, config_name: str, config: Any, settings: dict[str, Any]) -> Any:
    """Return the validated config: a path may be given as text, and a tuple as a list."""
    config_type = __getattr__(config_name)
    if config is not None and (type(config) is not config_type or settings):
        raise TypeError(f"halation.{name}() takes one {config_name}, or settings as keywords")
    values = settings if config is None else dataclasses.asdict(config)
    validate_settings = importlib.import_module("halation.config").validate_settings
    return config_type(**validate_settings(config_type, values, f"halation.{name}()"))
