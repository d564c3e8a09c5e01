"""Halation: train, sample, distil, batch-generate with and score diffusion transformers.

The Python API mirrors the command line:

    import halation
    halation.train(data="streets", model="tiny", image_size=(32, 32), n_steps=100, output_dir="runs/first")
    halation.distill(teacher_path="runs/first", data_path="streets", objective="trajectory", output_dir="runs/fast")
    halation.sample(checkpoint="runs/first", prompts=("A rainy street at night",), output_dir="outputs/rain")
    halation.generate(prompts_csv="prompts.csv", model_path="models/pixart", output_dir="outputs/many")
    report = halation.evaluate(generated="outputs/many", reference="data/val2017", metrics=("fid", "kid"))
    report["metrics"]["fid"]["value"]

In your own training loop, on every rank:

    sampler = halation.RankSampler(draw, ["a red car", "a blue car"], "runs/mine", seed=0, model=model, every=100)
    sampler(step)  # draw(prompt, generator) returns an image; docs/own_trainer.md has an example for each trainer

Settings have the names of the flags (`halation train --help`). `evaluate` returns its report. The others return the
exit code: 0, or 1 if some images failed. All raise `halation.errors.HalationError` on errors.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halation.sampling.user_training_loop_sampler import RankSampler, Sample

__version__ = "0.1.0"
__all__ = ["RankSampler", "Sample", "__version__", "distill", "evaluate", "generate", "sample", "train", "watch"]


def __getattr__(name: str) -> Any:
    """Import RankSampler and Sample on first use: they need torch, which is slow to import."""
    if name in ("RankSampler", "Sample"):
        return getattr(importlib.import_module("halation.sampling.user_training_loop_sampler"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def train(**settings: Any) -> int:
    """Run `halation train` with these settings."""
    return _run("train", "training", "TrainConfig", settings)


def distill(**settings: Any) -> int:
    """Run `halation distill` with these settings."""
    return _run("distill", "distillation", "DistillConfig", settings)


def sample(**settings: Any) -> int:
    """Run `halation sample` with these settings.

    `model_path` is an alias of `checkpoint`, as on the command line.
    """
    return _run("sample", "sampling", "SampleConfig", settings)


def generate(**settings: Any) -> int:
    """Run `halation generate` with these settings.

    `prompts` has texts, or one file.
    """
    return _run("generate", "generation", "GenerateConfig", settings)


def evaluate(**settings: Any) -> dict[str, Any]:
    """Run `halation evaluate` with these settings and return the object that `--json` prints."""
    return _run("evaluate", "evaluation", "EvaluateConfig", settings, function="evaluate")


def watch(**settings: Any) -> int:
    """Run `halation watch` with these settings.

    With `once` it returns when all existing checkpoints are scored.
    """
    return _run("watch", "watcher", "WatchConfig", settings)


def _run(name: str, package: str, config: str, settings: dict[str, Any], *, function: str = "run") -> Any:
    """Validate the settings and call the command, imported here because commands import torch."""
    config_type = getattr(importlib.import_module(f"halation.{package}.config"), config)
    values = importlib.import_module("halation.config").validate_settings(config_type, settings, f"halation.{name}()")
    return getattr(importlib.import_module(f"halation.{package}.command"), function)(config_type(**values))
