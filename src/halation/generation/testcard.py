"""A painter that needs no model: a card of colours that follow from the spec, to try prompts, disks, clusters and recoveries with."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from halation.errors import InputError
from halation.generation.painter import OnStep
from halation.models.painting import Frames, Painting
from halation.specs import Spec

NAME = "testcard"
NUM_BARS = 8


def seconds_of(model_path: str) -> float | None:
    """Seconds a sheet of `testcard:0.2` takes; None for everything that is no test card."""
    name, _, seconds = model_path.partition(":")
    if name != NAME:
        return None
    try:
        value = float(seconds or 0)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e6:
        raise InputError(
            f"--model_path {model_path}", "testcard, or testcard:SECONDS", "give the seconds a sheet takes"
        )
    return value


class TestCard:
    """Draws bars whose colours are the digest of the spec, after as long as it is told to take."""

    __test__ = False  # pytest: the name is the thing's, not a test's

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.facts: dict[str, Any] = {"pipeline": "test card", "options": {}}

    def check(self, spec: Spec) -> None:
        """Any spec will do."""

    def draw(self, specs: Sequence[Spec], on_step: OnStep) -> Painting:
        for _step in range(specs[0].steps):
            if self.seconds:
                time.sleep(self.seconds / specs[0].steps)
            on_step()
        return Painting(collect=lambda: [card(spec) for spec in specs])


def card(spec: Spec) -> Frames:
    """Bars above, a ramp below; frames of a video differ by a step of the ramp."""
    settings = f"{spec.prompt}\0{spec.negative_prompt}\0{spec.seed}\0{spec.steps}\0{spec.guidance_scale}"
    colours = np.frombuffer(hashlib.sha256(settings.encode()).digest()[: NUM_BARS * 3], np.uint8).reshape(NUM_BARS, 3)
    bars = colours[np.arange(spec.width) * NUM_BARS // spec.width]
    frames = np.empty((spec.num_frames, spec.height, spec.width, 3), np.uint8)
    frames[:] = bars
    ramp = (np.arange(spec.width) * 255 // max(1, spec.width - 1)).astype(np.uint8)
    for number, frame in enumerate(frames):
        frame[spec.height * 3 // 4 :] = np.roll(ramp, number * 8)[:, None]
    return frames
