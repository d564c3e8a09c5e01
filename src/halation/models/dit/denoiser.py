"""The DiT family: implements the Denoiser protocols with its tokenizer and image space."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halation.errors import InputError
from halation.flow.paths import RectifiedFlowPath
from halation.flow.samplers import SAMPLERS, guided_velocity, schedule
from halation.flow.seeded_noise import noise_from_seed
from halation.models.autoencoder import PixelSpace
from halation.models.denoiser import Condition, FamilyDefaults, GuidanceKind, ImageSpace, SolverSettings, null_condition
from halation.models.dit.network import DiT, DiTConfig
from halation.models.dit.tokenizer import WordTokenizer
from halation.models.model_folder import default_patch_size
from halation.sample_specs import SampleBatch, SampleSpec


@dataclass(frozen=True, kw_only=True)
class NoiseInputs:
    """All inputs for sampling one batch, on the device."""

    noise: Tensor
    condition: Condition
    null: Condition
    scales: Tensor
    num_steps: int
    truncated: tuple[bool, ...]

    @property
    def num_rows(self) -> int:
        return len(self.noise)

    def halves(self) -> tuple[NoiseInputs, NoiseInputs]:
        middle = -(-self.num_rows // 2)
        return self._slice_rows(slice(None, middle)), self._slice_rows(slice(middle, None))

    def _slice_rows(self, rows: slice) -> NoiseInputs:
        return NoiseInputs(
            noise=self.noise[rows],
            condition={name: value[rows] for name, value in self.condition.items()},
            null={name: value[rows] for name, value in self.null.items()},
            scales=self.scales[rows],
            num_steps=self.num_steps,
            truncated=self.truncated[rows],
        )


class DiTDenoiser:
    """A DiT with its tokenizer or class names and its image space."""

    name = "Halation DiT"
    guidance_kind: GuidanceKind = "pair"

    def __init__(
        self,
        *,
        config: DiTConfig,
        space: ImageSpace,
        tokenizer: WordTokenizer | None = None,
        class_names: Sequence[str] = (),
    ) -> None:
        if config.conditioning == "text" and (tokenizer is None or tokenizer.vocabulary_size != config.vocabulary_size):
            raise ValueError("a text-conditional model needs the tokenizer that matches its vocabulary_size")
        if tokenizer is not None and tokenizer.max_tokens != config.max_tokens:
            raise ValueError(f"a tokenizer of {tokenizer.max_tokens} tokens for a model of {config.max_tokens}")
        if config.conditioning == "class" and len(class_names) != config.num_classes:
            raise ValueError(f"{len(class_names)} class names for {config.num_classes} classes")
        if config.channels != space.channels:
            raise ValueError(f"a model of {config.channels} channels for a space of {space.channels}")
        self.config = config
        module = DiT(config)
        self.module: nn.Module = module
        self.space = space
        self.tokenizer = tokenizer
        self.class_names = tuple(class_names)
        self._class_ids = {name: index for index, name in enumerate(self.class_names)}
        self._flops = module.flops()
        self.noise_path = RectifiedFlowPath()
        self.defaults = FamilyDefaults()
        self.hidden_size = config.hidden
        self.num_blocks = config.depth

    def init_weights(self, seed: int) -> DiTDenoiser:
        """Initialize the weights on the CPU from a seed."""
        assert isinstance(self.module, DiT)
        self.module.init_weights(seed)
        return self

    def encode_prompts(self, prompts: Sequence[str]) -> Condition:
        if self.tokenizer is not None:
            return self.tokenizer.encode_batch(prompts)
        return {"label": torch.tensor([self._class_id(prompt) for prompt in prompts], dtype=torch.int64)}

    def encode_captions(self, captions: Sequence[str], labels: Sequence[int]) -> Condition:
        if self.tokenizer is not None:
            return self.tokenizer.encode_batch(captions)
        return {"label": torch.tensor(list(labels), dtype=torch.int64)}

    def _class_id(self, prompt: str) -> int:
        """Return the class of a name or a number; the empty prompt is the null class."""
        name = prompt.strip()
        if not name:
            return self.config.num_classes
        if name in self._class_ids:
            return self._class_ids[name]
        if name.isascii() and name.isdigit() and int(name) < self.config.num_classes:
            return int(name)
        near = difflib.get_close_matches(name, self.class_names, n=3, cutoff=0.0)
        raise InputError(
            f"prompt {prompt!r} for a class-conditional model",
            f"a class name or a number below {self.config.num_classes}",
            f"use one of its classes, such as {', '.join(near)}",
        )

    def truncation_flags(self, prompts: Sequence[str]) -> list[bool]:
        if self.tokenizer is None:
            return [False] * len(prompts)
        return [self.tokenizer.encode(prompt).truncated for prompt in prompts]

    def sample_shape(self, height: int, width: int) -> tuple[int, int, int]:
        config, factor = self.config, self.space.downsampling_factor
        if (height, width) != (config.height * factor, config.width * factor):
            raise InputError(
                f"an image of {height} x {width}",
                f"{config.height * factor} x {config.width * factor}, the size of this model",
                "use that size, or train a model for the other one",
            )
        return (config.channels, config.height, config.width)

    def check_spec(self, spec: SampleSpec) -> None:
        self.sample_shape(spec.height, spec.width)
        self.encode_prompts([spec.prompt, spec.negative_prompt])

    def forward(self, module: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        velocity: Tensor = module(x, t, condition)
        return velocity.to(torch.float32)

    def predict(self, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        return self.forward(self.module, x, t, condition)

    def set_guidance(self, scale: float) -> None:
        """Do nothing: a DiT uses a null branch."""

    def add_size_condition(self, condition: Condition, original_sizes: Tensor, height: int, width: int) -> Condition:
        return condition

    def times(self, num_steps: int, height: int, width: int, shift: float) -> tuple[float, ...]:
        return tuple(schedule(num_steps, shift).tolist())

    def prepare(self, batch: SampleBatch, device: torch.device | str) -> NoiseInputs:
        first = batch.specs[0]
        if any(spec.shape != first.shape for spec in batch.specs):
            raise ValueError("the specs of one batch must have one shape")
        shape = self.sample_shape(first.height, first.width)
        prompts = [spec.prompt for spec in batch.specs]
        noise = torch.stack([noise_from_seed(spec.seed, shape) for spec in batch.specs])
        null = self.encode_prompts([spec.negative_prompt for spec in batch.specs])
        return NoiseInputs(
            noise=noise.to(device),
            condition={name: value.to(device) for name, value in self.encode_prompts(prompts).items()},
            null={name: value.to(device) for name, value in null.items()},
            scales=torch.tensor([spec.guidance_scale for spec in batch.specs], dtype=torch.float32).to(device),
            num_steps=first.steps,
            truncated=tuple(self.truncation_flags(prompts)),
        )

    def dummy_inputs(self, batch: SampleBatch, device: torch.device | str) -> NoiseInputs:
        first, num_specs = batch.specs[0], len(batch.specs)
        null = {name: value.to(device) for name, value in null_condition(self, num_specs).items()}
        return NoiseInputs(
            noise=torch.zeros((num_specs, *self.sample_shape(first.height, first.width)), device=device),
            condition=null,
            null=null,
            scales=torch.ones(num_specs, device=device),
            num_steps=first.steps,
            truncated=(False,) * num_specs,
        )

    # The decorator, unlike a `with` in the body, restores the caller's grad mode between two steps. inference_mode is
    # not used because FSDP cannot use its tensors afterwards.
    @torch.no_grad()
    def denoise(self, inputs: NoiseInputs, solver: SolverSettings) -> Iterator[Tensor]:
        """Yield the float32 state after each step; the module runs in the solver's dtype."""
        device_type = inputs.noise.device.type

        def predict(x: Tensor, t: Tensor, condition: Condition) -> Tensor:
            with torch.autocast(device_type, dtype=solver.dtype, enabled=solver.dtype != torch.float32):
                return self.predict(x, t, condition)

        times = schedule(inputs.num_steps, solver.shift)
        scale = inputs.scales if solver.use_cfg else 1.0
        truncate_from = solver.truncate_from
        velocity = guided_velocity(
            predict, inputs.condition, inputs.null, scale, truncate_from=truncate_from, times=times
        )
        yield from SAMPLERS[solver.sampler](velocity, inputs.noise, times)

    def sample(self, inputs: NoiseInputs, solver: SolverSettings, on_step: Callable[[], None]) -> Tensor:
        x = inputs.noise
        for x in self.denoise(inputs, solver):  # noqa: B007 - the last state is the result
            on_step()
        return x

    def keep_text_encoders(self) -> None:
        """Do nothing: the tokenizer is always loaded."""

    def enable_gradient_checkpointing(self) -> None:
        self.module.gradient_checkpointing = True  # type: ignore[assignment]

    def shard_units(self) -> list[nn.Module]:
        text = getattr(self.module, "text", None)
        blocks = list(getattr(self.module, "blocks"))  # noqa: B009  the module may be wrapped by an engine
        return [*([] if text is None else [text]), *blocks]

    def describe(self) -> dict[str, Any]:
        return {
            "family": "dit",
            "version": 1,
            "config": self.config.as_json(),
            "tokenizer": None if self.tokenizer is None else self.tokenizer.as_json(),
            "class_names": list(self.class_names),
            "space": self.space.describe(),
        }

    def flops_per_image(self) -> int:
        return self._flops

    def to(self, device: torch.device | str, *, module: bool = True) -> DiTDenoiser:
        if module:
            self.module.to(device)
        self.space.to(device)
        return self


