#!/usr/bin/env bash
# SAC from the command line:  scripts/run_online_rl_sac.sh --env HalfCheetah-v5
exec "${PYTHON:-python}" -m deft train sac "$@"
