"""Laws of the cache of pixels and latents."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from halation.data import latent_cache
from halation.data.dataset_protocol import JSON, CaptionedImage
from halation.data.prefetch import BatchPrefetcher, BucketOrder, ShuffledOrder
from halation.errors import InputError

FINGERPRINT: dict[str, JSON] = {"source": "drawn", "encoder": "thirds", "size": [8, 8]}


class Drawn:
    """Images from a formula, with captions in several scripts."""

    name = "drawn"
    fingerprint: dict[str, JSON] = {"kind": "drawn"}
    num_train = 53
    num_validation = 7
    height = width = 8
    class_names = ("even", "odd")

    def train(self, index: int) -> CaptionedImage:
        pixels = np.random.Generator(np.random.Philox(key=index)).integers(0, 256, (8, 8, 3), np.uint8)
        return CaptionedImage(
            pixels=pixels, caption=f"scene {index} \U0001f697 거리", label=index % 2, original_size=(index, 30)
        )

    def validation(self, index: int) -> CaptionedImage:
        return self.train(1000 + index)

    def captions(self) -> Iterable[str]:
        return []

    all_captions = captions


class Encoder:
    """Means over the batch would betray a batch of another size, so the latent carries its size."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, batch: list[np.ndarray]) -> np.ndarray:
        self.sizes.append(len(batch))
        pixels = np.stack(batch).transpose(0, 3, 1, 2)
        return (pixels[:, :, ::4, ::4] / 256 + len(batch)).astype(np.float16)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_cache_of_pixels_holds_the_images(tmp_path: Path) -> None:
    latent_cache.build(Drawn(), tmp_path, fingerprint=FINGERPRINT, shard_size=16)
    cache = latent_cache.open_cache(tmp_path, FINGERPRINT)
    assert (cache.num_train, cache.num_validation, cache.class_names) == (53, 7, ("even", "odd"))
    assert not cache.holds_latents
    for part, num in (("train", 53), ("validation", 7)):
        for index in range(num):
            kept, drawn = getattr(cache, part)(index), getattr(Drawn(), part)(index)
            assert kept.pixels.tobytes() == drawn.pixels.tobytes()
            assert (kept.caption, kept.label, kept.original_size) == (drawn.caption, drawn.label, drawn.original_size)
    assert list(cache.captions()) == [Drawn().train(index).caption for index in range(53)]
    assert list(cache.all_captions())[53:] == [Drawn().validation(index).caption for index in range(7)]
    assert cache.bucket_of is None


def test_pixels_are_views_of_the_file_and_cannot_be_written(tmp_path: Path) -> None:
    latent_cache.build(Drawn(), tmp_path, fingerprint=FINGERPRINT)
    pixels = latent_cache.open_cache(tmp_path, FINGERPRINT).train(3).pixels
    assert not pixels.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        pixels[0] = 0


def test_any_reader_of_safetensors_can_read_a_shard(tmp_path: Path) -> None:
    latent_cache.build(Drawn(), tmp_path, Encoder(), fingerprint=FINGERPRINT, shard_size=16)
    tensor = load_file(tmp_path / "train-00002.safetensors")["x"]
    cache = latent_cache.open_cache(tmp_path, FINGERPRINT)
    assert tensor.shape == (16, 3, 2, 2)
    assert tensor.dtype == np.float16
    assert tensor[5].tobytes() == cache.train(37).pixels.tobytes()


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_any_number_of_ranks_writes_the_same_bytes(tmp_path: Path, world_size: int) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    latent_cache.build(Drawn(), alone, Encoder(), fingerprint=FINGERPRINT, shard_size=10, encode_size=4)
    for rank in reversed(range(world_size)):
        encode = Encoder()
        latent_cache.build(
            Drawn(),
            together,
            encode,
            fingerprint=FINGERPRINT,
            rank_and_size=(rank, world_size),
            shard_size=10,
            encode_size=4,
        )
        assert set(encode.sizes) == {4}
    assert files(alone) == files(together)


def test_processes_write_the_same_bytes(tmp_path: Path) -> None:
    latent_cache.build(Drawn(), tmp_path / "here", fingerprint=FINGERPRINT, shard_size=40)
    latent_cache.build(Drawn(), tmp_path / "there", fingerprint=FINGERPRINT, shard_size=40, num_workers=2)
    assert files(tmp_path / "here") == files(tmp_path / "there")


