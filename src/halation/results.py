"""Results of the Python API: the files of a finished command, as objects.

An object holds the path of the folder and reads its files when they are asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halation import input_files

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, kw_only=True)
class ImageResult:
    """One image of a generation or of a sampling, done or failed."""

    path: Path | None
    """The image, or the video; None if it failed."""
    prompt: str
    seed: int
    index: int
    """Position in the prompt list, from 0."""
    id: str = ""
    reason: str = ""
    """Why it failed."""
    settings: Mapping[str, Any]
    """The rest of its row: size, steps, guidance scale and SHA-256."""

    def open(self) -> Image:
        """Return the image, or the first frame of the video, as a PIL image."""
        from PIL import Image

        if self.path is None:
            raise FileNotFoundError(f"image {self.id or self.index} failed: {self.reason}")
        with Image.open(
            self.path.with_suffix("") / "frame_0000.png" if self.path.suffix == ".mp4" else self.path
        ) as file:
            return file.copy()


@dataclass(frozen=True, kw_only=True)
class _FolderResult:
    output_dir: Path
    exit_code: int = 0
    """0 if all is done, 1 if some images failed."""


@dataclass(frozen=True, kw_only=True)
class TrainingResult(_FolderResult):
    """The run folder of a training or a distillation."""

    @property
    def export(self) -> Path:
        """The folder that `generate`, `evaluate`, `distill` and diffusers load."""
        return self.output_dir / "export"

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl: step, loss, lr, and the scores of evaluations."""
        return list(_read_lines(self.output_dir / "metrics.jsonl"))

    @property
    def checkpoints(self) -> list[Path]:
        """The committed checkpoints on disk, oldest first."""
        return sorted(path.parent for path in self.output_dir.glob("checkpoints/*/COMMIT.json"))

    @property
    def samples(self) -> list[ImageResult]:
        """The samples of the newest step."""
        steps = sorted(self.output_dir.glob("samples/*/samples.json"))
        return _read_samples(steps[-1]) if steps else []


@dataclass(frozen=True, kw_only=True)
class SamplingResult(_FolderResult):
    """The output folder of `sample`."""

    @property
    def rows(self) -> list[ImageResult]:
        """The images, in the order of the prompts."""
        return _read_samples(self.output_dir / "samples.json")

    @property
    def paths(self) -> list[Path]:
        """The files of the images, in the order of the prompts."""
        return [row.path for row in self.rows if row.path is not None]

    @property
    def grid(self) -> Path:
        """One image with all others and their prompts."""
        return self.output_dir / "grid.png"


@dataclass(frozen=True, kw_only=True)
class GenerationResult(_FolderResult):
    """The output folder of `generate`."""

    def __iter__(self) -> Iterator[ImageResult]:
        """Yield the finished images in the order of the list, read one by one: there may be a million."""
        for row in _read_lines(self.output_dir / "metadata.jsonl"):
            path = self.output_dir / row.pop("file_name")
            known = {"prompt": row.pop("prompt"), "seed": row.pop("seed"), "index": row.pop("index")}
            yield ImageResult(path=path, id=row.pop("image_id"), settings=row, **known)

    @property
    def rows(self) -> list[ImageResult]:
        """The finished images, in the order of the prompt list."""
        return list(self)

    @property
    def paths(self) -> list[Path]:
        """The files of the finished images, in the order of the prompt list."""
        return [row.path for row in self if row.path is not None]

    @property
    def failures(self) -> list[ImageResult]:
        """The images that failed, each with its reason."""
        found = []
        for file in sorted(self.output_dir.glob("failed_prompts_gpu*.txt")):
            for line in file.read_text(encoding="utf-8").split("\n"):
                if line and not line.startswith("#"):
                    index, name, seed, prompt, reason = line.split("\t")
                    name, prompt, reason = (json.loads(f'"{text}"') for text in (name, prompt, reason))
                    found.append(
                        ImageResult(
                            path=None,
                            id=name,
                            prompt=prompt,
                            reason=reason,
                            index=int(index),
                            seed=int(seed),
                            settings={},
                        )
                    )
        return sorted(found, key=lambda row: row.index)

    @property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json: counts, seconds and workers of the last call."""
        return dict(input_files.read_json(self.output_dir / "summary.json"))


@dataclass(frozen=True, kw_only=True)
class WatchResult(_FolderResult):
    """The output folder of `watch`."""


class Scores(dict[str, Any]):
    """The report of `evaluate`: the object that `--json` prints, with `value` for one number of it."""

    def value(self, metric: str) -> float:
        """Return the value of a metric, such as `fid`, `kid` or `precision`."""
        if metric not in self["metrics"]:
            raise KeyError(f"no metric {metric!r} in these scores; they have {', '.join(self['metrics'])}")
        return float(self["metrics"][metric]["value"])

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={entry['value']:.4g}" for name, entry in self.get("metrics", {}).items())
        return f"Scores({values})"


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a JSONL file that a command wrote; a line that is being written is left out."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def _read_samples(index: Path) -> list[ImageResult]:
    results = []
    for row in input_files.read_json(index)["samples"]:
        path = index.parent / row["file"] if row["state"] == "done" else None
        known = {"prompt": row["prompt"], "seed": row["seed"], "index": row["index"]}
        results.append(ImageResult(path=path, reason=row.get("reason") or "", settings=row, **known))
    return results
