"""The shell command that draws one picture of a run again, the same pixels, into another folder."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

ROW = ("prompt", "negative_prompt", "seed", "width", "height", "steps", "guidance_scale")
FLAGS = ("model_path", "num_frames", "scheduler", "raw", "pipeline_args", "batch_size", "dtype", "compile")
FLAGS_AFTER = ("cfg_truncation_step", "enable_half_frame", "offload", "threads", "fps")
CHANGE = re.compile(r"(?P<name>\w+): (?P<before>.*) -> (?P<after>.*)", re.DOTALL)
OUTPUT = "outputs/again"


def command(record: Mapping[str, Any], spec: Mapping[str, Any], micro_batch: int, epoch: int) -> str:
    """One line for a shell: the spec as a list of one prompt on standard input, and every setting that decides its pixels.

    `micro_batch` is the smaller number of pictures at once that this one was drawn with, or 0; `epoch` counts the changes of
    settings that came before it.
    """
    settings = settings_at(record, epoch)
    fixed = record.get("fixed") or {}
    row = {"image_id": spec["id"]} | {name: spec[name] for name in ROW if name != "negative_prompt" or spec[name]}
    words = ["halation", "generate", "--prompts", "-", "--prompts_format", "jsonl"]
    for name in (*FLAGS, *FLAGS_AFTER):
        words += _flag(name, settings.get(name))
    at_once = micro_batch or settings.get("micro_batch") or fixed.get("micro batch") or 0
    words += _flag("micro_batch", at_once or None) + _flag("png", fixed.get("png coder"))
    words += ["--nproc", "1", "--output_dir", OUTPUT]
    return f"printf '%s\\n' {shlex.quote(_json(row))} | {shlex.join(words)}"


def _flag(name: str, value: Any) -> list[str]:
    """Nothing for what is not said: an empty text, an empty list, a switch that is off."""
    if value is None or value is False or value in ("", [], ()):
        return []
    if value is True:
        return [f"--{name}", "True"]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", str(value)]


def _json(row: Mapping[str, Any]) -> str:
    """Characters that do not show, or that turn the direction of a line, are written as escapes: one should see what one pastes."""
    text = json.dumps(dict(row), ensure_ascii=False)
    return text if text.isprintable() else json.dumps(dict(row))


def settings_at(record: Mapping[str, Any], epoch: int) -> dict[str, Any]:
    """The settings before the changes that came after `epoch`, as far as the record of changes still tells them."""
    settings = dict(record.get("settings") or {})
    changes = record.get("changes") or []
    for change in reversed(changes[epoch:]):
        for line in change.get("changed", ()) if isinstance(change, dict) else ():
            found = CHANGE.fullmatch(str(line))
            if found and found["name"] in settings:
                try:
                    settings[found["name"]] = json.loads(found["before"])
                except ValueError:  # too long to have been written down whole
                    continue
    return settings
