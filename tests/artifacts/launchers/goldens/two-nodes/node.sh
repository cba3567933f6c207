#!/usr/bin/env bash
# Starts the 8 ranks of one of the 2 nodes of quickstart-llama on 16 × h100-sxm-80gb; it is called on each of them.
# Written by `toolkit emit`, which rewrites it: change the job and emit again.
# Call it from the folder in which `toolkit emit` ran, which relative paths refer to.
#
# Usage: NODE_RANK=0 MASTER_ADDR=HOST [MASTER_PORT=PORT] [NODE_ADDR=HOST] bash out-torchrun/node.sh [ARGUMENTS of toolkit train]
#   NODE_RANK    0 on the first node, up to 1 on the last
#   MASTER_ADDR  name or address of the first node, the same on each
#   MASTER_PORT  a free port there, 29500 if it is left out
#   NODE_ADDR    name or address by which the others reach this node, its host name if it is left out
set -euo pipefail

# A scheduler that starts one process a node counts it as a rank, which it is not.
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE
for name in "${!PET_@}"; do unset "$name"; done  # torchrun's options, which Kubeflow sets for its own way to start

: "${NODE_RANK:?set NODE_RANK to 0 on the first node, up to 1 on the last}"
: "${MASTER_ADDR:?set MASTER_ADDR to the address of node 0, the same on each node}"
MASTER_PORT="${MASTER_PORT:-29500}"
# cores divided among the node's processes: CPU Adam and the data loader use them, while torchrun's default of 1 starves both
export OMP_NUM_THREADS="${OMP_NUM_THREADS-$(( $(nproc) > 8 ? $(nproc) / 8 : 1 ))}"
# data loader workers are forked, and tokenizers' thread pool does not survive a fork
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM-false}"
# the last lines of a killed rank reach its log
export PYTHONUNBUFFERED="${PYTHONUNBUFFERED-1}"
# a crash in native code prints the Python stack
export PYTHONFAULTHANDLER="${PYTHONFAULTHANDLER-1}"
# segments grow in place, so little of a card is lost to fragmentation; large pages keep remapping cheap on a nearly full card
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF-${PYTORCH_ALLOC_CONF-expandable_segments:True,large_segment_size_mb:128}}"
# spares DeepSpeed the probing of other vendors (accelerator/real_accelerator.py get_accelerator)
export DS_ACCELERATOR=cuda
export PYTHONSAFEPATH=1  # a random.py in the working folder does not stand in for the standard library

for argument in "$@"; do
  if [ "$argument" = --elastic ]; then
    echo "error: --elastic needs torchrun with a range of nodes, and this script starts 2: run torchrun --nnodes 1:2 \
--nproc-per-node 8 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint HOST:PORT -m toolkit train JOB --elastic on each node, \
with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1. [ELASTIC]" >&2
    exit 2
  fi
done

is_host=false
[ "$NODE_RANK" != 0 ] || is_host=true
address=()
[ -z "${NODE_ADDR:-}" ] || address=(--local-addr "$NODE_ADDR")

# Signals go to the ranks: torchrun would kill them 30 s after it, in the midst of a save.
asked=0
ranks=()
look() {  # what is known of the ranks outlives torchrun, which the signal may end
  local found
  read -r -a found <<< "$(cat /proc/"$agent"/task/*/children 2>/dev/null | tr '\n' ' ')"
  [ "${#found[@]}" -eq 0 ] || ranks=("${found[@]}")
}
alive() { kill -0 "$1" 2>/dev/null && ! grep -qs '^State:.*Z' "/proc/$1/status"; }
# shellcheck disable=SC2329 # the traps below call it
tell() {
  local rank told=0
  look
  for rank in "${ranks[@]}"; do
    if alive "$rank" && kill -s "$1" "$rank" 2>/dev/null; then
      told=1
      [ "$1" != USR1 ] || break  # all ranks agree with one: another might hear it a step later, and save again
    fi
  done
  if [ "$told" -eq 0 ] && [ "$1" = USR2 ]; then
    kill -s TERM "$agent" 2>/dev/null || true  # it has no ranks yet
  fi
}
set -m  # a process group of its own, which the terminal's Ctrl-C does not reach
torchrun --nnodes 2 --nproc-per-node 8 \
  --rdzv-backend c10d --rdzv-id my-job --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" \
  --rdzv-conf "is_host=$is_host,read_timeout=600,join_timeout=600" "${address[@]}" \
  -m toolkit train out-torchrun/plan.json "$@" < /dev/null &
agent=$!
trap 'asked=1; tell USR2' INT TERM HUP USR2  # save and end
trap 'tell USR1' USR1                        # save and go on

code=0
while kill -0 "$agent" 2>/dev/null; do
  look
  sleep 1 > /dev/null 2>&1 &
  code=0
  wait -n "$agent" "$!" || code=$?
done
last=0
wait "$agent" || last=$?
[ "$last" -eq 127 ] || code=$last  # its own, if a signal ended the wait above
if [ "$asked" -eq 1 ]; then
  for rank in "${ranks[@]}"; do
    while alive "$rank"; do sleep 0.2 || true; done  # a signal to all ends the sleep
  done
  [ "$code" -eq 0 ] || code=130  # as `toolkit train` ends after a signal; torchrun makes it 1
fi
exit "$code"
