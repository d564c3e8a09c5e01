"""A distillation stopped while it builds targets keeps them and resumes with the rest."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from support import commands, rank_functions
from support.commands import finish, halation, started

pytestmark = [pytest.mark.ranks, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_ITEMS, NUM_STEPS = 40, 4


def answers(folder: Path) -> int:
    """How often the teacher was asked since the log of faults was begun."""
    log = folder / "fired"
    return log.read_text().count("lessons.answer") if log.exists() else 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_signal_while_the_teacher_is_asked_costs_one_item_a_rank(
    tmp_path: Path, nproc: int, number: signal.Signals, code: int
) -> None:
    flags: dict[str, object] = {
        **{"teacher_path": rank_functions.tiny_teacher(), "data_path": rank_functions.write_prompts(tmp_path)},
        "nproc": nproc,
        **{"trajectories": NUM_ITEMS, "teacher_steps": NUM_STEPS, "teacher_batch_size": 1, "sample": False},
        **{"n_steps": 1, "batch_size": 2, "report_to": "none", "progress": "none", "output_dir": tmp_path / "run"},
    }  # fmt: skip
    words = halation(["distill", *(word for name, value in flags.items() for word in (f"--{name}", str(value)))])
    with started(words, tmp_path / "log", "lessons.answer:1+:sleep=0.05") as command:
        commands.until(lambda: answers(tmp_path) >= 6 * NUM_STEPS, 120, command)
        command.process.send_signal(number)
        assert command.process.wait(60) == code, command.said()
    told = re.search(r"asked to stop: (\d+) of 40 items are saved; run the same command to resume", command.said())
    assert told, command.said()
    kept = int(told[1])
    assert NUM_STEPS * kept <= answers(tmp_path) <= NUM_STEPS * (kept + nproc), (
        "no more than what each rank was at is lost"
    )
    assert 4 <= kept < NUM_ITEMS
    (tmp_path / "fired").unlink()
    assert finish(words, tmp_path / "log", "lessons.answer:1+:sleep=0", timeout_s=300) == 0, (
        tmp_path / "log"
    ).read_text()
    assert answers(tmp_path) == NUM_STEPS * (NUM_ITEMS - kept), "it goes on with the rest alone"
