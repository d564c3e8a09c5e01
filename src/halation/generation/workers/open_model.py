"""The worker's side of the settings: from the orders of a `halation generate` to a model on a device, and a runner around it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from halation.distributed.launcher import describe_device
from halation.generation.image_writer import EncodedImage, EncodeOptions, ImageStore
from halation.generation.workers.generate_encode_store import AsyncRunner
from halation.generation.workers.model_runner import ImageModel
from halation.input_files import RefusedFileError

MAX_ENCODER_THREADS = 4


def open_runner(settings: Mapping[str, Any], store: Callable[[EncodedImage], None] | None = None) -> AsyncRunner:
    """A runner as ordered; `store` takes finished encoded images, by default into the folder of the run."""
    return AsyncRunner(
        lambda: open_model(settings),
        EncodeOptions(**settings["style"]),
        settings["label"],
        store or ImageStore(Path(settings["folder"]), settings.get("folder_identity")),
        min(MAX_ENCODER_THREADS, os.cpu_count() or 1),
    )


def open_model(settings: Mapping[str, Any]) -> ImageModel:
    """The model, on its device; called on the thread that will draw with it."""
    model = settings["model"]
    if model["kind"] == "testcard":
        from halation.models.test_pattern import PatternTiming, TestPatternModel

        return TestPatternModel(PatternTiming(**{name: value for name, value in model.items() if name != "kind"}))
    import torch

    device = settings["device"]
    if device == "cpu":
        torch.set_num_threads(settings["threads"])
    else:
        torch.cuda.set_device(device)
    try:
        loaded_model = _open_pipeline(settings) if model["kind"] == "pipeline" else _open_checkpoint(settings)
    except RefusedFileError as error:
        raise error.as_input_error() from error
    loaded_model.facts["computes on"] = describe_device(device)
    return loaded_model


def _open_pipeline(settings: Mapping[str, Any]) -> ImageModel:
    from halation.models.pipelines.load import filter_library_warnings

    filter_library_warnings()
    from halation.models.pipelines.pipeline_model import open_pipeline

    return open_pipeline(
        Path(settings["model"]["path"]),
        dtype=settings["dtype"],
        device=settings["device"],
        scheduler=settings["scheduler"],
        offload=settings["offload"],
        compile=settings["compile"],
        arguments=settings["arguments"],
        cfg_truncation_step=settings["cfg_truncation_step"],
        half_frame=settings["half_frame"],
    )


def _open_checkpoint(settings: Mapping[str, Any]) -> ImageModel:
    from halation.models.bundled_models import bundled_folder
    from halation.models.checkpoint_loading import load_denoiser
    from halation.models.denoise_and_decode import DiTModel

    model = settings["model"]
    # On another machine the package, and what comes with it, may lie elsewhere.
    folder = bundled_folder(model["embedded"] or "") or Path(model["path"])
    denoiser = load_denoiser(folder, raw=settings["raw"], checked=True).to(settings["device"])
    denoiser.keep_text_encoders()
    return DiTModel(
        denoiser,
        device=settings["device"],
        dtype=settings["dtype"],
        sampler=settings["scheduler"] or model["sampler"],
        time_shift=model["time_shift"],
        truncate_from=settings["cfg_truncation_step"],
        compile=settings["compile"],
        own_sampler=model["sampler"],
    )