def test_reading_many_equals_reading_each(tmp_path: Path) -> None:
    latent_cache.build(Drawn(), tmp_path, Encoder(), fingerprint=FINGERPRINT, shard_size=10)
    cache = latent_cache.open_cache(tmp_path, FINGERPRINT)
    assert cache.holds_latents
    wanted = [52, 0, 10, 9, 0, 31]
    stack = cache.read(wanted)
    assert stack.pixels.shape == (6, 3, 2, 2)
    for row, index in enumerate(wanted):
        assert stack.pixels[row].tobytes() == cache.train(index).pixels.tobytes()
        assert (stack.captions[row], stack.labels[row]) == (cache.train(index).caption, cache.train(index).label)
    assert stack.originals.tolist() == [[index, 30] for index in wanted]
    assert cache.read([6], split="heldout").captions == [cache.validation(6).caption]
    assert cache.read([]).pixels.shape == (0, 3, 2, 2)
    for outside in (-1, 53):
        with pytest.raises(IndexError, match="53 images"):
            cache.read([outside])
        with pytest.raises(IndexError, match="53 images"):
            cache.train(outside)


def test_the_loader_reads_a_cache_like_its_source(tmp_path: Path) -> None:
    latent_cache.build(Drawn(), tmp_path, fingerprint=FINGERPRINT, shard_size=10)
    steps = [(step, range(step * 9, step * 9 + 9)) for step in range(8)]
    with BatchPrefetcher(Drawn(), ShuffledOrder(1, 53), steps) as batches:
        drawn = list(batches)
    with BatchPrefetcher(latent_cache.open_cache(tmp_path, FINGERPRINT), ShuffledOrder(1, 53), steps) as batches:
        cached = list(batches)
    assert [batch["pixels"].tobytes() for batch in drawn] == [batch["pixels"].tobytes() for batch in cached]
    assert [batch["captions"] for batch in drawn] == [batch["captions"] for batch in cached]


def test_a_stale_cache_is_refused_with_the_difference(tmp_path: Path) -> None:
    latent_cache.build(Drawn(), tmp_path, fingerprint=FINGERPRINT)
    wanted: dict[str, JSON] = {**FINGERPRINT, "encoder": "halves", "crop": "centre"}
    with pytest.raises(InputError, match="was made for something else") as caught:
        latent_cache.open_cache(tmp_path, wanted)
    assert "encoder: 'thirds' in the cache, 'halves' wanted" in caught.value.found
    assert "crop: None in the cache, 'centre' wanted" in caught.value.found
    assert "size" not in caught.value.found
    with pytest.raises(InputError, match="was made for something else"):
        latent_cache.build(Drawn(), tmp_path, fingerprint=wanted)
    with pytest.raises(InputError, match="shard_size: 32 in the cache, 10 wanted"):
        latent_cache.build(Drawn(), tmp_path, fingerprint=FINGERPRINT, shard_size=10)


def test_only_what_differs_inside_a_fingerprint_is_told_and_hashes_in_short(tmp_path: Path) -> None:
    encoder: dict[str, JSON] = {"height": 64, "width": 64, "sha256": "ab" * 32}
    latent_cache.build(Drawn(), tmp_path, fingerprint={"encoder": encoder})
    with pytest.raises(InputError) as caught:
        latent_cache.open_cache(tmp_path, {"encoder": {**encoder, "height": 128, "sha256": "cd" * 32}})
    first, *lines = caught.value.found.split("\n    ")
    assert first.endswith("was made for something else:")
    assert lines == [
        "encoder.height: 64 in the cache, 128 wanted",
        "encoder.sha256: 'abababababab...' in the cache, 'cdcdcdcdcdcd...' wanted",
    ]


@pytest.mark.parametrize(
    ("num", "encode_size", "size"),
    [(50, 8, 8), (512, 8, 8), (512, 32, 32), (10_000, 8, 160), (65_536, 32, 1024), (10**7, 2, 1024), (0, 8, 8)],
)
def test_few_images_make_shards_for_many_ranks_and_many_keep_large_ones(num: int, encode_size: int, size: int) -> None:
    assert latent_cache.default_shard_size(num, encode_size) == size


def test_three_ranks_share_few_images_and_write_what_one_writes(tmp_path: Path) -> None:
    encoders = [Encoder() for _ in range(3)]
    for rank, encode in enumerate(encoders):
        latent_cache.build(
            Drawn(), tmp_path / "three", encode, fingerprint=FINGERPRINT, rank_and_size=(rank, 3), encode_size=8
        )
    latent_cache.build(Drawn(), tmp_path / "one", Encoder(), fingerprint=FINGERPRINT, encode_size=8)
    assert files(tmp_path / "three") == files(tmp_path / "one")
    assert [len(encode.sizes) for encode in encoders] == [3, 3, 2]


def test_a_cache_that_was_begun_with_other_shards_is_gone_on_with(tmp_path: Path) -> None:
    latent_cache.build(Drawn(), tmp_path, fingerprint=FINGERPRINT, shard_size=1024)
    before = files(tmp_path)
    (tmp_path / "train-00000.json").unlink()
    latent_cache.build(Drawn(), tmp_path, fingerprint=FINGERPRINT, rank_and_size=(0, 2))
    assert files(tmp_path) == before


