"""The demo ends with a picture of the progress and a page of the run, and says how to open both."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from benchmarks.big_folders import training_folder

from halation import cli
from halation.jobs import demo


def test_the_page_of_a_run_is_written_into_it_and_again_over_itself(tmp_path: Path) -> None:
    run = training_folder(tmp_path / "demo_run", 2, 2, size=32)
    page = demo.write_page(run)
    assert page == run / "gallery.html"
    assert "data:image/webp" in page.read_text()
    assert demo.write_page(run).stat().st_size == page.stat().st_size


def test_the_program_is_called_by_a_name_that_a_shell_finds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    beside = Path(sys.executable).with_name("halation")
    monkeypatch.setenv("PATH", str(beside.parent))
    assert demo.program() == "halation"
    monkeypatch.setenv("PATH", str(tmp_path))
    found = shutil.which(demo.program())
    assert found is not None
    assert os.path.samefile(found, beside)


@pytest.mark.slow
@pytest.mark.ranks
def test_the_demo_ends_with_its_page_and_how_to_see_it_live(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "demo_run"
    assert cli.main(["demo", "--output_dir", str(run), "--n_steps", "8", "--nproc", "1", "--progress", "none"]) == 0
    said = capsys.readouterr().err
    assert str(run / "gallery.html") in said
    assert f"gallery {run}" in said
    assert "data:image/webp" in (run / "gallery.html").read_text()
    assert (run / "progress.png").exists()
