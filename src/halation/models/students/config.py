"""The shape of a student: a JSON file in which null or a missing key means the teacher's.

    {"family": "wan", "width": 1536, "heads": 12, "depth": 30, "patch_size": null}

| key               | what it is                                            | where it may differ from the teacher's |
|-------------------|-------------------------------------------------------|----------------------------------------|
| `family`          | `dit`, `hunyuandit`, `pixart`, `sd3`, `flux` or `wan`  | nowhere: it is there to be checked     |
| `width`           | channels of the transformer; `heads` divides it       | everywhere                             |
| `heads`           | attention heads; a head is `width / heads` wide       | everywhere                             |
| `depth`           | blocks (of FLUX double and single ones together)      | everywhere                             |
| `layers`          | the teacher's blocks to keep, from 0; not `depth`     | everywhere                             |
| `mlp_ratio`       | width of the feed-forward part over `width`           | HunyuanDiT and Wan                     |
| `patch_size`      | latents on a side of a patch; `patch` is the same key | everywhere but FLUX (packs two by two) |
| `latent_channels` | channels of the autoencoder's latents                 | nowhere: both work in the same latents |
| `text_width`      | channels of the text embeddings that are read         | a DiT, whose text encoder is its own   |
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halation.errors import InputError
from halation.input_files import MAX_SETTINGS_BYTES, read_json

ALIASES = {"patch": "patch_size"}


@dataclass(frozen=True, kw_only=True)
class StudentConfig:
    """What of a student's shape is said; None is as the teacher's."""

    family: str | None = None
    width: int | None = None
    depth: int | None = None
    heads: int | None = None
    patch_size: int | None = None
    latent_channels: int | None = None
    text_width: int | None = None
    mlp_ratio: float | None = None
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.layers is not None and self.depth not in (None, len(self.layers)):
            raise InputError(
                f"a student of depth {self.depth} with {len(self.layers)} layers",
                "one number of blocks",
                "leave depth out where layers are listed",
            )

    @classmethod
    def from_json(cls, value: Any, source: str = "the student's config") -> StudentConfig:
        """From what a JSON file holds; `source` is its name in messages."""
        if not isinstance(value, Mapping):
            raise InputError(
                f"{source} holds {type(value).__name__}",
                'an object such as {"width": 384, "depth": 6}',
                "write the keys and values in braces",
            )
        known = [field.name for field in dataclasses.fields(cls)]
        found: dict[str, Any] = {}
        for key, entry in value.items():
            name = ALIASES.get(key, key)
            if name not in known:
                near = difflib.get_close_matches(str(key), [*known, *ALIASES], n=1, cutoff=0.0)
                raise InputError(
                    f"{source} has the key {str(key)!r}, which is none of a student's",
                    ", ".join([*known, *ALIASES]),
                    f"write {near[0]}, or take it out" if near else "take it out",
                )
            if name in found:
                raise InputError(f"{source} has {name} twice ({key} is the same)", "it once", "take one of them out")
            found[name] = None if entry is None else _check_value(source, name, entry)
        return cls(**found)

    @classmethod
    def read(cls, file: str | Path) -> StudentConfig:
        """From a JSON file; no file at all ("") is a student of the teacher's own shape."""
        if not str(file):
            return cls()
        path = Path(file)
        try:
            value = read_json(path, max_bytes=MAX_SETTINGS_BYTES)
        except OSError as error:
            raise InputError(
                f"{path} cannot be read: {error.strerror}", "the student's shape as JSON", "check --student_config"
            ) from error
        except ValueError as error:
            raise InputError(
                f"{path} is not JSON: {error}", 'an object such as {"width": 384, "depth": 6}', "correct the file"
            ) from error
        return cls.from_json(value, str(path))

    def as_json(self) -> dict[str, Any]:
        """Only what was said."""
        said = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in said.items()}


def _check_value(source: str, name: str, entry: Any) -> Any:
    fits, expected = _is_integer(entry, 1), "a whole number from 1 on"
    if name == "family":
        fits, expected = isinstance(entry, str), "a word such as wan"
    elif name == "layers":
        fits = isinstance(entry, (list, tuple)) and bool(entry) and all(_is_integer(item, 0) for item in entry)
        expected = "a list of numbers from 0 on, such as [0, 4, 8]"
    elif name == "mlp_ratio":
        fits = isinstance(entry, (int, float)) and not isinstance(entry, bool) and 0 < entry < 1000
        expected = "a number above 0, such as 4.0"
    if not fits:
        raise InputError(
            f"{source}: {name} is {json.dumps(entry)}", f"{expected}, or null for the teacher's", f"change {name}"
        )
    return tuple(entry) if name == "layers" else entry


def _is_integer(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
