"""Laws of the cache of text embeddings."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from halation.data import text_cache
from halation.errors import InputError

FINGERPRINT = "encoders, version 1"
CAPTIONS = [f"scene {number} \U0001f697 거리" for number in range(60)] + ["", 'a, b\n"c"']


class Encoder:
    """A row says which text it is and how many were encoded at once."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def __call__(self, wanted: Sequence[str]) -> dict[str, torch.Tensor]:
        self.batches.append(list(wanted))
        lengths = torch.tensor([len(text) for text in wanted])
        marks = torch.tensor([float(sum(text.encode()) % 251) for text in wanted])
        return {
            "embeds": (marks[:, None, None] + torch.arange(6).reshape(3, 2)).bfloat16(),
            "mask": torch.arange(4)[None] < lengths[:, None] % 5,
            "length": lengths,
        }

    @property
    def num_texts(self) -> int:
        return len({text for batch in self.batches for text in batch})


def expected(wanted: Sequence[str]) -> dict[str, torch.Tensor]:
    return Encoder()(wanted)


def check(cache: text_cache.CachedTexts, wanted: Sequence[str]) -> None:
    found = cache.read(wanted)
    assert found.keys() == expected(wanted).keys()
    for name, tensor in expected(wanted).items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def test_what_was_encoded_is_read_back_in_any_order(tmp_path: Path) -> None:
    text_cache.build(CAPTIONS, tmp_path, Encoder(), fingerprint=FINGERPRINT, shard_size=16)
    cache = text_cache.open_cache(tmp_path, FINGERPRINT)
    assert len(cache) == len(CAPTIONS)
    check(cache, CAPTIONS)
    check(cache, [CAPTIONS[50], CAPTIONS[0], CAPTIONS[50], ""])
    assert {name: tuple(tensor.shape) for name, tensor in cache.read([]).items()} == {
        "embeds": (0, 3, 2),
        "mask": (0, 4),
        "length": (0,),
    }
    assert "" in cache
    assert "never said" not in cache
    with pytest.raises(KeyError, match="never said"):
        cache.read(["never said"])


