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
    """Every how many epochs an epoch's end is a date, where somebody said so; 0 thins them out by the other intervals."""

    @property
    def epochs_between(self) -> int:
        """Every how many epochs an epoch's end is a date: at least the shortest interval apart."""
        if self.epochs_every:
            return self.epochs_every
        intervals = [every for every in (self.ckpt_every, self.ckpt_latest_every) if every > 0]
        apart = min(intervals, default=self.n_steps) * self.global_batch
        return max(1, -(-apart // self.num_pictures))

    def epoch_end(self, step: int) -> bool:
        """Whether an epoch that counts ended during this step."""
        pictures = self.num_pictures * self.epochs_between
        if self.epochs_every or pictures == self.num_pictures or self.num_pictures <= (step - 1) * self.global_batch:
            return step * self.global_batch // pictures > (step - 1) * self.global_batch // pictures
        return step * self.global_batch >= self.num_pictures  # the first epoch always counts

    def epoch(self, step: int) -> int:
        """The epoch that ended during this step, the last one of several, or else the one the step is in; the first is 1."""
        ended = step * self.global_batch // self.num_pictures
        return ended if ended > (step - 1) * self.global_batch // self.num_pictures else ended + 1

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
