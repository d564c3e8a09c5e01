"""Reasons of failures that say the same of different files, numbers or words, told as one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

GAP = "…"
"""Stands for whatever differs; a page takes it for any letters when it looks for the rows of a reason."""
PART = re.compile(r"""('[^']*'|"[^"]*"|`[^`]*`|[^\s/]{0,200}/\S*[^\s:;,.)]|\d+(?:\.\d+)?)""")


def grouped(counts: Mapping[str, int]) -> Counter[str]:
    """Counts of texts, with those that differ only in paths, numbers and quoted words taken together."""
    groups: dict[tuple[str, ...], tuple[list[str], int]] = {}
    for text, number in counts.items():
        pieces = PART.split(text)
        fixed = tuple(pieces[::2])
        known, before = groups.get(fixed, (pieces, 0))
        same = [piece if piece == other else GAP for piece, other in zip(pieces, known, strict=True)]
        groups[fixed] = (same, before + number)
    return Counter({"".join(pieces): number for pieces, number in groups.values()})
