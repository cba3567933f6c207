#!/usr/bin/env bash
# Starts quickstart-llama on 16 × h100-sxm-80gb on 2 nodes by pdsh over ssh.
# Written by `toolkit emit`, which rewrites it: change the job and emit again.
# Call it from the folder in which `toolkit emit` ran: each node must have that folder, and toolkit, at the same path.
#
# Usage: bash out-pdsh/pdsh.sh [ARGUMENTS of toolkit train]
#        bash out-pdsh/pdsh.sh stop     lets all ranks save and end
set -uo pipefail

hosts=alpha,beta
port="${MASTER_PORT:-29500}"
# Process ids of the nodes, for `stop`: in a folder of each node that is the user's alone.
kept='kept="${XDG_RUNTIME_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}}/toolkit"'
mark="\$kept/my-job-$port"
quoted() { printf "'%s' " "${1//\'/\'\\\'\'}"; }
# -S: the largest exit code of a node; -f: all nodes at once.
over_all=(pdsh -R ssh -S -f 2 -w "$hosts")

stop() { "${over_all[@]}" "$kept; kill -s TERM \"\$(cat \"$mark-%n.pid\")\""; }

if [ "${1:-}" = stop ]; then
  stop
  exit
fi
command="cd $(quoted "$PWD") || exit 1; "
for name in PATH PYTHONPATH LD_LIBRARY_PATH "${!NCCL_@}"; do
  [ -z "${!name+set}" ] || command+="export $name=$(quoted "${!name}"); "
done
command+="export MASTER_ADDR=alpha MASTER_PORT=$port; "
command+="$kept; (umask 077; mkdir -p \"\$kept\"); bash "
command+=out-pdsh/node.sh
command+=" --resume auto $(for word in "$@"; do quoted "$word"; done) < /dev/null & "
# pdsh replaces %n by the number of the node and %h by its name, and %% by one %.
command="export NODE_RANK=%n NODE_ADDR=%h; ${command//%/%%}"
failed="its ranks ended with exit code"
command+="echo \$! > \"$mark-%n.pid\"; wait \$!; code=\$?; [ \$code -eq 0 ] || echo $failed \$code; exit \$code"
"${over_all[@]}" "$command" | {
  trap '' INT
  told=false
  while IFS= read -r line; do
    printf '%s\n' "$line"
    if ! $told && [[ "$line" == *": $failed "* ]]; then
      told=true
      stop 2>/dev/null &  # the others would wait for it
    fi
  done
  wait
}
exit "${PIPESTATUS[0]}"
