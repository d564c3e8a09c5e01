"""A student inside a pipeline: its transformer and its scheduler."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import diffusers
import torch
from torch import nn

from halation.models.pipelines.family_quirks import get_family
from halation.models.pipelines.folder_safety_check import PipelineFiles, inspect_pipeline_folder, read_json
from halation.models.pipelines.load import load_components, pipeline_class, pipeline_modules
from halation.models.pipelines.schedulers import few_step_scheduler
from halation.models.pipelines.training.text_encoding import other_components
from halation.models.pipelines.training.trainable_family import get_trainable_family
from halation.models.pipelines.wan_experts import has_two_experts, transformer_names
from halation.models.students.architecture_from_teacher import check_patch_size, read_shape, transformer_config
from halation.models.students.config import StudentConfig
from halation.models.students.shrink import ShrinkPlan, shrink_weights

InitialWeights = Literal["teacher", "random", "none"]
"""The teacher's weights cut to size, random weights, or any weights because a checkpoint is loaded later."""


@dataclass(frozen=True, kw_only=True)
class PipelineStudent:
    """The parts of a pipeline folder that belong to the student."""

    base: str
    """The teacher's component that the student is initialized from."""
    config: Mapping[str, Any]
    """Config of the student's transformer."""
    is_copy: bool
    """True if its transformer has the architecture of the base."""
    few_steps: int = 0
    """Number of sampling steps; 0 means that it is sampled like the teacher."""
    shrink_plan: ShrinkPlan | None = None
    init: InitialWeights = "none"
    seed: int = 0

    @classmethod
    def from_teacher(
        cls, folder: Path, shape: StudentConfig, *, few_steps: int, init: InitialWeights, seed: int
    ) -> PipelineStudent:
        """Plan the student of the pipeline in a folder, which must be of a trainable family.

        If the teacher has two experts, the student starts from the low-noise expert, which produces the final image.
        """
        files = inspect_pipeline_folder(folder, pipeline_modules())
        pipeline_class(files)
        get_trainable_family(files.class_name, folder)
        transformer_names(files, allow_experts=True)
        base = "transformer_2" if has_two_experts(files) else "transformer"
        teacher_config = read_json(files.path / base / "config.json")
        default_config = {
            name: parameter.default
            for name, parameter in inspect.signature(_transformer_class(files, base).__init__).parameters.items()
            if parameter.default is not inspect.Parameter.empty
        }
        teacher_config.pop("_name_or_path", None)  # a path of the machine it was saved on
        full_config = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in {**default_config, **teacher_config}.items()
        }
        if read_json(files.path / "model_index.json").get("expand_timesteps"):
            check_patch_size(files.class_name, full_config, shape)
        config, layers = transformer_config(files.class_name, full_config, shape)
        return cls(
            base=base,
            config=config,
            is_copy=config == full_config,
            few_steps=few_steps,
            shrink_plan=ShrinkPlan.for_transformers(get_family(files.class_name).name, full_config, config, layers),
            init=init,
            seed=seed,
        )

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PipelineStudent:
        """Restore the result of `as_json`; the weights come from a checkpoint."""
        is_copy, few_steps = bool(value["is_copy"]), int(value["few_steps"])
        return cls(base=str(value["base"]), config=dict(value["config"]), is_copy=is_copy, few_steps=few_steps)

    def as_json(self) -> dict[str, Any]:
        own = {"is_copy": self.is_copy, "few_steps": self.few_steps}
        return {"base": self.base, "config": dict(self.config), **own}

    @property
    def replaced_components(self) -> set[str]:
        """Components of the folder that the student replaces or does not have."""
        own = {"scheduler"} if self.few_steps else set()
        return own | {"transformer", self.base}

    def load_pipeline(self, files: PipelineFiles, dtype: torch.dtype) -> Any:
        """Load the teacher's pipeline with the student's transformer, without text encoders."""
        transformer = self._load_transformer(files, dtype)
        without = {"boundary_ratio": None} if self.base == "transformer_2" else {}
        return load_components(
            files,
            dtype=torch.float32,
            absent=other_components(files, ("transformer", "vae")),
            transformer=transformer,
            **without,
        )

    def _load_transformer(self, files: PipelineFiles, dtype: torch.dtype) -> nn.Module:
        if self.init == "random" or (self.init == "none" and not self.is_copy):
            return self._create_transformer(files)
        # A copy loads the teacher's weights even if a checkpoint follows: some models have buffers, and adapters need
        # their base weights.
        parts = load_components(files, dtype=dtype, absent=other_components(files, (self.base,)))
        teacher: nn.Module = getattr(parts, self.base)
        if self.is_copy:
            return teacher
        assert self.shrink_plan is not None
        student = self._create_transformer(files)
        weights = shrink_weights(teacher, student, self.shrink_plan)
        student.load_state_dict(weights, strict=False)  # buffers are the student's own
        return student

    def _create_transformer(self, files: PipelineFiles) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            module: nn.Module = _transformer_class(files, self.base).from_config(dict(self.config))
        return module

    def set_scheduler(self, pipe: Any, height: int, width: int) -> None:
        """Set the few-step scheduler if the student is sampled in few steps."""
        if self.few_steps:
            family = get_family(type(pipe).__name__)
            tokens = num_tokens(pipe, height, width)
            pipe.scheduler = few_step_scheduler(pipe.scheduler, family, self.few_steps, tokens)


def _transformer_class(files: PipelineFiles, base: str) -> Any:
    return getattr(diffusers, files.components[base][1])


def num_tokens(pipe: Any, height: int, width: int) -> int:
    """Number of patches of an image; some pipelines shift their times by it."""
    shape = read_shape(get_family(type(pipe).__name__).name, pipe.transformer.config)
    factor = getattr(pipe, "vae_scale_factor_spatial", None) or pipe.vae_scale_factor
    return (height // factor // shape.patch_size) * (width // factor // shape.patch_size)
