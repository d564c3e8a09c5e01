#!/usr/bin/env bash
# Train on every visible GPU, or on two CPU ranks without a GPU. Takes the flags of train.py and works from any folder:
#   bash run_ddp.sh --num_register_tokens 4 --batch_size 64 --lr 2e-4
#   bash run_ddp.sh --data FOLDER --eval_every 10000 --eval_images 5000    # FID of all ranks; --eval_every 0: none
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)"
python="$here/../../.venv/bin/python"
[ -x "$python" ] || python="$(command -v python || command -v python3)"

# Used for the rendezvous if it is free, else the system picks a port.
export MASTER_PORT="${MASTER_PORT:-29500}"

ranks=()
case " ${*//-/_} " in
    *" __nproc"* | *" __help "* | *" _h "*) ;;
    *)
        gpus="$("$python" -c 'from halation.distributed.launcher import num_gpus; print(num_gpus())')"
        if [ "$gpus" = 0 ]; then
            echo "run_ddp.sh: no GPU found: training on 2 CPU ranks" >&2
            ranks=(--nproc 2)
        fi
        ;;
esac

exec "$python" "$here/train.py" ${ranks[@]+"${ranks[@]}"} "$@"