def create_dit(
    size: str,
    *,
    height: int,
    width: int,
    captions: Iterable[str] = (),
    class_names: Sequence[str] = (),
    space: ImageSpace | None = None,
    patch_size: int | None = None,
    num_register_tokens: int = 0,
) -> DiTDenoiser:
    """Create a DiT of a named size for images of `height` x `width` pixels.

    It is conditioned on classes if `class_names` is given, else on text. Its module is on the meta device: call
    `init_weights(seed)`, or load weights.
    """
    space = PixelSpace() if space is None else space
    if height % space.downsampling_factor or width % space.downsampling_factor:
        raise InputError(
            f"an image of {height} x {width}",
            f"multiples of {space.downsampling_factor}, the factor of the autoencoder",
            "change the image size",
        )
    if patch_size is None:
        patch_size = default_patch_size(height, space.downsampling_factor)
    tokenizer = None if class_names else WordTokenizer.from_captions(captions)
    config = DiTConfig.of_size(
        size,
        height=height // space.downsampling_factor,
        width=width // space.downsampling_factor,
        channels=space.channels,
        patch_size=patch_size,
        num_register_tokens=num_register_tokens,
        conditioning="class" if tokenizer is None else "text",
        vocabulary_size=0 if tokenizer is None else tokenizer.vocabulary_size,
        max_tokens=48 if tokenizer is None else tokenizer.max_tokens,
        num_classes=len(class_names),
    )
    return DiTDenoiser(config=config, space=space, tokenizer=tokenizer, class_names=class_names)
