"""Loading a checked pipeline folder: the class, the weights in their dtype on their device, offloading and compiled blocks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import diffusers
import torch
import transformers
from safetensors import SafetensorError
from torch import nn

from halation.errors import InputError
from halation.models.pipeline_checks import DTYPES, Options, refuse_other_inputs
from halation.models.pipeline_files import PipelineFiles
from halation.models.steering import DENOISERS

logger = logging.getLogger(__name__)
_MAX_SHAPES = (
    64  # each size, batch and guidance pattern of a run is compiled once; the default of 8 falls back to eager silently
)


def pipeline_modules() -> frozenset[str]:
    """diffusers' own pipeline packages: some components (safety checkers) are found under these names."""
    names = diffusers.pipelines._import_structure
    return frozenset(str(name) for name in names if str(name).isidentifier())


def pipeline_class(files: PipelineFiles) -> type[Any]:
    """The pipeline class a folder names, if it draws pictures or videos from text."""
    kind = getattr(diffusers, files.class_name, None)
    if not isinstance(kind, type) or not issubclass(kind, diffusers.DiffusionPipeline):
        raise InputError(
            f"{files.path}: model_index.json asks for {files.class_name}, which diffusers {diffusers.__version__} does not have",
            "a pipeline class of the installed diffusers",
            "install the diffusers release the model asks for; Halation runs no code from a model folder",
        )
    refuse_other_inputs(kind)
    for name, (library, class_name) in files.components.items():
        home = {"diffusers": diffusers, "transformers": transformers}.get(library)
        if home is not None and not isinstance(getattr(home, class_name, None), type):
            raise InputError(
                f"{files.path}: the component {name!r} is a {class_name}, which the installed {library} does not have",
                f"a class of {library}",
                f"install the {library} release the model asks for",
            )
        _need_weights(files, name, getattr(home, class_name, None))
    return kind


def _need_weights(files: PipelineFiles, name: str, kind: Any) -> None:
    is_model = isinstance(kind, type) and issubclass(kind, nn.Module)
    if is_model and not any((files.path / name).glob("*.safetensors")):
        raise InputError(
            f"{files.path / name} has no weights",
            "safetensors files beside its config.json",
            "download the whole model",
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """No bars of the libraries: the run has its own, drawn by one process."""
    transformers.utils.logging.disable_progress_bar()
    diffusers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.utils.logging.enable_progress_bar()
        diffusers.utils.logging.enable_progress_bar()


def load(files: PipelineFiles, options: Options) -> Any:
    """The pipeline, its weights memory-mapped where they need no cast, or read straight onto the GPU."""
    on_gpu = torch.device(options.device).type == "cuda" and options.offload == "none"
    placing = {"device_map": "cuda"} if on_gpu else {}
    try:
        with _quiet(), torch.device("cpu") if not on_gpu else torch.cuda.device(options.device):
            pipe = diffusers.DiffusionPipeline.from_pretrained(
                str(files.path),
                dtype=DTYPES[options.dtype],
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                variant=files.variant,
                **placing,
            )
    except (ValueError, KeyError, TypeError, AttributeError, OSError, ImportError, SafetensorError) as error:
        raise InputError(
            f"{files.path} cannot be opened as a {files.class_name}: {type(error).__name__}: {error}",
            "a whole pipeline folder, as save_pretrained writes it",
            "copy the model again, or install what the message asks for",
        ) from error
    pipe.set_progress_bar_config(disable=True)
    for component in pipe.components.values():
        if isinstance(component, nn.Module):
            component.eval().requires_grad_(False)
    return pipe


def apply_offload(pipe: Any, options: Options) -> None:
    """Where the weights wait: on the GPU, or in host memory by whole models or by layers."""
    device = torch.device(options.device)
    if options.offload == "model":
        pipe.enable_model_cpu_offload(device=device)
    elif options.offload == "layers":
        # The autoencoder is small and stays, so that a row can be decoded again in float32.
        pipe.enable_group_offload(
            onload_device=device, offload_type="leaf_level", use_stream=True, exclude_modules=["vae"]
        )
        pipe.vae.to(device)


def apply_compile(pipe: Any) -> None:
    """Compile the block that repeats, never the whole model: seconds instead of minutes, and one graph for all layers."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MAX_SHAPES)
    for name in DENOISERS:
        module = getattr(pipe, name, None)
        if isinstance(module, nn.Module):
            for block in repeated_blocks(module):
                block.compile(dynamic=False)


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """The blocks the class itself calls repeated, otherwise the elements of its largest lists of modules."""
    names = getattr(module, "_repeated_blocks", None)
    if names:
        return [inner for inner in module.modules() if type(inner).__name__ in names]
    lists = [inner for inner in module.children() if isinstance(inner, nn.ModuleList) and len(inner)]
    if not lists:
        return []
    longest = max(len(inner) for inner in lists)
    return [block for inner in lists if 2 * len(inner) >= longest for block in inner]
