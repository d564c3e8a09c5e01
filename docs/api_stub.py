"""Write the types of the Python API from the settings: `python docs/api_stub.py`, after a setting changed.

The stub lets editors complete the keywords of `halation.train(...)` and type checkers check them.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import sys
import typing
from pathlib import Path
from typing import Any

import halation

STUB = Path(halation.__file__).with_suffix(".pyi")
PATHS = ("data", "generated", "model", "prompts", "reference", "vae", "weights")
"""Settings in text form that are often paths."""
FUNCTIONS = {
    "train": ("training", "TrainConfig", "TrainingResult"),
    "distill": ("distillation", "DistillConfig", "TrainingResult"),
    "sample": ("sampling", "SampleConfig", "SamplingResult"),
    "generate": ("generation", "GenerateConfig", "GenerationResult"),
    "evaluate": ("evaluation", "EvaluateConfig", "Scores"),
    "watch": ("watcher", "WatchConfig", "WatchResult"),
}
HEADER = '''"""The types of the Python API. Made by `python docs/api_stub.py`; change the settings instead."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from halation.distillation.config import DistillConfig as DistillConfig
from halation.evaluation.config import EvaluateConfig as EvaluateConfig
from halation.generation.config import GenerateConfig as GenerateConfig
from halation.generation.loaded_model import LoadedModel as LoadedModel
from halation.generation.loaded_model import load_model as load_model
from halation.progress import ProgressEvent as ProgressEvent
from halation.results import GenerationResult as GenerationResult
from halation.results import ImageResult as ImageResult
from halation.results import SamplingResult as SamplingResult
from halation.results import Scores as Scores
from halation.results import TrainingResult as TrainingResult
from halation.results import WatchResult as WatchResult
from halation.sampling.config import SampleConfig as SampleConfig
from halation.sampling.user_training_loop_sampler import RankSampler as RankSampler
from halation.sampling.user_training_loop_sampler import Sample as Sample
from halation.training.config import TrainConfig as TrainConfig
from halation.watcher.config import WatchConfig as WatchConfig

__version__: str
__all__: list[str]
StrPath = str | os.PathLike[str]
'''


def make_stub() -> str:
    """Return the text of the stub."""
    return "\n".join([HEADER, *(_function(name, *parts) for name, parts in FUNCTIONS.items())])


def _function(name: str, package: str, config: str, result: str) -> str:
    config_type = getattr(importlib.import_module(f"halation.{package}.config"), config)
    doc = inspect.cleandoc(inspect.getdoc(getattr(halation, name)) or "").splitlines()[0]
    callback = "on_progress: Callable[[ProgressEvent], object] | None = None"
    keywords = "\n".join(f"    {line}," for line in [callback, *_keywords(config_type, name)])
    return (
        f"@overload\ndef {name}(config: {config}, /, *, {callback}) -> {result}: ...\n"
        f'@overload\ndef {name}(\n    *,\n{keywords}\n) -> {result}:\n    """{doc}"""\n'
    )


def _keywords(config_type: Any, function: str) -> list[str]:
    hints = typing.get_type_hints(config_type)
    lines = []
    for field in dataclasses.fields(config_type):
        is_required = field.default is dataclasses.MISSING
        default = "" if is_required else f" = {_default(field.default)}"
        lines.append(f"{field.name}: {_type(hints[field.name], function, field.name)}{default}")
    return lines


def _type(hint: Any, function: str, name: str) -> str:
    if (function, name) == ("generate", "model_path"):
        return "StrPath | LoadedModel | Any"
    if (function, name) == ("generate", "prompts"):
        return "StrPath | Sequence[str | Mapping[str, Any]]"
    arguments = [each for each in typing.get_args(hint) if each not in (type(None), Ellipsis)]
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if origin is tuple:
        inner = _type(arguments[0], function, name)
        return f"Sequence[{inner}] | {inner}"
    if type(None) in typing.get_args(hint):
        return " | ".join([*dict.fromkeys(_type(each, function, name) for each in arguments), "None"])
    if arguments:
        return " | ".join(dict.fromkeys(_type(each, function, name) for each in arguments))
    if hint is Path or (hint is str and (name in PATHS or name.endswith(("_path", "_dir", "_csv", "_file")))):
        return "StrPath"
    return str(hint.__name__)


def _default(value: Any) -> str:
    text = repr(value)
    try:
        ast.literal_eval(text)
    except ValueError:
        return "..."
    return text


if __name__ == "__main__":
    STUB.write_text(make_stub(), encoding="utf-8")
    sys.stdout.write(f"wrote {STUB}\n")
