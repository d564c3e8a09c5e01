"""Pictures that a model draws for scoring alone: from the painter to the extractors of the same rank, without touching the disk."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from halation.data.decode import BrokenPictureError
from halation.errors import InputError
from halation.evaluation.config import EvaluateConfig
from halation.evaluation.image_sources import hashed
from halation.evaluation.preprocess import Prepare, Prepared, Sheet, prepare
from halation.generation.ledger import group_of
from halation.generation.requests import Defaults, requests
from halation.generation.workers.model_runner import Painter, collected
from halation.generation.workers.open_model import open_model
from halation.models.image_result import Frames, PaintError
from halation.models.model_ref import Subject, subject_of
from halation.plan import Sheets, sheets_of
from halation.prompts import PromptFile
from halation.specs import Sheet as DrawnSheet
from halation.specs import Spec

CHUNK = 64
"""Pictures that are drawn, scored and put away together."""


@dataclass(frozen=True, kw_only=True)
class Live:
    """A model and the specs it is to draw, in the order of their sheets."""

    config: EvaluateConfig
    subject: Subject
    specs: tuple[Spec, ...]
    sheets: Sheets
    device: str

    @cached_property
    def order(self) -> npt.NDArray[np.int64]:
        """The spec at each position: sheets hold specs of one shape, so positions are not always indices."""
        return np.concatenate([self.sheets.rows(number) for number in range(len(self.sheets))])

    @cached_property
    def captions(self) -> tuple[str, ...]:
        return tuple(spec.prompt for spec in self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    @property
    def facts(self) -> dict[str, Any]:
        config, first = self.config, self.specs[0]
        return {
            "kind": "model",
            "path": config.model_path,
            "model": self.subject.digest,
            "settings": {
                "prompts": config.prompts,
                "specs_sha256": self._specs_hash,
                "seed_start": config.seed_start,
                "height": first.height,
                "width": first.width,
                "num_inference_steps": first.steps,
                "guidance_scale": first.guidance_scale,
                "scheduler": config.scheduler,
                "dtype": self._dtype,
                "raw": config.raw,
                "compile": config.compile,
                "sheet_size": config.sheet_size,
            },
        }

    @cached_property
    def _specs_hash(self) -> str:
        return hashed([spec.as_json() for spec in self.specs])

    @cached_property
    def key(self) -> str:
        how = [self.config.sheet_size, self._dtype, self.config.scheduler, self.config.compile, self.config.threads]
        versions = [version(name) for name in ("torch", "diffusers", "transformers")]
        return hashed([self.subject.digest, how, versions, self.device, self._specs_hash])

    @property
    def _dtype(self) -> str:
        return self.config.model_dtype or ("fp32" if self.device == "cpu" else "bf16")

    def name(self, index: int) -> str:
        return f"picture {self.specs[int(self.order[index])].id}"

    def starts(self, chunk: int = CHUNK) -> list[int]:
        """Positions at which chunks of about so many pictures begin: always between sheets."""
        lengths = [len(self.sheets.rows(number)) for number in range(len(self.sheets))]
        per_chunk = max(1, chunk // self.config.sheet_size)
        firsts = np.concatenate([[0], np.cumsum(lengths)])
        return [int(firsts[number]) for number in range(0, len(lengths), per_chunk)]

    def open(self, device: str) -> Painter:
        config = self.config
        order = {
            "model": self.subject.order,
            "device": device,
            "threads": config.threads,
            "dtype": self._dtype,
            "scheduler": config.scheduler,
            "offload": "none",
            "compile": config.compile,
            "arguments": {},
            "cfg_truncation_step": None,
            "half_frame": False,
            "raw": config.raw,
        }
        return Painter(open_model(order))

    def rehearse(self, painter: Painter) -> int:
        """How many pictures of a sheet fit into memory at once."""
        examples = {group_of(spec): spec for spec in self.specs}
        return painter.rehearse(list(examples.values()), self.config.sheet_size, 0)

    def draw(
        self,
        painter: Painter,
        micro_batch: int,
        coming: Iterator[Sheet],
        preparations: Mapping[str, Prepare],
        on_step: Callable[[], None],
        stop: Callable[[], int],
    ) -> Iterator[tuple[Sheet, Prepared]]:
        """Prepared sheets of the extractor's size; the model draws in sheets of its own, as many as they need."""
        numbers = np.concatenate([np.full(len(self.sheets.rows(n)), n) for n in range(len(self.sheets))])
        drawn: dict[int, Frames | PaintError] = {}
        for sheet in coming:
            for number in sorted({int(numbers[position]) for position in sheet.indices}):
                if stop():
                    return
                rows = self.sheets.rows(number)
                first = int(np.searchsorted(numbers, number))
                if first not in drawn and not any(first + place in drawn for place in range(len(rows))):
                    pictures = self._paint(painter, micro_batch, rows, on_step)
                    drawn |= {first + place: picture for place, picture in enumerate(pictures)}
            wanted = {name: preparations[name] for name in sheet.names}
            yield sheet, prepare([(position, _pixels(drawn.pop(position))) for position in sheet.indices], wanted)

    def _paint(
        self, painter: Painter, micro_batch: int, rows: npt.NDArray[np.int64], on_step: Callable[[], None]
    ) -> list[Frames | PaintError]:
        specs = [self.specs[row] for row in rows.tolist()]
        fillers = [specs[-1]] * (self.config.sheet_size - len(specs))
        sheet = DrawnSheet(specs=tuple(specs + fillers), num_real=len(specs))
        found: dict[int, Frames | PaintError] = {}
        for piece in painter.paint(sheet, micro_batch, range(len(specs)), on_step):
            found |= dict(zip(piece.rows, collected(piece, lambda action: action()), strict=True))
        return [found[place] for place in range(len(specs))]


