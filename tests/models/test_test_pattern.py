"""The test card: what its pace means, and what is refused."""

from __future__ import annotations

import itertools
import time

import pytest

from halation.errors import InputError
from halation.models.test_pattern import PatternTiming, TestPatternModel, parse_timing
from halation.sample_specs import SampleSpec


def spec(height: int = 480, width: int = 832, steps: int = 20, num_frames: int = 1) -> SampleSpec:
    return SampleSpec(
        index=0,
        id="a",
        prompt="a cat",
        seed=1,
        height=height,
        width=width,
        steps=steps,
        guidance_scale=1.0,
        num_frames=num_frames,
    )


def test_a_folder_is_no_test_card() -> None:
    assert parse_timing("models/testcard") is None
    assert parse_timing("testcards") is None


def test_seconds_alone_are_those_of_every_batch() -> None:
    for words, seconds in (("testcard", 0.0), ("testcard:", 0.0), ("testcard:0.2", 0.2), ("testcard:3", 3.0)):
        pace = parse_timing(words)
        assert pace is not None
        assert pace.batch_time_s(spec()) == pace.batch_time_s(spec(64, 64, 2)) == seconds


def test_with_a_size_the_time_follows_pixels_frames_and_steps() -> None:
    pace = parse_timing("testcard:0.2@480x832x20")
    assert pace is not None
    assert pace.batch_time_s(spec()) == pytest.approx(0.2)
    assert pace.batch_time_s(spec(240, 832, 20)) == pytest.approx(0.1)
    assert pace.batch_time_s(spec(480, 416, 40)) == pytest.approx(0.2)
    assert pace.batch_time_s(spec(480, 832, 5, num_frames=8)) == pytest.approx(0.4)


def test_one_worker_can_be_slower_than_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = parse_timing("testcard:0.2@480x832x20,1=2.5,12=4")
    assert pace is not None
    for worker, seconds in (("0", 0.2), ("1", 0.5), ("2", 0.2), ("12", 0.8)):
        monkeypatch.setenv("RANK", worker)
        assert pace.batch_time_s(spec()) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "words", ["fast", "-1", "nan", "1e9", "0.2@480x832", "0.2@0x832x20", "0.2@axbxc", "0.2,slow", "0.2,1=", "0.2,1=2=3"]
)
def test_a_pace_that_means_nothing_is_refused_with_what_does(words: str) -> None:
    with pytest.raises(InputError, match="testcard:SECONDS@HEIGHTxWIDTHxSTEPS"):
        parse_timing(f"testcard:{words}")


def test_a_batch_takes_its_time_step_by_step() -> None:
    steps: list[float] = []
    began = time.perf_counter()
    TestPatternModel(PatternTiming(seconds=0.2)).draw(
        [spec(16, 16, 4)], lambda: steps.append(time.perf_counter() - began)
    )
    assert len(steps) == 4
    assert all(moment >= 0.05 * number for number, moment in enumerate(steps, 1))
    assert all(later > sooner for sooner, later in itertools.pairwise(steps))
