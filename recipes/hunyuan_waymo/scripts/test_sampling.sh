#!/usr/bin/env bash
# Draw an image from each of four ranks at a checkpoint of a short training, and check what came out. From any folder; below it,
# results/test_sampling holds the images. Exit code 0 if all is well.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)"
python="$here/../../../.venv/bin/python"
[ -x "$python" ] || python="$(command -v python || command -v python3)"

exec "$python" "$here/../hydit/check_sampling.py" "$@"
