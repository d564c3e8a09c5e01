"""--pipeline_args: options that only the pipeline's own call knows, checked against its signature before anything is loaded."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Mapping
from typing import Any

from halation.errors import InputError

_FROM_THE_SPEC = {
    "prompt": "the prompt list",
    "negative_prompt": "--negative_prompt",
    "height": "--height",
    "width": "--width",
    "num_frames": "--num_frames",
    "num_inference_steps": "--num_inference_steps",
    "guidance_scale": "--guidance_scale",
    "generator": "--seed_start",
}
_OURS = ("output_type", "return_dict", "latents", "num_images_per_prompt", "num_videos_per_prompt")
_PLAIN = (bool, int, float, str)


def call_parameters(kind: type[Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(kind.__call__).parameters


def _call_hints(kind: type[Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(kind.__call__)
    except (NameError, TypeError):  # written for a type checker only
        return {}


def check_arguments(kind: type[Any], arguments: Mapping[str, Any]) -> None:
    """Refuse what the pipeline's call does not take, with what it does."""
    hints = _call_hints(kind)
    usable = {
        name: parameter
        for name, parameter in call_parameters(kind).items()
        if name not in ("self", *_FROM_THE_SPEC, *_OURS)
        and not name.startswith("callback")
        and not any(part in name for part in ("_embeds", "attention_mask", "ip_adapter"))
        and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    for name, value in arguments.items():
        if name in _FROM_THE_SPEC:
            raise InputError(
                f"--pipeline_args {name}={value}",
                "an option of the pipeline that has no flag of its own",
                f"use {_FROM_THE_SPEC[name]}",
            )
        if name not in usable:
            raise InputError(
                f"--pipeline_args {name}={value}: {kind.__name__} has no such option",
                f"one of {', '.join(sorted(usable))}",
                "choose one of those, or leave it out",
            )
        _check_value(name, value, usable[name].default, hints.get(name, Any))


def _check_value(name: str, value: Any, default: Any, hint: Any) -> None:
    if isinstance(default, _PLAIN):
        if not _fits(value, type(default)) and not (hint is float and _fits(value, float)):
            raise InputError(
                f"--pipeline_args {name}={value!r}",
                f"a value like its default, {default!r}",
                f"give {name} as {type(default).__name__}",
            )
    elif value is not None and not _fits(value, hint):
        described = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
        raise InputError(
            f"--pipeline_args {name}={value!r}",
            f"what the pipeline takes for it, {described}",
            f"give {name} so, or leave it out; a list is written as [1, 2]",
        )


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value read from JSON can stand for a hint; what a hint means beyond JSON's types is left to the pipeline."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is tuple and Ellipsis not in inner:
        return isinstance(value, list | tuple) and len(value) == len(inner) and all(map(_fits, value, inner))
    if origin in (list, tuple):
        return isinstance(value, list | tuple) and all(_fits(entry, inner[0]) for entry in value)
    kind = origin or hint
    if not isinstance(kind, type):
        return True
    if kind in (int, float):
        return isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    return isinstance(value, kind)


def as_called(kind: type[Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as the call wants them: JSON has lists only, and some pipelines add theirs to a tuple."""
    hints = _call_hints(kind)
    return {
        name: tuple(value) if isinstance(value, list) and _wants_tuple(hints.get(name)) else value
        for name, value in arguments.items()
    }


def _wants_tuple(hint: Any) -> bool:
    kinds = [typing.get_origin(one) or one for one in (typing.get_args(hint) or ()) if one is not type(None)]
    return typing.get_origin(hint) is tuple or (
        typing.get_origin(hint) in (typing.Union, types.UnionType) and tuple in kinds and list not in kinds
    )


def refused_by_the_call(kind: type[Any], arguments: Mapping[str, Any], error: Exception) -> InputError:
    """For a call that failed at a rehearsal: what was given beyond the ordinary is what a person can change."""
    given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return InputError(
        f"{kind.__name__} does not draw with --pipeline_args {given}: {type(error).__name__}: {error}",
        "values that the pipeline's own call accepts",
        "change them, or leave them out to see whether they are the reason",
    )
