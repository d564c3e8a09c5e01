#!/usr/bin/env bash
# Fine-tune HunyuanDiT on every visible GPU (2 CPU ranks where there is none), with an image from each at every checkpoint:
#   bash scripts/train_waymo_base.sh [STEPS] [flags of halation train]
# MODEL_PATH is a HunyuanDiT in diffusers layout or its name on the hub, else a tiny one is made; DATA a folder or CSV of images
# with captions, else street scenes. Works from any folder and writes below it. Again with more steps or other GPUs goes on.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)"
python="$here/../../../.venv/bin/python"
[ -x "$python" ] || python="$(command -v python || command -v python3)"

steps=()
case "${1-}" in
    '' | -*) ;;
    *[!0-9]*)
        echo "train_waymo_base.sh: '$1' is no number of steps; usage: train_waymo_base.sh [STEPS] [--flags]" >&2
        exit 2
        ;;
    *)
        steps=(--n_steps "$1")
        shift
        ;;
esac

exec "$python" "$here/../hydit/training.py" ${steps[@]+"${steps[@]}"} "$@"
