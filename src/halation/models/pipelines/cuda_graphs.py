"""Runs a denoiser's forward as one CUDA graph for each shape of its inputs.

At batch one the CPU needs as long to launch a large transformer's kernels as the GPU to run them. Shapes never change
within a run, so each is recorded once and replayed; the numbers are the recorded kernels' own.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from halation.models.async_image_result import DRY_RUN

log = logging.getLogger(__name__)
NUM_WARM_UPS = 2
"""Calls before the recording: what is compiled or chosen at a first call must be settled by then."""
GraphKey = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class CapturedGraph:
    """A graph with the tensors it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: tuple[Any, ...]


class CudaGraphForward:
    """Calls `forward` until it is warm, then records it, then replays the recording; other inputs are called."""

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
        """Record one call; a forward that cannot be recorded (it reads a number from the GPU) is called from now on."""
        static = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(static, structure)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            # Only this thread's calls are watched: others wait for copies meanwhile.
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                outputs = self.forward(*args, **kwargs)
        except RuntimeError as error:
            # Out of memory too: a recording holds its own, and without it the batch may fit.
            log.info("the forward is not replayed as a CUDA graph: %s", str(error).splitlines()[:1])
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
    """What must be equal for a recording to fit; None where something may change that a recording would not notice."""
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
