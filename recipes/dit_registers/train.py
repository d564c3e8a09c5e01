"""Trains a DiT with register tokens: `halation train` with the defaults of this recipe.

It works with and without torchrun.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from halation import cli


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

if __name__ == "__main__":
    sys.exit(cli.run("train", sys.argv[1:], defaults=DEFAULTS, prog="train.py"))
