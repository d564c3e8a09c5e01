"""Generates images for a prompt list on all GPUs: `halation generate` with other defaults."""

from __future__ import annotations

import sys
from typing import Any

from halation import cli

# A batch of one image: images are assigned round-robin to the GPUs one by one, as this recipe documents.
DEFAULTS: dict[str, Any] = {"batch_size": 1}

if __name__ == "__main__":
    sys.exit(cli.run("generate", sys.argv[1:], defaults=DEFAULTS, prog="batch_generate_t2i_multigpu.py"))
