#!/usr/bin/env bash
# quickstart-llama on 8 × h100-sxm-80gb on a machine of vast.ai, through its CLI (pip install vastai; vastai set api-key KEY).
# Written by `toolkit emit`, which rewrites it: change the job and emit again.
# Call it from the folder in which `toolkit emit` ran, which is copied to the machine.
#
# Usage: bash out-vastai/vastai.sh offers            machines that have the cards, the cheapest first
#        bash out-vastai/vastai.sh create OFFER      rents one; DISK_GB sets its disk, 200 if left out
#        bash out-vastai/vastai.sh upload INSTANCE   copies this folder there, after which training starts
#        bash out-vastai/vastai.sh fetch INSTANCE    copies the run's output folder back
#        bash out-vastai/vastai.sh destroy INSTANCE
#
# An instance that is stopped and started again resumes from its last undamaged checkpoint.
set -euo pipefail

image=registry.example/image:1
folder=/mnt/toolkit
onstart='mkdir -p /mnt/toolkit && cd /mnt/toolkit || exit 1
(
  until [ -e .uploaded ]; do sleep 5; done
  pip install '"'"'accelerator-toolkit'"'"' || exit 1
  exec bash out-vastai/node.sh --resume auto
) >> train.log 2>&1 &
'
[ "$#" -ge 1 ] || set -- help
if [ "$1" != offers ] && [ "$#" -ne 2 ]; then
  sed -n '/^# Usage:/,/^#$/s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
case "$1" in
  offers)
    vastai search offers 'gpu_name=H100_SXM num_gpus=8 gpu_ram>=75 rentable=true verified=true' -o dph
    ;;
  create)
    vastai create instance "$2" --image "$image" --disk "${DISK_GB:-200}" --label my-job --ssh --direct --onstart-cmd "$onstart"
    ;;
  upload)
    mark="$(mktemp -d)"
    trap 'rm -r "$mark"' EXIT
    touch "$mark/.uploaded"
    vastai copy "local:$PWD/" "C.$2:$folder/"
    vastai copy "local:$mark/" "C.$2:$folder/"
    ;;
  fetch)
    mkdir -p runs/my-job
    vastai copy "C.$2:"/mnt/toolkit/runs/my-job/ "local:"runs/my-job/
    ;;
  destroy)
    vastai destroy instance "$2"
    ;;
  *)
    echo "no such command: $1" >&2
    exit 2
    ;;
esac
