"""Reads defaults, sizes and guidance of a pipeline before it is loaded.

The signature comes from the source of the installed diffusers, sizes from the JSON configs of the model. Neither torch
nor diffusers is imported, which would take seconds in a process that only starts workers.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from halation import input_files
from halation.errors import InputError, format_value
from halation.models.pipelines.family_quirks import FAMILIES, get_family

REQUIRED, NOT_LITERAL = object(), object()
"""Stand for the default of an argument that has none, and of one that is not written as a literal."""
DENOISER_FOLDERS = ("transformer", "unet", "decoder", "prior")
_AUTOENCODER_FOLDERS = ("vae", "vqvae", "movq", "vqgan")
_REQUIRED_ARGUMENTS = ("prompt", "height", "width", "num_inference_steps", "generator", "output_type")
_IMAGE_ARGUMENTS = ("image", "video", "mask_image", "control_image", "images", "input_image")
_OTHER_TASKS = (
    *("Img2Img", "Inpaint", "ControlNet", "ImageToVideo", "Image2Video", "VideoToVideo", "Edit", "Kontext", "Upscale"),
    *("Fill", "Redux", "Depth", "Animate", "VACE", "Control", "Adapter"),
)
_PACKS_LATENTS = (
    *("FluxPipeline", "Flux2Pipeline", "Flux2KleinPipeline", "ChromaPipeline", "BriaPipeline", "OvisImagePipeline"),
    *("LongCatImagePipeline", "ZImagePipeline"),
)
"""These pack 2 x 2 latents into one token, so their configs have a patch size of 1 or none."""
_SAMPLE_SIZE_FACTORS = {"BriaPipeline": 2}
"""How often the factor of the autoencoder is counted in the default size."""
_GUIDANCE_EMBEDS = {"Flux2Pipeline": True, "HunyuanVideoPipeline": True}
"""Value of guidance_embeds for configs that leave it out; False for other families."""
_THRESHOLDS = {"ZImagePipeline": 0.0}
"""The scale above which the unconditional branch runs, if it is not 1."""
_NAME_PATTERN = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,99}")
_IMPORT_NAMES = {"opencv": "cv2"}
_PACKAGES = {"opencv": "opencv-python"}


class GivenSettings(Protocol):
    """Settings of a command or of a row of prompts; None or empty for those that are not given."""

    @property
    def height(self) -> int | None: ...
    @property
    def width(self) -> int | None: ...
    @property
    def guidance_scale(self) -> float | None: ...
    @property
    def negative_prompt(self) -> str | None: ...


# -- the signature


def read_call_arguments(class_name: str) -> Mapping[str, Any]:
    """Return the arguments of a pipeline's call with their defaults, without importing it."""
    return _read_class(class_name)[0]


