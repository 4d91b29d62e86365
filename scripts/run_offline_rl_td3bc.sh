#!/usr/bin/env bash
# TD3+BC from the command line:  scripts/run_offline_rl_td3bc.sh --dataset hopper-medium-v2
exec "${PYTHON:-python}" -m deft train td3-bc "$@"
