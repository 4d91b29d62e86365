#!/usr/bin/env bash
# PPO from the command line:  scripts/run_online_rl_ppo.sh --env CartPole-v1
exec "${PYTHON:-python}" -m deft train ppo "$@"
