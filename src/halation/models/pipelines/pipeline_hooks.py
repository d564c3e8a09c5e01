"""Hooks inside a pipeline: steps, guidance, doubled frames, decoder input, CUDA graphs.

They are installed once and track the state of one call. Without options they change no result. The pipeline's own
`__call__` generates the images.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from halation.models.async_image_result import DRY_RUN
from halation.models.pipelines.family_quirks import GuidanceBranches

log = logging.getLogger(__name__)
NUM_WARM_UPS = 2
"""Calls before the capture, so that compilation and autotuning are finished by then."""
GraphKey = tuple[Any, ...]
DENOISER_COMPONENTS = ("transformer", "transformer_2", "unet")
_NOT_PER_ROW = ("image_rotary_emb", "img_ids", "txt_ids")
_MAX_CACHED_ENCODINGS = 2  # each batch's prompts replace the last batch's; negative prompts, used every time, stay


@dataclass(kw_only=True)
class PipelineCall:
    """The state of one call of the pipeline."""

    num_rows: int
    num_steps: int
    on_step: Callable[[], None]
    generators: Sequence[torch.Generator]
    double_frames_to: int | None = None  # latent frames after the last high-noise step
    num_scheduler_calls: int = 0
    num_denoiser_calls: int = 0  # since the scheduler's last step
    conditional_output: Any = None
    decode_call: DecodeCall | None = None
    out_of_memory: torch.OutOfMemoryError | None = None


@dataclass(frozen=True, kw_only=True)
class DecodeCall:
    """The arguments of a decode, and which rows of its result are finite."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    finite_rows: Tensor


