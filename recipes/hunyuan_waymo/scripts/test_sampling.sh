#!/usr/bin/env bash
# Sample one image on each of four ranks at a checkpoint of a short training, and check the result. Works from any
# folder and writes the images to results/test_sampling below it. The exit code is 0 if all checks pass.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)"
python="$here/../../../.venv/bin/python"
[ -x "$python" ] || python="$(command -v python || command -v python3)"

exec "$python" "$here/../hydit/check_sampling.py" "$@"
