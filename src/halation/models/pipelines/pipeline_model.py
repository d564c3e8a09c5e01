"""Generates batches with a diffusers pipeline's `__call__`, with hooks for all families."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from torch import Tensor, nn

from halation.errors import InputError
from halation.models.async_image_result import DRY_RUN, Frames, ImageError, NonFiniteImageError, PendingImages
from halation.models.dtypes import DTYPES
from halation.models.pipelines import load
from halation.models.pipelines.call_settings import CallSettings, read_call_settings
from halation.models.pipelines.capabilities import PipelineChecker, PipelineOptions, call_parameters, library_class
from halation.models.pipelines.family_quirks import PipelineFamily, get_family
from halation.models.pipelines.folder_safety_check import inspect_pipeline_folder
from halation.models.pipelines.pipeline_hooks import DecodeCall, PipelineCall, PipelineHooks, finite_rows
from halation.models.pipelines.schedulers import make_scheduler
from halation.models.pipelines.tokenizer_checks import PromptLengthCheck, check_tokenizers
from halation.runs.run_folder import scratch_folder
from halation.sample_specs import SampleSpec

NOT_FINITE = "the decoded image is not finite"
_CALL_ERRORS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RuntimeError)
"""Errors that a pipeline raises for an unexpected value."""


def as_videos(output: Any) -> Tensor:
    """Convert any family's output to (rows, frames, 3, height, width) in [0, 1]."""
    if isinstance(output, (list, tuple)) and output and isinstance(output[0], Tensor):
        output = torch.stack(list(output))
    if isinstance(output, np.ndarray):
        output = torch.from_numpy(output).movedim(-1, -3)
    if not isinstance(output, Tensor) or output.ndim not in (4, 5):
        raise ImageError(f"the pipeline returned {type(output).__name__}, which is no image")
    return output.unsqueeze(1) if output.ndim == 4 else output


def start_host_copy(pixels: Tensor, finite: Tensor) -> Callable[[], tuple[Frames, list[bool]]]:
    """Start copying to the host; return a function that waits, callable on another thread."""
    if pixels.device.type != "cuda":
        return lambda: (pixels.cpu().numpy(), finite.tolist())
    host = torch.empty(pixels.shape, dtype=pixels.dtype, pin_memory=True)
    flags = torch.empty(finite.shape, dtype=finite.dtype, pin_memory=True)
    host.copy_(pixels, non_blocking=True)
    flags.copy_(finite, non_blocking=True)
    copy_done = torch.cuda.Event()
    copy_done.record(torch.cuda.current_stream(pixels.device))

    def wait() -> tuple[Frames, list[bool]]:
        copy_done.synchronize()
        return host.numpy(), flags.tolist()

    return wait


def make_collector(
    videos: Tensor, finite: Tensor, specs: Sequence[SampleSpec], errors: Mapping[int, ImageError]
) -> Callable[[], list[Frames | ImageError]]:
    """Return `PendingImages.collect` for the rows of one call; rows in `errors` have no image."""
    first = specs[0]
    found = (videos.shape[1], videos.shape[3], videos.shape[4])
    wanted = (first.num_frames, first.height, first.width)
    if len(videos) != len(specs) or found != wanted:
        error = ImageError(
            f"the pipeline drew {len(videos)} x {_format_size(found)} "
            f"where {len(specs)} x {_format_size(wanted)} was asked for"
        )
        return lambda: [error for _ in specs]
    # uint8 (rows, frames, height, width, 3), rounded as the pipeline's own conversion to PIL rounds
    wait = start_host_copy((videos.movedim(2, -1).float() * 255).round().to(torch.uint8), finite)

    def collect() -> list[Frames | ImageError]:
        pixels, flags = wait()
        return [
            errors[row] if row in errors else pixels[row] if flags[row] else NonFiniteImageError(NOT_FINITE)
            for row in range(len(specs))
        ]

    return collect


def _format_size(size: tuple[int, int, int]) -> str:
    num_frames, height, width = size
    return f"{height} x {width}" + (f", {num_frames} frames" if num_frames > 1 else "")


@dataclass(frozen=True, kw_only=True)
class PartialResult:
    """Part of a larger result: row `rows[n]` of the whole is row `result_rows[n]` of `result`."""

    result: PendingImages
    rows: tuple[int, ...]
    result_rows: tuple[int, ...]