@dataclass(kw_only=True)
class PipelineHooks:
    """Wraps scheduler `step`, `forward` of denoisers and text encoders, and VAE `decode`."""

    pipe: Any
    guidance_branches: GuidanceBranches
    cfg_truncation_step: int | None = None
    use_cuda_graphs: bool = False  # replay the denoisers' forwards as CUDA graphs
    timesteps_on_cpu: bool = False
    _call: PipelineCall | None = field(default=None, init=False)
    _replaced: list[tuple[Any, str, Any]] = field(default_factory=list, init=False)

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        self._replaced.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, function)

    def uninstall(self) -> None:
        """Restore what `install` replaced."""
        for owner, name, previous in reversed(self._replaced):
            if previous is None:
                delattr(owner, name)
            else:
                setattr(owner, name, previous)
        self._replaced.clear()

    def install(self) -> None:
        """Install the hooks; call this before any offloading.

        accelerate stores the `forward` it finds and restores it with its hooks.
        """
        scheduler = self.pipe.scheduler
        self._replace(scheduler, "step", self._wrap_step(scheduler.step))
        if self.timesteps_on_cpu:
            self._replace(scheduler, "set_timesteps", keep_timesteps_on_cpu(scheduler.set_timesteps))
        for name in DENOISER_COMPONENTS:
            module = getattr(self.pipe, name, None)
            if isinstance(module, nn.Module):
                forward = CudaGraphForward(module.forward) if self.use_cuda_graphs else module.forward
                self._replace(module, "forward", self._wrap_denoiser(forward))
        for name, module in self.pipe.components.items():
            if name.startswith("text_encoder") and isinstance(module, nn.Module):
                self._replace(module, "forward", cache_encodings(module.forward))
        vae = getattr(self.pipe, "vae", None)
        if vae is not None and hasattr(vae, "decode"):
            self._replace(vae, "decode", self._wrap_decode(vae.decode))

    @contextmanager
    def track_call(self, call: PipelineCall) -> Iterator[PipelineCall]:
        self._call = call
        try:
            yield call
        finally:
            self._call = None

    # The scheduler

    def _step_index(self, call: PipelineCall, scheduler_call: int) -> int:
        """Return the requested step of a scheduler call.

        Heun makes two calls per step, PNDM one call more than steps.
        """
        num_calls = max(len(self.pipe.scheduler.timesteps), call.num_steps)
        return scheduler_call * call.num_steps // num_calls

    def _wrap_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        takes_generator = "generator" in inspect.signature(step).parameters

        @functools.wraps(step)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            call = self._call
            if call is None:
                return step(*args, **kwargs)
            if takes_generator and kwargs.get("generator") is None:
                # Some pipelines do not pass it, and a stochastic solver would then use the global generator.
                kwargs["generator"] = list(call.generators)
            result = step(*args, **kwargs)
            if call.double_frames_to is not None and self._leaves_high_noise(call):
                result = self._double_result_frames(result, call.double_frames_to)
            before = self._step_index(call, call.num_scheduler_calls)
            call.num_scheduler_calls += 1
            call.num_denoiser_calls = 0
            call.conditional_output = None
            if self._step_index(call, call.num_scheduler_calls) > before:
                call.on_step()
            return result

        return wrapper

    def _leaves_high_noise(self, call: PipelineCall) -> bool:
        timesteps = self.pipe.scheduler.timesteps
        following = call.num_scheduler_calls + 1
        boundary = boundary_timestep(self.pipe)
        if following >= len(timesteps):
            return bool(timesteps[-1] >= boundary)
        return bool(timesteps[following] < boundary <= timesteps[following - 1])

    def _double_result_frames(self, result: Any, num_frames: int) -> Any:
        """Repeat every latent frame in the step's result and in the solver's history."""
        sample = result[0]
        scheduler = self.pipe.scheduler
        for name, value in vars(scheduler).items():
            if isinstance(value, Tensor) and value.shape == sample.shape:
                setattr(scheduler, name, double_frames(value, num_frames))
            elif isinstance(value, list) and any(isinstance(entry, Tensor) for entry in value):
                for index, entry in enumerate(value):
                    if isinstance(entry, Tensor) and entry.shape == sample.shape:
                        value[index] = double_frames(entry, num_frames)
        assert isinstance(result, tuple), "pipelines call their scheduler with return_dict=False"
        return tuple(
            double_frames(value, num_frames) if isinstance(value, Tensor) and value.shape == sample.shape else value
            for value in result
        )

    # The denoiser

    def _wrap_denoiser(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            call, first_truncated = self._call, self.cfg_truncation_step
            if call is None or first_truncated is None:
                return forward(*args, **kwargs)
            position = call.num_denoiser_calls
            call.num_denoiser_calls += 1
            if self._step_index(call, call.num_scheduler_calls) < first_truncated:
                return forward(*args, **kwargs)
            if self.guidance_branches == "doubled":
                return _run_conditional_half(forward, 2 * call.num_rows, args, kwargs)
            if position == 0:
                call.conditional_output = forward(*args, **kwargs)
            return call.conditional_output

        return wrapper

    # The autoencoder

    def _wrap_decode(self, decode: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(decode)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            call = self._call
            if call is None:
                return decode(*args, **kwargs)
            try:
                result = decode(*args, **kwargs)
            except torch.OutOfMemoryError as error:  # at least one pipeline catches it and fails on the next line
                call.out_of_memory = error
                raise
            pixels = result[0]
            if isinstance(pixels, Tensor) and len(pixels) == call.num_rows:
                call.decode_call = DecodeCall(args=args, kwargs=kwargs, finite_rows=finite_rows(pixels))
            return result

        return wrapper


def keep_timesteps_on_cpu(set_timesteps: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the timesteps on the CPU, where reading them needs no synchronization.

    For pipelines whose loop reads them one by one; the values are the same.
    """

    @functools.wraps(set_timesteps)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return set_timesteps(*args, **{**kwargs, "device": "cpu"})

    return wrapper


def boundary_timestep(pipe: Any) -> float:
    """Return the timestep below which the low-noise expert runs, computed as in the pipeline."""
    return float(pipe.config.boundary_ratio) * int(pipe.scheduler.config.num_train_timesteps)


def double_frames(latents: Tensor, num_frames: int) -> Tensor:
    """Repeat each latent frame (dimension 2) and cut to `num_frames`.

    An odd number of frames comes from its half, rounded up.
    """
    return latents.repeat_interleave(2, dim=2)[:, :, :num_frames].contiguous()


def finite_rows(values: Tensor) -> Tensor:
    """Return one bool per row, on the device of `values`; call it before values are clamped."""
    return torch.isfinite(values).flatten(1).all(dim=1)


def _run_conditional_half(
    forward: Callable[..., Any], num_rows: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the conditional half of a doubled batch and return it for both halves.

    Guidance of two equal halves returns them unchanged.
    """
    sample = args[0] if args else kwargs.get("hidden_states", kwargs.get("sample"))
    if not isinstance(sample, Tensor) or len(sample) != num_rows:
        return forward(*args, **kwargs)

    def half(value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim and len(value) == num_rows:
            return value[num_rows // 2 :]
        if isinstance(value, dict):
            return {name: half(inner) for name, inner in value.items()}
        return value

    halved = {name: value if name in _NOT_PER_ROW else half(value) for name, value in kwargs.items()}
    result = forward(*map(half, args), **halved)
    if isinstance(result, tuple):
        return tuple(torch.cat([value, value]) if isinstance(value, Tensor) else value for value in result)
    return type(result)(**{name: torch.cat([value, value]) for name, value in result.items()})


def cache_encodings(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Cache a text encoder's results by token ids; negative prompts recur in every batch."""
    cache: OrderedDict[tuple[Any, ...], Any] = OrderedDict()

    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        key = _cache_key([*args, *(part for pair in sorted(kwargs.items()) for part in pair)])
        if key is None:
            return forward(*args, **kwargs)
        if key in cache:
            cache.move_to_end(key)
            return cache[key]
        result = cache[key] = forward(*args, **kwargs)
        if len(cache) > _MAX_CACHED_ENCODINGS:
            cache.popitem(last=False)
        return result

    return wrapper


def _cache_key(values: list[Any]) -> tuple[Any, ...] | None:
    parts: list[Any] = []
    for value in values:
        if isinstance(value, Tensor) and not value.is_floating_point():
            parts.append((value.device.type, value.dtype, tuple(value.shape), value.cpu().numpy().tobytes()))
        elif value is None or isinstance(value, (str, int, float, bool)):
            parts.append((type(value), value))
        else:
            return None
    return tuple(parts)


# -- CUDA graphs


@dataclass(frozen=True, kw_only=True)
class CapturedGraph:
    """A CUDA graph with its input and output tensors."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: tuple[Any, ...]


class CudaGraphForward:
    """Calls `forward` for warm-up, then captures it as a CUDA graph and replays the graph.

    At batch size 1, launching the kernels of a large transformer takes the CPU as long as the GPU needs to run them.
    Shapes do not change within a run, so each is captured once. Inputs that cannot be captured are passed to `forward`.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)
        self.forward = forward
        self.num_calls: dict[GraphKey, int] = {}
        self.graphs: dict[GraphKey, CapturedGraph] = {}
        self.pool: Any = None
        self.is_disabled = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        key = None if self.is_disabled or DRY_RUN.get() else graph_key(leaves, structure)
        if key is None:
            return self.forward(*args, **kwargs)
        if key not in self.graphs:
            self.num_calls[key] = self.num_calls.get(key, 0) + 1
            if self.num_calls[key] <= NUM_WARM_UPS or not self._capture(key, leaves, structure):
                return self.forward(*args, **kwargs)
        captured = self.graphs[key]
        for static, given in zip(captured.inputs, (leaf for leaf in leaves if isinstance(leaf, Tensor)), strict=True):
            static.copy_(given)
        captured.graph.replay()
        # The next replay writes into the same memory.
        return tuple(value.clone() if isinstance(value, Tensor) else value for value in captured.outputs)

    def _capture(self, key: GraphKey, leaves: list[Any], structure: Any) -> bool:
        """Capture one call; return False and disable graphs if that is not possible.

        A forward that reads a value from the GPU cannot be captured.
        """
        static = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(static, structure)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            # thread_local: other threads wait for copies meanwhile, which must not invalidate the capture.
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                outputs = self.forward(*args, **kwargs)
        except RuntimeError as error:
            # This includes out of memory: a graph has its own memory pool, and without it the batch may fit.
            log.info("cannot capture the forward as a CUDA graph: %s", str(error).splitlines()[:1])
            self._disable()
            return False
        if not isinstance(outputs, tuple):
            self._disable()
            return False
        self.pool = self.pool or graph.pool()
        tensors = [leaf for leaf in static if isinstance(leaf, Tensor)]
        self.graphs[key] = CapturedGraph(graph=graph, inputs=tensors, outputs=outputs)
        return True

    def _disable(self) -> None:
        self.is_disabled = True
        self.graphs.clear()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def graph_key(leaves: list[Any], structure: Any) -> GraphKey | None:
    """Return the key under which a graph can be replayed, or None.

    None means that an argument could change without the graph noticing.
    """
    parts: list[Any] = [structure]
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.device.type != "cuda":
                return None
            parts.append((tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device))
        elif leaf is None or isinstance(leaf, str | int | float | bool | torch.dtype):
            parts.append((type(leaf), leaf))
        else:
            return None
    try:
        hash(key := tuple(parts))
    except TypeError:
        return None
    return key
