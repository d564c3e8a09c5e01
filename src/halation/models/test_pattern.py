"""A painter that needs no model: a card of colours that follow from the spec, to try prompts, disks, clusters and recoveries with."""

from __future__ import annotations

import hashlib
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from halation.errors import InputError
from halation.models.image_result import Frames, OnStep, Painting
from halation.specs import Spec

NAME = "testcard"
NUM_BARS = 8


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long sheets take."""

    seconds: float = 0.0
    work: float = 0.0
    """Pixels times steps that take these seconds; others take more or less in proportion. 0: every sheet takes them."""
    slower: Mapping[str, float] = field(default_factory=dict)
    """Workers, by their number, that take so many times as long."""

    def of(self, spec: Spec) -> float:
        share = spec.height * spec.width * spec.num_frames * spec.steps / self.work if self.work else 1.0
        return self.seconds * share * self.slower.get(os.environ.get("RANK", ""), 1.0)


FORM = re.compile(r"(?P<seconds>[\d.e-]+)(@(?P<work>\d+x\d+x\d+))?(?P<slower>(,\d+=[\d.]+)*)")


def pace_of(model_path: str) -> Pace | None:
    """The pace a `testcard...` asks for; None for everything that is no test card.

    `testcard` takes no time, `testcard:0.2` 0.2 s a sheet, `testcard:0.2@480x832x20` 0.2 s for 480 x 832 pixels in 20 steps and in
    proportion for others; `,1=2.5` behind either makes worker 1 take 2.5 times as long.
    """
    name, _, words = model_path.partition(":")
    if name != NAME:
        return None
    if not words:
        return Pace()
    form = FORM.fullmatch(words)
    try:
        if form is None:
            raise ValueError
        slower = dict(entry.split("=") for entry in form["slower"].split(",")[1:])
        pace = Pace(
            seconds=float(form["seconds"]),
            work=float(math.prod(map(int, form["work"].split("x")))) if form["work"] else 0.0,
            slower={worker: float(factor) for worker, factor in slower.items()},
        )
        if not 0 <= pace.seconds < 1e6 or (form["work"] and not pace.work):
            raise ValueError
    except ValueError as error:
        raise InputError(
            f"--model_path {model_path}",
            "testcard, testcard:SECONDS, or testcard:SECONDS@HEIGHTxWIDTHxSTEPS",
            "give the seconds a sheet takes, and if wanted the sheet that takes them",
        ) from error
    return pace


class TestCard:
    """Draws bars whose colours are the digest of the spec, after as long as it is told to take."""

    __test__ = False  # pytest: the name is the thing's, not a test's

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.facts: dict[str, Any] = {"pipeline": "test card", "options": {}}

    def check(self, spec: Spec) -> None:
        """Any spec will do."""

    def draw(self, specs: Sequence[Spec], on_step: OnStep) -> Painting:
        began, seconds = time.perf_counter(), self.pace.of(specs[0])
        for step in range(1, specs[0].steps + 1):
            # Up to a moment, not for a while: what sleeps overshoot does not add up.
            left = began + seconds * step / specs[0].steps - time.perf_counter()
            if left > 0:
                time.sleep(left)
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
