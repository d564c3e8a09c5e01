"""Starts `halation generate` on the test card, and knows what an undisturbed call leaves behind."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from support import generation_checker as checker
from support.commands import Started, finish, halation

PROMPTS = "".join(f"prompt number {number}\n" for number in range(24))


def generate(folder: Path, prompts: Path | str = PROMPTS, **settings: object) -> list[str]:
    """The command for `folder`/out; prompts given as text are written beside it first."""
    if isinstance(prompts, str):
        path = folder / "prompts.txt"
        if not path.exists() or path.read_text() != prompts:
            path.write_text(prompts)
        prompts = path
    flags: dict[str, object] = {
        "prompts": prompts,
        "model_path": "testcard",
        "output_dir": folder / "out",
        "height": 16,
        "width": 24,
        "num_inference_steps": 2,
        "batch_size": 4,
        "nproc": 2,
        "progress": "plain",
    } | settings
    words = [word for name, value in flags.items() if value is not True for word in (f"--{name}", str(value))]
    return halation(["generate", *words, *(f"--{name}" for name, value in flags.items() if value is True)])


def run(folder: Path, fault: str = "", timeout_s: float = 60, **settings: object) -> int:
    """Call it once, to its end; what it said is in `folder`/log, and nothing of it may still run."""
    log = folder / "log"
    log.unlink(missing_ok=True)
    return finish(generate(folder, **settings), log, fault, timeout_s=timeout_s)  # type: ignore[arg-type]


def said(folder: Path) -> str:
    return (folder / "log").read_text(errors="replace")


@functools.cache
def unbroken(prompts: str = PROMPTS, batch_size: int = 4) -> tuple[dict[str, str], bytes]:
    """Images and metadata of a call that nobody disturbed, with one worker; made once for all tests of a session."""
    with tempfile.TemporaryDirectory(prefix="halation_unbroken_") as name:
        folder = Path(name)
        assert run(folder, prompts=prompts, nproc=1, batch_size=batch_size) == 0, said(folder)
        assert checker.problems(folder / "out", prompts.count("\n")) == []
        return checker.state(folder / "out")


def assert_whole(folder: Path, prompts: str = PROMPTS, batch_size: int = 4) -> None:
    """GEN and CLEAN: what an undisturbed call leaves, and nothing else."""
    problems = checker.problems(folder / "out", prompts.count("\n"))
    assert not problems, "\n".join(problems)
    assert checker.state(folder / "out") == unbroken(prompts, batch_size), "other bytes than without a disturbance"


def assert_completed_by_the_same_command(folder: Path, prompts: str = PROMPTS, **settings: object) -> None:
    assert run(folder, prompts=prompts, **settings) == 0, said(folder)
    assert_whole(folder, prompts)


def worker_pids(command: Started) -> list[int]:
    """The processes of the workers, in the order of their numbers."""
    return [pid for _, pid in sorted(command.rank_pids().items())]
