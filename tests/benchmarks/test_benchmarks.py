"""Every benchmark runs at its small size on a CPU, and both of its sides do the same work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.__main__ import NAMES

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_small_size_runs_on_a_cpu_and_ends_with_a_ratio(name: str, tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--size", "small", "--output", str(output)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    report = json.loads(output.read_text())
    ratios = [line for line in done.stdout.splitlines() if line.startswith(f"RATIO {name} | ")]
    assert report["rows"]
    assert len(ratios) == len(report["rows"])
    assert all(row["ours"] > 0 and row["peer"] > 0 for row in report["rows"])
    assert not list(tmp_path.glob("halation_benchmark_*"))  # the temporary inputs are gone again


def test_without_clean_fid_the_scores_duel_says_so_and_has_no_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import duel_10_scores, oracles

    monkeypatch.delitem(sys.modules, "cleanfid", raising=False)
    monkeypatch.setattr(oracles, "PLACES", (tmp_path / "nothing",))
    assert duel_10_scores.main(["--size", "small"]).rows == ()
    assert "clean-fid is not installed" in capsys.readouterr().out
