"""Checks what a pipeline supports before it generates: options, sizes, steps, guidance."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from halation.errors import InputError
from halation.models.dtypes import DTYPES
from halation.models.pipelines import call_settings
from halation.models.pipelines.call_settings import Guidance
from halation.models.pipelines.family_quirks import FAMILIES, PipelineFamily
from halation.models.pipelines.pipeline_hooks import boundary_timestep
from halation.models.pipelines.schedulers import copy_with_timesteps
from halation.sample_specs import SampleSpec

_SPEC_ARGUMENTS = {
    "prompt": "the prompt list",
    "negative_prompt": "--negative_prompt",
    "height": "--height",
    "width": "--width",
    "num_frames": "--num_frames",
    "video_length": "--num_frames",
    "num_inference_steps": "--num_inference_steps",
    "guidance_scale": "--guidance_scale",
    "distilled_guidance_scale": "--guidance_scale",
    "generator": "--seed_start",
}
_RESERVED_ARGUMENTS = ("output_type", "return_dict", "latents", "num_images_per_prompt", "num_videos_per_prompt")
_SCALAR_TYPES = (bool, int, float, str)
logger = logging.getLogger(__name__)

OFFLOAD_MODES = ("none", "model", "layers")


def library_class(kind: type[Any]) -> type[Any]:
    """Return the class itself, or the class of diffusers that it is derived from."""
    return next((base for base in kind.__mro__ if base.__module__.startswith("diffusers.")), kind)


def call_parameters(kind: type[Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(kind.__call__).parameters


def _call_hints(kind: type[Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(kind.__call__)
    except (NameError, TypeError):  # hints that only a type checker can resolve
        return {}


def _check_value(name: str, value: Any, default: Any, hint: Any) -> None:
    if isinstance(default, _SCALAR_TYPES):
        if not _matches_hint(value, type(default)) and not (hint is float and _matches_hint(value, float)):
            raise InputError(
                f"--pipeline_args {name}={value!r}",
                f"a value like its default, {default!r}",
                f"give {name} as {type(default).__name__}",
            )
    elif value is not None and not _matches_hint(value, hint):
        described = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
        raise InputError(
            f"--pipeline_args {name}={value!r}",
            f"a value of the type that the pipeline accepts, {described}",
            f"change {name}, or leave it out; a list is written as [1, 2]",
        )


def _matches_hint(value: Any, hint: Any) -> bool:
    """Return True if a JSON value matches a type hint; the pipeline checks non-JSON types."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_matches_hint(value, one) for one in inner)
    if origin is tuple and Ellipsis not in inner:
        return isinstance(value, list | tuple) and len(value) == len(inner) and all(map(_matches_hint, value, inner))
    if origin in (list, tuple):
        return isinstance(value, list | tuple) and all(_matches_hint(entry, inner[0]) for entry in value)
    kind = origin or hint
    if not isinstance(kind, type):
        return True
    if kind in (int, float):
        return isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    return isinstance(value, kind)


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """Options for opening a pipeline, from the flags."""

    dtype: str
    device: str
    scheduler: str
    offload: str
    compile: bool
    arguments: Mapping[str, Any]
    cfg_truncation_step: int | None
    half_frame: bool

    def check(self, kind: type[Any], family: PipelineFamily, guidance: Guidance) -> None:
        """Run the checks that need no weights, before gigabytes are read."""
        if self.dtype not in DTYPES:
            raise InputError(f"--dtype {self.dtype}", f"one of {', '.join(DTYPES)}", "choose one of those")
        if self.offload not in OFFLOAD_MODES:
            raise InputError(f"--offload {self.offload}", f"one of {', '.join(OFFLOAD_MODES)}", "choose one of those")
        if self.offload != "none" and torch.device(self.device).type == "cpu":
            raise InputError(
                f"--offload {self.offload} on a CPU", "a GPU to offload from", "leave --offload out, or give --gpu_ids"
            )
        self._check_arguments(kind, guidance)
        if self.cfg_truncation_step is not None:
            self._check_truncation(kind, family, guidance)

    def _check_arguments(self, kind: type[Any], guidance: Guidance) -> None:
        """Reject arguments that the pipeline's call does not accept; list those it does."""
        hints = _call_hints(kind)
        with_flags = _SPEC_ARGUMENTS | ({guidance.argument: "--guidance_scale"} if guidance.argument else {})
        usable = {
            name: parameter
            for name, parameter in call_parameters(kind).items()
            if name not in ("self", *with_flags, *_RESERVED_ARGUMENTS)
            and not name.startswith("callback")
            and not any(part in name for part in ("_embeds", "attention_mask", "ip_adapter"))
            and parameter.kind is not inspect.Parameter.VAR_KEYWORD
        }
        for name, value in self.arguments.items():
            if name in with_flags:
                raise InputError(
                    f"--pipeline_args {name}={value}",
                    "an option of the pipeline that has no flag",
                    f"use {with_flags[name]}",
                )
            if name not in usable:
                raise InputError(
                    f"--pipeline_args {name}={value}: {kind.__name__} has no such option",
                    f"one of {', '.join(sorted(usable))}",
                    "choose one of those, or leave it out",
                )
            _check_value(name, value, usable[name].default, hints.get(name, Any))

    def call_arguments(self, kind: type[Any]) -> dict[str, Any]:
        """Return the arguments for the call; lists become tuples if the pipeline requires it.

        JSON has only lists, and some pipelines concatenate theirs with a tuple.
        """
        hints, converted = _call_hints(kind), dict(self.arguments)
        for name, value in self.arguments.items():
            origin, inner = typing.get_origin(hints.get(name)), typing.get_args(hints.get(name))
            kinds = [typing.get_origin(one) or one for one in inner]
            is_union = origin in (typing.Union, types.UnionType)
            if isinstance(value, list) and (origin is tuple or (is_union and tuple in kinds and list not in kinds)):
                converted[name] = tuple(value)
        return converted

    def _check_truncation(self, kind: type[Any], family: PipelineFamily, guidance: Guidance) -> None:
        assert self.cfg_truncation_step is not None
        if self.cfg_truncation_step < 0:
            raise InputError(
                f"--cfg_truncation_step {self.cfg_truncation_step}", "a step of at least 0", "count steps from 0"
            )
        if family.guidance_branches == "unknown":
            names = sorted({entry.name for entry in FAMILIES.values()})
            raise InputError(
                f"--cfg_truncation_step with {kind.__name__}, whose guidance Halation does not know",
                f"one of the families {', '.join(names)}",
                "leave --cfg_truncation_step out",
            )
        argument = guidance.switch
        if argument != guidance.argument and not float(self.arguments.get(argument, 1.0)) > 1:
            raise InputError(
                f"--cfg_truncation_step with {kind.__name__}, which is guidance-distilled and has no "
                "unconditional branch to leave out",
                f"a pipeline with an unconditional branch, or {argument} above 1",
                f"leave --cfg_truncation_step out, or add --pipeline_args {argument}=4.0",
            )


