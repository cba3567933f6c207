"""Each tool's own schema or parser accepts the files written for it.

The tools exclude each other's dependencies and ours, so each is looked for in this environment and then in those that
LAUNCHER_TOOLS names, folders of virtual environments with a `:` between them. A tool that is in none is a skip with its name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from launcher_plans import CASES, launchers_of, write_case

pytestmark = pytest.mark.full

SKYPILOT = """
import sys, sky
task = sky.Task.from_yaml(sys.argv[1])
(resources,) = task.resources
print(task.num_nodes, resources.accelerators, resources.image_id)
"""
# Every key of the file is one that the models of the operator's own SDK have, and each value has their type.
KUBEFLOW = """
import sys, yaml
from kubeflow.training import models
from kubernetes.client import models as core
plan, job = yaml.safe_load_all(open(sys.argv[1]))

def check(value, kind, place):
    if kind.startswith("list["):
        assert isinstance(value, list), place
        for item in value:
            check(item, kind[5:-1], place)
    elif kind.startswith("dict("):
        assert isinstance(value, dict), place
        for key, item in value.items():
            check(item, kind[5:-1].split(", ")[1], place + "." + key)
    elif kind in ("str", "int", "bool", "object", "float"):
        assert kind == "object" or isinstance(value, {"str": str, "int": int, "bool": bool, "float": float}[kind]) or (
            kind == "str" and isinstance(value, int)), (place, value)
    else:
        model = getattr(models, kind, None) or getattr(core, kind)
        names = {json: name for name, json in model.attribute_map.items()}
        for key, item in value.items():
            assert key in names, place + "." + key
            check(item, model.openapi_types[names[key]], place + "." + key)
        model(**{names[key]: item for key, item in value.items()})

check(job, "KubeflowOrgV1PyTorchJob", "job")
check(plan, "V1ConfigMap", "plan")
print(job["kind"])
"""
JOBSET = """
import sys, yaml
from kubeflow_trainer_api import models
plan, job = yaml.safe_load_all(open(sys.argv[1]))

def keys(value, place):
    if isinstance(value, dict):
        for key, item in value.items():
            yield place + "." + key
            yield from keys(item, place + "." + key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from keys(item, place + "[" + str(index) + "]")

read = models.JobsetV1alpha2JobSetSpec.from_dict(job["spec"]).to_dict()
assert sorted(keys(job["spec"], "spec")) == sorted(keys(read, "spec"))
config = models.IoK8sApiCoreV1ConfigMap.from_dict(plan).to_dict()
assert sorted(keys(plan, "")) == sorted(keys(config, ""))
print(job["kind"])
"""
KUBERNETES = """
import sys, yaml, kubernetes_validate
plan, job = yaml.safe_load_all(open(sys.argv[1]))
kubernetes_validate.validate(plan, kubernetes_validate.latest_version(), strict=True)
templates = ([job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]] if job["kind"] == "JobSet" else
             [replica["template"] for replica in job["spec"]["pytorchReplicaSpecs"].values()])
for template in templates:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": template["spec"]}
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
if job["kind"] == "JobSet":
    batch = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **job["spec"]["replicatedJobs"][0]["template"]}
    kubernetes_validate.validate(batch, kubernetes_validate.latest_version(), strict=True)
print(len(templates))
"""
AZURE = """
import sys, os
from azure.ai.ml import load_job
job = load_job(sys.argv[1])
print(job.resources.instance_count, job.compute, job.environment.image, os.path.realpath(os.path.join(os.path.dirname(sys.argv[1]), str(job.code))) == os.getcwd())
"""
SAGEMAKER = """
import runpy, sys
from unittest import mock
made = runpy.run_path(sys.argv[1])
nodes = int(sys.argv[2])
where = ["--file-system", "fs-0123456789abcdef0", "--folder", "/fsx/run", "--subnets", "subnet-1", "--security-groups", "sg-1"]
words = ["--role", "arn:aws:iam::123456789012:role/x", *(where if nodes > 1 else ["--checkpoints", "s3://bucket/run"])]
import sagemaker.train.model_trainer as module
from sagemaker.train.defaults import TrainDefaults
TrainDefaults.get_role = staticmethod(lambda role=None, **_: role)  # asks AWS what the role may do
session = mock.MagicMock(spec=module.Session, boto_region_name="us-east-1", boto_session=mock.MagicMock())  # AWS itself
session.default_bucket_prefix, session.default_bucket.return_value = None, "bucket"
class Trainer(module.ModelTrainer):
    def __init__(self, **values):
        super().__init__(sagemaker_session=session, **values)
made["make_trainer"].__globals__["ModelTrainer"] = Trainer
trainer = made["make_trainer"](made["parse"](words))
print(trainer.compute.instance_type, trainer.compute.instance_count, repr(trainer.source_code.command.partition("exec ")[2]))
"""
MODAL = """
import runpy, sys
made = runpy.run_path(sys.argv[1], run_name="imported")
print(made["app"].name, sorted(made["app"].registered_functions), sorted(made["app"].registered_entrypoints))
"""
RUNPOD = """
import runpy, sys, base64, io, tarfile
import runpod
from runpod.api import ctl_commands
made = runpy.run_path(sys.argv[1], run_name="imported")
sent = []
def answer(query, *more, **named):
    sent.append(query)
    volume = {"id": "runs", "dataCenterId": "EU-1"}
    return {"data": {"podFindAndDeployOnDemand": {"id": "x"}, "gpuTypes": [{"id": "x"}], "myself": {"networkVolumes": [volume]}}}
