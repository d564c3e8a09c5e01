"""The worker's side of the settings: from the orders of a `halation generate` to a model on a device, and an easel around it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from halation.distributed.launcher import computes_on
from halation.generation.image_writer import Parcel, Store, Style
from halation.generation.workers.async_runner import Easel
from halation.generation.workers.model_runner import Model

MAX_ENCODERS = 4


def open_easel(order: Mapping[str, Any], deliver: Callable[[Parcel], None] | None = None) -> Easel:
    """An easel as ordered; `deliver` takes finished parcels, by default into the folder of the run."""
    return Easel(
        lambda: open_model(order),
        Style(**order["style"]),
        order["label"],
        deliver or Store(Path(order["folder"])),
        min(MAX_ENCODERS, os.cpu_count() or 1),
    )


def open_model(order: Mapping[str, Any]) -> Model:
    """The model, on its device; called on the thread that will draw with it."""
    model = order["model"]
    if model["kind"] == "testcard":
        from halation.models.test_pattern import Pace, TestCard

        return TestCard(Pace(**{name: value for name, value in model.items() if name != "kind"}))
    import torch

    device = order["device"]
    if device == "cpu":
        torch.set_num_threads(order["threads"])
    else:
        torch.cuda.set_device(device)
    opened: Model = _open_pipeline(order) if model["kind"] == "pipeline" else _open_checkpoint(order)
    opened.facts["computes on"] = computes_on(device)
    return opened


def _open_pipeline(order: Mapping[str, Any]) -> Model:
    from halation.models.pipelines.library_messages import silence

    silence()
    from halation.models.pipelines.runner import open_pipeline

    return open_pipeline(
        Path(order["model"]["path"]),
        dtype=order["dtype"],
        device=order["device"],
        scheduler=order["scheduler"],
        offload=order["offload"],
        compile=order["compile"],
        arguments=order["arguments"],
        cfg_truncation_step=order["cfg_truncation_step"],
        half_frame=order["half_frame"],
    )


def _open_checkpoint(order: Mapping[str, Any]) -> Model:
    from halation.generation.workers.dit_model import CheckpointModel
    from halation.models.bundled import embedded_folder
    from halation.models.checkpoints import load_denoiser

    model = order["model"]
    # On another machine the package, and what comes with it, may lie elsewhere.
    folder = embedded_folder(model["embedded"] or "") or Path(model["path"])
    denoiser = load_denoiser(folder, raw=order["raw"], checked=True).to(order["device"])
    denoiser.hold_encoders()
    return CheckpointModel(
        denoiser,
        device=order["device"],
        dtype=order["dtype"],
        sampler=order["scheduler"] or model["sampler"],
        time_shift=model["time_shift"],
        truncate_from=order["cfg_truncation_step"],
        compile=order["compile"],
        own_sampler=model["sampler"],
    )
