#!/usr/bin/env bash
# Train on one GPU, the first of CUDA_VISIBLE_DEVICES, or on the CPU. Takes the flags of train.py, from any folder.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)"
exec bash "$here/run_ddp.sh" --nproc 1 "$@"
