"""examples/slurm/pretrain.sbatch, with stand-ins for Slurm's own commands."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples/slurm/pretrain.sbatch"
SCONTROL = """#!/usr/bin/env bash
if [ "$1" = show ]; then echo localhost; echo localhost; else echo "$@" >> "$NOTES"; fi
"""
# The second machine's task, with its number. Slurm gives a task one core unless it is told here.
SRUN = """#!/usr/bin/env bash
if [ "${SRUN_CPUS_PER_TASK:-1}" != "$SLURM_CPUS_PER_TASK" ]; then echo "one core" >&2; exit 9; fi
while [[ $1 == --* ]]; do shift; done
export SLURM_NODEID=1
exec "$@"
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    commands = tmp_path / "bin"
    commands.mkdir()
    save = tmp_path / "save"
    save.mkdir()
    write(commands / "scontrol", SCONTROL)
    write(commands / "srun", SRUN)
    slurm = {"SUBMIT_DIR": ROOT, "NNODES": 2, "JOB_NODELIST": "node[1-2]", "JOB_ID": 12345, "CPUS_PER_TASK": 4}
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")}
    return clean | {
        "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "NOTES": str(tmp_path / "notes"),
        "GPUS": "2",
        "TRAIN": "t",
        "VALID": "v",
        "TOKENIZER": "k",
        "SAVE": str(save),
        **{f"SLURM_{name}": str(value) for name, value in slurm.items()},
    }


def write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def test_the_shell_reads_it_and_so_does_slurm():
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    lines = SCRIPT.read_text().splitlines()
    directives = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert directives[-1] < first_command, "Slurm reads none after the first command"
    assert "#SBATCH --signal=B:TERM@120" in lines
    assert "#SBATCH --requeue" in lines


def test_what_each_machine_starts(environment: dict[str, str], tmp_path: Path):
    """The inner line, with torchrun's place taken by a program that shows what it was given."""
    write(tmp_path / "bin" / "torchrun", '#!/usr/bin/env bash\necho "OMP $OMP_NUM_THREADS"\necho "$@"\n')
    write(tmp_path / "bin" / "python", '#!/usr/bin/env bash\necho "$@"\n')
    said = subprocess.run(
        ["bash", str(SCRIPT), "--lr", "1e-4"], env=environment, capture_output=True, text=True, check=True
    )
    doctor, threads, launch = said.stdout.splitlines()
    assert doctor == "tools/doctor.py --nproc-per-node 2 --nnodes 2"
    assert threads == "OMP 2"
    assert launch.startswith(
        "--nproc-per-node 2 --nnodes 2 --node-rank 1 --master-addr localhost --master-port 22345 --max-restarts 3 "
        "pretrain_gpt.py "
    )
    assert f"--save {environment['SAVE']} --load {environment['SAVE']}" in launch
    assert launch.endswith(" --lr 1e-4")


def test_the_launch_line_is_a_launch_that_works(environment: dict[str, str], tmp_path: Path):
    """Through the real torchrun, to a dry run of all ranks."""
    for suffix in (".bin", ".idx"):
        (tmp_path / f"corpus{suffix}").touch()
    flags = ["--dry-run", "--world-size", "16", "--tokenizer-type", "ByteTokenizer"]
    data = {"TRAIN": str(tmp_path / "corpus"), "VALID": str(tmp_path / "corpus"), "GPUS": "1", "SLURM_NNODES": "1"}
    write(tmp_path / "bin" / "srun", SRUN.replace("SLURM_NODEID=1", "SLURM_NODEID=0"))
    said = subprocess.run(
        ["bash", str(SCRIPT), *flags], env=environment | data, capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, said.stdout + said.stderr
    assert "world size 16 = TP 1 x PP 1 x CP 1 x DP 16" in said.stdout
    assert "MASTER_ADDR localhost is" in said.stdout, "the doctor looked first"


RUN = """#!/usr/bin/env bash
case "$*" in *doctor*) exit 0 ;; esac
rm -f "$SAVE/exit.json"
touch "$SAVE/started"
for _ in $(seq 300); do
    if [ -e "$SAVE/stop" ]; then echo '{"code": 75, "rank": 0}' > "$SAVE/exit.json"; exit 1; fi
    sleep 0.05
done
echo '{"code": 70}' > "$SAVE/exit.json"
exit 1
"""


@pytest.mark.parametrize("stopped", ["by Slurm", "by hand", ""])
def test_a_run_that_slurm_has_stopped_is_queued_again_and_one_stopped_by_hand_or_failed_is_not(
    stopped: str, environment: dict[str, str], tmp_path: Path
):
    run = RUN if stopped else RUN.replace("seq 300", "seq 1")
    (Path(environment["SAVE"]) / "exit.json").write_text('{"code": 75}')  # of an earlier run
    write(tmp_path / "bin" / "srun", run)
    save, notes = Path(environment["SAVE"]), tmp_path / "notes"
    with subprocess.Popen(["bash", str(SCRIPT)], env=environment) as job:
        while not (save / "started").exists():
            assert job.poll() is None, "ended before it began"
            time.sleep(0.02)
        if stopped == "by Slurm":
            job.send_signal(signal.SIGTERM)
        elif stopped:
            (save / "stop").touch()
        assert job.wait(30) == 1
    assert (notes.read_text() if notes.exists() else "") == ("requeue 12345\n" if stopped == "by Slurm" else "")