ctl_commands.run_graphql_query = answer
made["create"]()
query = sent[-1]
from graphql import parse
parse(query)
arguments = {field.name.value: field.value for field in parse(query).definitions[0].selection_set.selections[0].arguments[0].value.fields}
env = {pair.fields[0].value.value: pair.fields[1].value.value for pair in arguments["env"].values}
archive = tarfile.open(fileobj=io.BytesIO(base64.b64decode(env["TOOLKIT_FILES"])))
print(arguments["gpuTypeId"].value, arguments["gpuCount"].value, sorted(archive.getnames()))
"""


@cache
def python_with(module: str) -> str | None:
    """Returns a Python in which a module can be imported."""
    folders = [Path(folder) for folder in os.environ.get("LAUNCHER_TOOLS", "").split(":") if folder]
    for python in [sys.executable, *(str(folder / "bin" / "python") for folder in folders)]:
        if subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode == 0:
            return python
    return None


def told(module: str, program: str, *arguments: object, cwd: Path) -> str:
    """Runs a program where a module is installed, and returns its last line."""
    python = python_with(module)
    if python is None:
        pytest.skip(f"{module} is not installed here, nor in an environment of LAUNCHER_TOOLS")
    command = [python, "-c", program, *map(str, arguments)]
    home = {"HOME": str(cwd), "PYTHONPATH": "", "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **home}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def cases(launcher: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [case for case in CASES if launcher in launchers_of(case)])


def written(case: str, launcher: str, tmp_path: Path) -> tuple[Path, int]:
    plan, files = write_case(case, tmp_path)
    return files[launcher], plan.job.cluster.nodes


@cases("skypilot")
def test_skypilot(case, tmp_path):
    file, nodes = written(case, "skypilot", tmp_path)
    shown = told("sky", SKYPILOT, file, cwd=tmp_path)
    assert shown.startswith(f"{nodes} ")
    assert ("H100" in shown) is ("cpu" not in case)


@cases("jobset")
@pytest.mark.parametrize(
    ("launcher", "module", "program"),
    [("pytorchjob", "kubeflow.training", KUBEFLOW), ("jobset", "kubeflow_trainer_api", JOBSET)],
)
def test_kubernetes(case, launcher, module, program, tmp_path):
    file, _ = written(case, launcher, tmp_path)
    assert told("kubernetes_validate", KUBERNETES, file, cwd=tmp_path).isdigit()
    assert told(module, program, file, cwd=tmp_path).lower() == launcher


@cases("azureml")
def test_azure(case, tmp_path):
    file, nodes = written(case, "azureml", tmp_path)
    assert told("azure.ai.ml", AZURE, file, cwd=tmp_path).split() == [
        str(nodes),
        "gpus",
        "registry.example/image:1",
        "True",
    ]


@cases("sagemaker")
def test_sagemaker(case, tmp_path):
    file, nodes = written(case, "sagemaker", tmp_path)
    shown = told("sagemaker.train", SAGEMAKER, file, nodes, cwd=tmp_path)
    assert shown.startswith(f"ml.p5.48xlarge {nodes} ")
    assert "node.sh" in shown


@cases("modal")
def test_modal(case, tmp_path):
    file, _ = written(case, "modal", tmp_path)
    assert told("modal", MODAL, file, cwd=tmp_path).endswith("['train'] ['main']")


@cases("runpod")
def test_runpod(case, tmp_path):
    file, _ = written(case, "runpod", tmp_path)
    shown = told("runpod", RUNPOD, file, cwd=tmp_path)
    assert shown.startswith("NVIDIA H100 80GB HBM3 8 ")
    assert "plan.json" in shown


class Recorder(BaseHTTPRequestHandler):
    """Answers as the server of vast.ai, and records what it is asked."""

    asked: ClassVar[list[tuple[str, str, dict]]] = []

    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.asked.append((self.command, self.path, json.loads(body or "{}")))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps({"success": True, "offers": [], "new_contract": 7}).encode())

    do_GET = do_PUT = do_POST = do_DELETE = answer  # noqa: N815 - as the base class calls them

    def log_message(self, *arguments):
        pass


@cases("vastai")
def test_vastai(case, tmp_path):
    """Its own command line takes each command of the script, and asks its server for what was meant."""
    file, _ = written(case, "vastai", tmp_path)
    python = python_with("vastai")
    if python is None:
        pytest.skip("vastai is not installed here, nor in an environment of LAUNCHER_TOOLS")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    tools = tmp_path / "bin"
    tools.mkdir()
    there = f"--url http://127.0.0.1:{server.server_port} --api-key x --raw"
    (tools / "vastai").write_text(f'#!/bin/sh\nexec {Path(python).parent / "vastai"} "$@" {there}\n')
    (tools / "vastai").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "HOME": str(tmp_path), "PYTHONPATH": ""}
    for words in (["offers"], ["create", "11"], ["destroy", "7"]):
        command = ["bash", str(file), *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, input="y\n")
        assert done.returncode == 0, done.stderr
    server.shutdown()
    (offers,) = [body for _, path, body in Recorder.asked if "bundles" in path or "search" in path]
    query = offers.get("q", offers)
    assert (query["gpu_name"], query["num_gpus"]) == ({"eq": "H100 SXM"}, {"eq": "8"})
    (made,) = [body for _, path, body in Recorder.asked if "/asks/11/" in path]
    assert (made["image"], made["disk"], made["label"]) == ("registry.example/image:1", 200, "my-job")
    assert "exec bash out-vastai/node.sh --resume auto" in made["onstart"]
    assert Recorder.asked[-1][:2] == ("DELETE", "/api/v0/instances/7/")
