"""Loads a checked pipeline folder: class, weights, dtype, device, offloading, compiling.

Importing this module installs filters for messages of diffusers and transformers, some of which are logged while models
are imported.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import diffusers
import torch
import transformers
from torch import nn

from halation.errors import HalationError, InputError
from halation.models.denoiser import compile_blocks
from halation.models.dtypes import DTYPES
from halation.models.pipelines.call_settings import check_packages, check_text_only
from halation.models.pipelines.capabilities import PipelineOptions
from halation.models.pipelines.folder_safety_check import PipelineFiles
from halation.models.pipelines.pipeline_hooks import DENOISER_COMPONENTS
from halation.models.pipelines.tokenizer_checks import check_has_vocabulary

_IGNORED_MESSAGES = (
    "requires torchvision",  # image processors that no pipeline here calls
    "Token indices sequence length is longer",  # logged by the tokenizer, though the pipeline truncates the text
    "that should be kept in float32: []",  # an empty list
    "Setting accelerator to CPU",  # logged by DeepSpeed, which transformers imports if it is installed
    "The following part of your input was truncated",  # logged for every caption; Halation counts them instead
)
logger = logging.getLogger(__name__)


class _IgnoredMessageFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return not any(words in text for words in _IGNORED_MESSAGES)


def filter_library_warnings() -> None:
    """Install filters that drop these messages; safe to call twice."""
    for library in (transformers.utils.logging, diffusers.utils.logging):
        logger = library.get_logger(library.__name__.split(".")[0])
        for handler in logger.handlers:
            if not any(isinstance(each, _IgnoredMessageFilter) for each in handler.filters):
                handler.addFilter(_IgnoredMessageFilter())
    deepspeed_logger = logging.getLogger("DeepSpeed")  # filter the logger: its handlers may not exist before its import
    if not any(isinstance(each, _IgnoredMessageFilter) for each in deepspeed_logger.filters):
        deepspeed_logger.addFilter(_IgnoredMessageFilter())


filter_library_warnings()


def pipeline_modules() -> frozenset[str]:
    """Return the pipeline packages of diffusers, which contain some components.

    Safety checkers are listed in `model_index.json` under these names.
    """
    names = diffusers.pipelines._import_structure
    return frozenset(str(name) for name in names if str(name).isidentifier())


def pipeline_class(files: PipelineFiles) -> type[Any]:
    """Return the pipeline class of a folder; reject those that need more than text."""
    check_packages(files.class_name)
    kind = getattr(diffusers, files.class_name, None)
    if not isinstance(kind, type) or not issubclass(kind, diffusers.DiffusionPipeline):
        raise InputError(
            f"{files.path}: model_index.json requires {files.class_name}, "
            f"which diffusers {diffusers.__version__} does not have",
            "a pipeline class of the installed diffusers",
            "install the diffusers release that the model requires; Halation runs no code from a model folder",
        )
    check_text_only(files.class_name)
    for name, (library, class_name) in files.components.items():
        library_module = {"diffusers": diffusers, "transformers": transformers}.get(library)
        if library_module is not None and not isinstance(getattr(library_module, class_name, None), type):
            raise InputError(
                f"{files.path}: the component {name!r} is a {class_name}, which the installed {library} does not have",
                f"a class of {library}",
                f"install the {library} release that the model requires",
            )
        component_class = getattr(library_module, class_name, None)
        is_model = isinstance(component_class, type) and issubclass(component_class, nn.Module)
        if is_model and not any((files.path / name).glob("*.safetensors")):
            raise InputError(
                f"{files.path / name} has no weights",
                "safetensors files beside its config.json",
                "download the whole model",
            )
        check_has_vocabulary(files.path / name, component_class)
    return kind


class _MissingWeightsHandler(logging.Handler):
    """Collects missing weights, which the libraries only log and initialize randomly."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.missing_weights: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        for names in re.findall(r"newly initialized: \[(.*?)\]", text):
            self.missing_weights += [name.strip(" '") for name in names.split(",")]
        self.missing_weights += re.findall(r"^\W*([\w.{}, ]+?)\s*\|\s*MISSING", text, flags=re.MULTILINE)


@contextmanager
def _collect_missing_weights() -> Iterator[_MissingWeightsHandler]:
    """Hide the libraries' progress bars and capture their warnings about missing weights."""
    handler = _MissingWeightsHandler()
    libraries = (transformers.utils.logging, diffusers.utils.logging)
    levels = [library.get_verbosity() for library in libraries]
    for library in libraries:
        library.disable_progress_bar()
        library.set_verbosity(min(library.get_verbosity(), logging.WARNING))
        library.get_logger(library.__name__.split(".")[0]).addHandler(handler)
    try:
        yield handler
    finally:
        for library, level in zip(libraries, levels, strict=True):
            library.set_verbosity(level)
            library.get_logger(library.__name__.split(".")[0]).removeHandler(handler)


