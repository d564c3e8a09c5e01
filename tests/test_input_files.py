"""User files are opened only if they are regular, within limits and inside their folder."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from safetensors.numpy import save as save_safetensors

from halation import input_files
from halation.cli import main
from halation.csv_jsonl_reader import csv_table
from halation.data.decode import BrokenImageError, decode_with_size
from halation.errors import InputError
from halation.evaluation.metrics.moments import Moments
from halation.evaluation.saved_statistics import FORMAT, _read_file, write_statistics
from halation.input_files import RefusedFileError
from halation.prompt_files import PromptFile, read_prompts


def refusal(path: Path, **limits: Any) -> str:
    with pytest.raises(RefusedFileError) as caught, input_files.open_regular_file(path, **limits):
        pass
    assert caught.value.as_input_error().exit_code == 2
    return str(caught.value.strerror)


def test_only_regular_files_are_opened_and_nothing_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    (tmp_path / "file").write_bytes(b"text")
    assert "a named pipe" in refusal(tmp_path / "pipe")
    assert "a device" in refusal(tmp_path / "link")
    with pytest.raises(IsADirectoryError):
        input_files.open_regular_file(tmp_path)
    with pytest.raises(FileNotFoundError):
        input_files.open_regular_file("a\0b")
    assert input_files.read_bytes(tmp_path / "file", 4) == b"text"


def test_sizes_are_checked_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(2**40)
    assert "it has 1048576 MiB, and the limit is 256 MiB" in refusal(tmp_path / "sparse", max_bytes=256 << 20)
    (tmp_path / "file").write_bytes(b"12345678")
    with pytest.raises(RefusedFileError):
        input_files.read_bytes(tmp_path / "file", 4)
    monkeypatch.setenv("HALATION_INPUT_LIMITS", "2")
    assert input_files.read_bytes(tmp_path / "file", 4) == b"12345678"
    with pytest.raises(RefusedFileError, match="more than 8 bytes"):
        input_files.read_stream(io.BytesIO(bytes(9)), "stream", 4)


def test_links_lead_to_places_inside_the_folder_alone(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for path in (folder / "real", tmp_path / "outside", tmp_path / "folder_beside"):
        path.write_bytes(b"x")
    (folder / "in").symlink_to("real")
    (folder / "out").symlink_to(tmp_path / "outside")
    (folder / "beside").symlink_to(tmp_path / "folder_beside")
    (tmp_path / "typed").symlink_to(folder)
    for top in (folder, tmp_path / "typed"):
        within = input_files.data_folder(top)
        input_files.open_regular_file(top / "in", within=within).close()
        assert "leads out of" in refusal(top / "out", within=within)
        assert "leads out of" in refusal(top / "beside", within=within)
    with input_files.use_limits(None, follow_links=True):
        assert input_files.data_folder(folder) is None
    assert input_files.data_folder(folder) is not None


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"[" * 100_000, "nested deeper"),
        (b"[" * 65 + b"]" * 65, "nested deeper"),
        (b"[" + b"[]," * 5_000_000 + b"0]", "more than 4000000 values"),
        (b'{"a":' * 100_000, "nested deeper"),
    ],
)
def test_json_is_bounded_in_depth_and_number(data: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        input_files.parse_json(data)
    assert input_files.parse_json(b"[" * 64 + b"]" * 64)


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2) + b"{}x",
        struct.pack("<Q", 20) + b"[" * 20,
        struct.pack("<Q", 2) + b"[]",
        b"",
        struct.pack("<Q", 40) + b'{"a":{"shape":3,"data_offsets":[0,0]}}  ',
    ],
)
def test_safetensors_headers_that_are_none_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match="header"):
        input_files.read_safetensors_header(tmp_path / "x.safetensors")


def test_numbers_of_a_config_have_a_type_and_a_range() -> None:
    ranges = {"depth": (1, 512), "scale": (0.0, 1e6)}
    input_files.check_numbers("x", {"depth": 5, "scale": 2, "other": "y"}, ranges)
    for values in ({"depth": "5"}, {"depth": 0}, {"depth": True}, {"depth": 5.0}, {"depth": 10**9}):
        with pytest.raises(InputError, match="x: depth is"):
            input_files.check_numbers("x", values, ranges)
    for scale in (float("nan"), float("inf"), None, [1]):
        with pytest.raises(InputError, match="x: scale is"):
            input_files.check_numbers("x", {"scale": scale}, ranges)


def test_refusals_travel_between_processes() -> None:
    error = pickle.loads(pickle.dumps(RefusedFileError("a", "b", "c")))
    assert (error.filename, error.strerror, error.action) == ("a", "b", "c")


@pytest.mark.parametrize("words", [["--input_limits", "0"], ["--input_limits", "x"], ["--input_limits"]])
def test_a_scale_that_is_none_is_refused_and_leaves_nothing_behind(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *words]) == 2
    assert "--input_limits" in capsys.readouterr().err
    assert input_files.SCALE_VARIABLE not in os.environ


def test_a_message_is_short_however_long_the_value_is() -> None:
    error = InputError("x" * 10**7 + " is too long", "less", "shorten it")
    assert len(str(error)) < 6000
    assert "is too long\n  expected: less" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_wide_headers_are_read_in_linear_time() -> None:
    def seconds(num: int) -> float:
        start = time.process_time()
        header, _ = csv_table("x", ",".join(f"c{index}" for index in range(num)) + "\n")
        assert len(header) == num
        return time.process_time() - start

    assert seconds(16_000) < 1.0


def test_an_image_file_of_another_kind_or_size_is_broken(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(BrokenImageError, match="a named pipe"):
        decode_with_size(tmp_path / "pipe.png", 8, 8)
    with open(tmp_path / "long.png", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(BrokenImageError, match="the limit is 256 MiB"):
        decode_with_size(tmp_path / "long.png", 8, 8)


def test_deep_gray_images_keep_their_pixels(tmp_path: Path) -> None:
    levels = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
    Image.fromarray(levels).save(tmp_path / "deep.png")
    expected = ((levels.astype(np.int64) * 255 + 32767) // 65535).astype(np.uint8)
    pixels = decode_with_size(tmp_path / "deep.png", 256, 256).pixels
    assert (pixels[..., 0] == expected).all()


def npy(shape: tuple[int, ...], num_bytes: int) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f8", "fortran_order": False, "shape": shape})
    return stream.getvalue() + bytes(num_bytes)


@pytest.mark.parametrize("shape", [(10**12,), (-1,), (64, 10**9), (2**62, 4)])
def test_arrays_whose_header_is_a_lie_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with zipfile.ZipFile(tmp_path / "lie.npz", "w") as file:
        file.writestr("mu.npy", npy(shape, 512))
        file.writestr("sigma.npy", npy((64, 64), 64 * 64 * 8))
    with pytest.raises(InputError, match=r"lie\.npz cannot be read"):
        _read_file(tmp_path / "lie.npz")


def test_statistics_of_other_tools_are_read_as_before(tmp_path: Path) -> None:
    mean, covariance = np.arange(8.0), np.eye(8, dtype=np.float32)
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "good.npz", mu=mean, sigma=covariance, images=np.zeros((2, 4, 4, 3), np.uint8))
        found = _read_file(tmp_path / "good.npz").moments
        assert (found.mean == mean).all()
        assert (found.covariance == covariance).all()


@pytest.mark.parametrize("encoding", ["plain", "dictionary", "DELTA_BYTE_ARRAY"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "gzip"])
def test_parquet_of_all_kinds_is_read_as_before(tmp_path: Path, encoding: str, version: str, compression: str) -> None:
    prompts = [f"a street {index % 700} {'long ' * (index % 50)}" for index in range(10_000)]
    table = pa.table({"prompt": prompts, "seed": list(range(10_000)), "other": [[1, 2]] * 10_000})
    encodings = {"prompt": encoding} if encoding.isupper() else None
    pq.write_table(
        table, tmp_path / "p.parquet", compression=compression, row_group_size=3000, data_page_version=version,
        use_dictionary=["prompt"] if encoding == "dictionary" else False, column_encoding=encodings,
    )  # fmt: skip
    rows = read_prompts(tmp_path / "p.parquet")
    assert [row.prompt for row in rows] == prompts
    assert [row.seed for row in rows] == list(range(10_000))


@pytest.mark.slow
def test_a_parquet_value_that_stands_in_every_row_is_unpacked_a_few_rows_at_a_time(tmp_path: Path) -> None:
    text = "x" * 10**6
    for index, options in enumerate(
        ({"use_dictionary": True}, {"use_dictionary": False, "column_encoding": {"prompt": "DELTA_BYTE_ARRAY"}})
    ):
        path = tmp_path / f"{index}.parquet"
        pq.write_table(pa.table({"prompt": [text] * 1000}), path, compression="zstd", **options)
        before = pa.default_memory_pool().max_memory()
        with pytest.raises(InputError, match=r"line 537: more than|unpack to more than"):
            read_prompts_lengths(path)
        assert pa.default_memory_pool().max_memory() - before < 600 << 20


def read_prompts_lengths(path: Path) -> list[int]:
    from halation.prompt_files import iter_prompts

    return [len(row.prompt) for row in iter_prompts(path)]


@pytest.mark.parametrize("change", [lambda data: data[:-9] + data[-8:], lambda data: data[:40] + data[60:]])
def test_a_damaged_parquet_file_is_refused(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    pq.write_table(pa.table({"prompt": ["a street"] * 100}), tmp_path / "p.parquet")
    (tmp_path / "p.parquet").write_bytes(change((tmp_path / "p.parquet").read_bytes()))
    with pytest.raises(InputError):
        read_prompts(tmp_path / "p.parquet")


def test_rows_and_keys_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_files, "MAX_TABLE_ROWS", 3)
    contents = {
        "p.txt": "a\n" * 4,
        "p.csv": "prompt\n" + "a\n" * 4,
        "p.jsonl": '{"prompt": "a"}\n' * 4,
    }
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(InputError, match=r"line [45]: row 4"):
            read_prompts(tmp_path / name)
    keys = json.dumps({"prompt": "a"} | {f"k{index}": 0 for index in range(20_000)})
    (tmp_path / "p.jsonl").write_text(keys)
    with pytest.raises(InputError, match="line 1: 20001 columns"):
        read_prompts(tmp_path / "p.jsonl")


def found_files(folder: Path, **settings: Any) -> list[str]:
    walk = input_files.walk_folder(folder, **{"max_entries": 1000, **settings})
    return sorted(os.path.relpath(os.path.join(top, name), folder) for top, _, names in walk for name in names)


def test_a_walk_over_links_that_lead_back_comes_to_an_end(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").touch()
    for name in ("a", "b"):
        (tmp_path / name).symlink_to(tmp_path)
        (tmp_path / "inner" / name).symlink_to("..")
    assert found_files(tmp_path) == found_files(tmp_path, once=True) == ["inner/file"]


def test_a_folder_of_two_names_is_found_under_both_unless_once_is_enough(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "vocab.json").touch()
    (tmp_path / "tokenizer_2").symlink_to("tokenizer")
    assert found_files(tmp_path) == ["tokenizer/vocab.json", "tokenizer_2/vocab.json"]
    assert len(found_files(tmp_path, once=True)) == 1


def test_links_that_multiply_are_refused(tmp_path: Path) -> None:
    for level in range(20):
        (tmp_path / str(level)).mkdir()
        for name in ("a", "b"):
            (tmp_path / str(level) / name).symlink_to(tmp_path / str(level + 1))
    with pytest.raises(RefusedFileError, match="more than 1000 files and folders"):
        found_files(tmp_path / "0")


def parquet_of_shared_pages(num_groups: int, num_pages: int) -> bytes:
    """Row groups that all point at the same pages, each of which says that it holds nothing."""

    def varint(number: int) -> bytes:
        return (bytes([number & 127 | 128]) + varint(number >> 7)) if number > 127 else bytes([number])

    def integer(number: int) -> bytes:
        return varint(2 * number)

    def text(value: bytes) -> bytes:
        return varint(len(value)) + value

    def struct_of(*fields: tuple[int, int, bytes]) -> bytes:
        before = [0, *(number for number, _, _ in fields)]
        parts = [
            bytes([number - last << 4 | kind]) + body
            for last, (number, kind, body) in zip(before, fields, strict=False)
        ]
        return b"".join(parts) + b"\0"

    def list_of(kind: int, items: list[bytes]) -> bytes:
        return bytes([0xF0 | kind]) + varint(len(items)) + b"".join(items)

    pages = b"\x15\x00\x15\x00\x15\x00\x00" * num_pages
    size = integer(len(pages))
    chunk = struct_of(
        (1, 5, integer(6)), (2, 9, list_of(5, [b"\0"])), (3, 9, list_of(8, [text(b"prompt")])), (4, 5, b"\0"),
        (5, 6, b"\0"), (6, 6, size), (7, 6, size), (9, 6, integer(4)),
    )  # fmt: skip
    group = struct_of((1, 9, list_of(12, [struct_of((2, 6, b"\0"), (3, 12, chunk))])), (2, 6, size), (3, 6, b"\0"))
    column = struct_of((1, 5, integer(6)), (3, 5, integer(1)), (4, 8, text(b"prompt")), (6, 5, b"\0"))
    schema = list_of(12, [struct_of((4, 8, text(b"schema")), (5, 5, integer(1))), column])
    footer = struct_of((1, 5, integer(2)), (2, 9, schema), (3, 6, b"\0"), (4, 9, list_of(12, [group] * num_groups)))
    return b"PAR1" + pages + footer + struct.pack("<I", len(footer)) + b"PAR1"


@pytest.mark.parametrize(
    ("num_groups", "num_pages", "words"),
    [(20_000, 50_000, "row group 2 overlaps another one"), (1, 1_100_000, "more than 1000000 pages")],
)
def test_pages_of_a_parquet_file_are_counted_and_belong_to_one_row_group(
    tmp_path: Path, num_groups: int, num_pages: int, words: str
) -> None:
    (tmp_path / "p.parquet").write_bytes(parquet_of_shared_pages(num_groups, num_pages))
    start = time.process_time()
    with pytest.raises(InputError, match=words):
        read_prompts(tmp_path / "p.parquet")
    assert time.process_time() - start < 20


def test_a_parquet_column_of_string_views_is_read(tmp_path: Path) -> None:
    table = pa.table({"prompt": pa.array(["a street", "a car longer than twelve letters"], pa.string_view())})
    pq.write_table(table, tmp_path / "p.parquet")
    assert [row.prompt for row in read_prompts(tmp_path / "p.parquet")] == table["prompt"].to_pylist()


@pytest.mark.parametrize(
    ("name", "line", "words"),
    [("p.jsonl", b'{"prompt":"a"}\n', "row 5000001"), ("p.txt", b"a\n", "row 5000001")],
)
def test_rows_are_counted_before_one_is_parsed(tmp_path: Path, name: str, line: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(b"\n" * 100 + line * 5_000_001)
    start = time.process_time()
    with pytest.raises(InputError, match=words):
        PromptFile.open(tmp_path / name)
    assert time.process_time() - start < 10


def test_blank_lines_are_counted_too_and_skipped_in_little_time(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    start = time.process_time()
    path.write_bytes(b"prompt\n" + b"\n" * 20_000_000)
    with pytest.raises(InputError, match="20000001 lines"):
        read_prompts(path)
    path.write_bytes(b"\r\n\nprompt\r\n" + b"\n\r\n" * 9_000_000 + b" \na\n\n")
    assert [(row.line, row.prompt) for row in read_prompts(path)] == [(18_000_005, "a")]
    assert time.process_time() - start < 10


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 4, 1)])
def test_features_of_another_shape_than_the_mean_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = tmp_path / "s.safetensors"
    moments = Moments(num=2, mean=np.zeros(4), scatter=np.eye(4))
    write_statistics(path, moments, np.zeros((2, 4), np.float32), {})
    assert _read_file(path).features is not None
    arrays = {"mean": np.zeros(4), "scatter": np.eye(4), "num": np.array([2]), "features": np.zeros(shape)}
    path.write_bytes(save_safetensors(arrays, {"format": FORMAT, "facts": "{}"}))
    with pytest.raises(InputError, match="the features have shape"):
        _read_file(path)
