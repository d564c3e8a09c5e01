"""Resolves `--model_path`: the test card, a diffusers pipeline or a Halation model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from halation.errors import InputError, format_count
from halation.input_files import read_json
from halation.models import model_folder
from halation.models.dit.tokenizer import find_prompt_warnings
from halation.models.model_folder import EXPORT_FILE, HubOptions, bundled_name, resolve_model_path
from halation.models.pipelines.call_settings import CallSettings, GivenSettings, read_call_settings
from halation.models.pipelines.folder_safety_check import check_component_sizes, check_not_only_pickles
from halation.models.test_pattern import MODEL_NAME, parse_timing

DEFAULT_HEIGHT, DEFAULT_WIDTH, DEFAULT_GUIDANCE_SCALE, DEFAULT_STEPS = 480, 832, 7.5, 20
"""Defaults of the test card; the steps are also those of a DiT of Halation that was not distilled for fewer."""


@dataclass(frozen=True, kw_only=True)
class ModelRef:
    """A model before it is loaded: load arguments, digest of its weights, default settings."""

    load_args: dict[str, Any]
    name: str
    digest: str
    height: int = DEFAULT_HEIGHT
    """Default height; 0 if the configs of a pipeline do not show it."""
    width: int = DEFAULT_WIDTH
    guidance_scale: float | None = DEFAULT_GUIDANCE_SCALE
    """Default scale; None if it has no effect or the pipeline has no number for it."""
    steps: int = DEFAULT_STEPS
    call_settings: CallSettings | None = None
    """What the call of a pipeline reads; None for other models."""
    distillation_objective: str = ""
    """The objective that a few-step student was distilled with, else empty; it works only with `steps` steps."""

    is_distilled: bool = False
    """True if it was distilled; it then works only with `guidance_scale`."""

    hub_fact: Mapping[str, str] = field(default_factory=dict)
    """Name and commit of a model of the Hub, for the record of a run."""

    @classmethod
    def of_checkpoint(cls, folder: Path, sampling: Mapping[str, Any], *, name: str, digest: str = "") -> ModelRef:
        """Refer to a checkpoint or an export, with the sampling settings of its run."""
        load_args = {
            "kind": "checkpoint",
            "path": str(folder.resolve()),
            "embedded": bundled_name(folder),
            "sampler": sampling["sampler"],
            "time_shift": sampling.get("time_shift", 1.0),
        }
        # The settings of a bundled model are those of its model card. For other models, the number of steps used for
        # previews is not a good default.
        own_steps = {"steps": int(sampling["steps"])} if bundled_name(folder) else {}
        return cls(
            load_args=load_args,
            name=name,
            digest=digest,
            height=sampling["height"],
            width=sampling["width"],
            guidance_scale=sampling["guidance_scale"],
            is_distilled=bool(sampling.get("distilled")),
            **own_steps | model_folder.distillation_settings(sampling),
        )

    @property
    def defaults_of(self) -> str:
        """What the defaults come from, for messages."""
        return self.name if self.call_settings is None else self.call_settings.class_name

    def check(
        self,
        given: GivenSettings,
        guidance_scale: float | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """Raise for given settings that the model cannot draw or would ignore, before it is loaded.

        `guidance_scale` is the scale in effect, by default the given one or that of the model.
        """
        if self.call_settings is not None:
            scale = self.guidance_scale if given.guidance_scale is None else given.guidance_scale
            self.call_settings.check(given, scale if guidance_scale is None else guidance_scale, arguments or {})
        elif self.load_args["kind"] == "checkpoint":
            height, width = (given.height or self.height), (given.width or self.width)
            if (height, width) != (self.height, self.width):
                raise InputError(
                    f"--height {height} --width {width} with {self.name}",
                    f"{self.height} x {self.width}, the only size of this model",
                    "leave --height and --width out, or train a model for the other size",
                )

    def no_size_error(self) -> InputError:
        found = f"the configs of {self.name} do not show the size of its images"
        return InputError(found, "a height and a width", "give --height and --width")

    def warnings(
        self,
        steps: int | None,
        guidance_scale: float | None,
        prompts: Iterable[str],
        *,
        steps_flag: str = "num_inference_steps",
        check_lengths: bool = True,
    ) -> Iterator[str]:
        """Warn about settings that a student was not distilled for, and about unknown words.

        None for a setting means the model's default. `check_lengths` also warns about prompts that are too long.
        """
        if self.distillation_objective and steps not in (None, self.steps):
            learned = f"the model was distilled ({self.distillation_objective}) for {self.steps}"
            yield f"--{steps_flag}: {format_count(steps or 0, 'step')}, but {learned}; expect worse images"
        if self.is_distilled and guidance_scale is not None and guidance_scale != self.guidance_scale:
            learned = f"the model was distilled for {self.guidance_scale:g}"
            yield f"--guidance_scale {guidance_scale:g}, but {learned}; expect worse images"
        if self.load_args["kind"] == "checkpoint":
            yield from find_prompt_warnings(
                Path(self.load_args["path"]), self.name, prompts, check_lengths=check_lengths
            )


def resolve_model(model_path: str, *, raw: bool, hub: HubOptions = HubOptions()) -> ModelRef:  # noqa: B008
    """Find and check the model of a `--model_path` without loading it; download it if needed."""
    if not model_path:
        raise InputError("no --model_path", "a model", "give --model_path FOLDER, or testcard to try without a model")
    timing = parse_timing(model_path) if model_path.startswith(MODEL_NAME) else None
    if timing is not None:
        _check_no_hub_options(model_path, hub)
        return ModelRef(load_args={"kind": "testcard", **asdict(timing)}, name="testcard", digest="testcard 1")
    folder = _find_folder(model_path, hub, "model_path", pipelines_only=False)
    if (folder / "model_index.json").exists():
        check_component_sizes(folder)
        load_args = {"kind": "pipeline", "path": str(folder.resolve())}
        name = Path(model_path).resolve().name
        call_settings = read_call_settings(folder)
        settings = pipeline_defaults(call_settings) | read_export_settings(folder)
        if not call_settings.guidance.argument:  # recorded by the run, but without effect
            settings["guidance_scale"] = None
        return ModelRef(
            load_args=load_args,
            name=name,
            digest=model_folder.fingerprint(folder),
            hub_fact=model_folder.read_hub_fact(folder),
            **settings,
        )
    return _resolve_checkpoint(folder, raw)


def pipeline_defaults(settings: CallSettings) -> dict[str, Any]:
    """Return the fields of a ModelRef that hold the defaults of a pipeline's call."""
    height, width = settings.size or (0, 0)
    return {
        "height": height,
        "width": width,
        "guidance_scale": settings.guidance.default,
        "steps": settings.steps or DEFAULT_STEPS,
        "call_settings": settings,
    }


