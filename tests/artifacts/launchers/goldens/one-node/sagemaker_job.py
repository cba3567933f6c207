"""Starts quickstart-llama on 8 × h100-sxm-80gb as a training job of SageMaker, through its Python SDK (version 3).

Written by `toolkit emit`, which rewrites it: change the job and emit again. Call it from the folder in which `toolkit emit` ran,
which is uploaded. An output folder that was uploaded with it is moved away there, to its name with `.uploaded` behind.

Checkpoints go to the S3 folder that is given; a job that is started again with the same folder resumes.
"""

import argparse

from sagemaker.train import ModelTrainer
from sagemaker.train.configs import CheckpointConfig, Compute, SourceCode, StoppingCondition

# One line without double quotes: versions of the SDK write it between such into a script, and evaluate its words.
COMMAND = "mkdir -p /opt/ml/checkpoints runs && { [ -L runs/my-job ] || [ ! -e runs/my-job ] || mv -vT runs/my-job runs/my-job.uploaded; } && ln -sfn /opt/ml/checkpoints runs/my-job && exec bash out-sagemaker/node.sh --resume auto"


def make_trainer(arguments: argparse.Namespace) -> ModelTrainer:
    return ModelTrainer(
        base_job_name="my-job",
        role=arguments.role,
        training_image="registry.example/image:1",
        source_code=SourceCode(source_dir=".", command=COMMAND),
        compute=Compute(instance_type="ml.p5.48xlarge", instance_count=1, volume_size_in_gb=arguments.disk_gb),
        stopping_condition=StoppingCondition(max_runtime_in_seconds=43200),
        checkpoint_config=CheckpointConfig(s3_uri=arguments.checkpoints, local_path="/opt/ml/checkpoints"),
    )


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", required=True, help="ARN of the execution role")
    parser.add_argument("--disk-gb", type=int, default=500, help="disk of each instance")
    parser.add_argument("--checkpoints", required=True, help="s3://BUCKET/FOLDER of this run")
    return parser.parse_args(words)


if __name__ == "__main__":
    make_trainer(parse()).train(wait=False)
