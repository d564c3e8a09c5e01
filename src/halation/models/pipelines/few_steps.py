"""The times at which a pipeline looks at its states, and the scheduler of a student that is drawn in few steps."""

from __future__ import annotations

import math
from typing import Any

import diffusers
import numpy as np

from halation.errors import InputError
from halation.models.pipelines.families import Family
from halation.models.pipelines.schedulers import is_flow, shift_of


def fixed_shift(scheduler: Any, num_tokens: int) -> float:
    """How far a flow scheduler moves its times towards noise for a picture of so many tokens."""
    config = scheduler.config
    if not config.get("use_dynamic_shifting"):
        return shift_of(scheduler)
    amount = _dynamic_shift(config, num_tokens)
    return math.exp(amount) if config.get("time_shift_type", "exponential") == "exponential" else amount


def _dynamic_shift(config: Any, num_tokens: int) -> float:
    """The line through two sizes of pictures that the pipelines draw, by default through those of FLUX."""
    low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    least, most = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    return float(least + (most - least) * (num_tokens - low) / (high - low))


def few_step_scheduler(scheduler: Any, family: Family, num_steps: int, num_tokens: int) -> Any:
    """A first-order solver that goes from pure noise to the picture in `num_steps` steps of equal (shifted) time.

    Rectified flow is drawn by Euler at the shift the teacher has for this size; a table of noise levels by DDIM without noise of its
    own, from the last level on.
    """
    if not is_flow(scheduler):
        _refuse_uneven(num_steps, int(scheduler.config.num_train_timesteps))
        return diffusers.DDIMScheduler.from_config(
            scheduler.config,
            timestep_spacing="trailing",
            clip_sample=False,
            thresholding=False,
            set_alpha_to_one=True,
            steps_offset=0,
        )
    levels = int(scheduler.config.num_train_timesteps)
    shift = fixed_shift(scheduler, num_tokens)
    settings: dict[str, Any] = {"shift": shift, "num_train_timesteps": levels}
    if "sigmas" not in family.timesteps_take and num_steps > 1:
        settings |= _ending_at_a_step(shift, num_steps, levels)
    return diffusers.FlowMatchEulerDiscreteScheduler(**settings)


def _refuse_uneven(num_steps: int, levels: int) -> None:
    """DDIM counts whole levels: steps that do not divide them land one level beside where the next one looks."""
    if levels % num_steps:
        even = [str(number) for number in range(1, 9) if levels % number == 0]
        raise InputError(
            f"--student_steps {num_steps} of a table of {levels} noise levels",
            "steps that divide it, so that each lands where the next one begins",
            f"use one of {', '.join(even)}",
        )


def _ending_at_a_step(shift: float, num_steps: int, levels: int) -> dict[str, float]:
    """Where the pipeline leaves the times to the scheduler, that one spreads them down to its lowest level, and its last step of
    few would do nothing. Its own stretching puts that right: with the shift below, times that end at a K-th of the way, shifted,
    are those that K equal steps go through.

    Times u from 1 to m become 1 - (1 - T) / (1 - w(m)) * (1 - w(u)) with w(u) = a u / (1 + (a - 1) u). That is the wanted
    s u' / (1 + (s - 1) u') at u' = 1 - r (1 - u), r = (K - 1) / K / (1 - m), for a = s / (s - (s - 1) r). The lowest level m depends
    on a, by little: a few rounds settle it.
    """
    terminal = shift / num_steps / (1 + (shift - 1) / num_steps)
    own = shift
    for _ in range(20):
        lowest = own / levels / (1 + (own - 1) / levels)
        ratio = (num_steps - 1) / num_steps / (1 - lowest)
        own = shift / (shift - (shift - 1) * ratio)
    return {"shift": own, "shift_terminal": terminal}


def visited(scheduler: Any, family: Family, num_steps: int, num_tokens: int) -> tuple[float, ...]:
    """The times, from 1 to 0, that the pipeline's call goes through with this scheduler; one more than there are steps.

    The first is 1 whatever the scheduler calls it: a pipeline begins with pure noise.
    """
    copy = type(scheduler).from_config(scheduler.config)
    settings: dict[str, Any] = {}
    if "sigmas" in family.timesteps_take and not copy.config.get("use_flow_sigmas"):
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
