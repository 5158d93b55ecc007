"""--dry-run judges the layout, not the machine: what is not here is believed, and the memory gets a verdict."""

import math
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.cost.dry_run import describe
from megatron_ext.errors import ConfigurationError
from megatron_ext.train import configure as configuring
from megatron_ext.train.configure import Configured, configure
from tests.support import planner_numbers
from tests.support.golden_text import section
from tests.support.wrong_flags import BASE

ROOT = Path(__file__).resolve().parents[3]
MODEL = BASE.removesuffix(" --mock-data --vocab-size 1000 --device cpu --dry-run")
MOCK = "--mock-data --vocab-size 1000"


@pytest.fixture(autouse=True)
def _laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without GPUs, compiler and optional packages."""
    monkeypatch.setattr(configuring, "shows_gpu", lambda: False)
    found = configuring.importlib.util.find_spec
    ours = lambda name: found(name) if name.startswith("megatron_ext") else None  # noqa: E731
    monkeypatch.setattr(configuring.importlib.util, "find_spec", ours)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def dry(line: str) -> Configured:
    return configure(shlex.split(f"{MODEL} {line} --dry-run"), believing=True)


BELIEVED = [
    (f"{MOCK} --device cuda", "an NVIDIA GPU (--device cuda)"),
    (f"{MOCK} --distributed-backend nccl", "an NVIDIA GPU (--distributed-backend nccl)"),
    (f"{MOCK} --profile", "an NVIDIA GPU (--profile)"),
    (f"{MOCK} --record-memory-history", "an NVIDIA GPU (--record-memory-history)"),
    (
        f"{MOCK} --transformer-impl transformer_engine",
        "an NVIDIA GPU (--transformer-impl transformer_engine); the package transformer_engine",
    ),
    (
        f"{MOCK} --experimental-attention-variant gated_delta_net --linear-attention-freq 2 --recurrence-kernels fla "
        "--bf16 --disable-bias-linear --position-embedding-type rope --normalization RMSNorm",
        "an NVIDIA GPU (--recurrence-kernels fla); the package fla",
    ),
    (f"{MOCK} --load nowhere --exit-on-missing-checkpoint", "the checkpoint in --load"),
    (f"{MOCK} --wandb-project p", "the package wandb"),
    (f"{MOCK} --torch-compile", "the C++ compiler no-such-compiler"),
    ("--vocab-size 300 --tokenizer-type ByteTokenizer --data-path nowhere/corpus", "the files of --data-path"),
    ("--mock-data --vocab-file nowhere --merge-file nowhere", "the tokenizer (50257 entries)"),
    (
        "--mock-data --vocab-size 32000 --tokenizer-type Llama2Tokenizer --tokenizer-model nowhere",
        "the tokenizer (32000 entries)",
    ),
    (
        "--mock-data --tokenizer-type HuggingFaceTokenizer --tokenizer-model nowhere",
        "the tokenizer (taken for one of 128256 entries, as is usual; --vocab-size says another number)",
    ),
]


@pytest.mark.parametrize(("line", "what"), BELIEVED, ids=[line for line, _ in BELIEVED])
def test_what_the_machine_does_not_have_is_believed_with_one_warning(line: str, what: str):
    (warning,) = dry(line).typed.warnings
    assert warning == f"--dry-run believes what this machine does not have: {what}"
    with pytest.raises(ConfigurationError):  # a run needs it, and so does a tool that reads the data
        configure(shlex.split(f"{MODEL} {line}"), believing=True)
    with pytest.raises(ConfigurationError):
        configure(shlex.split(f"{MODEL} {line} --dry-run"))


def test_files_that_tasks_name_are_believed_and_the_list_is_not(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.yaml"
    line = f"--mock-data --tokenizer-type ByteTokenizer --eval-tasks {tasks}"
    assert "the files of --eval-tasks" in dry(line).typed.warnings[0]
    tasks.write_text("last: {task: LAMBADA, valid_data: nowhere.jsonl}")
    (warning,) = dry(line).typed.warnings
    assert warning.endswith("does not have: the files that the tasks of --eval-tasks name")
    with pytest.raises(ConfigurationError, match=r"last: nowhere\.jsonl is no file"):
        configure(shlex.split(f"{MODEL} {line}"))
    tasks.write_text("last: {task: GLUE, valid_data: nowhere.jsonl}")
    with pytest.raises(ConfigurationError, match="last: task is GLUE"):
        dry(line)


def test_the_vocabulary_of_a_believed_tokenizer_is_the_one_of_the_model():
    config = dry("--mock-data --vocab-file nowhere --merge-file nowhere").config
    assert (config.data.vocab_size, config.model.padded_vocab_size) == (50257, 50304)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (f"{MOCK} --device cpu --distributed-backend nccl", "works on GPUs alone"),
        (f"{MOCK} --device cpu --profile", "add --use-pytorch-profiler"),
        ("--mock-data --tokenizer-type HuggingFaceTokenizer", "--tokenizer-model"),
        ("--mock-data --tokenizer-type NullTokenizer --tokenizer-model nowhere", "needs --vocab-size"),
        (f"--mock-data --vocab-file {__file__} --merge-file {__file__}", "are not the vocab.json and merges.txt"),
    ],
)
def test_what_the_flags_say_against_each_other_is_not_believed(line: str, words: str):
    with pytest.raises(ConfigurationError, match=words):
        dry(line)


def test_nothing_is_believed_where_everything_is_there(monkeypatch: pytest.MonkeyPatch):
    for flags in ("--device cpu", "--profile --use-pytorch-profiler --tensorboard-dir events"):
        assert dry(f"{MOCK} {flags}").typed.warnings == (), flags
    monkeypatch.setattr(configuring, "shows_gpu", lambda: True)
    monkeypatch.setattr(configuring.importlib.util, "find_spec", lambda _name: object())
    for flags in ("--device cuda", "--wandb-project p", "--transformer-impl transformer_engine"):
        assert dry(f"{MOCK} {flags}").typed.warnings == (), flags


@pytest.mark.parametrize("flags", ["--device-memory-gb 80", "--device-name h100"])
def test_a_device_to_judge_by_belongs_to_a_dry_run(flags: str):
    with pytest.raises(ConfigurationError, match="is what --dry-run judges a layout by"):
        configure(shlex.split(f"{MODEL} {MOCK} --device cpu {flags}"))
    assert dry(f"{MOCK} --device cpu {flags}").config.model.num_layers == 8


def test_a_model_that_does_not_fit_ends_with_1():
    """175 billion parameters on 8 devices, without any sharding."""
    model = "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --micro-batch-size 1"
    line = f"{model} --lr 1e-4 --train-iters 9 --bf16 {MOCK} --dry-run --world-size 8 --tensor-model-parallel-size"
    command = [sys.executable, "pretrain_gpt.py", *shlex.split(line), "8"]
    for memory, code in (("80", 1), ("800", 0)):
        result = subprocess.run(
            [*command, "--device-memory-gb", memory], capture_output=True, text=True, cwd=ROOT, check=False
        )
        assert result.returncode == code, result.stderr
        assert ("does not fit, optimizer being the largest part" in result.stdout) is (code == 1)


def test_facts_are_left_alone_where_nothing_is_asked_of_the_machine():
    assert dry(f"{MOCK} --device cpu").config == configure(shlex.split(f"{MODEL} {MOCK} --device cpu --dry-run")).config


@pytest.mark.parametrize("title", planner_numbers.DRY_RUNS)
def test_no_line_of_a_description_changes_unseen(title: str) -> None:
    expected = section("planner.txt", f"dry run: {title}")
    assert planner_numbers.dry_run(title).rstrip() == expected, "python tests/golden/regenerate.py"


@pytest.mark.parametrize("flags", ["", "--pipeline-model-parallel-size 8 --num-layers 8 --world-size 64"])
def test_a_report_for_a_screen_fits_it(flags: str) -> None:
    """Rows of its tables are left out, and it says how many; the first and the last stay."""
    config = dry(f"{MOCK} {flags}").config
    whole = describe(config).splitlines()
    assert describe(config, len(whole)).splitlines() == whole
    short = describe(config, 20).splitlines()
    assert len(short) <= 20
    left_out = [int(line.split()[1]) for line in short if "rows more, which" in line]
    rows = [line for line in whole if line]
    shown = [line for line in short if line and "rows more, which" not in line]
    assert [line for line in rows if line in shown] == shown
    assert len(rows) == len(shown) + sum(left_out)
    assert bool(left_out) == bool(flags)
    narrow = describe(config, 22, 60).splitlines()
    assert sum(max(1, math.ceil(len(line) / 60)) for line in narrow) <= 22, "a longer line takes several of the screen"
