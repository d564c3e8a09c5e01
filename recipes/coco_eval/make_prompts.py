"""Writes a prompt list from a COCO captions file: one caption per image.

It is the caption with the lowest id, listed with the id of the image.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

from halation.errors import HalationError, InputError
from halation.runs.run_folder import write_atomic


def rows(captions: Path) -> list[tuple[str, str]]:
    """Return (image id, caption), sorted by id."""
    try:
        content: dict[str, Any] = json.loads(captions.read_text(encoding="utf-8"))
        first: dict[int, tuple[int, str]] = {}
        for annotation in content["annotations"]:
            found = (int(annotation["id"]), " ".join(str(annotation["caption"]).split()))
            image = int(annotation["image_id"])
            first[image] = min(found, first.get(image, found))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{captions}: {type(error).__name__}: {error}",
            "COCO's captions as JSON: annotations with id, image_id and caption (captions_val2017.json)",
            "check COCO_CAPTIONS",
        ) from error
    if not first:
        raise InputError(f"{captions} has no annotations", "captions of images", "check COCO_CAPTIONS")
    return [(f"{image:012d}", caption) for image, (_, caption) in sorted(first.items())]


def main(captions: str, output: str) -> int:
    try:
        found = rows(Path(captions))
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows([("image_id", "prompt"), *found])
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(Path(output), text.getvalue().encode())
    except HalationError as error:
        print(f"make_prompts.py: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{len(found)} prompts in {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]) if len(sys.argv) == 3 else "usage: make_prompts.py CAPTIONS.json PROMPTS.csv")
