"""Any number of threads prepares images with the same bits in order and names broken ones."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from halation.data.decode import BrokenImageError
from halation.errors import HalationError
from halation.evaluation.extractors.resize import ShortestEdgeCrop, SquareResize
from halation.evaluation.image_sources import ImageFiles, ImageSource, StreetImages
from halation.evaluation.preprocess_pool import (
    ExtractorBatch,
    PreparedBatch,
    PreprocessPool,
    SourcePreprocessor,
    TransformFn,
    num_rank_cores,
    prepare_images,
)
from halation.images.png_codec import encode_png
from support.commands import Started, halation, started, until

pytestmark = pytest.mark.ranks

PREPARATIONS: dict[str, TransformFn] = {
    "inception": SquareResize(size=29, rule="clean"),
    "clip": ShortestEdgeCrop(shortest_edge=22, exact=None, crop=(22, 22), resample=3),
}
BROKEN = 5


def loader(index: int) -> Callable[[], tuple[npt.NDArray[np.uint8], bytes]]:
    def load() -> tuple[npt.NDArray[np.uint8], bytes]:
        if index == BROKEN:
            raise BrokenImageError("cut off")
        pixels = np.random.default_rng(index).integers(0, 256, (40 + index, 50, 3), np.uint8)
        return pixels, hashlib.sha256(pixels.tobytes()).digest()

    return load


def prepared(num_threads: int) -> PreparedBatch:
    return prepare_images([(index, loader(index)) for index in range(12)], PREPARATIONS, num_threads)


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


def test_each_row_is_what_its_image_alone_becomes() -> None:
    found = prepared(4)
    for index in (0, 11):
        pixels, digest = loader(index)()
        assert found.digests[index].tobytes() == digest
        for name, preparation in PREPARATIONS.items():
            assert np.array_equal(found.inputs[name][index], preparation(pixels))


def test_images_are_prepared_beside_each_other() -> None:
    """Each waits for the other: one after the other they would wait for ever."""
    meeting = threading.Barrier(2, timeout=10)

    def load() -> tuple[npt.NDArray[np.uint8], bytes]:
        meeting.wait()
        return np.zeros((8, 8, 3), np.uint8), bytes(32)

    assert len(prepare_images([(0, load), (1, load)], PREPARATIONS, num_threads=2).sizes) == 2


def test_a_failure_that_is_no_broken_image_is_not_swallowed() -> None:
    def load() -> tuple[npt.NDArray[np.uint8], bytes]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        prepare_images([(0, loader(0)), (1, load)], PREPARATIONS, num_threads=2)


def test_ranks_of_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    whole = num_rank_cores()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(whole))
    assert num_rank_cores() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(whole + 1))
    assert num_rank_cores() == 1


def images_in(folder: Path, num: int) -> ImageFiles:
    names = tuple(f"{number:02d}.png" for number in range(num))
    data = [encode_png(loader(100 + number)()[0], {}) for number in range(num)]
    for name, content in zip(names, data, strict=True):
        (folder / name).write_bytes(content)
    digests = tuple(hashlib.sha256(content).hexdigest() for content in data)
    return ImageFiles(kind="run", folder=folder, names=names, stamps=((0, 0),) * num, digests=digests)


def test_what_travels_to_a_process_does_not_grow_with_the_source() -> None:
    names = tuple(f"{number:040d}.png" for number in range(5000))
    million = ImageFiles(kind="folder", folder=Path("pictures"), names=names, stamps=((0, 0),) * 5000, captions=names)
    source: ImageSource
    for source in (million, StreetImages(size=32, num=5000)):
        preparer = SourcePreprocessor(source=source, transforms=PREPARATIONS)
        assert len(pickle.dumps(preparer.worker)) < 2000
        assert len(pickle.dumps(preparer.image_refs(range(4000, 4008)))) < 2000


@pytest.mark.parametrize("num_workers", [0, 2])
def test_processes_give_what_the_source_has(tmp_path: Path, num_workers: int) -> None:
    files = images_in(tmp_path, 12)
    (tmp_path / files.names[3]).write_bytes((tmp_path / files.names[4]).read_bytes())
    preparer = SourcePreprocessor(source=files, transforms=PREPARATIONS)
    batches = [ExtractorBatch(range(0, 10), ("inception", "clip")), ExtractorBatch(range(10, 12), ("clip",))]
    with PreprocessPool(preparer, num_workers) as preparations:
        found = list(preparations.iter_batches(batches))
    assert [batch for batch, _ in found] == batches
    assert list(found[0][1].broken) == [3]
    assert "its SHA-256 differs from the ledger" in found[0][1].broken[3]
    for batch, made in found:
        assert made.inputs.keys() == set(batch.labels)
        for row, index in enumerate(batch.indices):
            if index != 3:
                pixels, digest = files.load(index)
                assert made.digests[row].tobytes() == digest
                assert np.array_equal(made.inputs["clip"][row], PREPARATIONS["clip"](pixels))


def refused(image: npt.NDArray[np.uint8]) -> np.ndarray:
    if image.shape[0] == 46:
        raise ValueError("too thin")
    return PREPARATIONS["clip"](image)


def exhausted(image: npt.NDArray[np.uint8]) -> np.ndarray:
    if image.shape[0] == 46:
        raise MemoryError
    return PREPARATIONS["clip"](image)


@pytest.mark.parametrize(
    ("preparation", "why"), [(refused, "50 x 46 pixels .*too thin"), (exhausted, "not enough memory")]
)
def test_a_image_that_cannot_be_prepared_is_a_broken_one(preparation: TransformFn, why: str) -> None:
    found = prepare_images([(index, loader(index)) for index in (4, 6, 7)], {"one": preparation}, num_threads=1)
    assert list(found.broken) == [6]
    assert re.search(why, found.broken[6])
    assert found.inputs["one"].shape == (3, 22, 22, 3)
    assert not found.inputs["one"][1].any()
    assert not found.digests[1].any()


def die(image: npt.NDArray[np.uint8]) -> np.ndarray:
    """What a decoder's crash or the system does to a process."""
    if image.shape[0] == 40 + 103:
        os.kill(os.getpid(), signal.SIGKILL)
    return image[:8, :8]


