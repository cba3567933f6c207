#!/usr/bin/env bash
# Starts quickstart-llama on 16 × h100-sxm-80gb by Open MPI, one process a rank; toolkit finds its ranks in Open MPI's variables.
# Written by `toolkit emit`, which rewrites it: change the job and emit again.
# Call it from the folder in which `toolkit emit` ran: each node must have that folder, and toolkit, at the same path.
#
# Usage: bash out-openmpi/openmpi.sh [ARGUMENTS of toolkit train]
#
# Ctrl-C, SIGTERM and SIGUSR2 let all ranks save and end.
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
names=()
for name in MASTER_ADDR MASTER_PORT OMP_NUM_THREADS TOKENIZERS_PARALLELISM PYTHONUNBUFFERED PYTHONFAULTHANDLER PYTORCH_CUDA_ALLOC_CONF DS_ACCELERATOR PATH PYTHONPATH LD_LIBRARY_PATH "${!NCCL_@}" "${!HF_@}"; do
  [ -z "${!name+set}" ] || names+=(-x "$name")
done
set -m  # a process group of its own, which the terminal's Ctrl-C does not reach
mpirun -np 16 --host alpha:8,beta:8 \
  --map-by ppr:8:node --bind-to none --wdir "$PWD" "${names[@]}" \
  python -P -m toolkit train out-openmpi/plan.json --resume auto "$@" < /dev/null &
mpi=$!
trap 'kill -s USR2 "$mpi" 2>/dev/null' INT TERM HUP USR2  # mpirun passes it on; it would kill the ranks at the others
code=0
while kill -0 "$mpi" 2>/dev/null; do
  code=0
  wait "$mpi" || code=$?
done
last=0
wait "$mpi" || last=$?
[ "$last" -eq 127 ] || code=$last  # its own, if a signal ended the wait above
exit "$code"
