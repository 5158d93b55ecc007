"""CUDA graphs are a matter of speed: a launch that asks for them and cannot have them runs without, and says why."""

import importlib.metadata
import importlib.util
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.cli.pretrain import main
from megatron_ext.config.derived.cuda_graphs import makes_graphs
from megatron_ext.device import graph_support
from megatron_ext.resilience.process_end import RunStatus
from megatron_ext.telemetry.banner import Begun, banner
from megatron_ext.train import configure as configuring
from megatron_ext.train.configure import Configured, configure
from megatron_ext.train.extensions import NONE, Extensions
from megatron_ext.train.pretrain import pretrain
from tests.support import small_runs
from tests.support.small_models import small_config

GRAPHS = "--cuda-graph-impl full_iteration"
MODEL = (
    "--num-layers 8 --hidden-size 128 --num-attention-heads 8 --seq-length 64 --micro-batch-size 1 --lr 1e-3 "
    "--train-iters 100 --mock-data --vocab-size 1000 --hidden-dropout 0 --attention-dropout 0"
)
SAYS = f"{GRAPHS} changes nothing here: steps run without CUDA graphs, and compute the same. In the way: "


@pytest.fixture(autouse=True)
def a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configuring, "shows_gpu", lambda: True)
    monkeypatch.setattr(configuring, "uncapturing_torch", lambda: None)


def configured(line: str) -> Configured:
    return configure(shlex.split(f"{MODEL} {GRAPHS} --dry-run --device cuda {line}"))


def in_the_way(line: str) -> list[str]:
    """What the one warning names, without the reasons."""
    found = configured(line)
    [warning] = [each for each in found.typed.warnings if GRAPHS in each]
    assert not makes_graphs(found.config)
    assert warning.startswith(SAYS)
    reasons = warning.removeprefix(SAYS).split("; ")
    assert all(reason.endswith(")") and " (" in reason and ": " in reason for reason in reasons), reasons
    return [reason.partition(" (")[0] for reason in reasons]


def test_steps_of_a_plain_launch_are_captured() -> None:
    found = configured("")
    assert (found.config.training.cuda_graph_impl, found.typed.warnings) == ("full_iteration", ())
    others = "--world-size 4 --use-distributed-optimizer --bf16 --linear-cross-entropy --gradient-accumulation-fusion"
    found = configured(f"{others} --cuda-graph-warmup-steps 5 --rampup-batch-size 4 4 100 --global-batch-size 8")
    assert (found.config.training.cuda_graph_impl, found.typed.warnings) == ("full_iteration", ())


REASONS = {
    "--tensor-model-parallel-size 2": ("--world-size 2", "--tensor-model-parallel-size 1"),
    "--pipeline-model-parallel-size 2": ("--world-size 2", "--pipeline-model-parallel-size 1"),
    "--context-parallel-size 2": ("--world-size 2", "--context-parallel-size 1"),
    "--use-torch-fsdp2": ("--world-size 2", "--use-torch-fsdp2=false"),
    "--use-megatron-fsdp": ("--world-size 2", "--use-megatron-fsdp=false"),
    "--overlap-grad-reduce": ("--world-size 2", "--overlap-grad-reduce=false"),
    "--num-distributed-optimizer-instances 2": (
        "--world-size 4 --use-distributed-optimizer",
        "--num-distributed-optimizer-instances 1",
    ),
    "--hidden-dropout 0.1": ("", "--hidden-dropout 0"),
    "--attention-dropout 0.25": ("", "--attention-dropout 0"),
    "--fp16": ("", "--fp16=false --bf16"),
    "--reset-attention-mask": ("", "--reset-attention-mask=false"),
    "--recompute-activations": ("", "--recompute-activations=false"),
    "--torch-compile": ("", "--torch-compile=false"),
    "--fp8-format hybrid": ("--bf16", None),
    "--optimizer-cpu-offload": ("--use-distributed-optimizer", "--optimizer-cpu-offload=false"),
    "--spike-threshold 3.0": ("--save checkpoints", None),
    "--timing-log-level 1": ("", "--timing-log-level 0"),
    "--log-communication-share": ("", "--log-communication-share=false"),
    "--log-straggler": ("", "--log-straggler=false"),
    "--nvtx-ranges": ("--profile --profile-step-start 2 --profile-step-end 4", "--nvtx-ranges=false"),
    "--num-experts 8": ("--disable-bias-linear", None),
    "--recompute-granularity full": ("--recompute-method uniform --recompute-num-layers 1", None),
}
"""What is in the way -> what it needs next to it, and what its warning says to use; None where it is to be left out."""


@pytest.mark.parametrize("named", REASONS)
def test_what_is_in_the_way_is_named_with_a_way_out(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configuring, "_missing_compiler", lambda: None)
    others, instead = REASONS[named]
    assert in_the_way(f"{others} {named}") == [named]
    found = configured(others if instead is None else f"{others} {named} {instead}")
    assert makes_graphs(found.config)
    assert not [warning for warning in found.typed.warnings if GRAPHS in warning]


def test_gathers_in_hooks_are_in_the_way_next_to_reductions() -> None:
    flags = "--world-size 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    assert in_the_way(flags) == ["--overlap-grad-reduce", "--overlap-param-gather"]


def test_transformer_engine_is_in_the_way() -> None:
    flags = shlex.split(f"{MODEL} {GRAPHS} --device cuda --transformer-impl transformer_engine --dry-run")
    [warning] = [each for each in configure(flags, believing=True).typed.warnings if each.startswith(GRAPHS)]
    assert "In the way: --transformer-impl transformer_engine (" in warning


