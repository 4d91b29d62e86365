#!/usr/bin/env bash
# IQL from the command line:  scripts/run_offline_rl_iql.sh --dataset hopper-medium-v2
exec "${PYTHON:-python}" -m deft train iql "$@"