def test_a_decode_process_that_dies_names_the_images_it_had_in_hand(tmp_path: Path) -> None:
    files = images_in(tmp_path, 12)
    began = time.monotonic()
    with pytest.raises(HalationError) as error:  # noqa: SIM117
        with PreprocessPool(SourcePreprocessor(source=files, transforms={"one": die}), 2) as preparations:
            list(preparations.iter_batches([ExtractorBatch(range(12), ("one",))]))
    assert time.monotonic() - began < 20
    said = str(error.value)
    assert "killed by signal 9" in said
    assert "--decode_workers" in said
    assert [name for name in files.names if str(tmp_path / name) in said] == list(files.names[:8])
    assert error.value.exit_code == 1


def decoders(command: Started) -> list[int]:
    return [pid for pid, words in command.alive().items() if "spawn_main" in words]


@pytest.mark.parametrize("ending", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_the_command_ends_in_seconds_after_a_decode_process_dies_or_a_signal(
    tmp_path: Path, ending: signal.Signals
) -> None:
    """The command ends within seconds if a decode process dies or a signal arrives."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    for number in range(300):
        (folder / f"{number:03d}.png").write_bytes(encode_png(pixels, {}))
    words = ["evaluate", "--generated", str(folder), "--reference", str(folder), "--metrics", "fd", "--allow_few"]
    words += ["--extractor", "streets", "--decode_workers", "2", "--batch_size", "4", "--nproc", "1"]
    words += ["--progress", "none", "--cache_dir", str(tmp_path / "cache")]
    with started(halation(words), tmp_path / "log") as command:
        until(lambda: len(decoders(command)) == 2, command=command)
        victim = decoders(command)[0]
        os.kill(victim, signal.SIGSTOP)  # whatever it has in hand, the command comes to wait for it
        time.sleep(1)
        os.kill(victim if ending == signal.SIGKILL else command.process.pid, ending)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGCONT)
        assert command.process.wait(20) == (1 if ending == signal.SIGKILL else 128 + signal.SIGTERM), command.said()
        command.until_gone(5)
        if ending == signal.SIGKILL:
            assert "killed by signal 9" in command.said()
            assert str(folder / "0") in command.said()
            assert "Traceback" not in command.said()