class PipelineChecker:
    """Checks specs and options against a loaded pipeline."""

    def __init__(self, *, pipe: Any, family: PipelineFamily, options: PipelineOptions) -> None:
        self.pipe = pipe
        self.family = family
        self.options = options
        self._parameters = call_parameters(type(pipe))
        self._warned: set[str] = set()
        self._scheduler_for_steps = functools.cache(lambda num_steps: copy_with_timesteps(pipe.scheduler, num_steps))

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)

    @property
    def _denoiser(self) -> Any:
        found = (getattr(self.pipe, name, None) for name in ("transformer", "transformer_2", "unet"))
        return next((module for module in found if module is not None), None)

    @property
    def has_two_experts(self) -> bool:
        parts = (getattr(self.pipe, name, None) for name in ("transformer", "transformer_2"))
        return all(part is not None for part in parts) and self.pipe.config.get("boundary_ratio") is not None

    @functools.cached_property
    def guidance(self) -> Guidance:
        denoiser = self._denoiser
        config = {} if denoiser is None else dict(denoiser.config)
        return call_settings.find_guidance(self.class_name, config, dict(self.pipe.config))

    @property
    def accepts_negative_prompt(self) -> bool:
        guidance = self.guidance
        if not guidance.takes_negative_prompt:
            return False
        return guidance.switch == guidance.argument or self._switch_value(None) > guidance.threshold

    def _switch_value(self, guidance_scale: float | None) -> float:
        defaults = call_settings.read_call_arguments(self.class_name)
        return self.guidance.switch_value(guidance_scale, self.options.arguments, defaults)

    @functools.cached_property
    def default_arguments(self) -> dict[str, Any]:
        """Disable caption cleaning if its libraries are missing.

        The pipeline would skip it anyway, with a warning on every call.
        """
        from diffusers.utils import is_bs4_available, is_ftfy_available

        if "clean_caption" in self._parameters and not (is_bs4_available() and is_ftfy_available()):
            return {"clean_caption": False}
        return {}

    def check_options(self) -> None:
        """Run the checks that need the loaded pipeline."""
        if self.options.offload == "model" and self.pipe.model_cpu_offload_seq is None:
            raise InputError(
                f"--offload model with {type(self.pipe).__name__}, which has no model_cpu_offload_seq",
                "none or layers",
                "use --offload layers",
            )
        if self.pipe.scheduler.config.get("stochastic_sampling"):
            raise InputError(
                f"the scheduler {type(self.pipe.scheduler).__name__} is set to stochastic_sampling",
                "a scheduler whose noise comes from the spec's seed",
                "set stochastic_sampling to false in scheduler/scheduler_config.json",
            )

    # One spec

    def check_spec(self, spec: SampleSpec) -> None:
        self.check_size(spec.height, spec.width)
        self._check_frames(spec)
        self._check_steps(spec)
        self._check_guidance(spec)

    @property
    def class_name(self) -> str:
        """The class of diffusers that the pipeline is, or that the caller's class is derived from."""
        return library_class(type(self.pipe)).__name__

    @functools.cached_property
    def size_multiple(self) -> int:
        """The number that must divide height and width."""
        parts = (getattr(self.pipe, name, None) for name in ("vae", "vqvae", "movq"))
        configs = [
            dict(part.config) if part is not None else {} for part in (self._denoiser, next(filter(None, parts), None))
        ]
        return call_settings.find_size_multiple(self.class_name, *configs)

    def check_size(self, height: int, width: int) -> None:
        multiple = self.size_multiple
        call_settings.check_size_multiple(type(self.pipe).__name__, multiple, height, width)
        denoiser = self._denoiser
        largest = denoiser.config.get("pos_embed_max_size") if denoiser is not None else None
        if largest and max(height, width) > largest * multiple:
            raise InputError(
                f"a size of {height} x {width} with {type(self.pipe).__name__}",
                f"at most {largest * multiple} pixels per side, the largest position of the model",
                "use a smaller size",
            )

    def _check_frames(self, spec: SampleSpec) -> None:
        if spec.num_frames < 1 or (
            spec.num_frames > 1 and not self._parameters.keys() & {"num_frames", "video_length"}
        ):
            raise InputError(
                f"--num_frames {spec.num_frames} with {type(self.pipe).__name__}",
                "1 frame: it generates images",
                "use 1",
            )
        temporal = self._temporal_factor
        if (spec.num_frames - 1) % temporal:
            lower = (spec.num_frames - 1) // temporal * temporal + 1
            raise InputError(
                f"--num_frames {spec.num_frames} with {type(self.pipe).__name__}",
                f"a multiple of {temporal}, plus 1",
                f"the nearest are {lower} and {lower + temporal}",
            )
        if not self.options.half_frame:
            return
        if spec.num_frames == 1:
            self._warn_once("--enable_half_frame has no effect with one frame")
        elif not self.has_two_experts or self.pipe.config.get("expand_timesteps"):
            raise InputError(
                f"--enable_half_frame with {type(self.pipe).__name__}, which has one denoiser for all noise levels",
                "a video pipeline with two experts (transformer, transformer_2 and boundary_ratio)",
                "leave --enable_half_frame out",
            )

    @property
    def _temporal_factor(self) -> int:
        names = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio")
        return int(next((getattr(self.pipe, name) for name in names if getattr(self.pipe, name, None)), 1))

    def frames_to_generate(self, spec: SampleSpec) -> tuple[int, int | None]:
        """Return the frames to request, and the latent frames after doubling, or None.

        With --enable_half_frame the high-noise expert generates ceil(F / 2) of a video's F latent frames. After its
        last step every latent frame is repeated once; for an odd F, the last repetition is dropped. In a causal
        autoencoder, the first latent frame is one frame of the video and each other one several (Wan: four), so half
        the latent frames are not exactly half the frames.
        """
        if not self.options.half_frame or spec.num_frames == 1 or not self.has_two_experts:
            return spec.num_frames, None
        if not bool(self._scheduler_for_steps(spec.steps).timesteps[0] >= boundary_timestep(self.pipe)):
            return spec.num_frames, None
        num_latent = (spec.num_frames - 1) // self._temporal_factor + 1
        return ((num_latent + 1) // 2 - 1) * self._temporal_factor + 1, num_latent

    def _check_steps(self, spec: SampleSpec) -> None:
        name = type(self.pipe.scheduler).__name__
        if spec.steps < 1:
            raise InputError(f"--num_inference_steps {spec.steps}", "at least 1", "use more steps")
        try:
            scheduler = self._scheduler_for_steps(spec.steps)
            if not torch.as_tensor(scheduler.timesteps).isfinite().all():
                raise ValueError("its timesteps would be NaN")
        except (ValueError, IndexError, RuntimeError, ZeroDivisionError) as error:
            raise InputError(
                f"--num_inference_steps {spec.steps} with {name}: {error}",
                "a number of steps that the scheduler supports",
                "use fewer or more steps, or another --scheduler",
            ) from error
        if spec.steps == 1 and self.family.one_step_needs_pred_original:
            sample = torch.zeros(1, 1, 2, 2)
            if len(scheduler.step(sample, scheduler.timesteps[0], sample, return_dict=False)) == 1:
                raise InputError(
                    f"one step with {type(self.pipe).__name__} and {name}",
                    "at least 2 steps, or a scheduler that returns the predicted image (lcm, ddpm, ddim)",
                    "use --num_inference_steps 2",
                )

    def _check_guidance(self, spec: SampleSpec) -> None:
        name = type(self.pipe).__name__
        if spec.guidance_scale is not None and not math.isfinite(spec.guidance_scale):
            raise InputError(f"--guidance_scale {spec.guidance_scale}", "a number", "use 1 for no guidance")
        if spec.negative_prompt and not self.accepts_negative_prompt:
            options = sorted(name for name in self._parameters if name.endswith(("_scale", "_prompt")))
            action = "leave the negative prompt out"
            if self.guidance.takes_negative_prompt:
                action += f", or add --pipeline_args {self.guidance.switch}=4.0"
            raise InputError(
                f"a negative prompt with {name}, which would ignore it",
                f"its options: {', '.join(options)}",
                action,
            )
        if spec.guidance_scale is not None and not self.guidance.argument:
            self._warn_once(f"{name} has no guidance: --guidance_scale has no effect")
        truncation = self.options.cfg_truncation_step
        if truncation is not None and self._switch_value(spec.guidance_scale) <= self.guidance.threshold:
            raise InputError(
                f"--cfg_truncation_step {truncation} with a guidance scale of {spec.guidance_scale}, which has no "
                "unconditional branch to leave out",
                "a guidance scale above 1",
                "leave --cfg_truncation_step out",
            )

    def describe(self, own_scheduler: str) -> dict[str, Any]:
        """Return the record for the run: the pipeline, and the equality class of each option.

        E0 is bit-identical, E1 changes rounding, E2 changes the image.
        """
        options, scheduler = self.options, type(self.pipe.scheduler).__name__
        classes: dict[str, str] = {"offload": "E0"} if options.offload != "none" else {}
        if options.compile:
            classes["compile"] = "E1"
        if options.cfg_truncation_step is not None:
            classes["cfg_truncation_step"] = "E2"
        if options.half_frame:
            classes["enable_half_frame"] = "E2"
        if scheduler != own_scheduler:
            classes["scheduler"] = "E2"
        if options.arguments:
            classes["pipeline_args"] = "E2"
        vae = getattr(self.pipe, "vae", None)
        # An earlier version passed the scale to guidance_scale in every family, so only another argument is recorded.
        other = {"guidance": self.guidance.argument} if self.guidance.argument not in ("", "guidance_scale") else {}
        return {
            **other,
            "pipeline": type(self.pipe).__name__,
            "family": self.family.name,
            "scheduler": scheduler,
            "dtype": options.dtype,
            "vae_dtype": None if vae is None else str(vae.dtype).removeprefix("torch."),
            "size_multiple": self.size_multiple,
            "arguments": {**self.default_arguments, **options.arguments},
            "options": classes,
        }
