"""A model without weights for tests and demos; its colours depend only on the spec."""

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
from halation.models.async_image_result import Frames, OnStep, PendingImages
from halation.sample_specs import SampleSpec

MODEL_NAME = "testcard"
NUM_BARS = 8


@dataclass(frozen=True, kw_only=True)
class PatternTiming:
    """How long batches take to generate."""

    seconds: float = 0.0
    work: float = 0.0
    """Pixels times steps that take `seconds`; other batches scale in proportion. 0: every batch takes `seconds`."""
    slower: Mapping[str, float] = field(default_factory=dict)
    """Slowdown factor by worker number."""

    def batch_time_s(self, spec: SampleSpec) -> float:
        scale = spec.height * spec.width * spec.num_frames * spec.steps / self.work if self.work else 1.0
        return self.seconds * scale * self.slower.get(os.environ.get("RANK", ""), 1.0)


TIMING_PATTERN = re.compile(r"(?P<seconds>[\d.e-]+)(@(?P<work>\d+x\d+x\d+))?(?P<slower>(,\d+=[\d.]+)*)")


def parse_timing(model_path: str) -> PatternTiming | None:
    """Parse the timing of a `testcard...` path; None if the path is not a test card.

    `testcard` takes no time, `testcard:0.2` takes 0.2 s per batch, and `testcard:0.2@480x832x20` takes 0.2 s for
    480 x 832 pixels in 20 steps and scales in proportion for others. A suffix `,1=2.5` makes worker 1 take 2.5 times as
    long.
    """
    name, _, arguments = model_path.partition(":")
    if name != MODEL_NAME:
        return None
    if not arguments:
        return PatternTiming()
    match = TIMING_PATTERN.fullmatch(arguments)
    try:
        if match is None:
            raise ValueError
        slower = dict(entry.split("=") for entry in match["slower"].split(",")[1:])
        timing = PatternTiming(
            seconds=float(match["seconds"]),
            work=float(math.prod(map(int, match["work"].split("x")))) if match["work"] else 0.0,
            slower={worker: float(factor) for worker, factor in slower.items()},
        )
        if not 0 <= timing.seconds < 1e6 or (match["work"] and not timing.work):
            raise ValueError
    except ValueError as error:
        raise InputError(
            f"--model_path {model_path}",
            "testcard, testcard:SECONDS, or testcard:SECONDS@HEIGHTxWIDTHxSTEPS",
            "give the seconds per batch, and optionally the batch that takes them",
        ) from error
    return timing


class TestPatternModel:
    """Generates bars whose colours are a digest of the spec, after the given time."""

    __test__ = False  # the name begins with Test, but pytest must not collect it

    def __init__(self, timing: PatternTiming) -> None:
        self.timing = timing
        self.facts: dict[str, Any] = {"pipeline": "test card", "options": {}}

    def check(self, spec: SampleSpec) -> None:
        """Accept any spec."""

    def draw(self, specs: Sequence[SampleSpec], on_step: OnStep) -> PendingImages:
        began, seconds = time.perf_counter(), self.timing.batch_time_s(specs[0])
        for step in range(1, specs[0].steps + 1):
            # Sleep until a deadline, not for a duration, so that overshoot does not accumulate.
            left = began + seconds * step / specs[0].steps - time.perf_counter()
            if left > 0:
                time.sleep(left)
            on_step()
        return PendingImages(collect=lambda: [render_pattern(spec) for spec in specs])


def render_pattern(spec: SampleSpec) -> Frames:
    """Render bars above a ramp; the frames of a video differ by a shift of the ramp."""
    settings = f"{spec.prompt}\0{spec.negative_prompt}\0{spec.seed}\0{spec.steps}\0{spec.guidance_scale}"
    colours = np.frombuffer(hashlib.sha256(settings.encode()).digest()[: NUM_BARS * 3], np.uint8).reshape(NUM_BARS, 3)
    bars = colours[np.arange(spec.width) * NUM_BARS // spec.width]
    frames = np.empty((spec.num_frames, spec.height, spec.width, 3), np.uint8)
    frames[:] = bars
    ramp = (np.arange(spec.width) * 255 // max(1, spec.width - 1)).astype(np.uint8)
    for number, frame in enumerate(frames):
        frame[spec.height * 3 // 4 :] = np.roll(ramp, number * 8)[:, None]
    return frames
