"""The launch scripts that need no GPU run as they are."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron_ext.train.configure import configure
from megatron_ext.untrusted.metrics_rows import read_rows
from tests.support.fresh_environment import make_environment
from tests.support.warm_python import warm_python

# Of the second tier: the steps of the quickstart are those of the guides and of examples/, whose launches are read.
pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, variables: Mapping[str, str]) -> str:
    """What a command that must succeed writes."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD_SIZE"))}
    environment |= variables
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout


# The quickstart's python. Of the 23 MB of text that the first step writes, every thirtieth file stays, and
# the model and the batches of both trainings are as asked.
PYTHON_WITH_LESS_TEXT = """#!/bin/bash
case "$*" in *" pretrain_gpt.py "* | "tools/prepare_cache.py "*) set -- "$@" {changes} ;; esac
if [[ "$1 $2" == "-m pip" ]]; then exec {environment}/bin/python "$@"; fi
{python} "$@" || exit
if [[ $1 == tools/python_corpus.py ]]; then sed -i -n '1~30p' {folder}/python_train.jsonl; fi
"""


FOR_ONE_RANK = "--num-layers 2 --micro-batch-size 4 --global-batch-size 4 --eval-iters 1"


def write_program(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True)
    file.write_text(text)
    file.chmod(0o755)


# On 2 and 8 ranks it is slow: the layouts that it trains there have tests of their own.
@pytest.mark.parametrize("ranks", ["1", *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in ("2", ""))])
def test_the_quickstart_in_short_and_what_it_tells_to_try_next(ranks: str, tmp_path: Path) -> None:
    """By default it goes on with eight ranks without GPUs. Few layers and small batches cannot be divided so."""
    folder = tmp_path / "run"
    samples, small = (4, FOR_ONE_RANK) if ranks == "1" else (8, "")
    for stale in ("checkpoints", "hf"):  # of an earlier quickstart
        (folder / stale).mkdir(parents=True)
        (folder / stale / "stale").touch()
    (folder / ".made_by_quickstart").touch()
    make_environment(tmp_path / "environment")
    warm = warm_python(tmp_path / "warm") | {"VIRTUAL_ENV": str(tmp_path / "environment")}
    less = PYTHON_WITH_LESS_TEXT.format(
        changes=small, python=tmp_path / "warm/python", folder=folder, environment=tmp_path / "environment"
    )
    write_program(tmp_path / "bin/python", less)
    variables = {**warm, "PATH": f"{tmp_path}/bin:{warm['PATH']}"}
    said = run("bash", "examples/quickstart.sh", str(folder), "10", ranks, variables=variables)
    assert not list(folder.rglob("stale"))
    threads = min(4, len(os.sched_getaffinity(0)))  # although the tests' OMP_NUM_THREADS is 1
    assert f"4/8 training on one process, threads: {threads}; stops after 9 of 10 steps" in said
    rows = list(read_rows(folder / "checkpoints/metrics.jsonl"))
    losses = {row["iteration"]: row["lm_loss"] for row in rows if "lm_loss" in row}
    validation = {row["iteration"]: row["validation_loss"] for row in rows if "validation_loss" in row}
    assert list(losses) == [1, 10], "the log's intervals, across the stop at 9"
    assert list(validation) == [0, 5, 10]
    assert validation[10] < validation[0] - 0.5
    assert f"resuming at iteration 9 of {folder}/checkpoints" in said
    for part in ("train", "valid"):
        assert f"{folder}/{part}_text_document: whole, every token is below 1024" in said
        assert (folder / f"{part}_manifest.json").exists()
    assert re.search(rf"train: \d+ samples of {folder}/train_text_document\n", said)  # the index, before the training
    assert (folder / "step_9.txt").read_text().count("--- sample ") == samples
    page = (folder / "report.html").read_text()
    assert 'href="hf">hf</a>' in page
    assert 'aria-label="layout: ' in page
    assert "class SmallMLP(nn.Module):</span>" in page
    assert "changed          at iteration 9: resumed" in page
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    losses_of_both = re.search(r"loss over 16,384 tokens of \S+: ours (\d\.\d+), transformers (\d\.\d+) \(", said)
    assert losses_of_both is not None
    assert float(losses_of_both[1]) == pytest.approx(float(losses_of_both[2]), rel=1e-6)
    assert (folder / "hf/model.safetensors").exists()
    assert "\nclass SmallMLP(nn.Module):\n    def __init__(self, config" in said.partition("8/8 a sample")[2]
    short = ["--train-iters", "2", "--lr-warmup-iters", "1", *small.split()]
    if ranks == "1":
        next_commands_work_in_a_new_shell(said.partition(" Next:\n")[2], " ".join(short))
        return
    said = run("bash", "examples/pretrain_cpu.sh", str(folder), *short, variables=warm)
    assert " validation loss at iteration 2 |" in said


