"""What an evaluation in training draws, and how its pictures are handed on: a sheet at a time, in memory, never to the disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice

import numpy as np

from halation.specs import Sheet
from halation.training.sample_files import Row
from halation.training.sampling import SampleSettings

Take = Callable[[range, list[np.ndarray]], None]
"""What is done with the pictures of a whole sheet, given by their indices."""


def evaluation_settings(
    samples: SampleSettings, prompts: Sequence[str], *, num: int, steps: int, sheet_size: int
) -> SampleSettings:
    """As the run's samples, for `num` pictures of these prompts, over and over where they are fewer.

    Every picture has a seed of its own, whatever samples do: pictures from one noise would be less varied than the model.
    """
    return dataclasses.replace(
        samples, prompts=tuple(islice(cycle(prompts), num)), steps=steps, sheet_size=sheet_size, same_seed=False
    )


class Handing:
    """Hands the pictures of each whole sheet on; a sheet that lacks one is not worth scoring."""

    def __init__(self, take: Take) -> None:
        self._take = take

    def put(self, sheet: Sheet, pictures: Mapping[int, np.ndarray], rows: Sequence[Row]) -> None:
        if len(pictures) == len(rows):
            first = sheet.specs[0].index
            self._take(range(first, first + len(rows)), [pictures[number] for number in range(len(rows))])

    def finish(self) -> None:
        """Everything was handed on at once."""
