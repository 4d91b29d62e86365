#!/usr/bin/env bash
# Phases and algorithms:  scripts/train.sh PHASE|ALGORITHM [NUM_GPUS [NUM_ENVS_PER_GPU]] [flags of deft train]
#
#   scripts/train.sh teacher 1 1 --num_episodes 1000
#   CUDA_VISIBLE_DEVICES=0,1,2,3 scripts/train.sh teacher 4 2 --num_episodes 10000
#   scripts/train.sh teacher 4 2 --auto_resume
#   scripts/train.sh all 1 2
#   scripts/train.sh ppo 4 8 --env tabletop
#   scripts/train.sh iql 4 --dataset hopper-medium-v2
#
# With several GPUs torchrun starts one process per GPU, each with its own environments.
set -euo pipefail

usage="usage: scripts/train.sh teacher|student|adversarial|all|ALGORITHM [NUM_GPUS [NUM_ENVS_PER_GPU]] [flags]"
phase="${1:-}"
has_envs=1
case "$phase" in
    teacher | student | adversarial | all | ppo | sac | td3 | cal-ql | fql-online | grpo) shift ;;
    iql | cql | td3-bc | rebrac | fql | dt | sft) has_envs=0; shift ;;
    *) echo "$usage" >&2; exit 2 ;;
esac
num_gpus=1
num_envs=1
if [[ "${1:-}" =~ ^[0-9]+$ ]]; then num_gpus="$1"; shift; fi
if [[ "${1:-}" =~ ^[0-9]+$ ]]; then num_envs="$1"; shift; fi
if (( num_gpus < 1 || num_envs < 1 )); then echo "$usage" >&2; exit 2; fi
if (( has_envs )); then set -- --num_envs "$num_envs" "$@"; fi

python="${PYTHON:-python}"
if (( num_gpus > 1 )); then
    exec "$python" -P -m torch.distributed.run --standalone --nproc_per_node "$num_gpus" -m deft train "$phase" "$@"
fi
exec "$python" -m deft train "$phase" "$@"