def test_a_text_is_encoded_once_in_batches_of_one_size(tmp_path: Path) -> None:
    encode = Encoder()
    text_cache.build(CAPTIONS + CAPTIONS[::-1], tmp_path, encode, fingerprint=FINGERPRINT, encode_size=7)
    assert {len(batch) for batch in encode.batches} == {7}
    assert len(encode.batches) == -(-len(CAPTIONS) // 7)
    assert encode.num_texts == len(CAPTIONS)


@settings(max_examples=5, deadline=None)
@given(
    world_size=st.integers(1, 4),
    first=st.integers(0, 40),
    shard_size=st.integers(1, 30),
    encode_size=st.integers(1, 9),
)
def test_ranks_of_any_number_leave_no_gap_and_only_what_is_new_is_encoded(
    tmp_path_factory: pytest.TempPathFactory, world_size: int, first: int, shard_size: int, encode_size: int
) -> None:
    folder = tmp_path_factory.mktemp("texts")
    text_cache.build(
        CAPTIONS[:first], folder, Encoder(), fingerprint=FINGERPRINT, rank_and_size=(0, 1), shard_size=shard_size
    )
    seen: list[str] = []
    # One after the other: each rank looks when the ones before it have written already.
    for rank in range(world_size):
        encode = Encoder()
        text_cache.build(
            CAPTIONS,
            folder,
            encode,
            fingerprint=FINGERPRINT,
            rank_and_size=(rank, world_size),
            shard_size=shard_size,
            encode_size=encode_size,
        )
        seen += {text for batch in encode.batches for text in batch}
    assert sorted(seen) == sorted(CAPTIONS[first:])
    assert text_cache.count_missing(CAPTIONS, folder, FINGERPRINT) == 0
    check(text_cache.open_cache(folder, FINGERPRINT), CAPTIONS)


def test_missing_counts_different_texts_and_needs_no_folder(tmp_path: Path) -> None:
    assert text_cache.count_missing(["a", "b", "a"], tmp_path / "none", FINGERPRINT) == 2
    assert not (tmp_path / "none").exists()
    text_cache.build(["a", "b"], tmp_path, Encoder(), fingerprint=FINGERPRINT)
    assert text_cache.count_missing(["a", "c", "c", "b"], tmp_path, FINGERPRINT) == 1


def test_any_reader_of_safetensors_can_read_a_shard(tmp_path: Path) -> None:
    text_cache.build(["a", "bb"], tmp_path, Encoder(), fingerprint=FINGERPRINT)
    (path,) = tmp_path.glob("*.safetensors")
    tensors = load_file(path)
    assert torch.equal(tensors["embeds"], expected(["a", "bb"])["embeds"])


@pytest.mark.parametrize("fingerprint", ["other", {"encoders": FINGERPRINT, "length": 77}])
def test_embeddings_of_other_encoders_are_refused(tmp_path: Path, fingerprint: str | dict[str, object]) -> None:
    text_cache.build(["a"], tmp_path, Encoder(), fingerprint=FINGERPRINT)
    for call in (
        lambda: text_cache.build(["b"], tmp_path, Encoder(), fingerprint=fingerprint),  # type: ignore[arg-type]
        lambda: text_cache.count_missing(["a"], tmp_path, fingerprint),  # type: ignore[arg-type]
        lambda: text_cache.open_cache(tmp_path, fingerprint),  # type: ignore[arg-type]
    ):
        with pytest.raises(InputError, match="was made for something else") as caught:
            call()
        assert "delete the folder" in caught.value.action


def test_a_folder_without_embeddings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no cache in"):
        text_cache.open_cache(tmp_path, FINGERPRINT)


@pytest.mark.parametrize("damage", ["missing", "cut", "bit", "note cut"])
def test_a_damaged_shard_is_found_and_only_its_texts_are_encoded_again(tmp_path: Path, damage: str) -> None:
    text_cache.build(CAPTIONS, tmp_path, Encoder(), fingerprint=FINGERPRINT, shard_size=16)
    before = shards(tmp_path)
    path = tmp_path / sorted(before)[1]
    if damage == "missing":
        path.unlink()
    elif damage == "bit":
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
    else:
        hurt = path if damage == "cut" else path.with_suffix(".json")
        hurt.write_bytes(hurt.read_bytes()[:-9])
    assert text_cache.count_missing(CAPTIONS, tmp_path, FINGERPRINT) > 0, "whoever asks what is to be done is told"
    with pytest.raises(InputError, match=rf"1 of {len(before)} shards .* missing or damaged: {path.name}"):
        text_cache.open_cache(tmp_path, FINGERPRINT)
    encode = Encoder()
    # Another number of ranks cuts the texts in another way, so the damaged name is not written again.
    for rank in range(2):
        text_cache.build(CAPTIONS, tmp_path, encode, fingerprint=FINGERPRINT, rank_and_size=(rank, 2), shard_size=16)
    assert encode.num_texts <= 16
    check(text_cache.open_cache(tmp_path, FINGERPRINT), CAPTIONS)


def test_the_same_call_after_a_damage_writes_the_same_shard(tmp_path: Path) -> None:
    text_cache.build(CAPTIONS, tmp_path, Encoder(), fingerprint=FINGERPRINT, shard_size=16)
    before = shards(tmp_path)
    (tmp_path / sorted(before)[0]).write_bytes(b"")
    text_cache.build(CAPTIONS, tmp_path, Encoder(), fingerprint=FINGERPRINT, shard_size=16)
    assert shards(tmp_path) == before


def test_progress_counts_texts_that_were_there_already(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    text_cache.build(["a", "b", "c"], tmp_path, Encoder(), fingerprint=FINGERPRINT)
    text_cache.build(
        ["a", "b", "c", "d", "e", "f"],
        tmp_path,
        Encoder(),
        fingerprint=FINGERPRINT,
        encode_size=2,
        on_progress=lambda *now: calls.append(now),
    )
    assert calls == [(3, 6), (5, 6), (6, 6)]


def test_texts_that_do_not_fit_on_the_disk_are_refused_before_the_first_is_written(tmp_path: Path) -> None:
    def encode(wanted: Sequence[str]) -> dict[str, torch.Tensor]:
        return {"embeds": torch.zeros(1).expand(len(wanted), 2**40)}  # 4 TiB a text, in four bytes of memory

    with pytest.raises(
        InputError, match=r"the embeddings of 62 texts take 253952\.0 GiB, and .* GiB are free"
    ) as caught:
        text_cache.build(CAPTIONS, tmp_path, encode, fingerprint=FINGERPRINT)
    assert "--cache_dir" in caught.value.action
    assert not shards(tmp_path)


def test_a_large_cache_is_announced_with_its_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def encode(wanted: Sequence[str]) -> dict[str, torch.Tensor]:
        return {"embeds": torch.zeros(len(wanted), 2**16, dtype=torch.bfloat16)}

    class Enough(Exception):
        pass

    def stop(done: int, _total: int) -> None:
        if done:
            raise Enough

    many = [str(number) for number in range(10_000)]
    with caplog.at_level(logging.INFO), pytest.raises(Enough):
        text_cache.build(many, tmp_path, encode, fingerprint=FINGERPRINT, on_progress=stop)
    assert "the embeddings of 10000 texts take 1.2 GiB in" in caplog.text


def test_an_encoder_that_gives_something_else_is_our_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected tensors with 8 rows"):
        text_cache.build(["a"], tmp_path, lambda wanted: {"embeds": torch.zeros(3, 2)}, fingerprint=FINGERPRINT)
    with pytest.raises(ValueError, match="returned nothing"):
        text_cache.build(["a"], tmp_path, lambda wanted: {}, fingerprint=FINGERPRINT)
    with pytest.raises(ValueError, match="expected at least 1"):
        text_cache.build(["a"], tmp_path, Encoder(), fingerprint=FINGERPRINT, encode_size=0)


def test_shards_of_different_shapes_are_refused(tmp_path: Path) -> None:
    text_cache.build(["a"], tmp_path, Encoder(), fingerprint=FINGERPRINT)
    text_cache.build(["b"], tmp_path, lambda wanted: {"embeds": torch.zeros(8, 9)}, fingerprint=FINGERPRINT)
    with pytest.raises(InputError, match="holds other tensors than the other shards"):
        text_cache.open_cache(tmp_path, FINGERPRINT).read(["a", "b"])


@pytest.mark.slow
def test_a_million_captions_are_listed_in_seconds(tmp_path: Path) -> None:
    many = [f"a street scene with number {number} and a car" for number in range(1_000_000)]
    text_cache.build(many[:512], tmp_path, Encoder(), fingerprint=FINGERPRINT)
    began = time.perf_counter()
    assert text_cache.count_missing(many, tmp_path, FINGERPRINT) == 1_000_000 - 512
    assert time.perf_counter() - began < 12


@pytest.mark.faults
def test_a_build_that_dies_is_finished_by_the_same_call(tmp_path: Path) -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_text_cache import CAPTIONS, Encoder, FINGERPRINT, text_cache\n"
        f"text_cache.build(CAPTIONS, {str(tmp_path)!r}, Encoder(), fingerprint=FINGERPRINT, shard_size=16)\n"
    )
    environment = {**os.environ, "HALATION_FAULT": "cache.rename:4:kill", "HALATION_FAULT_LOG": str(tmp_path / "fired")}
    died = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=False)
    assert died.returncode != 0
    # The shard whose note was never written is not there.
    assert text_cache.count_missing(CAPTIONS, tmp_path, FINGERPRINT) == len(CAPTIONS) - 16
    encode = Encoder()
    text_cache.build(CAPTIONS, tmp_path, encode, fingerprint=FINGERPRINT, shard_size=16)
    assert encode.num_texts == len(CAPTIONS) - 16
    check(text_cache.open_cache(tmp_path, FINGERPRINT), CAPTIONS)
    assert not list(tmp_path.glob(".*.tmp"))
