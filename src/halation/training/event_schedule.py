"""When a run saves, samples and evaluates: a pure function of the step, so that a killed run keeps its dates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SaveKind = Literal["kept", "latest"]


@dataclass(frozen=True, kw_only=True)
class CheckpointSchedule:
    """The dates of one run. Epoch ends count too, thinned out where epochs are short, or a small folder would only save."""

    n_steps: int
    ckpt_every: int
    ckpt_latest_every: int
    num_images: int
    global_batch: int
    eval_every: int = 0
    epoch_interval: int = 0
    """Every how many epochs an epoch's end is a date, where somebody counts in epochs: whole steps then, and one at least. 0 thins
    them out by the other intervals."""

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_images // self.global_batch)

    @property
    def default_epoch_interval(self) -> int:
        """Every how many epochs an epoch's end is a date: at least the shortest interval apart."""
        intervals = [every for every in (self.ckpt_every, self.ckpt_latest_every) if every > 0]
        apart = min(intervals, default=self.n_steps) * self.global_batch
        return max(1, -(-apart // self.num_images))

    def is_epoch_end(self, step: int) -> bool:
        """Whether an epoch that counts ended during this step."""
        if self.epoch_interval:
            return step % (self.steps_per_epoch * self.epoch_interval) == 0
        images = self.num_images * self.default_epoch_interval
        if images == self.num_images or self.num_images <= (step - 1) * self.global_batch:
            return step * self.global_batch // images > (step - 1) * self.global_batch // images
        return step * self.global_batch >= self.num_images  # the first epoch always counts

    def epoch(self, step: int) -> int:
        """The epoch in whole steps that this step belongs to; the first is 1."""
        return -(-step // self.steps_per_epoch)

    def save_kind(self, step: int) -> SaveKind | None:
        """What to save after this step; samples are drawn whenever something is."""
        if step == self.n_steps or (self.ckpt_every > 0 and step % self.ckpt_every == 0):
            return "kept"
        if (self.ckpt_latest_every > 0 and step % self.ckpt_latest_every == 0) or self.is_epoch_end(step):
            return "latest"
        return None

    def should_evaluate(self, step: int) -> bool:
        """Whether this step is evaluated, which does not make it a date for saving; the last one is both."""
        return self.eval_every > 0 and (step % self.eval_every == 0 or step == self.n_steps)
