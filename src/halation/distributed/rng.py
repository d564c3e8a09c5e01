"""Global state of a rank: random states as JSON, and torch's numerical settings.

Halation uses no global random state; user code may.
"""

from __future__ import annotations

import base64
import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch


def seed_all(seed: int, rank: int) -> None:
    """Seed the global states of a fresh run, which Python and numpy would seed from the clock."""
    words = np.random.SeedSequence((seed, rank)).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.manual_seed(int(words[2]))


def seed_for_image(seed: int) -> None:
    """Seed the global states equally on every rank, for samplers that ignore their generator.

    It does not use torch.manual_seed, which would also seed a GPU that is not in use yet.
    """
    words = np.random.SeedSequence(seed).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.default_generator.manual_seed(int(words[2]))
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(int(words[2]))


@contextlib.contextmanager
def fork_rng() -> Iterator[None]:
    """Restore the states of Python, numpy, torch and every GPU in use at the end."""
    python, arrays, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
        torch.set_rng_state(cpu)
        if gpus:
            torch.cuda.set_rng_state_all(gpus)


def capture(device: torch.device) -> dict[str, Any]:
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [kind, _encode(np.asarray(keys).tobytes()), int(position), int(has_gauss), float(cached)],
        "torch": _encode(torch.get_rng_state().numpy().tobytes()),
    }
    if device.type == "cuda":
        state["cuda"] = _encode(torch.cuda.get_rng_state(device).numpy().tobytes())
    return state


def restore(state: dict[str, Any], device: torch.device) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.frombuffer(_decode(keys), np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_decode_tensor(state["torch"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_decode_tensor(state["cuda"]), device)


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _decode(text: str) -> bytes:
    return base64.b64decode(text)


def _decode_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(_decode(text)), dtype=torch.uint8)


# Torch's numerical settings

_UNREADABLE = object()


class _TorchSetting(NamedTuple):
    """A torch setting that is global to the process or this thread."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


def _attribute(owner: Any, name: str) -> _TorchSetting:
    return _TorchSetting(lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def _autocast_settings(kind: str) -> tuple[_TorchSetting, _TorchSetting]:
    return (
        _TorchSetting(lambda: torch.is_autocast_enabled(kind), lambda on: torch.set_autocast_enabled(kind, on)),
        _TorchSetting(lambda: torch.get_autocast_dtype(kind), lambda dtype: torch.set_autocast_dtype(kind, dtype)),
    )


def _autocast_depth() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _set_autocast_depth(depth: int) -> None:
    """Exit autocast regions that were left open: torch would keep stale casts of weights."""
    while _autocast_depth() < depth:
        torch.autocast_increment_nesting()
    while _autocast_depth() > depth:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def _set_autocast_cache(enabled: bool) -> None:
    torch.clear_autocast_cache()  # with the other setting it may hold casts made without gradients
    torch.set_autocast_cache_enabled(enabled)


def _set_current_gpu(state: tuple[int, Any]) -> None:
    device, stream = state
    torch.cuda.set_device(device)
    if stream is not None:
        torch.cuda.set_stream(stream)


def _torch_settings() -> list[_TorchSetting]:
    """Return settings that affect a training step besides weights, modes and random states."""
    backends: Any = torch.backends
    cudnn, mkldnn = backends.cudnn, backends.mkldnn
    precisions = (backends, cudnn, backends.cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn)
    return [
        _TorchSetting(
            lambda: getattr(getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None), "device", None),
            torch.set_default_device,
        ),
        _TorchSetting(torch.get_default_dtype, torch.set_default_dtype),
        _TorchSetting(torch.get_num_threads, torch.set_num_threads),
        _TorchSetting(lambda: sys.float_info.min / 2 == 0.0, torch.set_flush_denormal),
        *_autocast_settings("cpu"),
        *_autocast_settings("cuda"),
        _TorchSetting(torch.is_autocast_cache_enabled, _set_autocast_cache),
        _TorchSetting(_autocast_depth, _set_autocast_depth),
        _TorchSetting(
            lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            lambda state: torch.set_anomaly_enabled(*state),
        ),
        _TorchSetting(
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            lambda state: torch.use_deterministic_algorithms(state[0], warn_only=state[1]),
        ),
        _attribute(torch.utils.deterministic, "fill_uninitialized_memory"),
        *(_attribute(cudnn, name) for name in ("enabled", "benchmark", "deterministic", "allow_tf32")),
        *(_attribute(mkldnn, name) for name in ("enabled", "deterministic")),
        _TorchSetting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        *(
            _attribute(backends.cuda.matmul, f"allow_{name}")
            for name in (
                "tf32",
                "fp16_reduced_precision_reduction",
                "bf16_reduced_precision_reduction",
                "fp16_accumulation",
            )
        ),
        # After the older names of the same settings, because writing those changes these.
        *(_attribute(owner, "fp32_precision") for owner in precisions),
        _TorchSetting(backends.cuda.flash_sdp_enabled, backends.cuda.enable_flash_sdp),
        _TorchSetting(backends.cuda.mem_efficient_sdp_enabled, backends.cuda.enable_mem_efficient_sdp),
        _TorchSetting(backends.cuda.math_sdp_enabled, backends.cuda.enable_math_sdp),
        _TorchSetting(backends.cuda.cudnn_sdp_enabled, backends.cuda.enable_cudnn_sdp),
        _TorchSetting(
            backends.cuda.fp16_bf16_reduction_math_sdp_allowed, backends.cuda.allow_fp16_bf16_reduction_math_sdp
        ),
        _TorchSetting(backends.mha.get_fastpath_enabled, backends.mha.set_fastpath_enabled),
        _TorchSetting(
            lambda: (
                (torch.cuda.current_device(), torch.cuda.current_stream()) if torch.cuda.is_initialized() else (0, None)
            ),
            _set_current_gpu,
        ),
    ]


def _read_setting(setting: _TorchSetting) -> Any:
    """Read a setting; torch raises for an older name if the newer one, also listed, was used."""
    try:
        return setting.read()
    except RuntimeError:
        return _UNREADABLE


@contextlib.contextmanager
def preserve_torch_settings() -> Iterator[None]:
    """Restore torch's settings at the end.

    These are precision, threads, algorithms, autocast, default dtype, devices and gradients.
    """
    before = [(setting, _read_setting(setting)) for setting in _torch_settings()]
    has_gradients = torch.is_grad_enabled()
    try:
        with torch.inference_mode(torch.is_inference_mode_enabled()), torch.set_grad_enabled(has_gradients):
            yield
    finally:
        for _ in range(2):  # older and newer names of one precision: writing one may change the other
            for setting, value in before:
                if value is not _UNREADABLE and _read_setting(setting) != value:
                    setting.write(value)
