#!/usr/bin/env bash
# Decision Transformer from the command line:  scripts/run_offline_rl_dt.sh --dataset hopper-medium-v2
exec "${PYTHON:-python}" -m deft train dt "$@"
