#!/usr/bin/env bash
# CQL from the command line:  scripts/run_offline_rl_cql.sh --dataset hopper-medium-v2
exec "${PYTHON:-python}" -m deft train cql "$@"
