"""When a run saves, samples and evaluates: a pure function of the step, so that a killed run keeps its dates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["kept", "latest"]


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """The dates of one run. Epoch ends count too, thinned out where epochs are short, or a small folder would only save."""

    n_steps: int
    ckpt_every: int
    ckpt_latest_every: int
    num_pictures: int
    global_batch: int
    eval_every: int = 0
    epochs_every: int = 0
    """Every how many epochs an epoch's end is a date, where somebody counts in epochs: whole steps then, and one at least. 0 thins
    them out by the other intervals."""

    @property
    def steps_an_epoch(self) -> int:
        return -(-self.num_pictures // self.global_batch)

    @property
    def epochs_between(self) -> int:
        """Every how many epochs an epoch's end is a date: at least the shortest interval apart."""
        intervals = [every for every in (self.ckpt_every, self.ckpt_latest_every) if every > 0]
        apart = min(intervals, default=self.n_steps) * self.global_batch
        return max(1, -(-apart // self.num_pictures))

    def epoch_end(self, step: int) -> bool:
        """Whether an epoch that counts ended during this step."""
        if self.epochs_every:
            return step % (self.steps_an_epoch * self.epochs_every) == 0
        pictures = self.num_pictures * self.epochs_between
        if pictures == self.num_pictures or self.num_pictures <= (step - 1) * self.global_batch:
            return step * self.global_batch // pictures > (step - 1) * self.global_batch // pictures
        return step * self.global_batch >= self.num_pictures  # the first epoch always counts

    def epoch(self, step: int) -> int:
        """The epoch in whole steps that this step belongs to; the first is 1."""
        return -(-step // self.steps_an_epoch)

    def due(self, step: int) -> Kind | None:
        """What to save after this step; samples are drawn whenever something is."""
        if step == self.n_steps or (self.ckpt_every > 0 and step % self.ckpt_every == 0):
            return "kept"
        if (self.ckpt_latest_every > 0 and step % self.ckpt_latest_every == 0) or self.epoch_end(step):
            return "latest"
        return None

    def evaluates(self, step: int) -> bool:
        """Whether this step is evaluated, which does not make it a date for saving; the last one is both."""
        return self.eval_every > 0 and (step % self.eval_every == 0 or step == self.n_steps)
