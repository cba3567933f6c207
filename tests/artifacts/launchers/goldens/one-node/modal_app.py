"""quickstart-llama on 8 × h100-sxm-80gb as an app of Modal (pip install modal; modal setup).

Written by `toolkit emit`, which rewrites it: change the job and emit again. Call it from the folder in which `toolkit emit` ran, which is
copied into the image:

    modal run --detach out-modal/modal_app.py

Checkpoints lie on the volume runs. A function that is preempted, or whose time is up, is called again and resumes.
"""

import signal
import subprocess

import modal

app = modal.App("my-job")
image = modal.Image.from_registry("registry.example/image:1")
image = image.run_commands("pip install 'accelerator-toolkit'")
image = image.add_local_dir(".", "/mnt/toolkit", ignore=[".git", ".venv", "runs/my-job"])
volume = modal.Volume.from_name("runs", create_if_missing=True)


@app.function(
    image=image,
    gpu="H100!:8",
    volumes={"/mnt/toolkit/runs/my-job": volume},
    timeout=43200,
    retries=modal.Retries(max_retries=10, initial_delay=1.0),
    single_use_containers=True,
)
def train() -> None:
    ranks = subprocess.Popen(["bash", "out-modal/node.sh", "--resume", "auto"], cwd="/mnt/toolkit")
    try:
        code = ranks.wait()
    except KeyboardInterrupt:  # Modal takes the machine away in 30 s
        ranks.send_signal(signal.SIGTERM)
        code = ranks.wait()
    if code != 0:
        raise RuntimeError(f"toolkit train ended with exit code {code}")


@app.local_entrypoint()
def main() -> None:
    train.remote()
