#!/usr/bin/env bash
# Starts quickstart-llama on 2 × cpu by Open MPI, one process a rank; toolkit finds its ranks in Open MPI's variables.
# Written by `toolkit emit`, which rewrites it: change the job and emit again.
# Call it from the folder in which `toolkit emit` ran: each node must have that folder, and toolkit, at the same path.
#
# Usage: bash out-openmpi/openmpi.sh [ARGUMENTS of toolkit train]
#
# Ctrl-C, SIGTERM and SIGUSR2 let all ranks save and end.
set -uo pipefail

# cores divided among the node's processes: CPU Adam and the data loader use them, while torchrun's default of 1 starves both
export OMP_NUM_THREADS="${OMP_NUM_THREADS-$(( $(nproc) > 2 ? $(nproc) / 2 : 1 ))}"
# data loader workers are forked, and tokenizers' thread pool does not survive a fork
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM-false}"
# the last lines of a killed rank reach its log
export PYTHONUNBUFFERED="${PYTHONUNBUFFERED-1}"
# a crash in native code prints the Python stack
export PYTHONFAULTHANDLER="${PYTHONFAULTHANDLER-1}"
# DeepSpeed would use any GPU it finds (accelerator/real_accelerator.py get_accelerator)
export DS_ACCELERATOR=cpu
# a job on CPU neither sees nor uses a GPU
export CUDA_VISIBLE_DEVICES=''
export MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}"
export MASTER_PORT="${MASTER_PORT:-29500}"
names=()
for name in MASTER_ADDR MASTER_PORT OMP_NUM_THREADS TOKENIZERS_PARALLELISM PYTHONUNBUFFERED PYTHONFAULTHANDLER DS_ACCELERATOR CUDA_VISIBLE_DEVICES PATH PYTHONPATH LD_LIBRARY_PATH "${!NCCL_@}" "${!HF_@}"; do
  [ -z "${!name+set}" ] || names+=(-x "$name")
done
set -m  # a process group of its own, which the terminal's Ctrl-C does not reach
mpirun -np 2 --host localhost:2 \
  --map-by ppr:2:node --bind-to none --wdir "$PWD" "${names[@]}" \
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
