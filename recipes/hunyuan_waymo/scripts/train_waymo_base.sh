#!/usr/bin/env bash
# Fine-tune HunyuanDiT on every visible GPU (2 CPU ranks without a GPU), with a sample of each rank at every checkpoint:
#   bash scripts/train_waymo_base.sh [STEPS] [flags of halation train]
# MODEL_PATH is a HunyuanDiT in diffusers layout or its name on the Hub; by default a tiny one is created. DATA is a
# folder or CSV of images with captions; by default street scenes. Works from any folder and writes below it. Run it
# again with more steps or other GPUs to resume.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)"
python="$here/../../../.venv/bin/python"
[ -x "$python" ] || python="$(command -v python || command -v python3)"

steps=()
case "${1-}" in
    '' | -*) ;;
    *[!0-9]*)
        echo "train_waymo_base.sh: '$1' is not a number of steps; usage: train_waymo_base.sh [STEPS] [--flags]" >&2
        exit 2
        ;;
    *)
        steps=(--n_steps "$1")
        shift
        ;;
esac

exec "$python" "$here/../hydit/training.py" ${steps[@]+"${steps[@]}"} "$@"
