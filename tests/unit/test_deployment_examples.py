"""The Dockerfile, the Kubernetes job and the workflow name what is there, and the job's command starts a recipe."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "examples/docker/Dockerfile").read_text()
JOB = yaml.safe_load((ROOT / "examples/kubernetes/pytorchjob.yaml").read_text())
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
PODS: dict[str, dict[str, Any]] = JOB["spec"]["pytorchReplicaSpecs"]


def test_the_image_is_made_of_what_is_there() -> None:
    copied = [word for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.MULTILINE) for word in line.split()[:-1]]
    assert {"requirements.txt", "pretrain_gpt.py", "megatron_ext", "tools", "tasks", "examples"} <= set(copied)
    assert [name for name in copied if not (ROOT / name).exists()] == []
    version = (ROOT / ".python-version").read_text().strip()
    assert re.findall(r"^FROM (.+)$", DOCKERFILE, re.MULTILINE) == [f"python:{version}-slim"]
    for named in re.findall(r"examples/[\w/.]+\w", DOCKERFILE):
        assert (ROOT / named).exists()


def test_the_jobs_pods_are_alike_and_have_what_they_mount() -> None:
    assert (PODS["Master"]["replicas"], PODS["Worker"]["replicas"]) == (1, 7)
    assert PODS["Master"]["template"] == PODS["Worker"]["template"]
    pod = PODS["Master"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["name"] == "pytorch", "the operator looks for a container of this name"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == JOB["spec"]["nprocPerNode"]
    assert container["workingDir"] in DOCKERFILE


@pytest.mark.parametrize("pod", ["0", "7"])
def test_the_jobs_command_starts_a_recipe(pod: str, tmp_path: Path) -> None:
    container = PODS["Worker"]["template"]["spec"]["containers"][0]
    (tmp_path / "torchrun").write_text('#!/bin/bash\necho "$*"\n')
    (tmp_path / "torchrun").chmod(0o755)
    operator = {
        "PET_NNODES": "8",
        "PET_NODE_RANK": pod,
        "PET_NPROC_PER_NODE": "8",
        "MASTER_ADDR": "llama3-8b-master-0",
        "MASTER_PORT": "23456",
    }
    given = {entry["name"]: entry["value"] for entry in container["env"]}
    ended = subprocess.run(
        [*container["command"], *container["args"]],
        cwd=ROOT,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", **operator, **given},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    words = shlex.split(ended.stdout)
    assert words[: words.index("pretrain_gpt.py")] == shlex.split(
        f"--nproc-per-node 8 --nnodes 8 --node-rank {pod} --master-addr llama3-8b-master-0 --master-port 23456 "
        "--max-restarts 3"
    )
    assert words[words.index("--config") + 1] == "examples/recipes/llama3.1-8b.yaml"
    assert words[words.index("--save") + 1] == "/ckpt/llama3-8b"


def test_the_workflow_runs_what_continuous_integration_runs() -> None:
    steps = WORKFLOW["jobs"]["test"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == [".ci/run"]
    assert (ROOT / ".ci/run").stat().st_mode & 0o111
    [python] = [step["with"] for step in steps if "setup-python" in step.get("uses", "")]
    assert (ROOT / python["python-version-file"]).exists()
    assert WORKFLOW[True]["push"]["branches"] == ["main"]  # YAML 1.1 reads `on` as true
