"""The architecture of a student as JSON; null or a missing key is the teacher's value.

    {"family": "wan", "width": 1536, "heads": 12, "depth": 30, "patch_size": null}

| key               | meaning                                                | families that can change it            |
|-------------------|--------------------------------------------------------|----------------------------------------|
| `family`          | `dit`, `hunyuandit`, `pixart`, `sd3`, `flux` or `wan`  | none: only checked                     |
| `width`           | channels of the transformer, a multiple of `heads`     | all                                    |
| `heads`           | attention heads; a head is `width / heads` wide        | all                                    |
| `depth`           | blocks (for FLUX double and single ones together)      | all                                    |
| `layers`          | the teacher's blocks to keep, from 0; replaces `depth` | all                                    |
| `mlp_ratio`       | width of the feed-forward part divided by `width`      | HunyuanDiT and Wan                     |
| `patch_size`      | latents on a side of a patch; alias `patch`            | all but FLUX (packs two by two)        |
| `latent_channels` | channels of the autoencoder's latents                  | none: both use the same latents        |
| `text_width`      | channels of the text embeddings                        | DiT (has its own text encoder)         |
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
    """The architecture of a student; None means the teacher's value."""

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
                "the same number of blocks in both",
                "leave depth out if layers is given",
            )

    @classmethod
    def from_json(cls, value: Any, source: str = "the student's config") -> StudentConfig:
        """Parse the content of a JSON file; `source` is its name in messages."""
        if not isinstance(value, Mapping):
            raise InputError(
                f"{source} contains a {type(value).__name__}",
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
                    f"{source} has the unknown key {str(key)!r}",
                    ", ".join([*known, *ALIASES]),
                    f"write {near[0]}, or remove it" if near else "remove it",
                )
            if name in found:
                raise InputError(
                    f"{source} has {name} twice ({key} is the same key)", "each key once", "remove one of them"
                )
            found[name] = None if entry is None else _check_value(source, name, entry)
        return cls(**found)

    @classmethod
    def read(cls, file: str | Path) -> StudentConfig:
        """Read a JSON file; no file ("") means the architecture of the teacher."""
        if not str(file):
            return cls()
        path = Path(file)
        try:
            value = read_json(path, max_bytes=MAX_SETTINGS_BYTES)
        except OSError as error:
            raise InputError(
                f"{path} cannot be read: {error.strerror}", "the student's config as JSON", "check --student_config"
            ) from error
        except ValueError as error:
            raise InputError(
                f"{path} is not JSON: {error}", 'an object such as {"width": 384, "depth": 6}', "correct the file"
            ) from error
        return cls.from_json(value, str(path))

    def as_json(self) -> dict[str, Any]:
        """Return only the values that were set."""
        said = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in said.items()}


def _check_value(source: str, name: str, entry: Any) -> Any:
    fits, expected = _is_integer(entry, 1), "an integer of at least 1"
    if name == "family":
        fits, expected = isinstance(entry, str), "a name such as wan"
    elif name == "layers":
        fits = isinstance(entry, (list, tuple)) and bool(entry) and all(_is_integer(item, 0) for item in entry)
        expected = "a list of integers of at least 0, such as [0, 4, 8]"
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
