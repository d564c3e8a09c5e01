"""`halation train` with the defaults of this recipe and DeepSpeed as its engine; without DeepSpeed, the usual engine, and it says so."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

NAME = "train_deepspeed.py"


def engine() -> str:
    if importlib.util.find_spec("deepspeed") is not None:
        return "deepspeed"
    print(
        f"{NAME}: deepspeed is not installed, so the ranks train with --engine auto (ddp); "
        "`pip install deepspeed` brings ZeRO, --engine fsdp shards without it",
        file=sys.stderr,
    )
    return "auto"


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from hydit.training import main

    sys.exit(main(sys.argv[1:], prog=NAME, engine=engine()))
