"""Another scheduler for a pipeline: by class name or short name, made from the pipeline's own scheduler config, if it fits the model."""

from __future__ import annotations

import inspect
from typing import Any

import diffusers
import numpy as np

from halation.errors import InputError
from halation.models.pipelines.families import Family

SHORT_NAMES = {
    "ddim": "DDIMScheduler",
    "ddpm": "DDPMScheduler",
    "deis": "DEISMultistepScheduler",
    "dpm++": "DPMSolverMultistepScheduler",
    "dpm++_single": "DPMSolverSinglestepScheduler",
    "euler": "EulerDiscreteScheduler",
    "euler_a": "EulerAncestralDiscreteScheduler",
    "flow_euler": "FlowMatchEulerDiscreteScheduler",
    "flow_heun": "FlowMatchHeunDiscreteScheduler",
    "heun": "HeunDiscreteScheduler",
    "lms": "LMSDiscreteScheduler",
    "pndm": "PNDMScheduler",
    "unipc": "UniPCMultistepScheduler",
}
_FLOW_NAMES = {
    "euler": "FlowMatchEulerDiscreteScheduler",
    "heun": "FlowMatchHeunDiscreteScheduler",
}
_FLOW_MATCHING = ("FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler")
_WITH_FLOW_SIGMAS = (
    "UniPCMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
)


def is_flow(scheduler: Any) -> bool:
    """Whether the model predicts a velocity between noise and picture, and not noise."""
    return type(scheduler).__name__.startswith("FlowMatch") or bool(scheduler.config.get("use_flow_sigmas"))


def shift_of(scheduler: Any) -> float:
    """How far a flow scheduler moves its times towards noise, which has two names; 1 where it does not."""
    return float(scheduler.config.get("shift", scheduler.config.get("flow_shift", 1.0)))


def fitting(scheduler: Any, family: Family) -> list[str]:
    """The class names that can stand in for this pipeline's scheduler."""
    if not is_flow(scheduler):
        names = {type(scheduler).__name__, *(kind.__name__ for kind in scheduler.compatibles)}
        return sorted(name for name in names if _is_real(name))
    names = {type(scheduler).__name__, *_FLOW_MATCHING, *_WITH_FLOW_SIGMAS}
    return sorted(name for name in names if _is_real(name) and _takes(name, scheduler, family))


def _is_real(name: str) -> bool:
    """Classes whose libraries are missing are placeholders; one draws its noise from no generator we could give it."""
    kind = getattr(diffusers, name, None)
    return isinstance(kind, type) and issubclass(kind, diffusers.SchedulerMixin) and name != "DPMSolverSDEScheduler"


def _takes(name: str, scheduler: Any, family: Family) -> bool:
    if name in _WITH_FLOW_SIGMAS and "mu" in family.timesteps_take and not scheduler.config.get("use_dynamic_shifting"):
        return False
    parameters = inspect.signature(getattr(diffusers, name).set_timesteps).parameters
    # With flow sigmas of its own a scheduler is not handed the pipeline's.
    return all(item in parameters or (item == "sigmas" and name in _WITH_FLOW_SIGMAS) for item in family.timesteps_take)


def replaced(scheduler: Any, wanted: str, family: Family) -> Any:
    """The scheduler a person asked for, with the config of the one the model came with."""
    names = fitting(scheduler, family)
    class_name = SHORT_NAMES.get(wanted, wanted)
    if is_flow(scheduler):
        class_name = _FLOW_NAMES.get(wanted, class_name)
    if class_name not in names:
        short = sorted(
            key
            for key, name in ({**SHORT_NAMES, **_FLOW_NAMES} if is_flow(scheduler) else SHORT_NAMES).items()
            if name in names
        )
        raise InputError(
            f"--scheduler {wanted} does not fit this pipeline, whose own is {type(scheduler).__name__}",
            f"one of {', '.join(short)}; or a class: {', '.join(names)}",
            "choose one of those, or leave --scheduler out",
        )
    if class_name == type(scheduler).__name__:
        return scheduler
    return getattr(diffusers, class_name).from_config(scheduler.config, **_translated(scheduler, class_name))


def _translated(scheduler: Any, class_name: str) -> dict[str, Any]:
    """Without the time shift another solver would walk another path of noise levels."""
    if not is_flow(scheduler):
        return {}
    shift = shift_of(scheduler)
    if class_name in _WITH_FLOW_SIGMAS:
        return {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": shift}
    return {"shift": shift}


def trial(scheduler: Any, num_steps: int) -> Any:
    """A copy of the scheduler with its timesteps set for `num_steps`; the scheduler itself is left alone."""
    copy = type(scheduler).from_config(scheduler.config)
    shifting = {"mu": 1.0} if scheduler.config.get("use_dynamic_shifting") else {}
    with np.errstate(all="ignore"):  # a number of steps that it cannot make gives times that are none
        copy.set_timesteps(num_steps, **shifting)
    return copy
