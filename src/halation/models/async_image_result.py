"""Generated images that may still be in transfer from the device."""

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
"""True while a runner tests whether a shape fits in memory; nothing is compiled or captured then."""


class ImageError(HalationError):
    """One image could not be generated; the message gives the reason."""


class NonFiniteImageError(ImageError):
    """The decoded pixels are NaN or infinite; decoding in float32 may help."""


@dataclass(frozen=True, kw_only=True)
class PendingImages:
    """Generated images whose pixels may still be in transfer from the device.

    `collect` waits and returns, for each spec, its frames or an error. It may be called from another thread while the
    next batch is being generated. `decode_in_float32` must be called on the generating thread, with the rows that came
    back as NonFiniteImageError, and decodes these rows again in float32; None if that would not help.
    """

    collect: Callable[[], list[Frames | ImageError]]
    decode_in_float32: Callable[[Sequence[int]], list[Frames | ImageError]] | None = None
