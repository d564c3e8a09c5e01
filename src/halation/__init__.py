"""Halation: train, sample, distil, batch-generate with and score diffusion transformers on every GPU that is there.

What the command line does, from Python:

    import halation
    halation.train(data="streets", model="tiny", image_size=(32, 32), n_steps=100, output_dir="runs/first")
    halation.distill(teacher_path="runs/first", data_path="streets", objective="trajectory", output_dir="runs/fast")
    halation.sample(checkpoint="runs/first", prompts=("A rainy street at night",), output_dir="outputs/rain")
    halation.generate(prompts_csv="prompts.csv", model_path="models/pixart", output_dir="outputs/many")
    halation.evaluate(generated="outputs/many", reference="data/val2017", metrics=("fid", "kid"))["metrics"]["fid"]["value"]

and, inside a training loop of your own, on every rank:

    sampler = halation.RankSampler(draw, ["a red car", "a blue car"], "runs/mine", seed=0, model=model, every=100)
    sampler(step)  # draw(prompt, generator) returns an image; docs/own_trainer.md has an example for each trainer

Settings are the flags (`halation train --help`). `evaluate` returns its report; the others return the exit code, 0, or 1 where some
images could not be drawn. All raise `halation.errors.HalationError` where they cannot do what is asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halation.sampling.user_training_loop_sampler import RankSampler, Sample

__version__ = "0.1.0"
__all__ = ["RankSampler", "Sample", "__version__", "distill", "evaluate", "generate", "sample", "train", "watch"]


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is asked for: `import halation` takes no time."""
    if name in ("RankSampler", "Sample"):
        from halation.sampling import user_training_loop_sampler

        return getattr(user_training_loop_sampler, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def train(**settings: Any) -> int:
    """`halation train` with these settings."""
    from halation.config import validate_settings
    from halation.training import command as job
    from halation.training.config import TrainConfig

    return job.run(TrainConfig(**validate_settings(TrainConfig, settings, "halation.train()")))


def distill(**settings: Any) -> int:
    """`halation distill` with these settings."""
    from halation.config import validate_settings
    from halation.distillation import command as job
    from halation.distillation.config import DistillConfig

    return job.run(DistillConfig(**validate_settings(DistillConfig, settings, "halation.distill()")))


def sample(**settings: Any) -> int:
    """`halation sample` with these settings; `model_path` is the same as `checkpoint`, as on the command line."""
    from halation.config import validate_settings
    from halation.sampling import command as job
    from halation.sampling.config import SampleConfig

    return job.run(SampleConfig(**validate_settings(SampleConfig, settings, "halation.sample()")))


def generate(**settings: Any) -> int:
    """`halation generate` with these settings; `prompts` is short for `prompts_csv`, as on the command line."""
    from halation.config import validate_settings
    from halation.generation import command as job
    from halation.generation.config import GenerateConfig

    return job.run(GenerateConfig(**validate_settings(GenerateConfig, settings, "halation.generate()")))


def evaluate(**settings: Any) -> dict[str, Any]:
    """`halation evaluate` with these settings: the object that `--json` prints."""
    from halation.config import validate_settings
    from halation.evaluation import command as job
    from halation.evaluation.config import EvaluateConfig

    return job.evaluate(EvaluateConfig(**validate_settings(EvaluateConfig, settings, "halation.evaluate()")))


def watch(**settings: Any) -> int:
    """`halation watch` with these settings; with `once` it ends when all that is there is scored."""
    from halation.config import validate_settings
    from halation.watcher import command as job
    from halation.watcher.config import WatchConfig

    return job.run(WatchConfig(**validate_settings(WatchConfig, settings, "halation.watch()")))
