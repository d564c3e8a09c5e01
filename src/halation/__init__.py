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

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from halation.progress import ProgressEvent, observe
from halation.results import GenerationResult, ImageResult, SamplingResult, Scores, TrainingResult, WatchResult

if TYPE_CHECKING:
    from halation.distillation.config import DistillConfig
    from halation.evaluation.config import EvaluateConfig
    from halation.generation.config import GenerateConfig
    from halation.generation.loaded_model import LoadedModel, load_model
    from halation.sampling.config import SampleConfig
    from halation.sampling.user_training_loop_sampler import RankSampler, Sample
    from halation.training.config import TrainConfig
    from halation.watcher.config import WatchConfig

__version__ = "0.1.0"
_LAZY = {
    "DistillConfig": "halation.distillation.config",
    "EvaluateConfig": "halation.evaluation.config",
    "GenerateConfig": "halation.generation.config",
    "LoadedModel": "halation.generation.loaded_model",
    "RankSampler": "halation.sampling.user_training_loop_sampler",
    "Sample": "halation.sampling.user_training_loop_sampler",
    "SampleConfig": "halation.sampling.config",
    "TrainConfig": "halation.training.config",
    "WatchConfig": "halation.watcher.config",
    "load_model": "halation.generation.loaded_model",
}
"""Imported on first use: some need torch, which is slow to import."""
__all__ = [
    "DistillConfig",
    "EvaluateConfig",
    "GenerateConfig",
    "GenerationResult",
    "ImageResult",
    "LoadedModel",
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
Callback = Callable[[ProgressEvent], object]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def train(config: TrainConfig | None = None, /, *, on_progress: Callback | None = None, **settings: Any) -> Any:
    """Run `halation train`."""
    config = _as_config("train", "TrainConfig", config, settings)
    with observe(on_progress):
        code = _command("training").run(config)
    return TrainingResult(output_dir=config.output_dir, exit_code=code)


def distill(config: DistillConfig | None = None, /, *, on_progress: Callback | None = None, **settings: Any) -> Any:
    """Run `halation distill`."""
    config = _as_config("distill", "DistillConfig", config, settings)
    with observe(on_progress):
        code = _command("distillation").run(config)
    return TrainingResult(output_dir=config.output_dir, exit_code=code)


def sample(config: SampleConfig | None = None, /, *, on_progress: Callback | None = None, **settings: Any) -> Any:
    """Run `halation sample`."""
    config = _as_config("sample", "SampleConfig", config, settings)
    with observe(on_progress):
        return SamplingResult(output_dir=_command("sampling").sample(config))


def generate(config: GenerateConfig | None = None, /, *, on_progress: Callback | None = None, **settings: Any) -> Any:
    """Run `halation generate`.

    `prompts` is a file, a list of texts, or a list of dicts with the columns of a prompt list. `model_path` may be a
    `LoadedModel` or a diffusers pipeline; it then generates in this process, one batch at a time.
    """
    prompts, model = settings.get("prompts"), settings.get("model_path")
    if isinstance(prompts, (list, tuple)):
        settings["prompts"] = "-"
    if model is not None and not isinstance(model, str) and not hasattr(model, "__fspath__"):
        model = __getattr__("LoadedModel").of(model)
        settings["model_path"] = model.name
    else:
        model = None
    config = _as_config("generate", "GenerateConfig", config, settings)
    with observe(on_progress):
        code = _command("generation").generate(config, prompts if settings.get("prompts") == "-" else None, model)
    return GenerationResult(output_dir=config.output_dir, exit_code=code)


def evaluate(config: EvaluateConfig | None = None, /, *, on_progress: Callback | None = None, **settings: Any) -> Any:
    """Run `halation evaluate` and return the object that `--json` prints."""
    config = _as_config("evaluate", "EvaluateConfig", config, settings)
    with observe(on_progress):
        return Scores(_command("evaluation").evaluate(config))


def watch(config: WatchConfig | None = None, /, *, on_progress: Callback | None = None, **settings: Any) -> Any:
    """Run `halation watch`; with `once` it returns when all existing checkpoints are scored."""
    config = _as_config("watch", "WatchConfig", config, settings)
    with observe(on_progress):
        code = _command("watcher").run(config)
    return WatchResult(output_dir=config.output_dir or config.run / "watch", exit_code=code)


def _command(package: str) -> Any:
    """Import a command when it is called: most commands import torch."""
    return importlib.import_module(f"halation.{package}.command")


def _as_config(name: str, config_name: str, config: Any, settings: dict[str, Any]) -> Any:
    """Return the config, or the one that these keywords give."""
    config_type = __getattr__(config_name)
    if config is None:
        values = importlib.import_module("halation.config").validate_settings(
            config_type, settings, f"halation.{name}()"
        )
        return config_type(**values)
    if not isinstance(config, config_type) or settings:
        raise TypeError(f"halation.{name}() takes one {config_name}, or settings as keywords")
    return config
