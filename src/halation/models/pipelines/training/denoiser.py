"""A diffusers pipeline whose transformer is trained, behind the Denoiser protocol; its text encoders are in memory only while they read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from halation.errors import InputError
from halation.flow import paths
from halation.models.blocks import recompute
from halation.models.denoiser import Condition, Guides, Habits, Solver
from halation.models.frame_autoencoder import space_of
from halation.models.pipelines.arguments import call_parameters
from halation.models.pipelines.experts import Experts, trained_part, transformer_names
from halation.models.pipelines.families import family_of
from halation.models.pipelines.few_steps import visited
from halation.models.pipelines.folder_check import PipelineFiles, inspect_folder
from halation.models.pipelines.load import load_parts, pipeline_class, pipeline_modules, take_over
from halation.models.pipelines.options import DTYPES, Checks, Options
from halation.models.pipelines.tokenizers import check_tokenizers
from halation.models.pipelines.training.drawing import (  # fmt: skip
    InPipeline,
    OnOneDevice,
    PipelineInputs,
    after_each_step,
    cast,
    standing_in,
    weights_dtype_of,
)
from halation.models.pipelines.training.family import TrainedFamily, trained_family
from halation.models.pipelines.training.lora import Lora, adapt
from halation.models.pipelines.training.text_encoding import Encode, PipelineTexts, TextStore, fingerprint_of, others
from halation.models.students.pipeline_student import PipelineStudent, num_tokens
from halation.specs import Sheet

_OPTIONS = Options(
    dtype="fp32",
    device="cpu",
    scheduler="",
    offload="none",
    compile=False,
    arguments={},
    cfg_truncation_step=None,
    half_frame=False,
)


class PipelineDenoiser:
    """A pipeline folder as something to train: transformer, autoencoder, tokenizers and scheduler."""

    def __init__(
        self,
        *,
        files: PipelineFiles,
        pipe: Any,
        family: TrainedFamily,
        size: tuple[int, int],
        dtype: str,
        weights_dtype: str,
        lora: Lora | None,
        student: PipelineStudent | None = None,
    ) -> None:
        self.files = files
        self.family = family
        self.lora = lora
        self.student = student
        self.size = size
        self.name = family_of(files.class_name).name
        self.module = trained_part(pipe)
        self.config = pipe.transformer.config
        self.space = space_of(pipe.vae, path=str((files.path / "vae").resolve()))
        self._dtypes = {"dtype": dtype, "weights_dtype": weights_dtype}
        self._pipe = pipe
        self._checks = Checks(pipe=pipe, family=family_of(files.class_name), options=_OPTIONS)
        self._texts = PipelineTexts(files=files, pipe=pipe, family=family, dtype=dtype)
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
        lora: Lora | None,
        height: int,
        width: int,
        seed: int = 0,
        stays_on_cpu: bool = True,
        experts: bool = False,
        student: PipelineStudent | None = None,
    ) -> PipelineDenoiser:
        """Check a folder and open what training needs of it, on the CPU; pictures will be `height` x `width` by default.

        The weights that are trained are in `weights_dtype`. Under adapters nothing of the base is trained, and it lies in `dtype`.
        A model that is not to be trained may have two `experts`, and keeps the few weights in float32 that its family keeps so.
        A `student` has a transformer of its own in the place of the folder's.
        """
        files = inspect_folder(Path(path), pipeline_modules())
        kind = pipeline_class(files)
        family_kind = trained_family(files.class_name, files.path)
        wanted = DTYPES[dtype if lora is not None else weights_dtype]
        transformers = ("transformer",) if student is not None else transformer_names(files, experts=experts)
        if student is not None:
            pipe = student.opened(files, wanted)
        else:
            pipe = load_parts(
                files,
                dtype={**dict.fromkeys(transformers, wanted), "default": torch.float32},
                absent=others(files, (*transformers, "vae")),
            )
        check_tokenizers(files.path, pipe, family_of(files.class_name))
        for name in transformers:
            take_over(
                getattr(pipe, name),
                # A GPU's copy is memory of its own, and ranks of one machine then share the file's pages until it is made.
                own_memory=stays_on_cpu,
                dtype=None if experts or lora is not None else wanted,
            )
        pipe.__class__ = type(kind.__name__, (OnOneDevice, kind), {})
        family = family_kind(pipe)
        if student is not None:
            student.reschedule(pipe, height, width)
        if lora is not None:
            adapt(pipe.transformer, lora, family.lora_targets, seed)
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
        denoiser._checks.options_fit()
        denoiser.sample_shape(height, width)
        return denoiser

    @classmethod
    def described(cls, description: Mapping[str, Any]) -> PipelineDenoiser:
        """The denoiser that `describe` describes, with the weights of its base folder."""
        try:
            if description["version"] != 1:
                raise ValueError(f"version {description['version']!r}")
            lora, student = description["lora"], description.get("student")
            denoiser = cls.open(
                Path(description["path"]),
                dtype=description["dtype"],
                weights_dtype=description["weights_dtype"],
                lora=None if lora is None else Lora.from_json(lora),
                height=int(description["height"]),
                width=int(description["width"]),
                experts=bool(description.get("experts")),
                student=None if student is None else PipelineStudent.from_json(student),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"a pipeline's description that does not hold together: {type(error).__name__}: {error}",
                "what describe() of a denoiser wrote",
                "take the config.json of the run, written by this release of Halation",
            ) from error
        if denoiser.fingerprint() != description.get("fingerprint"):
            raise InputError(
                f"the pipeline in {denoiser.files.path} is not the one this run was trained from",
                f"fingerprint {description.get('fingerprint')}",
                "put the original folder back, or start a new run",
            )
        return denoiser

    # What it is

    @property
    def path(self) -> paths.Path:
        return self.family.path

    @property
    def habits(self) -> Habits:
        return Habits(
            guidance_scale=self.default_guidance,
            time_sampling=self.family.time_sampling,
            time_shift=self.family.time_shift,
        )

    @property
    def scheduler(self) -> Any:
        """The pipeline's own, or that of a student's few steps."""
        return self._pipe.scheduler

    @property
    def guides(self) -> Guides:
        return self.family.guides

    @property
    def default_guidance(self) -> float:
        return float(call_parameters(type(self._pipe))["guidance_scale"].default)

    @property
    def default_size(self) -> tuple[int, int]:
        """What the pipeline draws where no size is asked for."""
        asked = tuple(call_parameters(type(self._pipe))[name].default for name in ("height", "width"))
        if all(isinstance(side, int) for side in asked):
            return asked
        side = getattr(self._pipe, "default_sample_size", None) or self.config.sample_size
        return (side * self.downsample, side * self.downsample)

    @property
    def size_multiple(self) -> int:
        """What height and width must divide by."""
        return self._checks.size_multiple

    @property
    def downsample(self) -> int:
        return self.space.downsample

    @property
    def num_channels(self) -> int:
        return self.space.channels

    @property
    def hidden(self) -> int:
        return int(self.config.num_attention_heads * self.config.attention_head_dim)

    @property
    def depth(self) -> int:
        return len(self.shard_units())

    def shard_units(self) -> list[nn.Module]:
        return self.family.units(self.module)

    def keep_no_activations(self) -> None:
        for unit in self.shard_units():
            recompute(unit)

    def fingerprint(self) -> str:
        """A hash over the files of all components of the folder."""
        if not self._fingerprint:
            self._fingerprint = fingerprint_of(self.files, tuple(self.files.components))
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
            **({"experts": True} if isinstance(self.module, Experts) else {}),
            **({} if self.student is None else {"student": self.student.as_json()}),
        }

    def flops_per_picture(self) -> int:
        if not self._flops:
            with torch.device("meta"):
                twin = type(self._pipe.transformer).from_config(self.config)
                x = torch.zeros(1, *self.sample_shape(*self.size))
                condition = {name: value.to("meta") for name, value in self.family.blank().items()}
                t = torch.zeros(1)
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                self.family.answer(twin, x, t, condition)
            self._flops = int(counter.get_total_flops())
        return self._flops

    def to(self, device: torch.device | str, *, module: bool = True) -> PipelineDenoiser:
        if module:
            self.module.to(device)
        self.space.to(device)
        self._device = torch.device(device)
        return self

    # Pictures and texts

    def sample_shape(self, height: int, width: int) -> tuple[int, int, int]:
        self._checks.size_fits(height, width)
        return (self.space.channels, height // self.downsample, width // self.downsample)

    def to_model(self, pixels: Tensor) -> Tensor:
        return self.space.encode(pixels)

    def to_pixels(self, x: Tensor) -> Tensor:
        return self.space.decode(x)

    def encoders(self, device: torch.device | str) -> AbstractContextManager[Encode]:
        """The text encoders on a device: texts to rows on the CPU. They are gone when it ends."""
        return self._texts.encoders(device)

    def text_fingerprint(self) -> str:
        """Equal where the same texts become the same embeddings."""
        return self._texts.fingerprint()

    def use_texts(self, store: TextStore) -> None:
        """Read embeddings from here; a text that is not in it is encoded when it is asked for."""
        self._texts.store = store

    def read_texts_of(self, other: PipelineDenoiser) -> None:
        """Read embeddings where another denoiser of the same folder does."""
        self._texts.store = other._texts.store

    def hold_encoders(self) -> None:
        """Keep the text encoders on the device from now on, where prompts come one after the other."""
        self._texts.hold(self._device)

    def encode_prompts(self, prompts: Sequence[str]) -> Condition:
        return self._texts.rows(prompts, self._device)

    def encode_captions(self, captions: Sequence[str], labels: Sequence[int]) -> Condition:
        return self._texts.rows(captions, self._device)

    def null_condition(self, num: int) -> Condition:
        return {name: row.repeat(num, *(1,) * (row.ndim - 1)) for name, row in self.encode_prompts([""]).items()}

    def truncated(self, prompts: Sequence[str]) -> list[bool]:
        return [self._texts.cuts(prompt) for prompt in prompts]

    def tell_guidance(self, scale: float) -> None:
        if self.guides == "embedded":
            self.family.told_guidance = scale

    def placed(self, condition: Condition, originals: Tensor, height: int, width: int) -> Condition:
        return self.family.placed(condition, originals, height, width)

    def forward(self, module: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        narrow = torch.is_autocast_enabled(x.device.type)
        dtype = torch.float32 if narrow else weights_dtype_of(self.module)
        return self.family.answer(module, x.to(dtype), t, cast(condition, dtype))

    # Drawing

    def times(self, num_steps: int, height: int, width: int, shift: float) -> tuple[float, ...]:
        tokens = num_tokens(self._pipe, height, width)
        return visited(self._pipe.scheduler, family_of(self.files.class_name), num_steps, tokens)

    def prepare(self, sheet: Sheet, device: torch.device | str) -> PipelineInputs:
        """Everything the pipeline would refuse is refused here."""
        prompts = [spec.prompt for spec in sheet.specs]
        first = sheet.specs[0]
        if any(spec.shape != first.shape or spec.guidance_scale != first.guidance_scale for spec in sheet.specs):
            raise ValueError("the specs of one sheet have one shape and one guidance scale")
        for spec in sheet.specs:
            self._checks.spec_fits(spec)
        null = self.encode_prompts([spec.negative_prompt for spec in sheet.specs])
        return self._inputs(sheet, device, self.encode_prompts(prompts), null, tuple(self.truncated(prompts)))

    def filler(self, sheet: Sheet, device: torch.device | str) -> PipelineInputs:
        num = len(sheet.specs)
        blank = {name: row.repeat(num, *(1,) * (row.ndim - 1)) for name, row in self.family.blank().items()}
        return self._inputs(sheet, device, blank, blank, (False,) * num)

    def _inputs(
        self,
        sheet: Sheet,
        device: torch.device | str,
        condition: Condition,
        null: Condition,
        truncated: tuple[bool, ...],
    ) -> PipelineInputs:
        first = sheet.specs[0]
        return PipelineInputs(
            condition={name: value.to(device) for name, value in condition.items()},
            null={name: value.to(device) for name, value in null.items()},
            seeds=tuple(spec.seed for spec in sheet.specs),
            guidance_scale=first.guidance_scale,
            num_steps=first.steps,
            height=first.height,
            width=first.width,
            device=torch.device(device),
            truncated=truncated,
        )

    @torch.no_grad()
    def sample(self, inputs: PipelineInputs, solver: Solver, on_step: Callable[[], None]) -> Tensor:
        """By the pipeline's own call: the latents that `pipe(prompt=..., generator=...)` would decode."""
        pipe, channels = self._pipe, self.sample_shape(inputs.height, inputs.width)
        seen = InPipeline(self.module, solver.dtype, inputs.device)
        pipe.drawing_on = inputs.device
        with standing_in(pipe, seen):
            output = pipe(
                generator=[torch.Generator("cpu").manual_seed(seed) for seed in inputs.seeds],
                num_inference_steps=inputs.num_steps,
                guidance_scale=inputs.guidance_scale,
                height=inputs.height,
                width=inputs.width,
                output_type="latent",
                **self.family.keywords(cast(inputs.condition, seen.dtype), cast(inputs.null, seen.dtype)),
                **after_each_step(type(pipe), on_step),
            )[0]
        return self.family.unpacked(output, *channels[1:]).to(torch.float32)
