"""Other schedulers for a pipeline, made from the config of its own scheduler."""

from __future__ import annotations

import inspect
import math
from typing import Any

import diffusers
import numpy as np

from halation.errors import InputError
from halation.flow.paths import PREDICTION_TYPES, DDPMPath, RectifiedFlowPath
from halation.models.pipelines.family_quirks import PipelineFamily

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
_FLOW_NAMES = {"euler": "FlowMatchEulerDiscreteScheduler", "heun": "FlowMatchHeunDiscreteScheduler"}
_WITH_FLOW_SIGMAS = ("UniPCMultistepScheduler", "DPMSolverMultistepScheduler", "DPMSolverSinglestepScheduler")


def ddpm_path(scheduler: Any) -> DDPMPath:
    """The scheduler's own table of signal shares and its prediction, for families trained with DDPM."""
    prediction = scheduler.config.get("prediction_type")
    alphas_cumprod = getattr(scheduler, "alphas_cumprod", None)
    if alphas_cumprod is None or is_flow(scheduler) or prediction not in PREDICTION_TYPES:
        raise InputError(
            f"the scheduler {type(scheduler).__name__} with prediction_type {prediction!r}",
            f"a scheduler with a table of noise levels that predicts one of {', '.join(PREDICTION_TYPES)}",
            "put the scheduler that the model was published with into its scheduler folder",
        )
    return DDPMPath(alphas_cumprod, prediction)


def rectified_flow_path(scheduler: Any) -> RectifiedFlowPath:
    """The straight line of rectified flow, for families trained on it."""
    if not is_flow(scheduler):
        raise InputError(
            f"the scheduler {type(scheduler).__name__}",
            "a flow-matching scheduler, which is what this family is trained with",
            "put the scheduler that the model was published with into its scheduler folder",
        )
    return RectifiedFlowPath()


def time_shift_for_tokens(scheduler: Any, num_tokens: int) -> float:
    """How far a flow scheduler moves its times towards noise for an image of so many tokens."""
    config = scheduler.config
    if not config.get("use_dynamic_shifting"):
        return time_shift(scheduler)
    amount = _dynamic_shift(config, num_tokens)
    return math.exp(amount) if config.get("time_shift_type", "exponential") == "exponential" else amount


def _dynamic_shift(config: Any, num_tokens: int) -> float:
    """The line through two sizes of images that the pipelines draw, by default through those of FLUX."""
    low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    least, most = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    return float(least + (most - least) * (num_tokens - low) / (high - low))


def few_step_scheduler(scheduler: Any, family: PipelineFamily, num_steps: int, num_tokens: int) -> Any:
    """A first-order solver that goes from pure noise to the image in `num_steps` steps of equal (shifted) time.

    Rectified flow is drawn by Euler at the shift the teacher has for this size; a table of noise levels by DDIM without
    noise of its own, from the last level on.
    """
    levels = int(scheduler.config.num_train_timesteps)
    if not is_flow(scheduler):
        if levels % num_steps:  # DDIM counts whole levels: other steps land one level beside where the next one looks
            even = [str(number) for number in range(1, 9) if levels % number == 0]
            raise InputError(
                f"--student_steps {num_steps} of a table of {levels} noise levels",
                "steps that divide it, so that each lands where the next one begins",
                f"use one of {', '.join(even)}",
            )
        return diffusers.DDIMScheduler.from_config(
            scheduler.config,
            timestep_spacing="trailing",
            clip_sample=False,
            thresholding=False,
            set_alpha_to_one=True,
            steps_offset=0,
        )
    shift = time_shift_for_tokens(scheduler, num_tokens)
    settings: dict[str, Any] = {"shift": shift, "num_train_timesteps": levels}
    if "sigmas" not in family.set_timesteps_arguments and num_steps > 1:
        settings |= _terminal_shift_settings(shift, num_steps, levels)
    return diffusers.FlowMatchEulerDiscreteScheduler(**settings)


def _terminal_shift_settings(shift: float, num_steps: int, levels: int) -> dict[str, float]:
    """Settings that make a scheduler, to which the pipeline leaves the times, go through K equal steps.

    By default it spreads its times down to its lowest level, and its last step of few would do nothing. Its own
    stretching corrects that: with the shift below, times that end at a K-th of the way, shifted, are those that K equal
    steps go through.

    Times u from 1 to m become 1 - (1 - T) / (1 - w(m)) * (1 - w(u)) with w(u) = a u / (1 + (a - 1) u). That is the
    wanted s u' / (1 + (s - 1) u') at u' = 1 - r (1 - u), r = (K - 1) / K / (1 - m), for a = s / (s - (s - 1) r). The
    lowest level m depends on a, by little: a few rounds settle it.
    """
    terminal = shift / num_steps / (1 + (shift - 1) / num_steps)
    own = shift
    for _ in range(20):
        lowest = own / levels / (1 + (own - 1) / levels)
        ratio = (num_steps - 1) / num_steps / (1 - lowest)
        own = shift / (shift - (shift - 1) * ratio)
    return {"shift": own, "shift_terminal": terminal}


