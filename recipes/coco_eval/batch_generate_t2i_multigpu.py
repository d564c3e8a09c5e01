"""Draw an image for every prompt of a list on all GPUs: `halation generate` with the defaults of this recipe."""

from __future__ import annotations

import sys
from typing import Any

from halation import cli

# A batch of one image: samples go round-robin over the GPUs one by one, as the commands of this recipe promise.
DEFAULTS: dict[str, Any] = {"batch_size": 1}

if __name__ == "__main__":
    sys.exit(cli.run("generate", sys.argv[1:], defaults=DEFAULTS, prog="batch_generate_t2i_multigpu.py"))
