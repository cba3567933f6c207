"""Starts quickstart-llama on 16 × h100-sxm-80gb as a training job of SageMaker, through its Python SDK (version 3).

Written by `toolkit emit`, which rewrites it: change the job and emit again. Call it from the folder in which `toolkit emit` ran,
which is uploaded. An output folder that was uploaded with it is moved away there, to its name with `.uploaded` behind.

All nodes write their checkpoints to one FSx for Lustre file system, whose folder is given.
"""

import argparse

from sagemaker.train import ModelTrainer
from sagemaker.train.configs import Compute, FileSystemDataSource, InputData, Networking, SourceCode

# One line without double quotes: versions of the SDK write it between such into a script, and evaluate its words.
COMMAND = "mkdir -p /opt/ml/input/data/work runs && { [ -L runs/my-job ] || [ ! -e runs/my-job ] || mv -vT runs/my-job runs/my-job.uploaded; } && ln -sfn /opt/ml/input/data/work runs/my-job && export NODE_RANK=$SM_CURRENT_HOST_RANK NODE_ADDR=$SM_CURRENT_HOST MASTER_ADDR=$SM_MASTER_ADDR MASTER_PORT=$SM_MASTER_PORT && exec bash out-sagemaker/node.sh --resume auto"


def make_trainer(arguments: argparse.Namespace) -> ModelTrainer:
    return ModelTrainer(
        base_job_name="my-job",
        role=arguments.role,
        training_image="registry.example/image:1",
        source_code=SourceCode(source_dir=".", command=COMMAND),
        compute=Compute(instance_type="ml.p5.48xlarge", instance_count=2, volume_size_in_gb=arguments.disk_gb),
        networking=Networking(subnets=arguments.subnets, security_group_ids=arguments.security_groups),
        input_data_config=[
            InputData(
                channel_name="work",
                data_source=FileSystemDataSource(
                    file_system_id=arguments.file_system,
                    file_system_access_mode="rw",
                    file_system_type="FSxLustre",
                    directory_path=arguments.folder,
                ),
            )
        ],
    )


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", required=True, help="ARN of the execution role")
    parser.add_argument("--disk-gb", type=int, default=500, help="disk of each instance")
    parser.add_argument("--file-system", required=True, help="id of the FSx for Lustre file system")
    parser.add_argument("--folder", required=True, help="folder of the run there, beginning with the mount name")
    parser.add_argument("--subnets", required=True, nargs="+")
    parser.add_argument("--security-groups", required=True, nargs="+")
    return parser.parse_args(words)


if __name__ == "__main__":
    make_trainer(parse()).train(wait=False)
