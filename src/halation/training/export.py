"""What a training leaves for others: a DiT as Halation reads it, or a whole pipeline as diffusers does; always from a checkpoint."""

from __future__ import annotations

from pathlib import Path

from halation.distributed.checkpoint.reader import Reader
from halation.models.denoiser import Denoiser
from halation.models.dit.denoiser import DiTDenoiser
from halation.models.fingerprint import EXPORT_FILE
from halation.runs.folder import publish_json
from halation.training import state


def export(reader: Reader, folder: Path, denoiser: Denoiser) -> None:
    """The export of a checkpoint of this denoiser."""
    if isinstance(denoiser, DiTDenoiser):
        state.export(reader, folder, denoiser.space)
        return
    # Here, because diffusers takes seconds to import, and a DiT does without it.
    from halation.models.pipelines.training.denoiser import PipelineDenoiser
    from halation.models.pipelines.training.export import export_pipeline

    assert isinstance(denoiser, PipelineDenoiser)
    export_pipeline(denoiser, folder, averaged=reader.part("ema"), raw=reader.part("model"))
    facts = {"step": reader.state["position"]["step"], "sampling": reader.state["sampling"]}
    publish_json(folder / EXPORT_FILE, facts)
