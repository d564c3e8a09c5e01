"""A diffusers pipeline whose transformer is trained: implements the Denoiser protocols.

Its text encoders are in memory only while they encode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from halation.errors import InputError
from halation.flow import paths
from halation.models.autoencoder import make_latent_space
from halation.models.denoiser import (
    Condition,
    FamilyDefaults,
    GuidanceKind,
    SolverSettings,
    apply_gradient_checkpointing,
)
from halation.models.dtypes import DTYPES
from halation.models.model_folder import components_fingerprint
from halation.models.pipelines.capabilities import PipelineChecker, PipelineOptions, call_parameters
from halation.models.pipelines.family_quirks import get_family
from halation.models.pipelines.folder_safety_check import PipelineFiles, inspect_pipeline_folder
from halation.models.pipelines.load import load_components, pipeline_class, pipeline_modules, prepare_weights
from halation.models.pipelines.pipeline_hooks import boundary_timestep
from halation.models.pipelines.schedulers import sampling_times
from halation.models.pipelines.tokenizer_checks import check_tokenizers
from halation.models.pipelines.training import text_encoding
from halation.models.pipelines.training.lora import LoraSettings, inject_lora
from halation.models.pipelines.training.trainable_family import TrainableFamily, get_trainable_family
from halation.models.pipelines.wan_experts import ExpertPair, transformer_names
from halation.models.students.pipeline_student import PipelineStudent, num_tokens
from halation.sample_specs import SampleBatch, SampleSpec

_DEFAULT_OPTIONS = PipelineOptions(
    dtype="fp32",
    device="cpu",
    scheduler="",
    offload="none",
    compile=False,
    arguments={},
    cfg_truncation_step=None,
    half_frame=False,
)


@dataclass(frozen=True, kw_only=True)
class PipelineInputs:
    """All inputs of the pipeline's call for one batch, on the device."""

    condition: Condition
    null: Condition
    seeds: tuple[int, ...]
    guidance_scale: float
    num_steps: int
    height: int
    width: int
    device: torch.device
    truncated: tuple[bool, ...]

    @property
    def num_rows(self) -> int:
        return len(self.seeds)

    def halves(self) -> tuple[PipelineInputs, PipelineInputs]:
        middle = -(-self.num_rows // 2)
        return self._slice_rows(slice(None, middle)), self._slice_rows(slice(middle, None))

    def _slice_rows(self, rows: slice) -> PipelineInputs:
        return replace(
            self,
            condition={name: value[rows] for name, value in self.condition.items()},
            null={name: value[rows] for name, value in self.null.items()},
            seeds=self.seeds[rows],
            truncated=self.truncated[rows],
        )


class AutocastTransformer:
    """Wraps the transformer for its pipeline: runs in the solver's dtype, with float32 inputs.

    Only the transformer runs under autocast; the scheduler keeps the precision of the latents.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        self._module = module
        self._autocast_dtype = dtype
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self._autocast_dtype != torch.float32 else module_dtype(self._module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(
            self._device.type, dtype=self._autocast_dtype, enabled=self._autocast_dtype != torch.float32
        ):
            return self._module(*args, **kwargs)


def module_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype of the weights, ignoring those that a family always keeps in float32."""
    fp32_modules = set(getattr(module, "_keep_in_fp32_modules", None) or ())
    return next(
        parameter.dtype
        for name, parameter in module.named_parameters()
        if parameter.is_floating_point() and fp32_modules.isdisjoint(name.split("."))
    )


class FixedDevicePipeline:
    """Mixin for a pipeline whose execution device is set explicitly.

    The weights are on another device if an engine keeps them in host memory.
    """

    drawing_on = torch.device("cpu")

    @property
    def _execution_device(self) -> torch.device:
        return self.drawing_on


def cast_condition(condition: Condition, dtype: torch.dtype) -> Condition:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in condition.items()}


