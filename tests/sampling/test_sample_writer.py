"""Images on the way to disk: bounded memory, one retry, and failed rows for lost images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halation import fault_injection
from halation.sample_specs import SampleSpec
from halation.sampling.sample_folder import NUM_WRITERS, SampleFolder, SampleWriter, is_drawn

PIXELS = np.full((8, 8, 3), 90, np.uint8)


@pytest.fixture(autouse=True)
def counted_from_here() -> Iterator[None]:
    fault_injection._counts.clear()
    yield
    fault_injection._counts.clear()


def spec(index: int) -> SampleSpec:
    name = f"sample_{index:02d}"
    return SampleSpec(
        index=index, id=name, prompt=f"prompt {index}", seed=index, height=8, width=8, steps=1, guidance_scale=1
    )


def row() -> dict[str, Any]:
    return {"rank": 0, "state": "done", "reason": ""}


@pytest.mark.faults
@pytest.mark.parametrize("code", ["ENOSPC", "EIO", "EROFS", "EMFILE"])
def test_a_disk_that_refuses_once_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setenv("HALATION_FAULT", f"publish.write:1:{code}")
    monkeypatch.setenv("HALATION_FAULT_LOG", str(tmp_path / "fired"))
    (tmp_path / "out").mkdir()
    writer, mine = SampleWriter(SampleFolder(folder=tmp_path / "out"), "euler"), row()
    writer.submit(spec(0), PIXELS, mine)
    writer.finish()
    assert (tmp_path / "fired").read_text() == f"publish.write:1:{code}:0\n"
    assert mine["state"] == "done"
    assert is_drawn(writer.sample_folder, spec(0))


@pytest.mark.faults
@pytest.mark.parametrize("point", ["publish.open", "publish.write", "publish.fsync", "publish.rename"])
def test_a_disk_that_stays_full_makes_a_failed_row_and_no_partial_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """A disk that stays full makes a failed row with the folder's name and no partial file."""
    writer, rows = SampleWriter(SampleFolder(folder=tmp_path), "euler"), [row(), row()]
    writer.submit(spec(0), PIXELS, rows[0])
    writer.pending[0][1].result()
    monkeypatch.setenv("HALATION_FAULT", f"{point}:1+:ENOSPC")
    writer.submit(spec(1), PIXELS, rows[1])
    writer.finish()
    assert rows[0]["state"] == "done"
    assert rows[1]["state"] == "failed"
    assert rows[1]["reason"] == f"OSError: cannot write to directory {tmp_path}: No space left on device"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sample_00.png", "sample_00.txt"]


@pytest.mark.faults
def test_never_more_than_a_few_images_wait_for_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALATION_FAULT", "sample.write:1+:sleep=0.02")
    writer, rows = SampleWriter(SampleFolder(folder=tmp_path), "euler"), [row() for _ in range(20)]
    most = 0
    for index, mine in enumerate(rows):
        writer.submit(spec(index), PIXELS, mine)
        most = max(most, sum(not future.done() for _, future in writer.pending))
    writer.finish()
    assert NUM_WRITERS <= most <= 2 * NUM_WRITERS
    assert all(mine["state"] == "done" and is_drawn(writer.sample_folder, spec(i)) for i, mine in enumerate(rows))


def test_a_image_counts_as_drawn_only_with_its_own_spec_and_its_prompt_beside_it(tmp_path: Path) -> None:
    writer = SampleWriter(SampleFolder(folder=tmp_path), "euler")
    writer.submit(spec(0), PIXELS, row())
    writer.finish()
    place = writer.sample_folder
    assert is_drawn(place, spec(0))
    (tmp_path / "sample_01.png").write_bytes((tmp_path / "sample_00.png").read_bytes())
    (tmp_path / "sample_01.txt").write_text("prompt 1")
    assert not is_drawn(place, spec(1)), "another image under its name"
    data = (tmp_path / "sample_00.png").read_bytes()
    (tmp_path / "sample_00.png").write_bytes(data[:-12])
    assert not is_drawn(place, spec(0)), "cut short"
    (tmp_path / "sample_00.png").write_bytes(data)
    (tmp_path / "sample_00.txt").unlink()
    assert not is_drawn(place, spec(0)), "without its prompt"
