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
mark="/tmp/toolkit-$(id -u)-my-job-$port"  # process ids of the nodes, for `stop`
quoted() { printf "'%s' " "${1//\'/\'\\\'\'}"; }
# -S: the largest exit code of a node; -f: all nodes at once.
over_all=(pdsh -R ssh -S -f 2 -w "$hosts")

if [ "${1:-}" = stop ]; then
  exec "${over_all[@]}" "kill -s TERM \"\$(cat $mark-%n.pid)\""
fi
command="cd $(quoted "$PWD") || exit 1; "
for name in PATH PYTHONPATH LD_LIBRARY_PATH "${!NCCL_@}"; do
  [ -z "${!name+set}" ] || command+="export $name=$(quoted "${!name}"); "
done
command+="export MASTER_ADDR=alpha MASTER_PORT=$port; "
command+="exec bash "
command+=out-pdsh/node.sh
command+=" --resume auto $(for word in "$@"; do quoted "$word"; done)"
# pdsh replaces %n by the number of the node and %h by its name, and %% by one %.
exec "${over_all[@]}" "export NODE_RANK=%n NODE_ADDR=%h; echo \$\$ > $mark-%n.pid; ${command//%/%%}"
