#!/usr/bin/env bash
# The phases of F1 training:  scripts/train.sh PHASE [NUM_GPUS [NUM_ENVS_PER_GPU]] [flags of deft train PHASE]
#
#   scripts/train.sh teacher 1 1 --num_episodes 1000
#   CUDA_VISIBLE_DEVICES=0,1,2,3 scripts/train.sh teacher 4 2 --num_episodes 10000
#   scripts/train.sh teacher 4 2 --auto_resume
#
# With several GPUs one process a GPU trains, each with its own environments; accelerate starts them.
set -euo pipefail

usage="usage: scripts/train.sh teacher|student|adversarial [NUM_GPUS [NUM_ENVS_PER_GPU]] [flags]"
phase="${1:-}"
case "$phase" in
    teacher | student | adversarial) shift ;;
    *) echo "$usage" >&2; exit 2 ;;
esac
num_gpus=1
num_envs=1
if [[ "${1:-}" =~ ^[0-9]+$ ]]; then num_gpus="$1"; shift; fi
if [[ "${1:-}" =~ ^[0-9]+$ ]]; then num_envs="$1"; shift; fi
if (( num_gpus < 1 || num_envs < 1 )); then echo "$usage" >&2; exit 2; fi

python="${PYTHON:-python}"
if (( num_gpus > 1 )); then
    exec "$python" -m accelerate.commands.launch --multi_gpu --num_processes "$num_gpus" --num_machines 1 --dynamo_backend no \
        --mixed_precision no -m deft train "$phase" --num_envs "$num_envs" "$@"
fi
exec "$python" -m deft train "$phase" --num_envs "$num_envs" "$@"