class PipelineDenoiser:
    """A trainable pipeline folder: transformer, autoencoder, tokenizers and scheduler."""

    def __init__(
        self,
        *,
        files: PipelineFiles,
        pipe: Any,
        family: TrainableFamily,
        size: tuple[int, int],
        dtype: str,
        weights_dtype: str,
        lora: LoraSettings | None,
        student: PipelineStudent | None = None,
    ) -> None:
        self.files = files
        self.family = family
        self.lora = lora
        self.student = student
        self.size = size
        self.name = get_family(files.class_name).name
        low = getattr(pipe, "transformer_2", None)
        self.module: nn.Module = pipe.transformer
        if low is not None:  # both experts as one module
            self.module = ExpertPair(pipe.transformer, low, boundary_timestep(pipe))
        self.config = pipe.transformer.config
        self.space = make_latent_space(pipe.vae, path=str((files.path / "vae").resolve()))
        self._dtypes = {"dtype": dtype, "weights_dtype": weights_dtype}
        self._pipe = pipe
        self._checker = PipelineChecker(pipe=pipe, family=get_family(files.class_name), options=_DEFAULT_OPTIONS)
        self._text_encoder = text_encoding.PipelineTextEncoder(files=files, pipe=pipe, family=family, dtype=dtype)
        self._device = torch.device("cpu")
        self._fingerprint = ""
        self._flops = 0

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        dtype: str,
        weights_dtype: str,
        lora: LoraSettings | None,
        height: int,
        width: int,
        seed: int = 0,
        stays_on_cpu: bool = True,
        allow_experts: bool = False,
        student: PipelineStudent | None = None,
    ) -> PipelineDenoiser:
        """Check a folder and load the components that training needs, on the CPU.

        `height` and `width` are the default image size. Trained weights are in `weights_dtype`. With adapters (`lora`)
        the base is not trained and is in `dtype`. A model that is not trained may have two experts (`allow_experts`),
        and keeps the few weights in float32 that its family always keeps so. The transformer of a `student` replaces
        the one of the folder.
        """
        files = inspect_pipeline_folder(Path(path), pipeline_modules())
        kind = pipeline_class(files)
        family_kind = get_trainable_family(files.class_name, files.path)
        wanted = DTYPES[dtype if lora is not None else weights_dtype]
        transformers = (
            ("transformer",) if student is not None else transformer_names(files, allow_experts=allow_experts)
        )
        if student is not None:
            pipe = student.load_pipeline(files, wanted)
        else:
            pipe = load_components(
                files,
                dtype={**dict.fromkeys(transformers, wanted), "default": torch.float32},
                absent=text_encoding.other_components(files, (*transformers, "vae")),
            )
        check_tokenizers(files.path, pipe, get_family(files.class_name))
        for name in transformers:
            prepare_weights(
                getattr(pipe, name),
                # Moving to a GPU copies the weights; until then, ranks of one machine share the pages of the file.
                own_memory=stays_on_cpu,
                dtype=None if allow_experts or lora is not None else wanted,
            )
        pipe.__class__ = type(kind.__name__, (FixedDevicePipeline, kind), {})
        family = family_kind(pipe)
        if student is not None:
            student.set_scheduler(pipe, height, width)
        if lora is not None:
            inject_lora(pipe.transformer, lora, family.lora_targets, seed)
        denoiser = cls(
            files=files,
            pipe=pipe,
            family=family,
            size=(height, width),
            dtype=dtype,
            weights_dtype=weights_dtype,
            lora=lora,
            student=student,
        )
        denoiser._checker.check_options()
        denoiser.sample_shape(height, width)
        return denoiser

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> PipelineDenoiser:
        """Rebuild the denoiser from the result of `describe`, with the weights of its base folder."""
        try:
            if description["version"] != 1:
                raise ValueError(f"version {description['version']!r}")
            lora, student = description["lora"], description.get("student")
            denoiser = cls.open(
                Path(description["path"]),
                dtype=description["dtype"],
                weights_dtype=description["weights_dtype"],
                lora=None if lora is None else LoraSettings.from_json(lora),
                height=int(description["height"]),
                width=int(description["width"]),
                allow_experts=bool(description.get("experts")),
                student=None if student is None else PipelineStudent.from_json(student),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"an invalid pipeline description: {type(error).__name__}: {error}",
                "a description written by describe() of a denoiser",
                "use the config.json of the run, written by this release of Halation",
            ) from error
        if denoiser.fingerprint() != description.get("fingerprint"):
            raise InputError(
                f"the pipeline in {denoiser.files.path} is not the one this run was trained from",
                f"fingerprint {description.get('fingerprint')}",
                "put the original folder back, or start a new run",
            )
        return denoiser

    # Properties

    @property
    def noise_path(self) -> paths.NoisePath:
        return self.family.noise_path

    @property
    def defaults(self) -> FamilyDefaults:
        return FamilyDefaults(
            guidance_scale=self.default_guidance,
            time_sampling=self.family.time_sampling,
            time_shift=self.family.time_shift,
        )

    @property
    def scheduler(self) -> Any:
        """The pipeline's scheduler, or the few-step scheduler of a student."""
        return self._pipe.scheduler

    @property
    def guidance_kind(self) -> GuidanceKind:
        return self.family.guidance_kind

    @property
    def default_guidance(self) -> float:
        return float(call_parameters(type(self._pipe))["guidance_scale"].default)

    @property
    def default_steps(self) -> int:
        """The number of denoising steps that the pipeline uses by default; 4 for FLUX schnell, made for few steps."""
        if self.guidance_kind == "none":
            return 4
        return int(call_parameters(type(self._pipe))["num_inference_steps"].default)

    @property
    def default_learning_rate(self) -> float:
        """The family's learning rate for adapters, or for all weights."""
        return self.family.learning_rates[0 if self.lora is not None else 1]

    @property
    def default_size(self) -> tuple[int, int]:
        """The image size that the pipeline uses by default."""
        asked = tuple(call_parameters(type(self._pipe))[name].default for name in ("height", "width"))
        if all(isinstance(side, int) for side in asked):
            return asked
        side = getattr(self._pipe, "default_sample_size", None) or self.config.sample_size
        side *= self.space.downsampling_factor
        return (side, side)

    @property
    def size_multiple(self) -> int:
        """The number that must divide height and width."""
        return self._checker.size_multiple

    @property
    def hidden_size(self) -> int:
        return int(self.config.num_attention_heads * self.config.attention_head_dim)

    @property
    def num_blocks(self) -> int:
        return len(self.shard_units())

    def shard_units(self) -> list[nn.Module]:
        return self.family.shard_units(self.module)

    def enable_gradient_checkpointing(self) -> None:
        for unit in self.shard_units():
            apply_gradient_checkpointing(unit)

    def fingerprint(self) -> str:
        """Hash of the files of all components of the folder."""
        if not self._fingerprint:
            self._fingerprint = components_fingerprint(self.files.path, self.files.components)
        return self._fingerprint

    def describe(self) -> dict[str, Any]:
        return {
            "family": "pipeline",
            "version": 1,
            "class": self.files.class_name,
            "path": str(self.files.path.resolve()),
            "fingerprint": self.fingerprint(),
            "lora": None if self.lora is None else self.lora.as_json(),
            "height": self.size[0],
            "width": self.size[1],
            **self._dtypes,
            **({"experts": True} if isinstance(self.module, ExpertPair) else {}),
            **({} if self.student is None else {"student": self.student.as_json()}),
        }

    def flops_per_image(self) -> int:
        if not self._flops:
            with torch.device("meta"):
                meta_module = type(self._pipe.transformer).from_config(self.config)
                x = torch.zeros(1, *self.sample_shape(*self.size))
                condition = {name: value.to("meta") for name, value in self.family.zero_condition().items()}
                t = torch.zeros(1)
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                self.family.predict(meta_module, x, t, condition)
            self._flops = int(counter.get_total_flops())
        return self._flops

    def to(self, device: torch.device | str, *, module: bool = True) -> PipelineDenoiser:
        if module:
            self.module.to(device)
        self.space.to(device)
        self._device = torch.device(device)
        return self

    # Images and texts

    def sample_shape(self, height: int, width: int) -> tuple[int, int, int]:
        self._checker.check_size(height, width)
        factor = self.space.downsampling_factor
        return (self.space.channels, height // factor, width // factor)

    def check_spec(self, spec: SampleSpec) -> None:
        self._checker.check_spec(spec)

    def load_text_encoders(self, device: torch.device | str) -> AbstractContextManager[text_encoding.EncodeTexts]:
        """Context with the text encoders on a device: encodes texts to rows on the CPU.

        The text encoders are freed when it exits.
        """
        return self._text_encoder.load_encoders(device)

    def text_fingerprint(self) -> str:
        """Return a string that is equal if the same texts have the same embeddings."""
        return self._text_encoder.fingerprint()

    def set_text_store(self, store: text_encoding.TextStore) -> None:
        """Read embeddings from a store; texts that it does not have are encoded on demand."""
        self._text_encoder.store = store

    def share_text_store(self, other: PipelineDenoiser) -> None:
        """Use the text store of another denoiser of the same folder."""
        self._text_encoder.store = other._text_encoder.store

    def keep_text_encoders(self) -> None:
        """Keep the text encoders on the device, for prompts that are encoded one after the other."""
        self._text_encoder.keep_loaded(self._device)

    def encode_prompts(self, prompts: Sequence[str]) -> Condition:
        return self._text_encoder.encode(prompts, self._device)

    def encode_captions(self, captions: Sequence[str], labels: Sequence[int]) -> Condition:
        return self._text_encoder.encode(captions, self._device)

    def truncation_flags(self, prompts: Sequence[str]) -> list[bool]:
        return [self._text_encoder.truncates(prompt) for prompt in prompts]

    def set_guidance(self, scale: float) -> None:
        if self.guidance_kind == "embedded":
            self.family.embedded_guidance = scale

    def add_size_condition(self, condition: Condition, original_sizes: Tensor, height: int, width: int) -> Condition:
        return self.family.add_size_condition(condition, original_sizes, height, width)

    def forward(self, module: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        is_autocast = torch.is_autocast_enabled(x.device.type)
        dtype = torch.float32 if is_autocast else module_dtype(self.module)
        return self.family.predict(module, x.to(dtype), t, cast_condition(condition, dtype))

    # Sampling

    def times(self, num_steps: int, height: int, width: int, shift: float) -> tuple[float, ...]:
        tokens = num_tokens(self._pipe, height, width)
        return sampling_times(self._pipe.scheduler, get_family(self.files.class_name), num_steps, tokens)

    def prepare(self, batch: SampleBatch, device: torch.device | str) -> PipelineInputs:
        """Build the inputs of a batch; raise here for everything that the pipeline would reject."""
        prompts = [spec.prompt for spec in batch.specs]
        first = batch.specs[0]
        if any(spec.shape != first.shape or spec.guidance_scale != first.guidance_scale for spec in batch.specs):
            raise ValueError("the specs of one batch must have one shape and one guidance scale")
        for spec in batch.specs:
            self._checker.check_spec(spec)
        null = self.encode_prompts([spec.negative_prompt for spec in batch.specs])
        return self._make_inputs(
            batch, device, self.encode_prompts(prompts), null, tuple(self.truncation_flags(prompts))
        )

    def dummy_inputs(self, batch: SampleBatch, device: torch.device | str) -> PipelineInputs:
        num = len(batch.specs)
        blank = {name: row.repeat(num, *(1,) * (row.ndim - 1)) for name, row in self.family.zero_condition().items()}
        return self._make_inputs(batch, device, blank, blank, (False,) * num)

    def _make_inputs(
        self,
        batch: SampleBatch,
        device: torch.device | str,
        condition: Condition,
        null: Condition,
        truncated: tuple[bool, ...],
    ) -> PipelineInputs:
        first = batch.specs[0]
        return PipelineInputs(
            condition={name: value.to(device) for name, value in condition.items()},
            null={name: value.to(device) for name, value in null.items()},
            seeds=tuple(spec.seed for spec in batch.specs),
            guidance_scale=1.0 if first.guidance_scale is None else first.guidance_scale,
            num_steps=first.steps,
            height=first.height,
            width=first.width,
            device=torch.device(device),
            truncated=truncated,
        )

    @torch.no_grad()
    def sample(self, inputs: PipelineInputs, solver: SolverSettings, on_step: Callable[[], None]) -> Tensor:
        """Run the pipeline's call; return the latents that it would decode."""
        pipe, channels = self._pipe, self.sample_shape(inputs.height, inputs.width)
        transformer = AutocastTransformer(self.module, solver.dtype, inputs.device)
        pipe.drawing_on = inputs.device
        with self._replace_transformer(transformer):
            output = pipe(
                generator=[torch.Generator("cpu").manual_seed(seed) for seed in inputs.seeds],
                num_inference_steps=inputs.num_steps,
                guidance_scale=inputs.guidance_scale,
                height=inputs.height,
                width=inputs.width,
                output_type="latent",
                **self.family.prompt_arguments(
                    cast_condition(inputs.condition, transformer.dtype), cast_condition(inputs.null, transformer.dtype)
                ),
                **self._step_callback(on_step),
            )[0]
        return self.family.unpack_latents(output, *channels[1:]).to(torch.float32)

    @contextmanager
    def _replace_transformer(self, module: AutocastTransformer) -> Iterator[None]:
        """Replace the pipeline's transformer, or both if it has two, inside the context."""
        pipe = self._pipe
        names = [name for name in ("transformer", "transformer_2") if getattr(pipe, name, None) is not None]
        originals = {name: getattr(pipe, name) for name in names}
        for name in names:
            setattr(pipe, name, module)
        try:
            yield
        finally:
            for name in names:
                setattr(pipe, name, originals[name])

    def _step_callback(self, on_step: Callable[[], None]) -> dict[str, Any]:
        if "callback_on_step_end" not in call_parameters(type(self._pipe)):
            return {"callback": lambda _step, _time, _latents: on_step()}

        def on_step_end(_pipe: Any, _step: int, _time: Any, values: dict[str, Any]) -> dict[str, Any]:
            on_step()
            return values

        return {"callback_on_step_end": on_step_end}
