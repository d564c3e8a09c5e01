"""`halation train` with the defaults of this recipe and the DeepSpeed engine.

Without DeepSpeed it prints a message and uses the default engine.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

NAME = "train_deepspeed.py"


def engine() -> str:
    if importlib.util.find_spec("deepspeed") is not None:
        return "deepspeed"
    print(
        f"{NAME}: deepspeed is not installed: training with --engine auto (ddp); "
        "run `pip install deepspeed` for ZeRO, or use --engine fsdp to shard without it",
        file=sys.stderr,
    )
    return "auto"


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from hydit.training import main

    sys.exit(main(sys.argv[1:], prog=NAME, engine=engine()))
