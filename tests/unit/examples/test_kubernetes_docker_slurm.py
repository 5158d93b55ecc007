"""The Dockerfile, the Kubernetes job and the workflow name what is there, and the job's command starts a recipe."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = (ROOT / "examples/docker/Dockerfile").read_text()
JOB = yaml.safe_load((ROOT / "examples/kubernetes/pytorchjob.yaml").read_text())
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
NOT_INSTALLED = "pip install -r requirements-dev.txt"
PODS: dict[str, dict[str, Any]] = JOB["spec"]["pytorchReplicaSpecs"]


def test_the_image_is_made_of_what_is_there() -> None:
    copied = [word for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.MULTILINE) for word in line.split()[:-1]]
    assert {"requirements.txt", "pretrain_gpt.py", "megatron_ext", "tools", "tasks", "examples"} <= set(copied)
    assert [name for name in copied if not (ROOT / name).exists()] == []
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sent == set(copied) - {"./"}
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


def test_the_job_is_what_the_published_schemas_allow() -> None:
    """That of Kubeflow's PyTorchJob for the job, that of Kubernetes for the pods in it; unknown names are refused."""
    jsonschema = pytest.importorskip("jsonschema", reason=NOT_INSTALLED)
    kubernetes = pytest.importorskip("kubernetes_validate", reason=NOT_INSTALLED)
    schema = json.loads((ROOT / "tests/golden/pytorchjob_schema.json").read_text())
    jsonschema.validate(JOB, schema)
    for name, pod in PODS.items():
        kubernetes.validate(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, **pod["template"]}, "1.37", True
        )
    with pytest.raises(jsonschema.ValidationError, match="'backoffLimits' was unexpected"):
        jsonschema.validate({**JOB, "spec": {**JOB["spec"], "runPolicy": {"backoffLimits": 10}}}, schema)
    wrong = {"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [{"name": "pytorch", "volumeMount": []}]}}
    with pytest.raises(jsonschema.ValidationError, match="'volumeMount' was unexpected"):
        kubernetes.validate(wrong, "1.37", True)


def test_the_workflow_is_what_githubs_schema_allows() -> None:
    pytest.importorskip("check_jsonschema", reason=NOT_INSTALLED)
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    checked = subprocess.run([*command, ROOT / ".github/workflows/ci.yml"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


class Cluster:
    """The pods of the job, one after another: what the operator gives them, and a stand-in for torchrun."""

    def __init__(self, folder: Path):
        self.container = PODS["Worker"]["template"]["spec"]["containers"][0]
        self.save = folder / "ckpt"
        self.commands = folder / "bin"
        self.commands.mkdir()
        (self.commands / "python").symlink_to(sys.executable)

    def pod(self, number: int = 0, *, ends: int | None = 0, does: str = "", **variables: str) -> tuple[int, str, str]:
        """Run a pod, whose run ends with a code in exit.json (None: no file); return code, output and errors."""
        record = f'echo \'{{"code": {ends}, "rank": 3, "message": "a \\\\"code\\\\": 9"}}\' > "$SAVE/exit.json"'
        torchrun = self.commands / "torchrun"
        torchrun.write_text(f"""#!/bin/bash
echo "$*"
ls "$SAVE" >&2
mkdir -p "$SAVE"
{does}
{"" if ends is None else record}
exit {int(ends != 0)}
""")
        torchrun.chmod(0o755)
        operator = {
            "PET_NNODES": "8",
            "PET_NODE_RANK": str(number),
            "PET_NPROC_PER_NODE": "8",
            "MASTER_ADDR": "llama3-8b-master-0",
            "MASTER_PORT": "23456",
        }
        given = {entry["name"]: entry["value"] for entry in self.container["env"]}
        paths = {"PATH": f"{self.commands}:/usr/bin:/bin", "VIRTUAL_ENV": str(self.commands), "SAVE": str(self.save)}
        ended = subprocess.run(
            [*self.container["command"], *self.container["args"]],
            cwd=ROOT,
            env=given | operator | paths | variables,
            capture_output=True,
            text=True,
            check=False,
        )
        return ended.returncode, ended.stdout, ended.stderr

    def hook(self) -> None:
        """Do what a pod does before it is taken away, without its pause."""
        command = self.container["lifecycle"]["preStop"]["exec"]["command"]
        assert command[-1].endswith("; sleep 570")
        words = [*command[:-1], command[-1].removesuffix("; sleep 570")]
        subprocess.run(words, env={"SAVE": str(self.save), "PATH": "/usr/bin:/bin"}, check=True)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


@pytest.mark.parametrize("pod", [0, 7])
def test_the_jobs_command_starts_a_recipe(pod: int, cluster: Cluster) -> None:
    code, output, errors = cluster.pod(pod)
    assert code == 0, errors
    words = shlex.split(output)
    assert words[: words.index("pretrain_gpt.py")] == shlex.split(
        f"--nproc-per-node 8 --nnodes 8 --node-rank {pod} --master-addr llama3-8b-master-0 --master-port 23456 "
        "--max-restarts 3"
    )
    assert words[words.index("--config") + 1] == "examples/recipes/llama3.1-8b.yaml"
    assert words[words.index("--save") + 1] == str(cluster.save)


def test_the_operator_reads_exit_codes() -> None:
    """From 128 on a pod is started again, below that the job fails; podFailurePolicy belongs to another kind, Job."""
    assert {spec["restartPolicy"] for spec in PODS.values()} == {"ExitCode"}
    assert JOB["spec"]["runPolicy"]["backoffLimit"] > 0


@pytest.mark.parametrize("pod", [0, 7])
@pytest.mark.parametrize(
    ("ends", "code"), [(64, 64), (65, 65), (70, 70), (71, 71), (74, 143), (76, 143), (1, 143), (None, 143)]
)
def test_the_cause_decides_whether_a_pod_is_started_again(
    ends: int | None, code: int, pod: int, cluster: Cluster
) -> None:
    assert cluster.pod(pod, ends=ends)[0] == code
    assert cluster.pod(pod)[0] == 0, "a job with other flags is not held up by what that one left"


def test_a_stop_by_file_stays_a_stop(cluster: Cluster) -> None:
    """For each pod that is started again, until somebody removes the record."""
    assert cluster.pod(ends=75)[0] == cluster.pod(3, ends=75)[0] == 0
    (cluster.save / "stop").touch()
    for pod in (0, 3):
        code, output, _ = cluster.pod(pod)
        assert code == 0
        assert "stopped on request" in output
        assert "pretrain_gpt.py" not in output
    (cluster.save / "exit.json").unlink()
    code, output, seen = cluster.pod()
    assert (code, "pretrain_gpt.py" in output) == (0, True)
    assert "stop" not in seen.split(), "it would stop the run again"


def test_a_pod_that_is_taken_away_goes_on_elsewhere(cluster: Cluster) -> None:
    cluster.save.mkdir()
    cluster.hook()
    assert (cluster.save / "stop").exists()
    assert cluster.pod(3, ends=75)[0] == 143
    code, output, seen = cluster.pod()
    assert (code, "pretrain_gpt.py" in output) == (0, True)
    assert set(seen.split()) == {"attempts"}, "of the earlier run nothing is left that would end this one"


def test_starts_without_a_new_checkpoint_are_bounded(cluster: Cluster) -> None:
    """Those after progress are not counted; when the job has failed, the next one counts anew."""
    tracker = 'echo {} > "$SAVE/latest_checkpointed_iteration.txt"'
    for iteration in range(4):
        assert cluster.pod(ends=76, does=tracker.format(iteration), ATTEMPTS="3")[0] == 143
    found = [cluster.pod(ends=76, ATTEMPTS="3") for _ in range(4)]
    assert [code for code, _, _ in found] == [143, 143, 143, 1]
    assert "error: 3 starts have brought no checkpoint after iteration 3;" in found[-1][2]
    assert found[-1][1] == ""
    assert cluster.pod(ends=76, ATTEMPTS="3")[0] == 143


def test_sigterm_reaches_the_run(cluster: Cluster) -> None:
    """The shell is the container's first process, which alone is told."""
    waits = 'trap "touch $SAVE/told; exit 1" TERM; kill -TERM $PPID; for _ in {1..100}; do sleep 0.1; done'
    code, _, errors = cluster.pod(ends=None, does=waits)
    assert (cluster.save / "told").exists(), errors
    assert code == 143


def test_the_workflow_runs_what_continuous_integration_runs() -> None:
    steps = WORKFLOW["jobs"]["test"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == [".ci/run"]
    assert (ROOT / ".ci/run").stat().st_mode & 0o111
    [python] = [step["with"] for step in steps if "setup-python" in step.get("uses", "")]
    assert (ROOT / python["python-version-file"]).exists()
    assert WORKFLOW[True]["push"]["branches"] == ["main"]  # YAML 1.1 reads `on` as true