def merge_results(parts: Sequence[PartialResult]) -> PendingImages:
    """Merge results that each have some of the rows."""
    sources = {row: (part, inner) for part in parts for row, inner in zip(part.rows, part.result_rows, strict=True)}

    def collect() -> list[Frames | ImageError]:
        collected = {id(part): part.result.collect() for part in parts}
        return [collected[id(part)][inner] for _, (part, inner) in sorted(sources.items())]

    def decode_in_float32(rows: Sequence[int]) -> list[Frames | ImageError]:
        results: list[Frames | ImageError] = []
        for row in rows:
            part, inner = sources[row]
            assert part.result.decode_in_float32 is not None
            results += part.result.decode_in_float32([inner])
        return results

    return PendingImages(
        collect=collect,
        decode_in_float32=decode_in_float32 if all(part.result.decode_in_float32 for part in parts) else None,
    )


def open_pipeline(
    path: Path,
    *,
    dtype: str,
    device: str,
    scheduler: str = "",
    offload: str = "none",
    compile: bool = False,
    arguments: Mapping[str, Any] | None = None,
    cfg_truncation_step: int | None = None,
    half_frame: bool = False,
) -> PipelineModel:
    """Check and load a pipeline folder for generation.

    No code of the folder is run: the classes come from diffusers and transformers, the weights are safetensors.
    """
    files = inspect_pipeline_folder(Path(path), load.pipeline_modules())
    kind = load.pipeline_class(files)
    options = PipelineOptions(
        dtype=dtype,
        device=device,
        scheduler=scheduler,
        offload=offload,
        compile=compile,
        arguments=dict(arguments or {}),
        cfg_truncation_step=cfg_truncation_step,
        half_frame=half_frame,
    )
    family = get_family(kind.__name__)
    options.check(kind, family, read_call_settings(files.path).guidance)
    pipe = load.load_pipeline(files, options)
    with load.refuse_library_errors(files):
        check_tokenizers(files.path, pipe, family)
    return _assemble(pipe, family, options)


@dataclass(frozen=True, kw_only=True)
class LoadedPipeline:
    """A pipeline that the caller has loaded, described as a folder would be."""

    pipe: Any
    name: str
    digest: str
    device: str
    dtype: str
    call_settings: CallSettings


def describe_pipeline(given: object) -> LoadedPipeline:
    """Check a pipeline that the caller has loaded, and hash what decides its images."""
    if not isinstance(given, diffusers.DiffusionPipeline):
        raise InputError(
            f"model_path is a {type(given).__name__}",
            "a path or name, a diffusers pipeline, or the result of halation.load_model()",
            "give one of these",
        )
    pipe: Any = given
    dtype = next((name for name, found in DTYPES.items() if found == pipe.dtype), "")
    if not dtype:
        raise InputError(f"a pipeline in {pipe.dtype}", f"one of {', '.join(DTYPES)}", "load it with one of these")
    name = Path(str(pipe.config.get("_name_or_path") or type(pipe).__name__)).name
    with scratch_folder("halation_configs_") as folder:
        pipe.save_config(folder)
        index = json.loads((folder / "model_index.json").read_text())
        index["_class_name"] = library_class(type(pipe)).__name__
        (folder / "model_index.json").write_text(json.dumps(index))
        for part, component in pipe.components.items():
            if isinstance(component, diffusers.ConfigMixin):
                component.save_config(folder / part)
        settings = read_call_settings(folder)
    return LoadedPipeline(
        pipe=pipe,
        name=name,
        digest=_pipeline_digest(pipe),
        device=str(pipe._execution_device),
        dtype=dtype,
        call_settings=settings,
    )


def _pipeline_digest(pipe: Any) -> str:
    """Hash all that decides the images of a loaded pipeline: configs, vocabularies and every weight."""
    digest = hashlib.sha256(type(pipe).__name__.encode())
    for name, component in sorted(pipe.components.items()):
        config: Any = getattr(component, "config", None)
        settings = config.to_dict() if hasattr(config, "to_dict") else dict(config or {})
        vocabulary = sorted(component.get_vocab().items()) if hasattr(component, "get_vocab") else []
        own = {key: value for key, value in settings.items() if not key.startswith("_")}
        text = json.dumps([name, type(component).__name__, own, vocabulary], sort_keys=True, default=str)
        digest.update(text.encode())
        for key, tensor in sorted(component.state_dict().items()) if isinstance(component, nn.Module) else ():
            digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


@contextmanager
def borrow_pipeline(loaded: LoadedPipeline, **options: Any) -> Iterator[PipelineModel]:
    """Generate with a pipeline that the caller has loaded, and leave it as it was."""
    pipe, family = loaded.pipe, get_family(loaded.call_settings.class_name)
    checked = PipelineOptions(offload="none", compile=False, **options)
    checked.check(type(pipe), family, loaded.call_settings.guidance)
    check_tokenizers(Path(type(pipe).__name__), pipe, family)
    modules = [component for component in pipe.components.values() if isinstance(component, nn.Module)]
    training = [module for module in modules if module.training]
    own_scheduler, own_bar = pipe.scheduler, getattr(pipe, "_progress_bar_config", {})
    for module in training:
        module.eval()
    pipe.set_progress_bar_config(disable=True)
    model = _assemble(pipe, family, checked)
    try:
        yield model
    finally:
        model.release()
        pipe.scheduler = own_scheduler
        pipe.set_progress_bar_config(**own_bar)
        for module in training:
            module.train()


