"""Creates schedulers for a pipeline from the config of its own scheduler."""

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
    """Return the noise path of a DDPM scheduler: its `alphas_cumprod` and its prediction type."""
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
    """Return the rectified flow path, for families trained with it."""
    if not is_flow(scheduler):
        raise InputError(
            f"the scheduler {type(scheduler).__name__}",
            "a flow-matching scheduler: this family is trained with flow matching",
            "put the scheduler that the model was published with into its scheduler folder",
        )
    return RectifiedFlowPath()


def time_shift_for_tokens(scheduler: Any, num_tokens: int) -> float:
    """Return the time shift (towards noise) of a flow scheduler for this number of tokens."""
    config = scheduler.config
    if not config.get("use_dynamic_shifting"):
        return time_shift(scheduler)
    amount = _dynamic_shift(config, num_tokens)
    return math.exp(amount) if config.get("time_shift_type", "exponential") == "exponential" else amount


def _dynamic_shift(config: Any, num_tokens: int) -> float:
    """Interpolate the shift linearly in the number of tokens; the defaults are those of FLUX."""
    low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    least, most = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    return float(least + (most - least) * (num_tokens - low) / (high - low))


def few_step_scheduler(scheduler: Any, family: PipelineFamily, num_steps: int, num_tokens: int) -> Any:
    """Create a first-order solver with `num_steps` steps of equal (shifted) time.

    Rectified flow uses Euler with the teacher's shift for this size. A table of noise levels uses DDIM without added
    noise, starting at the last level.
    """
    levels = int(scheduler.config.num_train_timesteps)
    if not is_flow(scheduler):
        if levels % num_steps:  # DDIM uses integer levels: other steps would end one level off the start of the next
            even = [str(number) for number in range(1, 9) if levels % number == 0]
            raise InputError(
                f"--student_steps {num_steps} for a table of {levels} noise levels",
                "a divisor of it, so that each step ends where the next one starts",
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
    """Return settings with which a scheduler that chooses its own times takes K equal steps.

    By default it spreads its times down to its lowest level, so that the last of few steps would do nothing.
    `shift_terminal` corrects that: together with the shift below, its times are those of K equal steps, of which the
    last starts at 1/K (shifted).

    Times u from 1 to m become 1 - (1 - T) / (1 - w(m)) * (1 - w(u)) with w(u) = a u / (1 + (a - 1) u). That equals the
    required s u' / (1 + (s - 1) u') at u' = 1 - r (1 - u), r = (K - 1) / K / (1 - m), for a = s / (s - (s - 1) r). The
    lowest level m depends weakly on a; a few iterations converge.
    """
    terminal = shift / num_steps / (1 + (shift - 1) / num_steps)
    own = shift
    for _ in range(20):
        lowest = own / levels / (1 + (own - 1) / levels)
        ratio = (num_steps - 1) / num_steps / (1 - lowest)
        own = shift / (shift - (shift - 1) * ratio)
    return {"shift": own, "shift_terminal": terminal}


def sampling_times(scheduler: Any, family: PipelineFamily, num_steps: int, num_tokens: int) -> tuple[float, ...]:
    """Return the `num_steps + 1` times, from 1 to 0, of a pipeline's call with this scheduler.

    The first is always 1, since a pipeline starts from pure noise.
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
    else:  # the middle of a level, so that rounding cannot give its neighbour
        found = [(int(level) + 0.5) / int(copy.config.num_train_timesteps) for level in copy.timesteps]
    inner = [time for time in dict.fromkeys(found[1:]) if time > 0]
    return (1.0, *inner, 0.0)


def is_flow(scheduler: Any) -> bool:
    """Return True for flow matching: the model predicts a velocity, not noise."""
    return type(scheduler).__name__.startswith("FlowMatch") or bool(scheduler.config.get("use_flow_sigmas"))


def time_shift(scheduler: Any) -> float:
    """Return the time shift of a flow scheduler, which has two config names; default 1."""
    return float(scheduler.config.get("shift", scheduler.config.get("flow_shift", 1.0)))


def _is_available(name: str) -> bool:
    """Return True if diffusers has this scheduler and it takes a generator.

    Classes whose libraries are missing are placeholders. DPMSolverSDEScheduler does not take a generator.
    """
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
    # Pipelines do not pass their sigmas to a scheduler that uses flow sigmas.
    return all(
        item in parameters or (item == "sigmas" and name in _WITH_FLOW_SIGMAS)
        for item in family.set_timesteps_arguments
    )


def make_scheduler(scheduler: Any, wanted: str, family: PipelineFamily) -> Any:
    """Create the scheduler of this name with the config of the model's own scheduler."""
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
            f"--scheduler {wanted} does not work with this pipeline, whose own scheduler is {own}",
            f"one of {', '.join(short)}; or a class name: {', '.join(names)}",
            "choose one of those, or leave --scheduler out",
        )
    if class_name == own:
        return scheduler
    changes: dict[str, Any] = {}
    if is_flow(scheduler):  # without the time shift another solver would use other noise levels
        shift = time_shift(scheduler)
        changes = {"shift": shift}
        if class_name in _WITH_FLOW_SIGMAS:
            changes = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": shift}
    return getattr(diffusers, class_name).from_config(scheduler.config, **changes)


def copy_with_timesteps(scheduler: Any, num_steps: int) -> Any:
    """Return a copy of the scheduler with its timesteps set for `num_steps`."""
    copy = type(scheduler).from_config(scheduler.config)
    shifting = {"mu": 1.0} if scheduler.config.get("use_dynamic_shifting") else {}
    with np.errstate(all="ignore"):  # an unsupported number of steps gives NaN times
        copy.set_timesteps(num_steps, **shifting)
    return copy
