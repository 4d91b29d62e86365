#!/usr/bin/env bash
# GRPO from the command line:  scripts/run_online_rl_grpo.sh --env driving
exec "${PYTHON:-python}" -m deft train grpo "$@"
