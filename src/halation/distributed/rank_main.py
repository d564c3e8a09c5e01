"""Entry point of a rank: `python -m ... FUNCTION CONFIG_CLASS CONFIG.json`."""

from __future__ import annotations

import json
import os
import pkgutil
import sys
import traceback
from pathlib import Path

from halation.config import from_json
from halation.distributed import launcher, stop_signals


def main() -> int:
    stop_signals.unblock_interrupts()
    launcher.tie_rank_to_launcher()
    function, config_class, path = sys.argv[1:]
    try:
        config = from_json(pkgutil.resolve_name(config_class), json.loads(Path(path).read_text()))
        pkgutil.resolve_name(function)(config)
    except BaseException as error:  # noqa: BLE001 - report any error to the parent
        trace = traceback.format_exc()
        launcher.report_error(error, trace)
        if os.environ.get("RANK") == "0" and os.environ.get("HALATION_TRACE"):
            sys.stderr.write(trace)
        code = getattr(error, "exit_code", 1)
        # Other threads may be blocked in a dead collective; flush only the streams.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