def test_a_folder_without_a_cache_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no cache in"):
        latent_cache.open_cache(tmp_path, FINGERPRINT)
    (tmp_path / "cache.json").write_text('{"format"')
    with pytest.raises(InputError, match="is damaged"):
        latent_cache.open_cache(tmp_path, FINGERPRINT)
    (tmp_path / "cache.json").write_text('{"format": 1}')  # that of releases before there were original sizes
    for call in (
        lambda: latent_cache.open_cache(tmp_path, FINGERPRINT),
        lambda: latent_cache.build(Drawn(), tmp_path, fingerprint=FINGERPRINT),
    ):
        with pytest.raises(InputError, match="another format") as caught:
            call()
        assert "delete the folder" in caught.value.action


@pytest.mark.parametrize("damage", ["missing", "cut", "empty", "bit", "note missing", "caption changed", "note cut"])
def test_a_damaged_shard_is_found_and_only_it_is_made_again(tmp_path: Path, damage: str) -> None:
    latent_cache.build(Drawn(), tmp_path, Encoder(), fingerprint=FINGERPRINT, shard_size=10, encode_size=5)
    before = files(tmp_path)
    shard, note = tmp_path / "train-00001.safetensors", tmp_path / "train-00001.json"
    _damage(damage, shard, note)
    with pytest.raises(InputError, match=r"missing or damaged: train-00001\.safetensors"):
        latent_cache.open_cache(tmp_path, FINGERPRINT)
    encode = Encoder()
    latent_cache.build(Drawn(), tmp_path, encode, fingerprint=FINGERPRINT, shard_size=10, encode_size=5)
    assert len(encode.sizes) == 2
    assert files(tmp_path) == before


def _damage(damage: str, shard: Path, note: Path) -> None:
    if damage in ("missing", "note missing"):
        (shard if damage == "missing" else note).unlink()
    elif damage in ("cut", "note cut"):
        path = shard if damage == "cut" else note
        path.write_bytes(path.read_bytes()[:-12])
    elif damage == "empty":
        shard.write_bytes(b"")
    elif damage == "bit":
        content = bytearray(shard.read_bytes())
        content[-20] ^= 4
        shard.write_bytes(content)
    else:
        note.write_text(note.read_text().replace("scene 12 ", "scene 13 "))


def test_progress_counts_images_that_were_there_already(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    latent_cache.build(
        Drawn(), tmp_path, fingerprint=FINGERPRINT, shard_size=30, on_progress=lambda *now: calls.append(now)
    )
    assert calls == [(0, 60), (30, 60), (53, 60), (60, 60)]
    calls.clear()
    latent_cache.build(
        Drawn(), tmp_path, fingerprint=FINGERPRINT, shard_size=30, on_progress=lambda *now: calls.append(now)
    )
    assert calls == [(60, 60)]


@pytest.mark.faults
@pytest.mark.parametrize("action", ["kill", "ENOSPC"])
@pytest.mark.parametrize("point", ["cache.write", "cache.fsync", "cache.rename"])
def test_a_build_that_dies_at_any_point_is_finished_by_the_same_call(tmp_path: Path, point: str, action: str) -> None:
    latent_cache.build(Drawn(), tmp_path / "whole", fingerprint=FINGERPRINT, shard_size=20)
    folder, log = tmp_path / "cache", tmp_path / "fired"
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_latent_cache import Drawn, FINGERPRINT, latent_cache\n"
        f"latent_cache.build(Drawn(), {str(folder)!r}, fingerprint=FINGERPRINT, shard_size=20)\n"
    )
    environment = {**os.environ, "HALATION_FAULT": f"{point}:4:{action}", "HALATION_FAULT_LOG": str(log)}
    died = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=False)
    assert died.returncode != 0
    assert f"{point}:4:{action}" in log.read_text()
    with pytest.raises(InputError, match="missing or damaged"):
        latent_cache.open_cache(folder, FINGERPRINT)
    latent_cache.build(Drawn(), folder, fingerprint=FINGERPRINT, shard_size=20)
    assert files(folder) == files(tmp_path / "whole")


def test_latents_may_be_exact(tmp_path: Path) -> None:
    def encode(batch: list[np.ndarray]) -> np.ndarray:
        return (np.stack(batch).transpose(0, 3, 1, 2) / 3).astype(np.float32)

    latent_cache.build(Drawn(), tmp_path, encode, fingerprint=FINGERPRINT)
    cache = latent_cache.open_cache(tmp_path, FINGERPRINT)
    assert cache.holds_latents
    assert np.array_equal(cache.read([7]).pixels, encode([Drawn().train(7).pixels]))


def test_an_encoder_that_gives_something_else_is_our_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected float16 or float32"):
        latent_cache.build(Drawn(), tmp_path, lambda batch: np.zeros((len(batch), 4, 2, 2)), fingerprint=FINGERPRINT)


