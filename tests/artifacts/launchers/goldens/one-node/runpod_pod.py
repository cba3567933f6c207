"""Starts quickstart-llama on 8 × h100-sxm-80gb in a pod of RunPod, through its Python SDK (pip install runpod).

Written by `toolkit emit`, which rewrites it: change the job and emit again. Call it from the folder in which `toolkit emit` ran, with
RUNPOD_API_KEY in the environment. The pod gets the plan alone: model and data come from the hub, or lie on the network volume.

/mnt/toolkit is the network volume runs: a new pod with it resumes the run.
The pod stops when the run ends.
"""

import base64
import io
import os
import tarfile

import runpod

FILES = ("out-runpod/plan.json", "out-runpod/node.sh")
START = (
    "mkdir -p /mnt/toolkit && cd /mnt/toolkit || exit 1\n"
    "printenv TOOLKIT_FILES | base64 -d | tar -xz\n"
    "pip install 'accelerator-toolkit' || exit 1\n"
    "bash out-runpod/node.sh --resume auto 2>&1 | tee -a train.log\n"
    'runpodctl stop pod "$RUNPOD_POD_ID" || sleep infinity\n'
)


def packed() -> str:
    """Return the files as text: a compressed archive in base64."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for name in FILES:
            tar.add(name)
    return base64.b64encode(archive.getvalue()).decode()


def create() -> dict:
    """Create the pod, and return RunPod's answer."""
    return runpod.create_pod(
        name="my-job",
        image_name="registry.example/image:1",
        gpu_type_id="NVIDIA H100 80GB HBM3",
        gpu_count=8,
        container_disk_in_gb=100,
        network_volume_id="runs",
        volume_mount_path="/mnt/toolkit",
        env={"TOOLKIT_FILES": packed(), "TOOLKIT_START": base64.b64encode(START.encode()).decode()},
        # The SDK puts this text between double quotes of a query, as it is.
        docker_args="bash -c 'printenv TOOLKIT_START | base64 -d > /tmp/start.sh && exec bash /tmp/start.sh'",
    )


if __name__ == "__main__":
    runpod.api_key = os.environ["RUNPOD_API_KEY"]
    print(create())