def test_one_warning_names_everything() -> None:
    flags = "--world-size 2 --tensor-model-parallel-size 2 --hidden-dropout 0.1 --fp16 --log-straggler"
    assert in_the_way(flags) == [
        "--tensor-model-parallel-size 2",
        "--hidden-dropout 0.1",
        "--fp16",
        "--log-straggler",
    ]


def test_cpu_processes_have_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configuring, "uncapturing_torch", lambda: "2.11.0")
    assert in_the_way("--device cpu") == ["--device cpu"], "whichever torch they have"
    monkeypatch.setattr(configuring, "shows_gpu", lambda: False)
    assert in_the_way("--device auto") == ["this machine shows no NVIDIA GPU"]


def test_a_dry_run_believes_in_the_gpu_that_graphs_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configuring, "shows_gpu", lambda: False)
    found = configure(shlex.split(f"{MODEL} {GRAPHS} --dry-run"), believing=True)
    assert makes_graphs(found.config)
    [warning] = found.typed.warnings
    assert warning.endswith(f"does not have: an NVIDIA GPU ({GRAPHS})")


def test_a_torch_that_cannot_capture_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configuring, "uncapturing_torch", lambda: "2.11.0")
    assert in_the_way("") == ["torch 2.11.0"]


def test_whether_torch_captures_is_read_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has = hasattr(torch.autograd.graph, "set_override_stale_capture_stream")
    assert graph_support.uncapturing_torch() == (None if has else torch.__version__.partition("+")[0])
    (tmp_path / "autograd").mkdir()
    (tmp_path / "autograd/graph.py").write_text("def saved_tensors_hooks():\n    pass\n")
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "2.11.0")
    origin = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: origin)
    assert graph_support.uncapturing_torch() == "2.11.0"
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert graph_support.uncapturing_torch() is None


def test_torch_is_asked_for_graphs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else's start waits for its file."""

    def asked() -> None:
        raise AssertionError("nobody asked for graphs")

    monkeypatch.setattr(configuring, "uncapturing_torch", asked)
    assert configure(shlex.split(f"{MODEL} --dry-run --cuda-graph-impl none")).typed.warnings == ()


def test_at_least_one_step_runs_before_the_capture() -> None:
    found = configured("--cuda-graph-warmup-steps 0")
    assert (makes_graphs(found.config), found.config.training.cuda_graph_warmup_steps) == (True, 1)
    [warning] = found.typed.warnings
    assert warning.startswith("--cuda-graph-warmup-steps 0 is taken for 1: ")


def test_steps_before_a_capture_that_never_comes_are_told() -> None:
    warnings = configured("--hidden-dropout 0.1 --cuda-graph-warmup-steps 5").typed.warnings
    assert [warning.partition(" here: ")[0] for warning in warnings] == [
        f"{GRAPHS} changes nothing",
        "--cuda-graph-warmup-steps 5 changes nothing",
    ]


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 0)])
def test_rank_0_prints_the_warning(rank: int, lines: int, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(f"{MODEL} {GRAPHS} --dry-run --device cpu --fp16")
    assert main(words, RunStatus(rank=rank)) == 0
    assert capsys.readouterr().err.count(f"warning: {SAYS}--device cpu (") == lines


@pytest.mark.parametrize(("part", "others"), [("loss", {}), ("layer_spec", {}), ("loss", {"layer_spec": print})])
def test_what_a_user_brings_is_not_replayed(
    part: str, others: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    own = Extensions(**{part: print, **others})
    config = small_config(training={"cuda_graph_impl": "full_iteration"})
    assert own.applied(config).training.cuda_graph_impl == "none"
    [warning] = own.warnings({"cuda_graph_impl": "full_iteration"})
    assert warning.startswith(f"{SAYS}{part}= (nobody knows ")
    assert [name for name in ("loss= (", "layer_spec= (") if name in warning] == [f"{n}= (" for n in (part, *others)]
    assert own.warnings({}) == own.warnings({"cuda_graph_impl": "local"}) == []
    assert NONE.applied(config) == config
    assert NONE.warnings({"cuda_graph_impl": "full_iteration"}) == []
    plain = small_config()
    assert own.applied(plain) == plain


def test_a_dry_run_tells_what_own_parts_leave_out(capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(f"{MODEL} {GRAPHS} --dry-run --device cuda")
    assert main(words, RunStatus(rank=0), loss=print) == 0
    assert f"warning: {SAYS}loss= (" in capsys.readouterr().err


def test_the_library_prints_the_warnings_of_flags(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*small_runs.MODEL, "--eval-iters", "0", *GRAPHS.split()]
    assert len(pretrain(words).losses) == 3
    assert f"warning: {SAYS}" in capsys.readouterr().err
    assert len(pretrain(configure(words)).losses) == 3
    assert SAYS not in capsys.readouterr().err, "who configures has the warnings"


def test_the_start_of_a_run_says_what_is_replayed() -> None:
    begun = Begun("a device", "nccl", iteration=0, consumed_samples=0)
    lines = banner(configured("").config, begun).splitlines()
    assert lines[-1] == "graphs  after 3 steps, each step replays the passes that one CUDA graph holds"
    assert not [line for line in banner(configured("--fp16").config, begun).splitlines() if line.startswith("graphs")]
