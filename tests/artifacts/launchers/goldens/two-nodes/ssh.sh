#!/usr/bin/env bash
# Starts quickstart-llama on 16 × h100-sxm-80gb on 2 nodes by ssh, which must not ask for passwords.
# Written by `toolkit emit`, which rewrites it: change the job and emit again.
# Call it from the folder in which `toolkit emit` ran: each node must have that folder, and toolkit, at the same path.
#
# Usage: bash out-ssh/ssh.sh [ARGUMENTS of toolkit train]
#
# Ctrl-C, or SIGTERM, lets all ranks save and end.
set -uo pipefail

hosts=(alpha beta)
port="${MASTER_PORT:-29500}"
# Process ids of the nodes, for `tell`: in a folder of each node that is the user's alone.
kept='kept="${XDG_RUNTIME_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}}/toolkit"'
mark="\$kept/my-job-$port"
quoted() { printf "'%s' " "${1//\'/\'\\\'\'}"; }

arguments="$(for word in "$@"; do quoted "$word"; done)"
sent="$(for name in PATH PYTHONPATH LD_LIBRARY_PATH "${!NCCL_@}" "${!HF_@}"; do
  [ -z "${!name+set}" ] || printf 'export %s=%s\n' "$name" "$(quoted "${!name}")"
done)"
start() {
  {
    printf 'cd %s || exit 1\n%s\n' "$(quoted "$PWD")" "$sent"
    printf 'export NODE_RANK=%s NODE_ADDR=%s MASTER_ADDR=%s MASTER_PORT=%s\n' "$1" "$2" "${hosts[0]}" "$port"
    printf '%s; (umask 077; mkdir -p "$kept"); echo $$ > "%s-%s.pid"\n' "$kept" "$mark" "$1"
    printf 'exec bash %s --resume auto %s < /dev/null\n' out-ssh/node.sh "$arguments"
  } | ssh -o BatchMode=yes "$2" bash -s 2>&1 | sed -u "s/^/$2: /"
}
# shellcheck disable=SC2329 # a trap below calls it, too
tell() {
  for rank in "${!hosts[@]}"; do
    ssh -n -o BatchMode=yes "${hosts[$rank]}" "$kept; kill -s TERM \"\$(cat \"$mark-$rank.pid\")\"" 2>/dev/null &
  done
}

set -m  # process groups of their own, which Ctrl-C does not reach
nodes=()
for rank in "${!hosts[@]}"; do
  {
    code=0
    start "$rank" "${hosts[$rank]}" || code=$?
    [ "$code" -eq 0 ] || tell  # the others would wait for it
    exit "$code"
  } &
  nodes+=("$!")
done
trap 'echo "each rank finishes its step and saves" >&2; tell' INT TERM HUP
worst=0
for node in "${nodes[@]}"; do
  code=0
  while kill -0 "$node" 2>/dev/null; do
    code=0
    wait "$node" || code=$?
  done
  last=0
  wait "$node" || last=$?
  [ "$last" -eq 127 ] || code=$last
  [ "$code" -le "$worst" ] || worst=$code
done
exit "$worst"
