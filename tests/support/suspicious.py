"""A training that looks at everything that sampling could disturb, before and after."""

from __future__ import annotations

from typing import Any

from halation.training.session import TrainingSession


class SuspiciousSession(TrainingSession):
    """`_visible` is what must be the same on both sides of the tasks after a save; what that is depends on the engine."""

    num_looks = 0

    def _after_save(self, step: int) -> None:
        before = self._visible()
        super()._after_save(step)
        assert self._visible() == before
        self.num_looks += 1

    def _visible(self) -> dict[str, Any]:
        raise AssertionError("a suspicious session says what it looks at")
