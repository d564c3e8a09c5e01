"""Samples of all epochs in one folder: names, removal by step, the teacher's image."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halation.evaluation.image_sources import find_image_files
from halation.images.png_codec import encode_png, read_png
from halation.sample_specs import SampleSpec
from halation.sampling.sample_folder import (
    ComparisonImages,
    RankNaming,
    SampleFolder,
    SampleWriter,
    publish_index,
    remove_samples_after,
)


def spec(index: int) -> SampleSpec:
    name = f"sample_{index:02d}"
    return SampleSpec(
        index=index, id=name, prompt=f"prompt {index}", seed=index, height=8, width=8, steps=1, guidance_scale=1
    )


def pixels(index: int, teacher: bool = False) -> np.ndarray:
    return np.full((8, 8, 3), (40 * index, 255 * teacher, 90), np.uint8)


def row(place: SampleFolder, index: int) -> dict[str, Any]:
    known = {"index": index, "prompt": spec(index).prompt, "rank": 0, "state": "done", "reason": ""}
    return known | {"file": place.image_path(spec(index)).name}


def drawn(place: SampleFolder, num: int, teacher: bool = False) -> list[dict[str, Any]]:
    place.folder.mkdir(parents=True, exist_ok=True)
    rows = [row(place, index) for index in range(num)]
    writer = SampleWriter(place, "euler")
    for index in range(num):
        writer.submit(spec(index), pixels(index, teacher), rows[index])
    writer.finish()
    return rows


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def by_rank(folder: Path, epoch: int, num_prompts: int = 6, num_ranks: int = 4) -> SampleFolder:
    return SampleFolder(folder=folder, naming=RankNaming(epoch=epoch, num_prompts=num_prompts, num_ranks=num_ranks))


def test_six_prompts_on_four_ranks_are_called_by_their_place_in_the_shares(tmp_path: Path) -> None:
    place = by_rank(tmp_path, 1)
    publish_index(place, drawn(place, 6), {"step": 3})
    pairs = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    stems = [f"epoch_0001_rank_{rank}_sample_{number:02d}" for rank, number in pairs]
    files = [f"{stem}{kind}" for stem in stems for kind in (".png", ".txt")]
    assert names(tmp_path) == sorted([*files, "epoch_0001_grid.png", "epoch_0001_samples.json"])
    for index, stem in enumerate(stems):
        assert np.array_equal(read_png(tmp_path / f"{stem}.png")[0], pixels(index))
        assert (tmp_path / f"{stem}.txt").read_text() == f"prompt {index}"
    assert [each["file"] for each in place.read_index()["samples"]] == [f"{stem}.png" for stem in stems]


def test_an_epoch_is_cleared_alone_and_a_folder_of_its_own_whole(tmp_path: Path) -> None:
    first, second, own = by_rank(tmp_path, 1), by_rank(tmp_path, 2), SampleFolder(folder=tmp_path / "step_0000003")
    for place in (first, second, own):
        publish_index(place, drawn(place, 6), {"step": 3})
    before = len(names(tmp_path))
    second.clear()
    assert len(names(tmp_path)) == before - 14
    assert first.read_index()["step"] == 3
    assert second.read_index() == {}
    own.clear()
    assert not own.folder.exists()


def test_samples_of_later_steps_are_forgotten_and_the_teachers_stay(tmp_path: Path) -> None:
    for epoch, step in ((1, 10), (2, 20), (3, 25)):
        place = by_rank(tmp_path, epoch)
        publish_index(place, drawn(place, 2), {"step": step})
    for step in (10, 20, 25):
        place = SampleFolder(folder=tmp_path / f"step_{step:07d}")
        publish_index(place, drawn(place, 1), {"step": step})
    drawn(SampleFolder(folder=tmp_path / "teacher"), 2)
    remove_samples_after(tmp_path, 20)
    assert {name[:10] for name in names(tmp_path)} == {"epoch_0001", "epoch_0002", "step_00000", "teacher"}
    assert [path.name for path in sorted(tmp_path.glob("step_*"))] == ["step_0000010", "step_0000020"]
    (tmp_path / "epoch_0001_samples.json").write_text("{damaged")
    remove_samples_after(tmp_path, 20)
    assert len(list(tmp_path.glob("epoch_0001*"))) == 6, "nobody knows of which step these are: they may be good"
    remove_samples_after(tmp_path, -1)
    assert names(tmp_path) == ["teacher"]
    assert len(names(tmp_path / "teacher")) == 4


@pytest.mark.parametrize("said", ["", "[]", "{", "null"])
def test_a_damaged_index_says_nothing(tmp_path: Path, said: str) -> None:
    (tmp_path / "samples.json").write_text(said)
    assert SampleFolder(folder=tmp_path).read_index() == {}


def test_the_teachers_image_stands_beside_the_students_and_is_named(tmp_path: Path) -> None:
    student = SampleFolder(folder=tmp_path / "step_0000002", label="student")
    teacher = SampleFolder(folder=tmp_path / "teacher", label="teacher")
    drawn(teacher, 3, teacher=True)
    teacher.image_path(spec(2)).unlink()
    beside = ComparisonImages(label="teacher", files={index: teacher.image_path(spec(index)) for index in range(3)})
    rows = drawn(student, 3)
    rows[1]["state"] = "failed"
    shown = publish_index(student, rows, {}, comparison=beside)
    left, top = [12, 152, 308, 448], [12, 12, shown.shape[0] // 2 + 6]
    cells = [shown[top[n // 2] + 3, left[n % 4] + 3].tolist() for n in range(5)]
    assert cells[0] == pixels(0)[0, 0].tolist()
    assert cells[1] == pixels(0, teacher=True)[0, 0].tolist()
    assert cells[3] == pixels(1, teacher=True)[0, 0].tolist()
    assert cells[4] == pixels(2)[0, 0].tolist()
    grey = [shown[top[0] + 3, left[2] + 20], shown[top[2] + 3, left[1] + 20]]
    assert all(cell.min() > 230 for cell in grey), "the student's failed one and the teacher's lost one are empty cells"
    listed = json.loads((student.folder / "samples.json").read_text())["samples"]
    assert [each["teacher"] for each in listed] == [f"../teacher/sample_{index:02d}.png" for index in range(3)]
    assert (student.folder / listed[0]["teacher"]).read_bytes() == teacher.image_path(spec(0)).read_bytes()


def test_captions_say_whose_image_it_is(tmp_path: Path) -> None:
    """Two grids that differ in a label differ under the images of that side alone."""
    student, teacher = SampleFolder(folder=tmp_path, label="student"), SampleFolder(folder=tmp_path / "teacher")
    drawn(teacher, 1)
    files = {0: teacher.image_path(spec(0))}
    rows = drawn(student, 1)
    shown = [
        publish_index(student, rows, {}, comparison=ComparisonImages(label=label, files=files))
        for label in ("teacher", "author")
    ]
    where = np.nonzero((shown[0] != shown[1]).any(axis=2))
    assert where[0].min() >= 140
    assert where[1].min() >= 150
    assert encode_png(shown[1], {}) == (tmp_path / "grid.png").read_bytes()


def test_who_scores_a_folder_of_epochs_leaves_the_grids_out(tmp_path: Path) -> None:
    for epoch in (1, 2):
        place = by_rank(tmp_path, epoch, num_prompts=2)
        publish_index(place, drawn(place, 2), {"step": epoch})
    stems = [f"epoch_000{epoch}_rank_{rank}_sample_00.png" for epoch in (1, 2) for rank in (0, 1)]
    assert list(find_image_files(tmp_path, "--generated").names) == stems
    (tmp_path / "a_grid.png").write_bytes((tmp_path / stems[0]).read_bytes())
    assert "a_grid.png" in find_image_files(tmp_path, "--generated").names, "somebody's image that is called so"
