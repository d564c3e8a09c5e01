"""Two transformers of one model, for noise levels above and below a boundary."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from halation.errors import InputError
from halation.models.pipelines.folder_safety_check import PipelineFiles, read_json


class ExpertPair(nn.Module):
    """Wraps both transformers as one; each row is passed to the expert of its timestep."""

    def __init__(self, high: nn.Module, low: nn.Module, boundary: float) -> None:
        """`boundary` is the lowest timestep of `high`."""
        super().__init__()
        self.high = high
        self.low = low
        self.boundary = boundary
        self.always_run_both = False
        """Run both experts at every forward, on a dummy row if an expert has none. Ranks that share the sharded weights
        must gather them equally often."""
        self._keep_in_fp32_modules = getattr(high, "_keep_in_fp32_modules", None)

    @property
    def config(self) -> Any:
        return self.high.config

    def cache_context(self, _name: str, **_where: Any) -> AbstractContextManager[None]:
        """Return a null context; pipelines enter it around each call, for caches not used here."""
        return nullcontext()

    def forward(
        self,
        *,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        attention_kwargs: dict[str, Any] | None = None,
        return_dict: bool = False,
    ) -> tuple[Tensor]:
        """Predict each row; `timestep` has one value per row, or one equal value per token."""
        rows = {"hidden_states": hidden_states, "timestep": timestep, "encoder_hidden_states": encoder_hidden_states}
        first = timestep if timestep.ndim == 1 else timestep[:, 0]
        is_high = first >= self.boundary
        row_indices = is_high.nonzero().flatten(), (~is_high).nonzero().flatten()
        parts = [
            self._run_expert(expert, rows, mine)
            for expert, mine in zip((self.high, self.low), row_indices, strict=True)
        ]
        answers = [part for part in parts if part is not None]
        if len(answers) == 1:
            return (answers[0],)
        return (torch.cat(answers)[torch.cat(row_indices).argsort()],)

    def _run_expert(self, expert: nn.Module, rows: dict[str, Tensor], row_indices: Tensor) -> Tensor | None:
        """Return the expert's predictions for its rows, or None if it has none."""
        num_rows = len(rows["timestep"])
        if len(row_indices) == num_rows:
            return _forward_rows(expert, rows)
        if len(row_indices):
            return _forward_rows(expert, {name: value[row_indices] for name, value in rows.items()})
        if self.always_run_both:
            _forward_rows(expert, {name: value[:1] for name, value in rows.items()})
        return None


def _forward_rows(expert: nn.Module, rows: dict[str, Tensor]) -> Tensor:
    answer: Tensor = expert(**rows, return_dict=False)[0]
    return answer


def transformer_names(files: PipelineFiles, *, allow_experts: bool) -> tuple[str, ...]:
    """Return the names of the transformers of a pipeline folder.

    There is one, or two experts if `allow_experts` is set.
    """
    if "transformer" not in files.components:
        raise InputError(
            f"{files.path} has no transformer", "a pipeline with the component transformer", "download the whole model"
        )
    if not has_two_experts(files):
        return ("transformer",)
    if not allow_experts:
        raise InputError(
            f"{files.path} has two transformers, one for high and one for low noise, which cannot be trained",
            "a model with one transformer",
            f"distil it into one: halation distill --teacher_path {files.path}",
        )
    return ("transformer", "transformer_2")


def has_two_experts(files: PipelineFiles) -> bool:
    """Return True if a folder has a second transformer and the boundary that makes it used."""
    index = read_json(files.path / "model_index.json")
    return "transformer_2" in files.components and index.get("boundary_ratio") is not None