def load_pipeline(files: PipelineFiles, options: PipelineOptions) -> Any:
    """Load the pipeline; weights are read to the GPU, or memory-mapped if they need no cast."""
    on_gpu = torch.device(options.device).type == "cuda" and options.offload == "none"
    device_arguments = {"device_map": "cuda"} if on_gpu else {}
    with torch.cuda.device(options.device) if on_gpu else nullcontext():
        return load_components(files, dtype=DTYPES[options.dtype], **device_arguments)


def load_components(
    files: PipelineFiles, *, dtype: Any, absent: Iterable[str] = (), **from_pretrained_arguments: Any
) -> Any:
    """Load the pipeline without the components in `absent`; `dtype` may be a mapping by name."""
    # diffusers requires an explicit None for a text encoder that is left out on purpose.
    without = [*absent, *(name for name in files.omitted_components if name.startswith(("text_encoder", "tokenizer")))]
    # Some models initialize weights randomly before loading; this must not change the caller's random state.
    with (
        _collect_missing_weights() as handler,
        torch.random.fork_rng(devices=[]),
        refuse_library_errors(files),
    ):
        # Use the pipeline's class: the base class loads optional components even if they are left out.
        pipe = getattr(diffusers, files.class_name).from_pretrained(
            str(files.path),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            variant=files.variant,
            dtype=dtype,
            **dict.fromkeys(without),
            **from_pretrained_arguments,
        )
    # Several published text encoders have no weights for the pooler, and no pipeline uses it.
    missing_weights = [name for name in handler.missing_weights if "pooler" not in name]
    if missing_weights:
        raise InputError(
            f"{files.path} lacks {len(missing_weights)} weights, first {missing_weights[0]}; "
            "they would be initialized randomly",
            "weights for every part of the model",
            "download the whole model",
        )
    pipe.set_progress_bar_config(disable=True)
    for component in pipe.components.values():
        if isinstance(component, nn.Module):
            # Keep requires_grad: without it, float32 matmuls on a GPU use another kernel, and pixels differ.
            component.eval()
    return pipe


def prepare_weights(module: nn.Module, *, own_memory: bool, dtype: torch.dtype | None) -> None:
    """Prepare loaded weights for training.

    `own_memory` copies them: loaded weights are a memory map of their file, which may be replaced meanwhile. Their
    address also depends on the length of the file's header, and single-row products round differently for different
    alignments, so sharded weights would not be bit-identical. `dtype` casts all weights: some families keep a few in
    float32, and no engine shards trained weights of two dtypes together.
    """
    for weight in module.parameters():
        weight.data = weight.data.to(dtype or weight.dtype)
    if own_memory:
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = tensor.data.clone()


@contextmanager
def refuse_library_errors(files: PipelineFiles) -> Iterator[None]:
    """Turn errors of the libraries into InputError: a retry would fail in the same way."""
    try:
        yield
    except (torch.OutOfMemoryError, HalationError):
        raise
    except Exception as error:
        raise InputError(
            f"{files.path} cannot be opened as a {files.class_name}: {type(error).__name__}: {error}",
            "a complete pipeline folder, as written by save_pretrained",
            "copy the model again, or install the library that the message names",
        ) from error


def apply_offload(pipe: Any, options: PipelineOptions) -> None:
    """Keep the weights on the GPU, or offload them to host memory by models or by layers."""
    device = torch.device(options.device)
    if options.offload == "model":
        pipe.enable_model_cpu_offload(device=device)
    elif options.offload == "layers":
        models = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
        whole = {
            name
            for name, part in models.items()
            if isinstance(part, diffusers.ModelMixin) and not getattr(part, "_supports_group_offloading", False)
        }
        for name in sorted(whole - {"vae"}):
            logger.warning("%s cannot be offloaded by layers and stays on the GPU", type(models[name]).__name__)
        # The autoencoder stays on the GPU, for a second decoding in float32.
        kept_on_device = {name: part for name, part in models.items() if name in whole | {"vae"}}
        pipe.enable_group_offload(
            onload_device=device, offload_type="leaf_level", use_stream=True, exclude_modules=list(kept_on_device)
        )
        for module in kept_on_device.values():
            module.to(device)


def apply_compile(pipe: Any) -> None:
    """Compile the repeated blocks of the denoisers.

    This takes seconds instead of minutes for the whole model, and all layers share one graph.
    """
    for name in DENOISER_COMPONENTS:
        module = getattr(pipe, name, None)
        if isinstance(module, nn.Module):
            compile_blocks(repeated_blocks(module))


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the blocks in `_repeated_blocks`, else the elements of the longest module lists."""
    names = getattr(module, "_repeated_blocks", None)
    if names:
        return [inner for inner in module.modules() if type(inner).__name__ in names]
    lists = [inner for inner in module.children() if isinstance(inner, nn.ModuleList) and len(inner)]
    if not lists:
        return []
    longest = max(len(inner) for inner in lists)
    return [block for inner in lists if 2 * len(inner) >= longest for block in inner]
