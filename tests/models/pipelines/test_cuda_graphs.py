"""CUDA graphs, tested without CUDA: which forwards are recorded and which are called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from halation.generation.workers.image_runner import force_eager
from halation.models.pipelines.pipeline_hooks import NUM_WARM_UPS, CudaGraphForward, graph_key


class Forward:
    """Doubles its input, and keeps what it was called with."""

    __name__ = "forward"

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor]:
        self.calls.append((args, kwargs))
        return (2 * args[0],)


def key(*args: Any, **kwargs: Any) -> Any:
    return graph_key(*pytree.tree_flatten((args, kwargs)))


def test_a_forward_on_cpu_tensors_is_simply_called() -> None:
    forward = Forward()
    replayed = CudaGraphForward(forward)
    sample = torch.ones(2)
    for number in range(2 * NUM_WARM_UPS + 2):
        (result,) = replayed(sample * number, return_dict=False)
        assert result.tolist() == [2.0 * number] * 2
    assert len(forward.calls) == 2 * NUM_WARM_UPS + 2
    assert forward.calls[0][1] == {"return_dict": False}
    assert not replayed.num_calls
    assert not replayed.graphs


def test_numbers_texts_and_nothing_make_a_key_and_another_value_makes_another() -> None:
    values = (1, 1.0, True, "a", None, torch.float32, 2)
    keys = [key(value) for value in values]
    assert None not in keys
    assert len(set(keys)) == len(values)
    assert key(1, scale=2) == key(1, scale=2) != key(1, other=2)
    assert key([1, 2]) != key((1, 2))
    assert key({"scale": 1}) != key({"scale": 2})


@pytest.mark.parametrize("value", [torch.ones(1), torch.ones(1, device="meta"), object(), {1, 2}, b"bytes", 1 + 2j])
def test_what_a_recording_would_not_notice_makes_no_key(value: Any) -> None:
    assert key(value) is None
    assert key(1, options={"inner": [value]}) is None


def test_a_call_that_cannot_be_hashed_makes_no_key() -> None:
    class Unhashable(float):
        __hash__ = None  # type: ignore[assignment]

    assert key(Unhashable(1.0)) is None


def test_a_rehearsal_does_not_count_as_warm_up() -> None:
    """Arguments that hold no tensor have a key on every machine, so warming up can be seen without a GPU."""
    replayed = CudaGraphForward(lambda value: (value,))
    with force_eager():
        for _ in range(NUM_WARM_UPS + 3):
            assert replayed(7) == (7,)
    assert not replayed.num_calls
    for _ in range(NUM_WARM_UPS):
        assert replayed(7) == (7,)
    assert list(replayed.num_calls.values()) == [NUM_WARM_UPS]
    assert not replayed.graphs


def test_a_forward_that_was_given_up_is_called_from_then_on() -> None:
    replayed = CudaGraphForward(lambda value: (value,))
    replayed.is_disabled = True
    for _ in range(NUM_WARM_UPS + 3):
        assert replayed(7) == (7,)
    assert not replayed.num_calls


def test_a_forward_keeps_its_name_and_its_errors() -> None:
    def forward(value: int) -> tuple[int]:
        raise ValueError(f"no {value}")

    replayed = CudaGraphForward(forward)
    assert replayed.__name__ == "forward"  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="no 7"):
        replayed(7)
