"""Images that a model has drawn, perhaps still on their way from the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from halation.errors import HalationError

Frames = npt.NDArray[np.uint8]
"""One image or video: uint8, (frames, height, width, 3)."""

OnStep = Callable[[], None]
"""Called after each step of the solver."""

DRY_RUN: ContextVar[bool] = ContextVar("rehearsing", default=False)
"""True while a runner tries whether a shape fits: nothing is compiled or recorded for good."""


class ImageError(HalationError):
    """One image could not be made; the message says why."""


class NonFiniteImageError(ImageError):
    """The decoded pixels are NaN or infinite; decoding in float32 may help."""


@dataclass(frozen=True, kw_only=True)
class PendingImages:
    """Drawn specs whose pixels may still be on their way from the device.

    `collect` waits and returns, for each spec, its frames or why there are none. It may be called from another thread
    than the one that drew, while the next batch is being drawn. `decode_in_float32`, called on the drawing thread with
    the rows that came back as NonFiniteImageError, decodes these rows again in float32; None where that is no use.
    """

    collect: Callable[[], list[Frames | ImageError]]
    decode_in_float32: Callable[[Sequence[int]], list[Frames | ImageError]] | None = None
