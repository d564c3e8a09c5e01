"""diffusers pipelines: opened safely, drawn by their own `__call__`, steered by hooks that all families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halation.models.image_result import REHEARSING, Frames, PaintError, Painting
from halation.models.pipelines.arguments import as_called, call_parameters, refused_by_the_call
from halation.models.pipelines.families import Family, family_of
from halation.models.pipelines.folder_check import inspect_folder
from halation.models.pipelines.hooks import Call, Decoded, Steering, finite_rows
from halation.models.pipelines.load import apply_compile, apply_offload, load, pipeline_class, pipeline_modules
from halation.models.pipelines.options import Checks, Options
from halation.models.pipelines.pixels import Part, as_videos, collector, merged
from halation.models.pipelines.schedulers import replaced
from halation.models.pipelines.tokenizers import TextLimit, check_tokenizers
from halation.specs import Spec

_CALL_ERRORS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RuntimeError)
"""What a pipeline raises over a value it did not expect."""


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
    """Check a pipeline folder, load it, and make it ready to draw.

    Nothing that lies in the folder is run: the classes come from diffusers and transformers, the weights are safetensors.
    """
    files = inspect_folder(Path(path), pipeline_modules())
    kind = pipeline_class(files)
    options = Options(
        dtype=dtype,
        device=device,
        scheduler=scheduler,
        offload=offload,
        compile=compile,
        arguments=dict(arguments or {}),
        cfg_truncation_step=cfg_truncation_step,
        half_frame=half_frame,
    )
    family = family_of(kind.__name__)
    options.check(kind, family)
    pipe = load(files, options)
    check_tokenizers(files.path, pipe, family)
    return _assembled(pipe, family, options)


def _assembled(pipe: Any, family: Family, options: Options) -> PipelineModel:
    """A loaded pipeline with its scheduler, hooks, compiled blocks and offloading, which only work in this order."""
    original = type(pipe.scheduler).__name__
    if options.scheduler:
        pipe.scheduler = replaced(pipe.scheduler, options.scheduler, family)
    checks = Checks(pipe=pipe, family=family, options=options)
    checks.options_fit()
    # Weights that move between host and GPU are not where a recording would look for them.
    replay = options.compile and options.offload == "none" and torch.device(options.device).type == "cuda"
    steering = Steering(
        pipe=pipe,
        branches=family.branches,
        cfg_truncation_step=options.cfg_truncation_step,
        replay=replay,
        timesteps_on_cpu=family.reads_timesteps,
    )
    steering.install()
    if options.compile:
        apply_compile(pipe)
    apply_offload(pipe, options)
    return PipelineModel(pipe=pipe, steering=steering, checks=checks, own_scheduler=original)


class PipelineModel:
    """A pipeline on one device: `check` says whether it can draw a spec, `draw` draws one micro-batch of one shape."""

    def __init__(self, *, pipe: Any, steering: Steering, checks: Checks, own_scheduler: str) -> None:
        self._pipe = pipe
        self._steering = steering
        self._checks = checks
        self._options = checks.options
        self._parameters = call_parameters(type(pipe))
        self._arguments = as_called(type(pipe), self._options.arguments)
        defaults = {name: parameter.default for name, parameter in self._parameters.items()}
        self._text_limit = TextLimit(pipe, checks.family, {**defaults, **self._options.arguments})
        self.facts = checks.facts(own_scheduler)

    def check(self, spec: Spec) -> None:
        """InputError where this pipeline cannot draw such a spec, with the nearest that it can."""
        self._checks.spec_fits(spec)

    def draw(self, specs: Sequence[Spec], on_step: Callable[[], None]) -> Painting:
        """Draw specs that share shape, steps and guidance; the pixels may still be on their way when this returns.

        `on_step` is called after every step of every pass; most calls are one pass.
        """
        first = specs[0]
        if any(spec.shape != first.shape or spec.guidance_scale != first.guidance_scale for spec in specs):
            raise ValueError("the specs of one call have one shape and one guidance scale")
        self._text_limit.mention(specs)
        if not self._checks.family.pads_text_to_one_length and len(specs) > 1:
            # A prompt padded to its longest neighbour would draw another picture beside another neighbour.
            return merged(
                [Part(painting=self._drawn([spec], on_step), rows=(row,), inner=(0,)) for row, spec in enumerate(specs)]
            )
        without = tuple(row for row, spec in enumerate(specs) if not spec.negative_prompt)
        if self._zeroes_no_negative and 0 < len(without) < len(specs):
            # Such a pipeline takes a whole call without negative prompts for another thing than one empty text among others.
            given = tuple(row for row in range(len(specs)) if row not in without)
            blank = [replace(spec, negative_prompt="") for spec in specs]
            return merged(
                [
                    Part(painting=self._drawn(specs, on_step), rows=given, inner=given),
                    Part(painting=self._drawn(blank, on_step), rows=without, inner=without),
                ]
            )
        return self._drawn(specs, on_step)

    @property
    def _zeroes_no_negative(self) -> bool:
        return bool(self._pipe.config.get("force_zeros_for_empty_prompt"))

    def _drawn(self, specs: Sequence[Spec], on_step: Callable[[], None]) -> Painting:
        first = specs[0]
        generators = [torch.Generator("cpu").manual_seed(spec.seed) for spec in specs]
        num_frames, double_to = self._checks.frames_to_draw(first)
        call = Call(
            num_rows=len(specs),
            num_steps=first.steps,
            on_step=on_step,
            generators=generators,
            double_frames_to=double_to,
        )
        output = self._run(call, self._keywords(specs, generators, num_frames))
        return self._painting(specs, output, call.decoded)

    def _run(self, call: Call, keywords: dict[str, Any]) -> Any:
        finished = False
        try:
            with torch.no_grad(), self._steering.during(call):
                output = self._pipe(**keywords)
            finished = True
        except UnboundLocalError:
            if call.out_of_memory is None:
                raise
            raise call.out_of_memory from None
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except _CALL_ERRORS as error:
            if not self._options.arguments or not REHEARSING.get():
                raise
            raise refused_by_the_call(type(self._pipe), self._options.arguments, error) from error
        finally:
            if not finished:
                self._pipe.maybe_free_model_hooks()
        return output

    def _keywords(self, specs: Sequence[Spec], generators: list[torch.Generator], num_frames: int) -> dict[str, Any]:
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
            "guidance_scale": first.guidance_scale,
            "num_frames": num_frames,
            # The size asked for is the size drawn; the family's nearest bucket would be another picture.
            "use_resolution_binning": False,
        }
        nothing_given = not any(spec.negative_prompt for spec in specs)
        if self._checks.has_negative_prompt and not (nothing_given and self._zeroes_no_negative):
            offered["negative_prompt"] = [spec.negative_prompt for spec in specs]
        keywords |= {name: value for name, value in offered.items() if name in self._parameters}
        return keywords | self._checks.settled_arguments | self._arguments

    def _painting(self, specs: Sequence[Spec], output: Any, decoded: Decoded | None) -> Painting:
        videos = as_videos(output[0])
        flags = getattr(output, "nsfw_content_detected", None) or []
        refused = {
            row: PaintError("withheld by the model's safety checker") for row, flagged in enumerate(flags) if flagged
        }
        finite = finite_rows(videos) if decoded is None else decoded.finite & finite_rows(videos)
        collect = collector(videos, finite, specs, refused)
        if decoded is None or not self._can_repair():
            return Painting(collect=collect)

        def repair(rows: Sequence[int]) -> list[Frames | PaintError]:
            return self._decoded_in_float32([specs[row] for row in rows], rows, decoded)

        return Painting(collect=collect, repair=repair)

    def _can_repair(self) -> bool:
        return any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in self._pipe.vae.parameters())

    def _decoded_in_float32(
        self, specs: Sequence[Spec], rows: Sequence[int], decoded: Decoded
    ) -> list[Frames | PaintError]:
        """Decode some rows once more with the autoencoder in float32, and put every weight back as it was."""
        vae = self._pipe.vae
        num_rows = len(decoded.finite)

        def chosen(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.ndim or len(value) != num_rows:
                return value
            picked = value[list(rows)]
            return picked.float() if picked.is_floating_point() else picked

        args = [chosen(value) for value in decoded.args]
        kwargs = {name: chosen(value) for name, value in decoded.kwargs.items()}
        weights = [tensor for tensor in (*vae.parameters(), *vae.buffers()) if tensor.is_floating_point()]
        halves = [tensor.data for tensor in weights]
        try:
            for tensor in weights:
                tensor.data = tensor.data.float()
            with torch.no_grad():
                pixels = vae.decode(*args, **kwargs)[0]
                videos = as_videos(self._postprocessed(pixels))
        finally:
            for tensor, half in zip(weights, halves, strict=True):
                tensor.data = half
            self._pipe.maybe_free_model_hooks()
        latents = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        refused = {
            row: PaintError("the denoiser's result is not finite, so there is nothing to decode")
            for row, fine in enumerate(finite_rows(latents).tolist())
            if not fine
        }
        return collector(videos, finite_rows(pixels) & finite_rows(videos), specs, refused)()

    def _postprocessed(self, pixels: Tensor) -> Any:
        video = getattr(self._pipe, "video_processor", None)
        if video is not None:
            return video.postprocess_video(pixels, output_type="pt")
        return self._pipe.image_processor.postprocess(pixels, output_type="pt")
