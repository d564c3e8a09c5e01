#!/usr/bin/env bash
# From prompts to scores: generate an image for every prompt, then compute FID against real images and the CLIP score
# against the prompts, as JSON. All settings are environment variables (see README.md). Run it again to do only what is
# missing. The exit code is 1 if a score that is only a default could not be computed; the last lines name it.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)"
python="$here/../../.venv/bin/python"
[ -x "$python" ] || python="$(command -v python || command -v python3)"

asked_reference="${REFERENCE:-}"
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

generate=(--prompts_csv "$PROMPTS_CSV" --output_dir "$OUTPUT_DIR" --model_path "$MODEL_PATH"
    --seed_start "${SEED_START:-42}" --num_inference_steps "${NUM_STEPS:-20}")
evaluate=(--generated "$OUTPUT_DIR" --output "$RESULTS")
devices=()
case "${USE_MULTIGPU:-true}" in
    true | True | TRUE | 1 | yes)
        if [ -n "${GPU_IDS:-}" ]; then
            # shellcheck disable=SC2206 # a list of numbers, meant to be split
            devices=(--gpu_ids ${GPU_IDS//,/ })
            if [ "$("$python" -c 'from halation.distributed.launcher import num_gpus; print(num_gpus())')" = 0 ]; then
                echo "run_full_evaluation.sh: no GPU found: GPU_IDS is ignored, 2 workers on the CPU" >&2
                devices=(--nproc 2)
            fi
        fi
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
[ -z "${EXTRACTOR:-}" ] || evaluate+=(--extractor "$EXTRACTOR")
[ -z "${CLIP_MODEL:-}" ] || evaluate+=(--clip_model "$CLIP_MODEL")
[ -z "${INCEPTION_WEIGHTS:-}" ] || evaluate+=(--inception_weights "$INCEPTION_WEIGHTS")
[ "${ALLOW_FEW:-false}" != true ] || evaluate+=(--allow_few)

extractor=inception
[ "$REFERENCE" != streets ] || extractor=streets
extractor="${EXTRACTOR:-$extractor}"
case "$extractor" in
    inception) metrics="fid clip" ;;
    streets) metrics="fd kid agreement" ;;
    *) metrics="fd kid clip" ;;
esac
# shellcheck disable=SC2206 # a list of words, meant to be split
metrics=(${METRICS:-$metrics})

# A score is required if a variable asks for it or for what it needs; the others are computed if they can be.
is_required() {
    case "$1" in
        clip) [ -n "${METRICS:-}${CLIP_MODEL:-}" ] ;;
        fid | fd | kid | prdc) [ -n "${METRICS:-}${EXTRACTOR:-}${INCEPTION_WEIGHTS:-}$asked_reference" ] ;;
        *) [ -n "${METRICS:-}" ] ;;
    esac
}

# Check some metrics without generating; returns 1, with the message in $message, if they cannot be computed.
check() {
    local code=0
    { message="$("$python" -m halation.cli evaluate "${evaluate[@]}" "${to_come[@]}" --metrics "$@" --check 2>&1 >&3)" || code=$?; } 3>&1
    [ "$code" != 2 ] || return 1
    [ -z "$message" ] || printf '%s\n' "$message" >&2
    [ "$code" = 0 ] || exit "$code"
}

not_computed=()
name_missing() {
    printf 'run_full_evaluation.sh: these scores %s:\n' "$1" >&2
    printf '  %s\n' "${not_computed[@]}" >&2
}

if [ "$REFERENCE" = streets ] || [ -e "$REFERENCE" ]; then
    evaluate+=(--reference "$REFERENCE")
else
    found="there are no real images at $REFERENCE"
    expected="a folder of real images, or saved statistics (.npz, .safetensors)"
    [ -z "$asked_reference" ] || refuse "$found" "$expected" "export REFERENCE=/path/to/val2017"
    without=()
    for metric in "${metrics[@]}"; do
        case "$metric" in
            fid | fd | kid | prdc)
                [ -z "${METRICS:-}" ] || refuse "$found" "$expected" "export REFERENCE=/path/to/val2017"
                not_computed+=("$metric: $found; to do: export REFERENCE=/path/to/val2017")
                ;;
            *) without+=("$metric") ;;
        esac
    done
    [ -n "${METRICS:-}" ] || [ "$extractor" != inception ] || without+=(is)
    metrics=(${without[@]+"${without[@]}"})
fi
if [ "${#metrics[@]}" -gt 0 ] && ! check "${metrics[@]}"; then
    possible=() errors=()
    for metric in "${metrics[@]}"; do
        if check "$metric"; then
            possible+=("$metric")
        elif is_required "$metric"; then
            errors+=("$message")
        else
            not_computed+=("$metric: ${message#*halation: }")
        fi
    done
    if [ "${#errors[@]}" -gt 0 ]; then
        printf '%s\n' "${errors[@]}" >&2
        exit 2
    fi
    metrics=(${possible[@]+"${possible[@]}"})
fi
[ "${#not_computed[@]}" = 0 ] || name_missing "cannot be computed and will be left out"

"$python" "$here/batch_generate_t2i_multigpu.py" "${generate[@]}" ${devices[@]+"${devices[@]}"}
if [ "${#metrics[@]}" -gt 0 ]; then
    "$python" -m halation.cli evaluate "${evaluate[@]}" --metrics "${metrics[@]}" ${devices[@]+"${devices[@]}"}
    echo "scores: $RESULTS"
fi
if [ "${#not_computed[@]}" -gt 0 ]; then
    name_missing "could not be computed. The images in $OUTPUT_DIR are kept: run the script again for the rest"
    exit 1
fi
