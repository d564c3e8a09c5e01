"""One run with a fence around it: whatever its files hold, the others are shown, and it is listed with the reason it cannot be read."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from halation.gallery.catalog import Entry

log = logging.getLogger(__name__)

# RuntimeError: too deep a recursion, and a link that leads to itself.
DAMAGE = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
    *(RuntimeError, MemoryError, sqlite3.Error),
)
"""What reading files that hold anything at all can end in."""
NO_TRAINING: dict[str, Any] = {
    name: [] for name in ("prompts", "variants", "steps", "checkpoints", "metrics", "scores")
}
NO_GENERATION: dict[str, Any] = {
    **{name: [] for name in ("workers", "reasons", "seeds", "size")},
    "counts": dict.fromkeys(("planned", "open", "done", "failed"), 0),
    "rate": None,
    "left_s": None,
    "model": "",
    "video": False,
}
NOTHING: dict[str, Any] = {
    "metrics": {"reset": False, "next": 0, "rows": []},
    "search": {"total": 0, "rows": []},
    "spec": None,
}
"""What the questions that only some kinds answer are answered with."""
Answer = TypeVar("Answer")


class Guarded:
    """An entry that never raises. Its summary is the one of the last look, so that a list of runs waits for none of them."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self.id = entry.id
        self.folder: Path = entry.folder
        self.kind = entry.kind
        self.name = entry.name
        self.parent = entry.parent
        self.version = entry.version
        self._num_own = 0
        """Changes of what cannot be read, which the entry does not count."""
        self._damage = ""
        self._said: set[str] = set()
        self._summary: dict[str, Any] | None = None

    def refresh(self) -> bool:
        changed, damage = self._asked(self._entry.refresh, False)
        self._summary, more = self._asked(self._entry.summary, self._summary)
        before, self._damage = self._damage, damage or more
        self._num_own += before != self._damage
        self.version = self._entry.version + self._num_own
        return changed or before != self._damage

    def summary(self) -> dict[str, Any]:
        if self._summary is None:
            self._summary, _ = self._asked(self._entry.summary, None)
        return self._told(self._summary or self._bare(), self._damage)

    def _told(self, summary: dict[str, Any], damage: str) -> dict[str, Any]:
        return summary | {"reason": summary["reason"] or damage, "version": self.version}

    def _bare(self) -> dict[str, Any]:
        numbers = {"done": 0, "planned": 0, "failed": 0, "changed": 0.0}
        unknown = dict.fromkeys(("started", "rate", "left_s", "last", "loss"))
        about = {"id": self.id, "name": self.name, "kind": self.kind, "parent": self.parent, "title": ""}
        unit = "pictures" if self.kind in ("generate", "sample") else "steps"
        return {**about, **numbers, **unknown, "state": "stopped", "reason": "", "unit": unit, "spark": []}

    def detail(self) -> dict[str, Any]:
        nothing = NO_GENERATION if self.kind == "generate" else NO_TRAINING
        found, damage = self._asked(self._entry.detail, nothing)
        return found | {"summary": self._told(found.get("summary") or self.summary(), self._damage or damage)}

    def picture(self, key: str) -> Path | None:
        return self._asked(lambda: self._entry.picture(key), None)[0]

    def log(self, num_lines: int) -> list[str]:
        nothing: list[str] = []
        return self._asked(lambda: self._entry.log(num_lines), nothing)[0]

    def config(self) -> dict[str, Any]:
        return self._asked(self._entry.config, {"settings": {}, "fixed": {}, "changes": []})[0]

    def __getattr__(self, name: str) -> Any:
        """What only some kinds of runs can do."""
        asked = getattr(self._entry, name)
        if name not in NOTHING:
            return asked
        return lambda *words: self._asked(lambda: asked(*words), NOTHING[name])[0]

    def _asked(self, question: Callable[[], Answer], otherwise: Answer) -> tuple[Answer, str]:
        """An answer, and why there is none."""
        try:
            return question(), ""
        except DAMAGE as error:
            words = f"cannot be read: {type(error).__name__}: {str(error)[:200]}"
            if words not in self._said and len(self._said) < 10:  # once, not every second
                self._said.add(words)
                log.exception("%s cannot be read", self.folder)
            return otherwise, words
