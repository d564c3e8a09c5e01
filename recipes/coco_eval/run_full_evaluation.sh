#!/usr/bin/env bash
# From prompts to scores: generate an image for every prompt, then compute FID against real images and the CLIP score
# against the prompts, as JSON. All settings are environment variables (see README.md). Run it again to do only what is
# missing.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)"
python="$here/../../.venv/bin/python"
[ -x "$python" ] || python="$(command -v python || command -v python3)"

PROMPTS_CSV="${PROMPTS_CSV:-./mscoco_data/prompts.csv}"
REFERENCE="${REFERENCE:-./mscoco_data/val2017}"
OUTPUT_DIR="${OUTPUT_DIR:-./eval_output}"
RESULTS="${RESULTS:-${OUTPUT_DIR%/}_results.json}"

refuse() {
    printf 'run_full_evaluation.sh: %s\n  expected: %s\n  to do:    %s\n' "$1" "$2" "$3" >&2
    exit 2
}

# Check all inputs before the first image is generated.
[ -n "${MODEL_PATH:-}" ] || refuse "MODEL_PATH is not set" "a diffusers pipeline or a Halation model" "export MODEL_PATH=/path/to/your/model"
if [ ! -e "$PROMPTS_CSV" ]; then
    [ -n "${COCO_CAPTIONS:-}" ] || refuse "there is no $PROMPTS_CSV" "a prompt list, or COCO captions" \
        "export PROMPTS_CSV=FILE, or COCO_CAPTIONS=/path/to/captions_val2017.json"
    "$python" "$here/make_prompts.py" "$COCO_CAPTIONS" "$PROMPTS_CSV"
fi
[ "$REFERENCE" = streets ] || [ -e "$REFERENCE" ] || refuse "there are no real images at $REFERENCE" \
    "a folder of real images, or saved statistics (.npz, .safetensors)" "export REFERENCE=/path/to/val2017"

generate=(--prompts_csv "$PROMPTS_CSV" --output_dir "$OUTPUT_DIR" --model_path "$MODEL_PATH"
    --seed_start "${SEED_START:-42}" --num_inference_steps "${NUM_STEPS:-20}")
evaluate=(--generated "$OUTPUT_DIR" --reference "$REFERENCE" --output "$RESULTS")
devices=()
case "${USE_MULTIGPU:-true}" in
    true | True | TRUE | 1 | yes)
        # shellcheck disable=SC2206 # a list of numbers, meant to be split
        [ -z "${GPU_IDS:-}" ] || devices=(--gpu_ids ${GPU_IDS//,/ })
        ;;
    *) devices=(--nproc 1) ;;
esac
to_come=(--prompts "$PROMPTS_CSV")
if [ -n "${NUM_SAMPLES:-}" ]; then
    generate+=(--num_samples "$NUM_SAMPLES")
    to_come+=(--num_samples "$NUM_SAMPLES")
fi
[ -z "${GUIDANCE_SCALE:-}" ] || generate+=(--guidance_scale "$GUIDANCE_SCALE")
[ -z "${HEIGHT:-}" ] || generate+=(--height "$HEIGHT")
[ -z "${WIDTH:-}" ] || generate+=(--width "$WIDTH")
[ -z "${DTYPE:-}" ] || generate+=(--dtype "$DTYPE")
extractor=inception
[ "$REFERENCE" != streets ] || extractor=streets
case "${EXTRACTOR:-$extractor}" in
    inception) metrics="fid clip" ;;
    streets) metrics="fd kid agreement" ;;
    *) metrics="fd kid clip" ;;
esac
# shellcheck disable=SC2206 # a list of words, meant to be split
evaluate+=(--metrics ${METRICS:-$metrics})
[ -z "${EXTRACTOR:-}" ] || evaluate+=(--extractor "$EXTRACTOR")
[ -z "${CLIP_MODEL:-}" ] || evaluate+=(--clip_model "$CLIP_MODEL")
[ -z "${INCEPTION_WEIGHTS:-}" ] || evaluate+=(--inception_weights "$INCEPTION_WEIGHTS")
[ "${ALLOW_FEW:-false}" != true ] || evaluate+=(--allow_few)

"$python" -m halation.cli evaluate "${evaluate[@]}" "${to_come[@]}" --check
"$python" "$here/batch_generate_t2i_multigpu.py" "${generate[@]}" ${devices[@]+"${devices[@]}"}
"$python" -m halation.cli evaluate "${evaluate[@]}" ${devices[@]+"${devices[@]}"}
echo "scores: $RESULTS"
