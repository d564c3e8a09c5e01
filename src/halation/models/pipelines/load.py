"""Loads a checked pipeline folder: class, weights, dtype, device, offloading, compiling.

Importing this module filters messages of diffusers and transformers, some of which come while models are imported.
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
from halation.models.pipelines.capabilities import PipelineOptions, check_text_only
from halation.models.pipelines.folder_safety_check import PipelineFiles
from halation.models.pipelines.pipeline_hooks import DENOISER_COMPONENTS
from halation.models.pipelines.tokenizer_checks import check_has_vocabulary

_IGNORED_MESSAGES = (
    "requires torchvision",  # image processors that no pipeline here calls
    "Token indices sequence length is longer",  # said once by the tokenizer, though the pipeline cuts the text itself
    "that should be kept in float32: []",  # a list of nothing
    "Setting accelerator to CPU",  # said by DeepSpeed, which transformers imports wherever it is installed
    "The following part of your input was truncated",  # said for every single caption; ours are counted
)
logger = logging.getLogger(__name__)


class _IgnoredMessageFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return not any(words in text for words in _IGNORED_MESSAGES)


def filter_library_warnings() -> None:
    """Keep these messages from the terminal; may be called twice."""
    for library in (transformers.utils.logging, diffusers.utils.logging):
        logger = library.get_logger(library.__name__.split(".")[0])
        for handler in logger.handlers:
            if not any(isinstance(each, _IgnoredMessageFilter) for each in handler.filters):
                handler.addFilter(_IgnoredMessageFilter())
    deepspeed_logger = logging.getLogger("DeepSpeed")  # its handlers come with its import, which may be still to come
    if not any(isinstance(each, _IgnoredMessageFilter) for each in deepspeed_logger.filters):
        deepspeed_logger.addFilter(_IgnoredMessageFilter())


filter_library_warnings()


def pipeline_modules() -> frozenset[str]:
    """diffusers' own pipeline packages: some components (safety checkers) are found under these names."""
    names = diffusers.pipelines._import_structure
    return frozenset(str(name) for name in names if str(name).isidentifier())


def pipeline_class(files: PipelineFiles) -> type[Any]:
    """The pipeline class a folder names, if it draws images or videos from text."""
    kind = getattr(diffusers, files.class_name, None)
    if not isinstance(kind, type) or not issubclass(kind, diffusers.DiffusionPipeline):
        raise InputError(
            f"{files.path}: model_index.json asks for {files.class_name}, "
            f"which diffusers {diffusers.__version__} does not have",
            "a pipeline class of the installed diffusers",
            "install the diffusers release the model asks for; Halation runs no code from a model folder",
        )
    check_text_only(kind)
    for name, (library, class_name) in files.components.items():
        library_module = {"diffusers": diffusers, "transformers": transformers}.get(library)
        if library_module is not None and not isinstance(getattr(library_module, class_name, None), type):
            raise InputError(
                f"{files.path}: the component {name!r} is a {class_name}, which the installed {library} does not have",
                f"a class of {library}",
                f"install the {library} release the model asks for",
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
    """Collects what the libraries only log: weights that the files do not hold and that were made up instead."""

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
    """The pipeline, its weights memory-mapped where they need no cast, or read straight onto the GPU."""
    on_gpu = torch.device(options.device).type == "cuda" and options.offload == "none"
    device_arguments = {"device_map": "cuda"} if on_gpu else {}
    with torch.cuda.device(options.device) if on_gpu else nullcontext():
        return load_components(files, dtype=DTYPES[options.dtype], **device_arguments)


def load_components(
    files: PipelineFiles, *, dtype: Any, absent: Iterable[str] = (), **from_pretrained_arguments: Any
) -> Any:
    """The pipeline without the components named in `absent`; `dtype` may be a mapping by component."""
    # diffusers wants to be told once more that a text encoder is missing on purpose.
    without = [*absent, *(name for name in files.omitted_components if name.startswith(("text_encoder", "tokenizer")))]
    # Some models draw first numbers that the files' own replace; the caller's random numbers must not change by it.
    with (
        _collect_missing_weights() as handler,
        torch.random.fork_rng(devices=[]),
        refuse_library_errors(files),
    ):
        # By its own class: through the base class, parts that are optional are loaded although they were left out.
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
    # A text encoder's pooler is made up in several published models, and no pipeline looks at it.
    missing_weights = [name for name in handler.missing_weights if "pooler" not in name]
    if missing_weights:
        raise InputError(
            f"{files.path} lacks {len(missing_weights)} weights, first {missing_weights[0]}; "
            "they would be random numbers",
            "weights for every part of the model",
            "download the whole model",
        )
    pipe.set_progress_bar_config(disable=True)
    for component in pipe.components.values():
        if isinstance(component, nn.Module):
            # Weights keep requires_grad: without it float32 matmuls on a GPU take another path, and pixels differ.
            component.eval()
    return pipe


def prepare_weights(module: nn.Module, *, own_memory: bool, dtype: torch.dtype | None) -> None:
    """Make the weights that were read fit for training.

    In memory of their own, because they are a window on their file, which may be replaced meanwhile. They also begin
    where the file's header ends, and products of single rows round by where memory begins: sharded weights would give
    other bits. In one dtype, where that is given: some families keep a few weights in float32, and no engine shards
    trained weights of two dtypes together.
    """
    for weight in module.parameters():
        weight.data = weight.data.to(dtype or weight.dtype)
    if own_memory:
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = tensor.data.clone()


@contextmanager
def refuse_library_errors(files: PipelineFiles) -> Iterator[None]:
    """What a library stumbles over in a folder is the folder's fault: another attempt would end in the same way."""
    try:
        yield
    except (torch.OutOfMemoryError, HalationError):
        raise
    except Exception as error:
        raise InputError(
            f"{files.path} cannot be opened as a {files.class_name}: {type(error).__name__}: {error}",
            "a whole pipeline folder, as save_pretrained writes it",
            "copy the model again, or install what the message asks for",
        ) from error


def apply_offload(pipe: Any, options: PipelineOptions) -> None:
    """Where the weights wait: on the GPU, or in host memory by whole models or by layers."""
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
        # The autoencoder stays for a second decoding in float32.
        kept_on_device = {name: part for name, part in models.items() if name in whole | {"vae"}}
        pipe.enable_group_offload(
            onload_device=device, offload_type="leaf_level", use_stream=True, exclude_modules=list(kept_on_device)
        )
        for module in kept_on_device.values():
            module.to(device)


def apply_compile(pipe: Any) -> None:
    """Compile the repeated block, not the whole model: seconds instead of minutes, and one graph for all layers."""
    for name in DENOISER_COMPONENTS:
        module = getattr(pipe, name, None)
        if isinstance(module, nn.Module):
            compile_blocks(repeated_blocks(module))


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
