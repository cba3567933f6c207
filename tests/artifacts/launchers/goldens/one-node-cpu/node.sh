#!/usr/bin/env bash
# Starts quickstart-llama on 2 × cpu.
# Written by `toolkit emit`, which rewrites it: change the job and emit again.
# Call it from the folder in which `toolkit emit` ran, which relative paths refer to.
#
# Usage: bash out-torchrun/node.sh [ARGUMENTS of toolkit train]
set -euo pipefail

# A scheduler that starts one process a node counts it as a rank, which it is not.
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE
unset NODE_RANK MASTER_ADDR MASTER_PORT
exec python -P -m toolkit train out-torchrun/plan.json "$@"
