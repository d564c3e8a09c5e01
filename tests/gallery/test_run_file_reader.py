"""Files that grow are read once, line by line, whatever happens to them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halation.gallery.run_file_reader import JsonlTailReader, read_json_object, read_last_lines
from halation.runs.run_folder import MetricsFile


def test_each_whole_line_is_given_once_and_a_half_one_when_it_has_its_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = JsonlTailReader(path)
    assert lines.read_new() == (False, [])
    path.write_text('{"step": 1}\n{"st')
    assert lines.read_new() == (False, [{"step": 1}])
    assert lines.read_new() == (False, [])
    with path.open("a") as file:
        file.write('ep": 2}\n')
    assert lines.read_new() == (False, [{"step": 2}])


def test_damaged_lines_are_left_out_and_cost_no_other(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff\xfe\n[1, 2]\n\n{"step": \n' + b"[" * 100_000 + b'\n{"step": 2}\n')
    assert JsonlTailReader(path).read_new() == (False, [{"step": 1}, {"step": 2}])


def test_a_rewound_file_is_told_of_and_read_from_its_beginning(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(1, 6):
        metrics.append({"step": step})
    lines = JsonlTailReader(metrics.path)
    lines.read_new()
    metrics.truncate_after(2)
    metrics.append({"step": 3, "again": True})
    assert lines.read_new() == (True, [{"step": 1}, {"step": 2}, {"step": 3, "again": True}])


def test_a_file_overwritten_in_place_by_a_longer_one_is_read_from_the_start(tmp_path: Path) -> None:
    """A file that was overwritten in place by a longer one is read from its beginning."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(3)))
    lines = JsonlTailReader(path)
    lines.read_new()
    path.write_text("".join(json.dumps({"other": step}) + "\n" for step in range(30)))
    rewritten, rows = lines.read_new()
    assert rewritten
    assert len(rows) == 30


def test_a_file_that_vanishes_is_void_and_one_that_comes_again_is_new(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    lines = JsonlTailReader(path)
    lines.read_new()
    path.unlink()
    assert lines.read_new() == (True, [])
    path.write_text('{"step": 7}\n')
    assert lines.read_new() == (False, [{"step": 7}])


def test_the_end_of_a_log_is_its_last_whole_lines_as_text(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    assert read_last_lines(path, 10) == []
    path.write_bytes(b"\xffbroken\n" + b"".join(b"line %06d\n" % number for number in range(50_000)))
    assert read_last_lines(path, 2) == ["line 049998", "line 049999"]
    assert all(len(line) == 11 for line in read_last_lines(path, 100_000)), "none is cut in the middle"
    assert read_last_lines(path, 0) == []


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"\xff", b"null", b"[" * 100_000])
def test_what_is_no_object_reads_as_an_empty_one(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(data)
    assert read_json_object(path) == {}