def _assemble(pipe: Any, family: PipelineFamily, options: PipelineOptions) -> PipelineModel:
    """Set up scheduler, hooks, compiled blocks and offloading; only this order works."""
    original = type(pipe.scheduler).__name__
    if options.scheduler:
        pipe.scheduler = make_scheduler(pipe.scheduler, options.scheduler, family)
    checker = PipelineChecker(pipe=pipe, family=family, options=options)
    checker.check_options()
    # Offloaded weights change their address, which a CUDA graph does not follow.
    replay = options.compile and options.offload == "none" and torch.device(options.device).type == "cuda"
    hooks = PipelineHooks(
        pipe=pipe,
        guidance_branches=family.guidance_branches,
        cfg_truncation_step=options.cfg_truncation_step,
        use_cuda_graphs=replay,
        timesteps_on_cpu=family.reads_timesteps,
    )
    hooks.install()
    if options.compile:
        load.apply_compile(pipe)
    load.apply_offload(pipe, options)
    return PipelineModel(pipe=pipe, hooks=hooks, checker=checker, own_scheduler=original)


class PipelineModel:
    """A pipeline on one device: `check` validates a spec, `draw` generates one micro-batch."""

    def __init__(self, *, pipe: Any, hooks: PipelineHooks, checker: PipelineChecker, own_scheduler: str) -> None:
        self._pipe = pipe
        self._hooks = hooks
        self._checker = checker
        self._options = checker.options
        self._parameters = call_parameters(type(pipe))
        self._arguments = self._options.call_arguments(type(pipe))
        defaults = {name: parameter.default for name, parameter in self._parameters.items()}
        self._text_limit = PromptLengthCheck(pipe, checker.family, {**defaults, **self._options.arguments})
        self.facts = checker.describe(own_scheduler)

    def release(self) -> None:
        """Remove the hooks from the pipeline."""
        self._hooks.uninstall()

    def check(self, spec: SampleSpec) -> None:
        """Raise InputError if the pipeline does not support a spec, with the nearest valid values."""
        self._checker.check_spec(spec)

    def draw(self, specs: Sequence[SampleSpec], on_step: Callable[[], None]) -> PendingImages:
        """Generate images for specs that share shape, steps and guidance.

        The pixels may still be in transfer when this returns. `on_step` is called after every step of every pass; most
        calls are one pass.
        """
        first = specs[0]
        if any(spec.shape != first.shape or spec.guidance_scale != first.guidance_scale for spec in specs):
            raise ValueError("the specs of one call must have one shape and one guidance scale")
        self._text_limit.warn_once(specs)
        if not self._checker.family.pads_text_to_fixed_length and len(specs) > 1:
            # Padding to the longest prompt would make an image depend on the other prompts of the batch.
            return merge_results(
                [
                    PartialResult(result=self._draw_once([spec], on_step), rows=(row,), result_rows=(0,))
                    for row, spec in enumerate(specs)
                ]
            )
        without = tuple(row for row, spec in enumerate(specs) if not spec.negative_prompt)
        if self._zeroes_empty_negative_prompt and 0 < len(without) < len(specs):
            # Such a pipeline treats a call without negative prompts differently from one with some empty ones.
            given = tuple(row for row in range(len(specs)) if row not in without)
            blank = [replace(spec, negative_prompt="") for spec in specs]
            return merge_results(
                [
                    PartialResult(result=self._draw_once(specs, on_step), rows=given, result_rows=given),
                    PartialResult(result=self._draw_once(blank, on_step), rows=without, result_rows=without),
                ]
            )
        return self._draw_once(specs, on_step)

    @property
    def _zeroes_empty_negative_prompt(self) -> bool:
        return bool(self._pipe.config.get("force_zeros_for_empty_prompt"))

    def _draw_once(self, specs: Sequence[SampleSpec], on_step: Callable[[], None]) -> PendingImages:
        first = specs[0]
        generators = [torch.Generator("cpu").manual_seed(spec.seed) for spec in specs]
        num_frames, double_to = self._checker.frames_to_generate(first)
        call = PipelineCall(
            num_rows=len(specs),
            num_steps=first.steps,
            on_step=on_step,
            generators=generators,
            double_frames_to=double_to,
        )
        output = self._call_pipeline(call, self._call_arguments(specs, generators, num_frames))
        return self._make_result(specs, output, call.decode_call)

    def _call_pipeline(self, call: PipelineCall, keywords: dict[str, Any]) -> Any:
        finished = False
        try:
            with torch.no_grad(), self._hooks.track_call(call):
                output = self._pipe(**keywords)
            finished = True
        except UnboundLocalError:
            if call.out_of_memory is None:
                raise
            raise call.out_of_memory from None
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except _CALL_ERRORS as error:
            if not self._options.arguments or not DRY_RUN.get():
                raise
            given = ", ".join(f"{name}={value!r}" for name, value in self._options.arguments.items())
            raise InputError(
                f"{type(self._pipe).__name__} failed with --pipeline_args {given}: {type(error).__name__}: {error}",
                "values that the pipeline's call accepts",
                "change them, or leave them out to see whether they are the cause",
            ) from error
        finally:
            if not finished:
                self._pipe.maybe_free_model_hooks()
        return output

    def _call_arguments(
        self, specs: Sequence[SampleSpec], generators: list[torch.Generator], num_frames: int
    ) -> dict[str, Any]:
        first = specs[0]
        keywords: dict[str, Any] = {
            "prompt": [spec.prompt for spec in specs],
            "generator": generators,
            "num_inference_steps": first.steps,
            "height": first.height,
            "width": first.width,
            "output_type": "pt",
        }
        offered: dict[str, Any] = {
            "num_frames": num_frames,
            "video_length": num_frames,
            # Generate the requested size, not the family's nearest bucket.
            "use_resolution_binning": False,
        }
        if self._checker.guidance.argument and first.guidance_scale is not None:
            offered[self._checker.guidance.argument] = first.guidance_scale
        nothing_given = not any(spec.negative_prompt for spec in specs)
        if self._checker.accepts_negative_prompt and not (nothing_given and self._zeroes_empty_negative_prompt):
            offered["negative_prompt"] = [spec.negative_prompt for spec in specs]
        keywords |= {name: value for name, value in offered.items() if name in self._parameters}
        return keywords | self._checker.default_arguments | self._arguments

    def _make_result(self, specs: Sequence[SampleSpec], output: Any, decode_call: DecodeCall | None) -> PendingImages:
        videos = as_videos(output[0])
        flags = getattr(output, "nsfw_content_detected", None) or []
        errors = {
            row: ImageError("withheld by the model's safety checker") for row, flagged in enumerate(flags) if flagged
        }
        finite = finite_rows(videos) if decode_call is None else decode_call.finite_rows & finite_rows(videos)
        collect = make_collector(videos, finite, specs, errors)
        if decode_call is None or not self._can_decode_in_float32():
            return PendingImages(collect=collect)

        def decode_in_float32(rows: Sequence[int]) -> list[Frames | ImageError]:
            return self._decode_in_float32([specs[row] for row in rows], rows, decode_call)

        return PendingImages(collect=collect, decode_in_float32=decode_in_float32)

    def _can_decode_in_float32(self) -> bool:
        return any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in self._pipe.vae.parameters())

    def _decode_in_float32(
        self, specs: Sequence[SampleSpec], rows: Sequence[int], decode_call: DecodeCall
    ) -> list[Frames | ImageError]:
        """Decode some rows again with the autoencoder in float32, then restore its weights."""
        vae = self._pipe.vae
        num_rows = len(decode_call.finite_rows)

        def select_rows(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.ndim or len(value) != num_rows:
                return value
            picked = value[list(rows)]
            return picked.float() if picked.is_floating_point() else picked

        args = [select_rows(value) for value in decode_call.args]
        kwargs = {name: select_rows(value) for name, value in decode_call.kwargs.items()}
        weights = [tensor for tensor in (*vae.parameters(), *vae.buffers()) if tensor.is_floating_point()]
        halves = [tensor.data for tensor in weights]
        try:
            for tensor in weights:
                tensor.data = tensor.data.float()
            with torch.no_grad():
                pixels = vae.decode(*args, **kwargs)[0]
                videos = as_videos(self._postprocess(pixels))
        finally:
            for tensor, half in zip(weights, halves, strict=True):
                tensor.data = half
            self._pipe.maybe_free_model_hooks()
        latents = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        errors = {
            row: ImageError("the denoiser's result is not finite, so there is nothing to decode")
            for row, fine in enumerate(finite_rows(latents).tolist())
            if not fine
        }
        return make_collector(videos, finite_rows(pixels) & finite_rows(videos), specs, errors)()

    def _postprocess(self, pixels: Tensor) -> Any:
        video = getattr(self._pipe, "video_processor", None)
        if video is not None:
            return video.postprocess_video(pixels, output_type="pt")
        return self._pipe.image_processor.postprocess(pixels, output_type="pt")