def next_commands_work_in_a_new_shell(printed: str, short: str) -> None:
    """Paste what the quickstart prints at its end into a shell that knows the system's programs alone."""
    lines = printed.splitlines()
    assert [bool(re.search(words, line)) for words, line in zip(NEXT, lines, strict=True)] == [True] * len(NEXT)
    # As printed; but the training in short, and of the server what it would show.
    lines[2] = re.sub(r"  +#", f" {short} #", lines[2])
    lines[4] = lines[4].replace("--logdir", "--inspect --logdir")
    script = "set -e\n" + "\n".join([*lines, "megatron-ext --help"])
    clean = ["env", "-i", "PATH=/usr/bin:/bin", f"HOME={os.environ['HOME']}", "OMP_NUM_THREADS=1", "bash", "-c", script]
    ended = subprocess.run(clean, cwd="/", capture_output=True, text=True, timeout=540, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    for said in (
        "--tensor-model-parallel-size",
        " validation loss at iteration 2 |",
        "\nclass ",
        "usage: megatron-ext",
    ):
        assert said in ended.stdout


NEXT = (
    "cd .* && source .*/bin/activate",
    "megatron-ext pretrain --help",
    "pretrain_cpu.sh",
    "megatron-ext sample",
    "tensorboard",
)


CLOCK = """import runpy, sys, time
read, sys.argv = time.perf_counter, sys.argv[2:]
time.perf_counter = lambda: {factor} * read()
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("factor", "takes"), [(1e-6, "1,200 steps of 0.00 s: about a minute in all"), (1e6, "100 steps")]
)
def test_the_quickstart_fits_its_steps_to_the_machine(factor: float, takes: str, tmp_path: Path) -> None:
    """It measures its own model; a clock that runs slower or faster makes the machine a fast or a slow one."""
    commands, folder = tmp_path / "commands", tmp_path / "run"
    (tmp_path / "clock.py").write_text(CLOCK.format(factor=factor))
    stand_in = STAND_IN.format(commands=commands, run=folder, python=sys.executable)
    measures = (
        f"""if [[ $1 == examples/quickstart_steps.py ]]; then exec {sys.executable} {tmp_path}/clock.py - "$@"; fi"""
    )
    write_program(tmp_path / "bin/python", stand_in.replace("#!/bin/bash\n", f"#!/bin/bash\n{measures}\n"))
    environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "VIRTUAL_ENV": str(tmp_path)}
    script = ["bash", str(ROOT / "examples/quickstart.sh"), str(folder)]
    ended = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert takes in ended.stderr
    steps = "1200" if factor < 1 else "100"
    assert f"of {steps} steps" in ended.stdout
    parts = re.findall(r"^== \[ *(\d+) s, about (\d+) s left\] (\d)/8 ", ended.stdout, re.MULTILINE)
    assert [number for _, _, number in parts] == list("12345678")
    for passed, left, _ in parts:  # a busy machine may need more than the minute
        assert int(left) == max(60 - int(passed), 0) if factor < 1 else int(passed) + int(left) > 300
    trainings = [line.split() for line in commands.read_text().splitlines() if "pretrain_gpt.py" in line]
    assert [words[words.index("--train-iters") + 1] for words in trainings] == [steps] * 2
    # A fast machine's training is the one whose losses README prints.
    first = trainings[0]
    warm_up = first[first.index("--lr-warmup-iters") + 1]
    assert (first[first.index("--exit-interval") + 1], warm_up) == (("1164", "60") if factor < 1 else ("97", "5"))


# Writes its arguments down, and the one file that the quickstart itself reads. A `-c` is run: it counts the cores.
STAND_IN = """#!/bin/bash
if [[ $1 == -c ]]; then exec {python} "$@"; fi
echo "$*" >> {commands}
case "$*" in *" pretrain_gpt.py "*) echo "$OMP_NUM_THREADS ${{GOMP_SPINCOUNT:-}}" >> {commands}.threads ;; esac
mkdir -p {run}
touch {run}/train_manifest.json
"""


def test_the_quickstart_on_eight_ranks_is_a_run_that_can_be_built(tmp_path: Path) -> None:
    """The flags of its training, from the script itself; this layout is trained in tests/parity."""
    commands, folder = tmp_path / "commands", tmp_path / "run"
    write_program(tmp_path / "bin/python", STAND_IN.format(commands=commands, run=folder, python=sys.executable))
    environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "VIRTUAL_ENV": str(tmp_path)}
    script = ["bash", str(ROOT / "examples/quickstart.sh"), str(folder), "10", "8"]
    ours = os.sched_getaffinity(0)
    try:
        for cores in ({min(ours)}, ours):  # a container's few cores on a machine of many
            commands.with_name("commands.threads").unlink(missing_ok=True)
            commands.unlink(missing_ok=True)
            os.sched_setaffinity(0, cores)
            ended = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
            assert ended.returncode == 0, ended.stderr
            threads = (tmp_path / "commands.threads").read_text().splitlines()
            assert threads == [f"{min(4, len(cores))} 5000", "1 "]
    finally:
        os.sched_setaffinity(0, ours)
    trainings = [line.split() for line in commands.read_text().splitlines() if "pretrain_gpt.py" in line]
    sizes = []
    for ranks, (launcher, flags) in zip((1, 8), ((words[:4], words[5:]) for words in trainings), strict=True):
        assert launcher == ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        for part in ("train", "valid"):
            for suffix in (".bin", ".idx"):
                (folder / f"{part}_text_document{suffix}").touch()
        given = [
            *flags,
            "--device",
            "cpu",
            "--tokenizer-type",
            "ByteTokenizer",
            "--dry-run",
            "--world-size",
            str(ranks),
        ]
        layout = configure(given).config.layout
        sizes.append((layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size))
        sizes.append((layout.num_virtual_stages_per_pipeline_rank, layout.data_parallel_size))
    assert sizes == [(1, 1), (None, 1), (2, 2), (2, 2)]


@pytest.mark.parametrize("named", ["folder", "folder/", "link", "link//", "folder/work.txt", "folder/sub/.."])
def test_the_quickstart_removes_no_folder_that_it_did_not_make(named: str, tmp_path: Path) -> None:
    (tmp_path / "folder/sub").mkdir(parents=True)
    (tmp_path / "folder/work.txt").write_text("a year's work")
    (tmp_path / "made").mkdir()
    (tmp_path / "made/.made_by_quickstart").touch()
    (tmp_path / "made/kept.txt").touch()
    (tmp_path / "link").symlink_to("made")  # one that it made: yet what it is to empty has another name
    command = ["bash", str(ROOT / "examples/quickstart.sh"), f"{tmp_path}/{named}", "1"]
    # A python that does nothing: a quickstart that does not refuse gets past its beginning, and not much further.
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to("/bin/true")
    environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "VIRTUAL_ENV": str(tmp_path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (tmp_path / "folder/work.txt").read_text() == "a year's work"
    assert (tmp_path / "made/kept.txt").exists()
    assert ended.returncode == 64, ended.stderr
    assert ended.stderr.count("\n") == 1
    assert ".made_by_quickstart" in ended.stderr