def test_what_the_cache_says_about_itself_is_plain_json(tmp_path: Path) -> None:
    latent_cache.build(Drawn(), tmp_path, fingerprint=FINGERPRINT, shard_size=20)
    assert json.loads((tmp_path / "cache.json").read_text())["fingerprint"] == FINGERPRINT
    note = json.loads((tmp_path / "heldout-00000.json").read_text())
    assert note["captions"][0] == Drawn().validation(0).caption


# -- buckets


class Sorted(Drawn):
    """The train part in three shapes, the validation part in a fourth."""

    shapes = ((4, 16), (8, 8), (16, 4))
    bucket_of = np.random.Generator(np.random.Philox(key=7)).integers(0, 3, 53)

    def train(self, index: int) -> CaptionedImage:
        if index >= 1000:
            return super().train(index)
        height, width = self.shapes[self.bucket_of[index]]
        pixels = np.random.Generator(np.random.Philox(key=index)).integers(0, 256, (height, width, 3), np.uint8)
        return CaptionedImage(
            pixels=pixels, caption=f"scene {index}", label=index % 2, original_size=(10 * height, 10 * width)
        )


@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 0), (3, 0), (1, 1)])
def test_a_cache_of_buckets_holds_the_images_in_shards_of_one_shape(
    tmp_path: Path, world_size: int, num_workers: int
) -> None:
    for rank in range(world_size):
        latent_cache.build(
            Sorted(),
            tmp_path,
            fingerprint=FINGERPRINT,
            rank_and_size=(rank, world_size),
            shard_size=6,
            num_workers=num_workers,
        )
    shapes = [load_file(path)["x"].shape for path in sorted(tmp_path.glob("train-*.safetensors"))]
    assert {shape[1:3] for shape in shapes} == set(Sorted.shapes)
    cache = latent_cache.open_cache(tmp_path, FINGERPRINT)
    assert cache.shapes == Sorted.shapes
    assert cache.bucket_of is not None
    assert cache.bucket_of.tolist() == Sorted.bucket_of.tolist()
    for index in range(53):
        kept, drawn = cache.train(index), Sorted().train(index)
        assert np.array_equal(kept.pixels, drawn.pixels)
        assert (kept.caption, kept.label, kept.original_size) == (drawn.caption, drawn.label, drawn.original_size)
    assert cache.validation(3).pixels.shape == (8, 8, 3)
    assert list(cache.captions()) == [f"scene {index}" for index in range(53)]


def test_batches_of_different_shapes_come_from_the_source_and_from_its_cache(tmp_path: Path) -> None:
    latent_cache.build(Sorted(), tmp_path, fingerprint=FINGERPRINT, shard_size=6)
    order = BucketOrder(3, Sorted.bucket_of, 8)
    # Two ranks' shares of each batch of eight, one after the other.
    steps = [(step, range(step * 4, step * 4 + 4)) for step in range(24)]
    with BatchPrefetcher(latent_cache.open_cache(tmp_path, FINGERPRINT), order, steps) as batches:
        cached = list(batches)
    with BatchPrefetcher(Sorted(), order, steps, memory_bytes=2000) as batches:
        drawn = list(batches)
    for one, other in zip(cached, drawn, strict=True):
        assert np.array_equal(one["pixels"], other["pixels"])
        assert one["captions"] == other["captions"]
        assert one["originals"].tolist() == other["originals"].tolist()
        assert one["originals"].tolist() == [[10 * side for side in one["pixels"].shape[1:3]]] * 4
    assert {batch["pixels"].shape[1:3] for batch in cached} == set(Sorted.shapes)
    for first, second in zip(cached[::2], cached[1::2], strict=True):
        assert first["pixels"].shape == second["pixels"].shape


def test_images_of_two_buckets_at_once_are_our_mistake(tmp_path: Path) -> None:
    latent_cache.build(Sorted(), tmp_path, fingerprint=FINGERPRINT)
    cache = latent_cache.open_cache(tmp_path, FINGERPRINT)
    with pytest.raises(ValueError, match="of 3 buckets"):
        cache.read(range(53))


def test_images_that_were_sorted_in_another_way_make_a_cache_stale(tmp_path: Path) -> None:
    latent_cache.build(Sorted(), tmp_path, fingerprint=FINGERPRINT)
    other = Sorted()
    other.bucket_of = Sorted.bucket_of[::-1].copy()
    with pytest.raises(InputError, match=r"made for something else:\n    buckets\."):
        latent_cache.build(other, tmp_path, fingerprint=FINGERPRINT)
    with pytest.raises(InputError, match=r"made for something else:\n    buckets: "):
        latent_cache.build(Drawn(), tmp_path, fingerprint=FINGERPRINT)