def _pixels(picture: Frames | PaintError) -> Callable[[], tuple[npt.NDArray[np.uint8], bytes]]:
    def load() -> tuple[npt.NDArray[np.uint8], bytes]:
        if isinstance(picture, PaintError):
            raise BrokenPictureError(str(picture))
        return picture[0], hashlib.sha256(np.ascontiguousarray(picture[0]).data).digest()

    return load


def open_live(config: EvaluateConfig, device: str) -> Live:
    """What is to be drawn, without loading the model."""
    if not config.prompts:
        raise InputError("--model_path without --prompts", "the prompts it is to draw", "give --prompts FILE")
    subject = subject_of(config.model_path, raw=config.raw)
    prompts = PromptFile.open(config.prompts)
    defaults = Defaults(
        seed_start=config.seed_start,
        height=subject.height if config.height is None else config.height,
        width=subject.width if config.width is None else config.width,
        num_frames=1,
        steps=config.num_inference_steps or subject.steps,
        guidance_scale=subject.guidance_scale if config.guidance_scale is None else config.guidance_scale,
        negative_prompt=config.negative_prompt,
    )
    rows = islice(requests(prompts.rows(), defaults, prompts.name), config.num_samples or None)
    specs = tuple(request.spec for request in rows)
    if config.num_samples > len(specs) > 0:
        raise InputError(
            f"--num_samples {config.num_samples} of {len(specs)} prompts in {config.prompts}",
            "at most as many as there are",
            "leave --num_samples out to draw all of them",
        )
    if not specs:
        raise InputError(f"{config.prompts} holds no prompts", "at least one", "check --prompts")
    groups: dict[Any, list[int]] = {}
    for spec in specs:
        groups.setdefault(group_of(spec), []).append(spec.index)
    ordered = [np.array(rows, np.int64) for rows in groups.values()]
    return Live(
        config=config, subject=subject, specs=specs, sheets=sheets_of(ordered, config.sheet_size), device=device
    )