def sampling_times(scheduler: Any, family: PipelineFamily, num_steps: int, num_tokens: int) -> tuple[float, ...]:
    """The times, from 1 to 0, that the pipeline's call goes through with this scheduler; one more than there are steps.

    The first is 1 whatever the scheduler calls it: a pipeline begins with pure noise.
    """
    copy = type(scheduler).from_config(scheduler.config)
    settings: dict[str, Any] = {}
    if "sigmas" in family.set_timesteps_arguments and not copy.config.get("use_flow_sigmas"):
        settings["sigmas"] = np.linspace(1.0, 1 / num_steps, num_steps)
    if copy.config.get("use_dynamic_shifting"):
        settings["mu"] = _dynamic_shift(copy.config, num_tokens)
    copy.set_timesteps(num_steps, **settings)
    if is_flow(copy):
        found = [float(sigma) for sigma in copy.sigmas]
    else:  # the middle of a level, which no rounding takes for its neighbour
        found = [(int(level) + 0.5) / int(copy.config.num_train_timesteps) for level in copy.timesteps]
    inner = [time for time in dict.fromkeys(found[1:]) if time > 0]
    return (1.0, *inner, 0.0)


def is_flow(scheduler: Any) -> bool:
    """Whether the model predicts a velocity between noise and image, and not noise."""
    return type(scheduler).__name__.startswith("FlowMatch") or bool(scheduler.config.get("use_flow_sigmas"))


def time_shift(scheduler: Any) -> float:
    """How far a flow scheduler moves its times towards noise, which has two names; 1 where it does not."""
    return float(scheduler.config.get("shift", scheduler.config.get("flow_shift", 1.0)))


def _is_available(name: str) -> bool:
    """Classes whose libraries are missing are placeholders; one draws its noise from no generator we could give it."""
    kind = getattr(diffusers, name, None)
    return isinstance(kind, type) and issubclass(kind, diffusers.SchedulerMixin) and name != "DPMSolverSDEScheduler"


def _accepts_timesteps(name: str, scheduler: Any, family: PipelineFamily) -> bool:
    if (
        name in _WITH_FLOW_SIGMAS
        and "mu" in family.set_timesteps_arguments
        and not scheduler.config.get("use_dynamic_shifting")
    ):
        return False
    parameters = inspect.signature(getattr(diffusers, name).set_timesteps).parameters
    # With flow sigmas of its own a scheduler is not handed the pipeline's.
    return all(
        item in parameters or (item == "sigmas" and name in _WITH_FLOW_SIGMAS)
        for item in family.set_timesteps_arguments
    )


def make_scheduler(scheduler: Any, wanted: str, family: PipelineFamily) -> Any:
    """The scheduler of this name, with the config of the one the model came with."""
    own = type(scheduler).__name__
    if is_flow(scheduler):
        short_names = {**SHORT_NAMES, **_FLOW_NAMES}
        candidates = {own, *_FLOW_NAMES.values(), *_WITH_FLOW_SIGMAS}
        names = sorted(n for n in candidates if _is_available(n) and _accepts_timesteps(n, scheduler, family))
    else:
        short_names = SHORT_NAMES
        candidates = {own, *(kind.__name__ for kind in scheduler.compatibles)}
        names = sorted(filter(_is_available, candidates))
    class_name = short_names.get(wanted, wanted)
    if class_name not in names:
        short = sorted(key for key, name in short_names.items() if name in names)
        raise InputError(
            f"--scheduler {wanted} does not fit this pipeline, whose own is {own}",
            f"one of {', '.join(short)}; or a class: {', '.join(names)}",
            "choose one of those, or leave --scheduler out",
        )
    if class_name == own:
        return scheduler
    changes: dict[str, Any] = {}
    if is_flow(scheduler):  # without the time shift another solver would walk another path of noise levels
        shift = time_shift(scheduler)
        changes = {"shift": shift}
        if class_name in _WITH_FLOW_SIGMAS:
            changes = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": shift}
    return getattr(diffusers, class_name).from_config(scheduler.config, **changes)


def copy_with_timesteps(scheduler: Any, num_steps: int) -> Any:
    """A copy of the scheduler with its timesteps set for `num_steps`; the scheduler itself is left alone."""
    copy = type(scheduler).from_config(scheduler.config)
    shifting = {"mu": 1.0} if scheduler.config.get("use_dynamic_shifting") else {}
    with np.errstate(all="ignore"):  # a number of steps that it cannot make gives times that are none
        copy.set_timesteps(num_steps, **shifting)
    return copy
