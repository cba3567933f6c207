#!/usr/bin/env bash
# Starts quickstart-llama on 16 × h100-sxm-80gb by MPICH's mpiexec, one process a rank; toolkit finds its ranks in the process manager's variables.
# Written by `toolkit emit`, which rewrites it: change the job and emit again.
# Call it from the folder in which `toolkit emit` ran: each node must have that folder, and toolkit, at the same path.
#
# Usage: bash out-mpich/mpich.sh [ARGUMENTS of toolkit train]
#
# Ctrl-C, SIGTERM and SIGUSR2 let all ranks save and end, if one of them runs on this machine.
set -uo pipefail

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
export MASTER_ADDR="${MASTER_ADDR:-alpha}"
export MASTER_PORT="${MASTER_PORT:-29500}"
names=MASTER_ADDR,MASTER_PORT
for name in OMP_NUM_THREADS TOKENIZERS_PARALLELISM PYTHONUNBUFFERED PYTHONFAULTHANDLER PYTORCH_CUDA_ALLOC_CONF DS_ACCELERATOR PATH PYTHONPATH LD_LIBRARY_PATH "${!NCCL_@}" "${!HF_@}"; do
  [ -z "${!name+set}" ] || names+=",$name"
done
set -m  # a process group of its own, which the terminal's Ctrl-C does not reach
mpiexec -n 16 -ppn 8 -hosts alpha,beta -wdir "$PWD" -genvlist "$names" \
  python -P -m toolkit train out-mpich/plan.json --resume auto "$@" < /dev/null &
mpi=$!
# mpiexec passes no signal on that means this to a rank. All ranks agree on the step, whichever of them hears of it.
# shellcheck disable=SC2329 # the trap below calls it
tell() {
  local proxies ranks
  children() { cat /proc/"$1"/task/*/children 2>/dev/null; }
  read -r -a proxies <<< "$(children "$mpi")"
  read -r -a ranks <<< "$(for proxy in "${proxies[@]}"; do children "$proxy"; done)"
  if [ "${#ranks[@]}" -gt 0 ]; then
    kill -s USR2 -- "${ranks[@]}" 2>/dev/null
  else
    echo "no rank runs on this machine, so none saves" >&2
    kill -s TERM "$mpi" 2>/dev/null
  fi
}
trap tell INT TERM HUP USR2
code=0
while kill -0 "$mpi" 2>/dev/null; do
  code=0
  wait "$mpi" || code=$?
done
last=0
wait "$mpi" || last=$?
[ "$last" -eq 127 ] || code=$last  # its own, if a signal ended the wait above
exit "$code"
