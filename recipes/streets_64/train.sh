#!/usr/bin/env bash
# Trains the bundled model streets-64: 7.8 million parameters, 15 to 20 minutes on one H200. Run it again to resume.
set -euo pipefail
halation train --data streets --model mini --num_register_tokens 4 --image_size 64 64 --batch_size 512 --n_steps 8000 \
    --lr 2e-3 --warmup_steps 500 --decay_steps 7500 --betas 0.9 0.95 --ema_decay 0.999 --dtype bf16 --compile --num_workers 8 --seed 0 \
    --sample_steps 12 --guidance_scale 1 --output_dir "${OUTPUT_DIR:-runs/streets-64}" "$@"
