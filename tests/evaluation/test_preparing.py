"""Pictures are made ready by any number of threads with the same bits, in their order, and broken ones are named."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from halation.data.decode import BrokenPictureError
from halation.evaluation.preparing import Prepared, own_cores, prepare
from halation.models.extractor_preparation import ShortestEdgeCrop, SquareResize

PREPARATIONS = {
    "inception": SquareResize(size=29, rule="clean"),
    "clip": ShortestEdgeCrop(shortest_edge=22, exact=None, crop=(22, 22), resample=3),
}
BROKEN = 5


def loader(index: int) -> Callable[[], tuple[npt.NDArray[np.uint8], bytes]]:
    def load() -> tuple[npt.NDArray[np.uint8], bytes]:
        if index == BROKEN:
            raise BrokenPictureError("cut off")
        pixels = np.random.default_rng(index).integers(0, 256, (40 + index, 50, 3), np.uint8)
        return pixels, hashlib.sha256(pixels.tobytes()).digest()

    return load


def prepared(num_threads: int) -> Prepared:
    return prepare([(index, loader(index)) for index in range(12)], PREPARATIONS, num_threads)


@pytest.mark.parametrize("num_threads", [0, 3, 64])
def test_threads_change_no_bit_and_no_order(num_threads: int) -> None:
    alone, together = prepared(1), prepared(num_threads)
    assert together.inputs.keys() == PREPARATIONS.keys()
    for name in PREPARATIONS:
        assert together.inputs[name].dtype == alone.inputs[name].dtype
        assert together.inputs[name].tobytes() == alone.inputs[name].tobytes()
    assert together.digests.tobytes() == alone.digests.tobytes()
    assert together.sizes.tolist() == [[8, 8] if index == BROKEN else [40 + index, 50] for index in range(12)]
    assert together.broken == alone.broken == {BROKEN: "cut off"}


def test_each_row_is_what_its_picture_alone_becomes() -> None:
    found = prepared(4)
    for index in (0, 11):
        pixels, digest = loader(index)()
        assert found.digests[index].tobytes() == digest
        for name, preparation in PREPARATIONS.items():
            assert np.array_equal(found.inputs[name][index], preparation(pixels))


def test_pictures_are_prepared_beside_each_other() -> None:
    """Each waits for the other: one after the other they would wait for ever."""
    meeting = threading.Barrier(2, timeout=10)

    def load() -> tuple[npt.NDArray[np.uint8], bytes]:
        meeting.wait()
        return np.zeros((8, 8, 3), np.uint8), bytes(32)

    assert len(prepare([(0, load), (1, load)], PREPARATIONS, num_threads=2).sizes) == 2


def test_a_failure_that_is_no_broken_picture_is_not_swallowed() -> None:
    def load() -> tuple[npt.NDArray[np.uint8], bytes]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        prepare([(0, loader(0)), (1, load)], PREPARATIONS, num_threads=2)


def test_ranks_of_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    whole = own_cores()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(whole))
    assert own_cores() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(whole + 1))
    assert own_cores() == 1
