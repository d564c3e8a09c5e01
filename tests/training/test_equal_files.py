"""Two equal trainings leave the same bytes, independent of process ids and delays."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.commands import finish, fired, halation, train


@pytest.mark.slow
@pytest.mark.ranks
def test_equal_trainings_leave_equal_checkpoints_and_exports(tmp_path: Path) -> None:
    files: list[dict[str, bytes]] = []
    # In the second one rank 1 is the last to report its files.
    for name, fault in (("one", "publish.write:1:sleep=3:2"), ("two", "publish.write:1:sleep=3:1")):
        run = tmp_path / name / "run"
        run.mkdir(parents=True)
        words = halation(train(run, nproc=3, batch_size=1, n_steps=2))
        assert finish(words, tmp_path / name / "log", fault) == 0, (tmp_path / name / "log").read_text()
        assert len(fired(tmp_path / name / "log")) == 1
        paths = [path for folder in ("checkpoints", "export") for path in (run / folder).rglob("*") if path.is_file()]
        files.append({str(path.relative_to(run)): path.read_bytes() for path in paths})
    assert {"export/model.pth", "checkpoints/step_0000002/COMMIT.json"} <= files[0].keys()
    assert [name for name in files[0] if files[0][name] != files[1].get(name)] == []
    assert files[0].keys() == files[1].keys()
