"""A transformers Trainer callback that samples on every rank after optimizer steps."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from halation.sampling.user_training_loop_sampler import RankSampler


class TransformersSamplerCallback(TrainerCallback):
    """Samples between optimizer steps: `Trainer(callbacks=[SamplerCallback(sampler)])`.

    `sampler(state.global_step)` is called before the first step and after every step; the sampler's `every` decides
    which of these calls sample. If the sampler has no model, the Trainer's model is used.
    """

    def __init__(self, sampler: RankSampler) -> None:
        self.sampler = sampler

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._draw(state, kwargs)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._draw(state, kwargs)

    def _draw(self, state: TrainerState, kwargs: dict[str, Any]) -> None:
        if kwargs.get("model") is not None:
            self.sampler.use(kwargs["model"])
        self.sampler(state.global_step)


SamplerCallback = TransformersSamplerCallback
"""The name to import."""