def read_export_settings(folder: Path) -> dict[str, Any]:
    """Read size, guidance and steps of a pipeline that Halation exported, else return {}."""
    if not (folder / EXPORT_FILE).exists():
        return {}
    try:
        sampling = read_json(folder / EXPORT_FILE)["sampling"]
        model_folder.check_sampling_settings(str(folder / EXPORT_FILE), sampling)
        height, width, guidance_scale = (sampling[name] for name in ("height", "width", "guidance_scale"))
        size = {"height": int(height), "width": int(width)}
        is_distilled = bool(sampling.get("distilled"))
        guidance = {"guidance_scale": float(guidance_scale), "is_distilled": is_distilled}
        return {**size, **guidance, **model_folder.distillation_settings(sampling)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{folder / EXPORT_FILE} cannot be read: {type(error).__name__}: {error}",
            "the sampling settings of the run that exported this pipeline",
            "export it again; or delete the file, and give --height, --width and --guidance_scale",
        ) from error


def _resolve_checkpoint(folder: Path, raw: bool) -> ModelRef:
    from halation.models import checkpoint_loading

    try:
        found = checkpoint_loading.find_checkpoint(folder)
        sampling = checkpoint_loading.read_sampling_settings(found)
    except InputError as error:
        check_not_only_pickles(folder)
        raise _not_a_model_error(folder, error.found) from error
    if not {"sampler", "height", "width", "guidance_scale"} <= sampling.keys():
        raise _not_a_model_error(folder, "it has no sampling settings; it may be a part of a pipeline")
    base = checkpoint_loading.check_base_exists(found)
    checkpoint_loading.check_model(found, raw=raw)
    digest = checkpoint_loading.weights_digest(found, raw=raw)
    ref = ModelRef.of_checkpoint(found, sampling, name=folder.resolve().name, digest=digest)
    if base is None:
        return ref
    settings = read_call_settings(base)  # a fine-tuned pipeline takes the sizes and the steps of its base
    steps = model_folder.distillation_settings(sampling).get("steps") or settings.steps or DEFAULT_STEPS
    return replace(ref, call_settings=settings, steps=steps)


def _not_a_model_error(folder: Path, why: str) -> InputError:
    return InputError(
        f"{folder} is neither a diffusers pipeline (no model_index.json) nor a model of Halation ({why})",
        "a folder written by save_pretrained() of a pipeline, or a run, checkpoint or export of Halation",
        "check --model_path; for a pipeline, give the folder that contains model_index.json",
    )


def resolve_pipeline_folder(
    model_path: str,
    flag: str = "model_path",
    hub: HubOptions = HubOptions(),  # noqa: B008
) -> Path:
    """Return the folder of a diffusers pipeline, from a path or a name on the Hub."""
    folder = _find_folder(model_path, hub, flag, pipelines_only=True)
    if not (folder / "model_index.json").is_file():
        run = model_folder.find_fine_tuned_run(folder)
        if run is not None:
            raise model_folder.fine_tuned_error(flag, folder, run)
        raise InputError(
            f"{model_folder.portable_name(folder)} is not a diffusers pipeline: it has no model_index.json",
            "a folder written by save_pretrained() of a pipeline",
            f"check --{flag}; to train a DiT of Halation further, give --model {bundled_name(folder) or 'FOLDER'}",
        )
    return folder


def _find_folder(name: str, hub: HubOptions, flag: str, *, pipelines_only: bool) -> Path:
    """Return a local or bundled folder, or the folder of a model of the Hub."""
    folder = resolve_model_path(name)
    if folder.is_dir():
        _check_no_hub_options(name, hub)
        return folder
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) or Path(name).parent.is_dir():
        bundled = ", ".join(model_folder.bundled_names())
        expected = f"a diffusers pipeline, a model of Halation, or a bundled model: {bundled}"
        raise InputError(f"there is no folder {name}", expected, model_folder.suggest_model(name, f"check --{flag}"))
    from halation.models.hub_download import download_model

    return download_model(name, hub, flag, pipelines_only=pipelines_only)


def _check_no_hub_options(name: str, hub: HubOptions) -> None:
    """Reject settings that have no effect on a model that is already here."""
    for setting in ("revision", "variant"):
        if value := getattr(hub, setting):
            raise InputError(
                f"--{setting} {value} with {name}, which is not downloaded from the Hub",
                "the name of a model on the Hub, as owner/name",
                f"leave --{setting} out: a local model is used as it is",
            )