@functools.cache
def _read_class(class_name: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return a call's arguments, and the constants that constructor and call set."""
    arguments: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    node = _find_class(class_name)
    functions = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
    if "__call__" not in functions:
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id.endswith("Pipeline") and base.id != "DiffusionPipeline":
                return _read_class(base.id)
    if call := functions.get("__call__"):
        names = [argument.arg for argument in (*call.args.posonlyargs, *call.args.args)][1:]
        defaults = [REQUIRED] * (len(names) - len(call.args.defaults)) + [*map(_literal, call.args.defaults)]
        arguments |= dict(zip(names, defaults, strict=True))
        for argument, default in zip(call.args.kwonlyargs, call.args.kw_defaults, strict=True):
            arguments[argument.arg] = REQUIRED if default is None else _literal(default)
    for function in filter(None, (functions.get("__init__"), functions.get("__call__"))):
        for assignment in ast.walk(function):
            if not isinstance(assignment, ast.Assign):
                continue
            value = assignment.value
            for target in assignment.targets:
                if isinstance(target, ast.Attribute):  # self.default_sample_size = 128
                    constants[target.attr] = _literal(value)
                elif isinstance(target, ast.Name) and isinstance(value, ast.BoolOp):  # height = height or 1024
                    constants.setdefault(target.id, _literal(value.values[-1]))
    return arguments, {name: value for name, value in constants.items() if type(value) is int}


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return NOT_LITERAL


def _diffusers_folder() -> Path:
    spec = importlib.util.find_spec("diffusers")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _find_class(class_name: str) -> ast.ClassDef:
    """Return the syntax tree of a pipeline class of the installed diffusers."""
    for path in sorted((_diffusers_folder() / "pipelines").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if f"\nclass {class_name}(" in text:
            tree = ast.parse(text)
            return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    from importlib.metadata import version

    raise InputError(
        f"model_index.json requires {class_name}, which diffusers {version('diffusers')} does not have",
        "a pipeline class of the installed diffusers",
        "install the diffusers release that the model requires; Halation runs no code from a model folder",
    )


def check_packages(class_name: str) -> None:
    """Raise if a pipeline needs a missing package; diffusers then has only a dummy of it."""
    pattern = re.compile(rf"^class {class_name}\(metaclass=DummyObject\):\s+_backends = (\[.*?\])", re.MULTILINE)
    missing: list[str] = []
    for path in (_diffusers_folder() / "utils").glob("dummy_*.py"):
        if match := pattern.search(path.read_text(encoding="utf-8")):
            names = ast.literal_eval(match[1])
            missing += [name for name in names if importlib.util.find_spec(_IMPORT_NAMES.get(name, name)) is None]
    if missing:
        words = " ".join(_PACKAGES.get(name, name) for name in missing)
        raise InputError(
            f"{class_name} needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed",
            "the packages that this pipeline of diffusers imports",
            f"pip install {words}",
        )


def check_text_only(class_name: str) -> None:
    """Reject pipelines that need more than text; the message names their other inputs."""
    check_packages(class_name)
    arguments = read_call_arguments(class_name)
    needed = [name for name, default in arguments.items() if default is REQUIRED and name != "prompt"]
    if any(word in class_name for word in _OTHER_TASKS):
        needed += [name for name in _IMAGE_ARGUMENTS if name in arguments and name not in needed]
    missing = [name for name in _REQUIRED_ARGUMENTS if name not in arguments]
    if not needed and not missing:
        return
    wants = f"needs {', '.join(needed)}" if needed else f"takes no {', '.join(missing)}"
    if "class_labels" in arguments:
        wants = "generates from class labels, not from text"
    raise InputError(
        f"{class_name} {wants}",
        "a pipeline that generates images or videos from a prompt alone",
        "use a text-to-image or text-to-video model, such as "
        + ", ".join(sorted({family.name for family in FAMILIES.values()})),
    )


# -- guidance


@dataclass(frozen=True, kw_only=True)
class Guidance:
    """How a pipeline uses --guidance_scale and negative prompts."""

    argument: str = ""
    """The argument of the call that takes --guidance_scale; empty if the model ignores it."""
    default: float | None = None
    """The default of that argument; None if it has none or has no effect."""
    switch: str = ""
    """The argument that runs the unconditional branch if it is above `threshold`; empty if nothing does."""
    threshold: float = 1.0
    why_unused: str = ""
    """Why --guidance_scale has no effect, as part of a message."""
    takes_negative_prompt: bool = False

    def switch_value(
        self, guidance_scale: float | None, arguments: Mapping[str, Any], defaults: Mapping[str, Any]
    ) -> float:
        """Return the value that decides whether the unconditional branch runs."""
        if self.switch == self.argument:
            value = self.default if guidance_scale is None else guidance_scale
        else:
            value = arguments.get(self.switch, defaults.get(self.switch))
        return float(value) if isinstance(value, int | float) else math.inf


def find_guidance(class_name: str, denoiser: Mapping[str, Any], index: Mapping[str, Any]) -> Guidance:
    """Return how a pipeline uses guidance, from its signature and configs."""
    arguments = read_call_arguments(class_name)
    takes_negative = "negative_prompt" in arguments
    embeds = bool(denoiser.get("guidance_embeds", _GUIDANCE_EMBEDS.get(class_name, False)))
    threshold = _THRESHOLDS.get(class_name, 1.0)

    def make(argument: str, switch: str, why: str = "") -> Guidance:
        default = arguments.get(argument)
        number = float(default) if isinstance(default, int | float) else None
        return Guidance(
            argument=argument, default=number, switch=switch, threshold=threshold, why_unused=why,
            takes_negative_prompt=takes_negative and bool(switch or not argument),
        )  # fmt: skip

    without = "guidance_embeds is false in its config, so it was trained without guidance"
    if "true_cfg_scale" in arguments:
        if embeds and "guidance_scale" in arguments:
            return make("guidance_scale", "true_cfg_scale")
        if arguments["true_cfg_scale"] > 1:
            return make("true_cfg_scale", "true_cfg_scale")
        return make("", "true_cfg_scale", without)
    if "distilled_guidance_scale" in arguments:
        return make("distilled_guidance_scale", "") if embeds else make("", "", without)
    if "guidance_scale" not in arguments:
        return make("", "", "its call has no guidance_scale")
    if index.get("is_distilled"):
        return make("", "", "is_distilled is true in its model_index.json: it runs without guidance")
    if denoiser.get("time_cond_proj_dim") is not None:
        return make("guidance_scale", "")
    if not takes_negative and "negative_prompt_embeds" not in arguments:
        is_ignored = "guidance_embeds" in denoiser and not embeds
        return make("", "", without) if is_ignored else make("guidance_scale", "")
    return make("guidance_scale", "guidance_scale")


# -- sizes


def find_size_multiple(class_name: str, denoiser: Mapping[str, Any], autoencoder: Mapping[str, Any]) -> int:
    """Return the number that must divide height and width.

    It combines the autoencoder's factor times the patch size with the family's own multiple.
    """
    patch = denoiser.get("patch_size") or 1
    if isinstance(patch, list | tuple):
        patch = patch[-1]
    packing = 2 if class_name in _PACKS_LATENTS else 1
    factor = find_downsampling(class_name, autoencoder) or 1
    return math.lcm(factor * int(patch) * packing, get_family(class_name).size_multiple)


def find_downsampling(class_name: str, autoencoder: Mapping[str, Any]) -> int | None:
    """Return the pixels per side of a latent, or None if the config does not show it."""
    constants = _read_class(class_name)[1]
    if constant := constants.get("vae_scale_factor") or constants.get("vae_scale_factor_spatial"):
        return int(constant)
    return _config_downsampling(autoencoder)


def _config_downsampling(autoencoder: Mapping[str, Any]) -> int | None:
    for name in ("scale_factor_spatial", "spatial_compression_ratio"):
        if autoencoder.get(name):
            return int(autoencoder[name])
    if "spatio_temporal_scaling" in autoencoder:
        return int(autoencoder.get("patch_size", 4)) * 2 ** sum(map(bool, autoencoder["spatio_temporal_scaling"]))
    for name in ("temperal_downsample", "temporal_downsample"):
        if autoencoder.get(name):
            return 2 ** len(autoencoder[name])
    blocks = autoencoder.get("encoder_block_out_channels") or autoencoder.get("block_out_channels")
    return 2 ** (len(blocks) - 1) if blocks else None


def _find_default_size(class_name: str, denoiser: Mapping[str, Any], factor: int | None) -> tuple[int, int] | None:
    """Return the size that a call draws without height and width, computed as the pipelines do."""
    arguments, constants = _read_class(class_name)
    sides = [
        next((value for value in found if isinstance(value, int) and value > 0), 0)
        for found in (
            (arguments.get(side), constants.get(f"default_{side}"), constants.get(side)) for side in ("height", "width")
        )
    ]
    if all(sides):
        return sides[0], sides[1]
    if factor is None:
        return None
    factor *= _SAMPLE_SIZE_FACTORS.get(class_name, 1)
    sample = constants.get("default_sample_size") or denoiser.get("sample_size")
    if sample is None and denoiser.get("sample_height"):
        sample = [denoiser["sample_height"], denoiser.get("sample_width", denoiser["sample_height"])]
    if not sample:
        sample = 128  # the pipelines' own fallback
    height, width = sample if isinstance(sample, list | tuple) else (sample, sample)
    return int(height) * factor, int(width) * factor


# -- a pipeline folder


@dataclass(frozen=True, kw_only=True)
class CallSettings:
    """Defaults and limits of a pipeline folder."""

    class_name: str
    size: tuple[int, int] | None
    """Height and width of a call without them; None if the configs do not show it."""
    steps: int | None
    guidance: Guidance
    size_multiple: int

    def check(self, given: GivenSettings, guidance_scale: float | None, arguments: Mapping[str, Any]) -> None:
        """Raise for given settings that the pipeline cannot draw or would ignore.

        `guidance_scale` is the scale in effect, and `arguments` are those of --pipeline_args.
        """
        check_size_multiple(self.class_name, self.size_multiple, given.height, given.width)
        guidance = self.guidance
        if given.guidance_scale is not None and not guidance.argument:
            raise InputError(
                f"--guidance_scale {given.guidance_scale:g} with {self.class_name}, which would ignore it: "
                f"{guidance.why_unused}",
                "no guidance scale for this model",
                "leave --guidance_scale out" + self._suggest_options("_scale"),
            )
        if given.negative_prompt:
            self._check_negative_prompt(guidance_scale, arguments)

    def _check_negative_prompt(self, guidance_scale: float | None, arguments: Mapping[str, Any]) -> None:
        guidance = self.guidance
        if not guidance.takes_negative_prompt:
            raise InputError(
                f"a negative prompt with {self.class_name}, which would ignore it",
                "prompts alone: the model has no unconditional branch that reads a negative prompt",
                "leave the negative prompt out" + self._suggest_options("_prompt"),
            )
        if not guidance.switch:
            return
        defaults = read_call_arguments(self.class_name)
        value = guidance.switch_value(guidance_scale, arguments, defaults)
        if value > guidance.threshold:
            return
        flag = "--guidance_scale" if guidance.switch == guidance.argument else f"--pipeline_args {guidance.switch}="
        raise InputError(
            f"a negative prompt with {self.class_name} at {guidance.switch} {value:g}, which would ignore it",
            f"{guidance.switch} above {guidance.threshold:g}: only then the model reads the negative prompt",
            f"leave the negative prompt out, or give {flag}{'4.0' if flag.endswith('=') else ' 4.0'}",
        )

    def _suggest_options(self, ending: str) -> str:
        skipped = ("guidance_scale", "prompt", "negative_prompt")
        names = [name for name in read_call_arguments(self.class_name) if name.endswith(ending) and name not in skipped]
        return f"; --pipeline_args can set {', '.join(names)}" if names else ""


def check_size_multiple(
    what: str,
    multiple: int,
    height: int | None,
    width: int | None,
    flag: str = "",
    needs: str = "autoencoder and patches",
) -> None:
    """Raise for a height or width that `multiple` does not divide, with the two nearest sizes.

    `flag` is the flag of both sides; by default each has its own, named after it.
    """
    sides = {name: side for name, side in (("height", height), ("width", width)) if side is not None}
    if all(side > 0 and side % multiple == 0 for side in sides.values()):
        return

    def as_flags(values: Sequence[int]) -> str:
        return " ".join(
            [f"--{flag}", *map(str, values)] if flag else [f"--{n} {v}" for n, v in zip(sides, values, strict=True)]
        )

    # Rounded down and up; a side that fits is the same in both.
    lower = [side // multiple * multiple for side in sides.values()]
    upper = [-(-side // multiple) * multiple or multiple for side in sides.values()]
    nearest = [as_flags(size) for size in (lower, upper) if min(size) > 0]
    raise InputError(
        f"{as_flags(list(sides.values()))} with {what}",
        f"multiples of {multiple}, which its {needs} need",
        f"the nearest: {', or '.join(nearest)}",
    )


def read_call_settings(folder: Path) -> CallSettings:
    """Read the defaults and limits of a folder; reject pipelines that need more than text."""
    index = _read_config(folder / "model_index.json")
    class_name = index.get("_class_name")
    if not isinstance(class_name, str) or not _NAME_PATTERN.fullmatch(class_name):
        raise InputError(
            f"{folder}: model_index.json requires the pipeline {format_value(class_name)}",
            "the name of a pipeline class of diffusers",
            "copy the model again; Halation never runs code from a model folder",
        )
    check_text_only(class_name)

    def read_first(names: Sequence[str]) -> Mapping[str, Any]:
        return next((found for name in names if (found := _read_config(folder / name / "config.json"))), {})

    denoiser, autoencoder = read_first(DENOISER_FOLDERS), read_first(_AUTOENCODER_FOLDERS)
    steps = read_call_arguments(class_name).get("num_inference_steps")
    is_pixel_model = index.keys() & set(DENOISER_FOLDERS) and not index.keys() & set(_AUTOENCODER_FOLDERS)
    try:
        factor = 1 if is_pixel_model else find_downsampling(class_name, autoencoder)
        return CallSettings(
            class_name=class_name,
            size=_find_default_size(class_name, denoiser, factor),
            steps=steps if isinstance(steps, int) else None,
            guidance=find_guidance(class_name, denoiser, index),
            size_multiple=find_size_multiple(class_name, denoiser, autoencoder),
        )
    except (TypeError, ValueError, LookupError, OverflowError) as error:
        raise InputError(
            f"the configs of {folder} show no image size ({type(error).__name__}: {error})",
            "the numbers that were saved with the model",
            "copy the model again",
        ) from error


def read_downsampling(folder: Path) -> int | None:
    """Return the pixels per side of a latent of this autoencoder folder, or None."""
    return _config_downsampling(_read_config(folder / "config.json"))


def _read_config(file: Path) -> Mapping[str, Any]:
    """Return a JSON object, or {} if there is no file."""
    try:
        value = input_files.read_json(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read as JSON: {error}", "a JSON file", "copy the model again") from error
    return value if isinstance(value, dict) else {}
