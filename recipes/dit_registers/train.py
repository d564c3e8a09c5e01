"""Trains a DiT with register tokens: `halation train` with the defaults of this recipe.

It works with and without torchrun.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from halation import cli
from halation.distributed import launcher
from halation.errors import HalationError
from halation.runs.run_folder import RunFolder, read_record
from halation.training.config import TrainConfig, fill_dit_defaults

PROG = "train.py"
MAX_CPU_MICRO_BATCH = 4
"""The default model needs 0.16 GiB per image. Not a function of the free memory: a resumed run needs the same value."""


def installed(package: str) -> bool:
    """Return True for a package, but not for a mere folder such as the `wandb/` of wandb runs."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


DEFAULTS: dict[str, Any] = {
    "output_dir": Path("runs/dit_registers"),
    "num_register_tokens": 0,
    "batch_size": 128,
    "n_steps": 200_000,
    "lr": 1e-4,
    "eval_every": 5_000,
    "report_to": tuple(name for name in ("tensorboard", "wandb") if installed(name)) or ("none",),
}


def main(words: Sequence[str]) -> int:
    """Train, and return the exit code."""
    try:
        # Parsed twice: the number of steps and the batch size decide the defaults of others.
        asked: TrainConfig = fill_dit_defaults(cli.parse("train", words, defaults=DEFAULTS, prog=PROG))
        micro_batches = [] if launcher.num_gpus() else cpu_micro_batches(asked)
    except HalationError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return error.exit_code
    code = cli.run("train", [*words, *micro_batches], defaults=DEFAULTS | by_steps(asked.n_steps), prog=PROG)
    if code == 0 and os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        link_weights(asked.output_dir / "export" / "model.pth")
    return code


def by_steps(n_steps: int) -> dict[str, Any]:
    """Disable evaluations by default in a run that ends before the first one is due."""
    return {"eval_every": 0} if n_steps < DEFAULTS["eval_every"] else {}


def cpu_micro_batches(asked: TrainConfig) -> list[str]:
    """Return flags for the same batch per rank in micro-batches that fit into the memory of a machine without a GPU."""
    run = RunFolder(asked.output_dir)
    if run.has_checkpoints():
        known = read_record(run)["settings"]
        if (known.get("batch_size"), known.get("accumulate")) == (asked.batch_size, asked.accumulate):
            return []  # it was started with these
    size = next(size for size in range(MAX_CPU_MICRO_BATCH, 0, -1) if asked.batch_size % size == 0)
    if size == asked.batch_size:
        return []
    accumulate = asked.accumulate * asked.batch_size // size
    return ["--batch_size", str(size), "--accumulate", str(accumulate)]


def link_weights(weights: Path, link: Path = Path("model.pth")) -> None:
    """Link `model.pth` in the working directory to the weights of the run."""
    if not weights.is_file():  # the export of a pipeline has none
        return
    if link.exists() and not link.is_symlink():
        print(f"{PROG}: {link} is a file of its own and is left as it is; the weights are {weights}", file=sys.stderr)
        return
    scratch = link.with_name(f".{link.name}.{os.getpid()}")
    scratch.symlink_to(weights)
    scratch.replace(link)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
