"""From what a pipeline returns to uint8 frames on the host: the same rounding as its own PIL path, without stopping the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halation.models.image_result import Frames, NotFinite, PaintError, Painting
from halation.specs import Spec

NOT_FINITE = "the decoded picture is not finite"


def as_videos(output: Any) -> Tensor:
    """(rows, frames, 3, height, width) in [0, 1] from `output_type="pt"`, whatever shape the family gives it."""
    if isinstance(output, (list, tuple)) and output and isinstance(output[0], Tensor):
        output = torch.stack(list(output))
    if isinstance(output, np.ndarray):
        output = torch.from_numpy(output).movedim(-1, -3)
    if not isinstance(output, Tensor) or output.ndim not in (4, 5):
        raise PaintError(f"the pipeline returned {type(output).__name__}, which is no picture")
    return output.unsqueeze(1) if output.ndim == 4 else output


def to_pixels(videos: Tensor) -> Tensor:
    """uint8 (rows, frames, height, width, 3), rounded as the pipeline's own conversion to PIL rounds."""
    return (videos.movedim(2, -1).float() * 255).round().to(torch.uint8)


def sent_home(pixels: Tensor, finite: Tensor) -> Callable[[], tuple[Frames, list[bool]]]:
    """Start the copies to the host; the function returned waits for them and may be called on another thread."""
    if pixels.device.type != "cuda":
        return lambda: (pixels.cpu().numpy(), finite.tolist())
    host = torch.empty(pixels.shape, dtype=pixels.dtype, pin_memory=True)
    flags = torch.empty(finite.shape, dtype=finite.dtype, pin_memory=True)
    host.copy_(pixels, non_blocking=True)
    flags.copy_(finite, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(pixels.device))

    def wait() -> tuple[Frames, list[bool]]:
        arrived.synchronize()
        return host.numpy(), flags.tolist()

    return wait


def collector(
    videos: Tensor, finite: Tensor, specs: Sequence[Spec], refused: Mapping[int, PaintError]
) -> Callable[[], list[Frames | PaintError]]:
    """`Painting.collect` for the rows of one call; `refused` rows have no picture whatever their pixels are."""
    first = specs[0]
    found = (videos.shape[1], videos.shape[3], videos.shape[4])
    wanted = (first.num_frames, first.height, first.width)
    if len(videos) != len(specs) or found != wanted:
        mistake = PaintError(
            f"the pipeline drew {len(videos)} x {_size(found)} where {len(specs)} x {_size(wanted)} was asked for"
        )
        return lambda: [mistake for _ in specs]
    wait = sent_home(to_pixels(videos), finite)

    def collect() -> list[Frames | PaintError]:
        pixels, flags = wait()
        return [
            refused[row] if row in refused else pixels[row] if flags[row] else NotFinite(NOT_FINITE)
            for row in range(len(specs))
        ]

    return collect


def _size(size: tuple[int, int, int]) -> str:
    num_frames, height, width = size
    return f"{height} x {width}" + (f", {num_frames} frames" if num_frames > 1 else "")


@dataclass(frozen=True, kw_only=True)
class Part:
    """Rows of a painting that stand for rows of a larger one: `rows[n]` of the whole is `inner[n]` of the painting."""

    painting: Painting
    rows: tuple[int, ...]
    inner: tuple[int, ...]


def merged(parts: Sequence[Part]) -> Painting:
    """One painting out of several, each of which knows some of the rows."""
    homes = {row: (part, inner) for part in parts for row, inner in zip(part.rows, part.inner, strict=True)}

    def collect() -> list[Frames | PaintError]:
        collected = {id(part): part.painting.collect() for part in parts}
        return [collected[id(part)][inner] for _, (part, inner) in sorted(homes.items())]

    def repair(rows: Sequence[int]) -> list[Frames | PaintError]:
        results: list[Frames | PaintError] = []
        for row in rows:
            part, inner = homes[row]
            assert part.painting.repair is not None
            results += part.painting.repair([inner])
        return results

    return Painting(collect=collect, repair=repair if all(part.painting.repair for part in parts) else None)
