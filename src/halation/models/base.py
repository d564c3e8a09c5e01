"""What a model family must offer so that training, sampling and export need not know which family it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from halation.errors import HalationError

Condition = dict[str, Tensor]
"""What a prompt or label becomes: tensors by name, each with one row a picture and a fixed length, so that a picture's condition
does not depend on its neighbours'. Text has `tokens` (int64) and `mask` (bool, true where there is a token); classes `label`."""


class NotFiniteError(HalationError):
    """A picture came out as NaN or infinity; `rows` says which pictures of the batch."""

    def __init__(self, message: str, rows: tuple[int, ...]) -> None:
        super().__init__(message)
        self.rows = rows


class Denoiser(Protocol):
    """A model family: the module that is trained, and everything around it that turns prompts and pixels into tensors and back."""

    module: nn.Module
    """Called as `module(x, t, condition)`; wrappers such as DDP go around it and are called the same way."""

    @property
    def num_channels(self) -> int:
        """Channels of the space the module works in."""

    def encode_prompts(self, prompts: Sequence[str]) -> Condition:
        """The condition of each prompt, on the CPU."""

    def encode_captions(self, captions: Sequence[str], labels: Sequence[int]) -> Condition:
        """The condition of training pictures, on the CPU: labels where the family knows classes, captions otherwise."""

    def truncated(self, prompts: Sequence[str]) -> list[bool]:
        """Which prompts are longer than the model reads."""

    def null_condition(self, num: int) -> Condition:
        """What captions are replaced by in training, `num` rows on the CPU."""

    def sample_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """(channels, height, width) of the tensor behind a picture of this size; another size than the model's is an InputError."""

    def to_model(self, pixels: Tensor) -> Tensor:
        """uint8 NHWC pictures to the float32 NCHW tensors the module learns, on the device of the pictures."""

    def to_pixels(self, x: Tensor) -> Tensor:
        """The way back, to uint8 NHWC; NotFiniteError where a picture is NaN."""

    def predict(self, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """The velocity at `x` and time `t` (one a picture, 1 is noise), in float32."""

    def shard_units(self) -> list[nn.Module]:
        """Modules to shard one by one, innermost first; nobody calls into their parts from outside."""

    def describe(self) -> dict[str, Any]:
        """JSON from which `models.load.build` makes the same denoiser again, without its weights."""

    def flops_per_picture(self) -> int:
        """Floating-point operations of one forward of one picture (a multiply-add is two)."""

    def to(self, device: torch.device | str) -> Denoiser:
        """Move the module and what surrounds it, in place."""
