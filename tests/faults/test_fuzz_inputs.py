"""Damaged and invented files never crash or hang a reader; former findings are replayed."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import input_fuzzer

FOUND = sorted(path for path in input_fuzzer.CORPUS.iterdir() if not path.name.startswith("."))


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.name)
def test_a_file_that_once_broke_its_reader_is_read_or_refused(path: Path) -> None:
    reader = input_fuzzer.readers()[path.name.rsplit("-", 1)[0]]
    assert not input_fuzzer.find_problem(reader, path.read_bytes())


@pytest.mark.slow
def test_two_minutes_of_damaged_and_invented_files_break_no_reader(tmp_path: Path) -> None:
    counts, problems = input_fuzzer.fuzz(120, 1, tmp_path)
    assert not problems, "\n\n".join(problems)
    assert set(counts) == set(input_fuzzer.readers()), "every reader had its turn"
