"""The path from pictures to noise that a pipeline's scheduler stands for: what training mixes and asks for."""

from __future__ import annotations

from typing import Any

from halation.errors import InputError
from halation.flow.paths import PREDICTIONS, Discrete, Straight
from halation.models.pipelines.schedulers import is_flow


def table_path(scheduler: Any) -> Discrete:
    """The scheduler's own table of signal shares and its prediction, for families trained with DDPM."""
    prediction = scheduler.config.get("prediction_type")
    shares = getattr(scheduler, "alphas_cumprod", None)
    if shares is None or is_flow(scheduler) or prediction not in PREDICTIONS:
        raise InputError(
            f"the scheduler {type(scheduler).__name__} with prediction_type {prediction!r}",
            f"a scheduler with a table of noise levels that predicts one of {', '.join(PREDICTIONS)}",
            "put the scheduler that the model was published with into its scheduler folder",
        )
    return Discrete(shares, prediction)


def straight_path(scheduler: Any) -> Straight:
    """The straight line of rectified flow, for families trained on it."""
    if not is_flow(scheduler):
        raise InputError(
            f"the scheduler {type(scheduler).__name__}",
            "a flow-matching scheduler, which is what this family is trained with",
            "put the scheduler that the model was published with into its scheduler folder",
        )
    return Straight()
