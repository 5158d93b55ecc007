"""Tasks and samples in the middle of training: they are written everywhere, and the training does not notice."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.plugins.pages.loss_curve import read_history
from megatron_ext.plugins.pages.run_page import run_page
from tests.support.evaluation_tasks import write_tasks
from tests.support.several_models import in_turn
from tests.support.trained_models import write_corpus

# Of the second tier: tests/plugins/tasks evaluates.
pytestmark = pytest.mark.full

FLAGS = """
    --num-layers 4 --hidden-size 48 --num-attention-heads 4 --seq-length 32 --hidden-dropout 0.1 --attention-dropout 0.1
    --tokenizer-type ByteTokenizer --split 80,20,0 --micro-batch-size 2 --global-batch-size 8 --train-iters 3 --lr 5e-3
    --eval-interval 2 --eval-iters 1 --log-interval 1 --device cpu --num-workers 0
"""
EXPERTS = """--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --disable-bias-linear --swiglu
    --position-embedding-type rope --expert-model-parallel-size 2"""
LAYOUTS = {
    "one sequence divided by tensor-parallel ranks": "--tensor-model-parallel-size 2 --sequence-parallel",
    "interleaved stages": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    "stages in a V": (
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --pipeline-schedule zbv"
    ),
    "experts, gradients and gathering overlapped": f"{EXPERTS} --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather",
}
MORE_LAYOUTS = {
    "positions divided": "--context-parallel-size 2 --position-embedding-type rope --attention-dropout 0",
    "weights divided by FSDP2": "--use-torch-fsdp2 --untie-embeddings-and-output-weights",
    "weights divided by Megatron-FSDP": "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
    "keys that an indexer chooses of a divided sequence": "--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 12 "
    "--qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 --experimental-attention-variant dsa "
    "--dsa-indexer-n-heads 4 --dsa-indexer-head-dim 12 --dsa-indexer-topk 6 --position-embedding-type rope "
    "--attention-dropout 0 --normalization RMSNorm --tensor-model-parallel-size 2 --sequence-parallel",
    "recomputed": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --bf16",
}


def _run(flags: list[str]) -> tuple[list[float], str]:
    """On a rank: the losses of the whole run, and what its state is at the end."""
    from megatron_ext import device
    from megatron_ext.resilience.process_end import RunStatus
    from megatron_ext.resilience.signals import SignalWatcher
    from megatron_ext.train.build import build_run
    from megatron_ext.train.callbacks.standard import standard_callbacks
    from megatron_ext.train.configure import configure
    from megatron_ext.train.trainer import Callback, Trainer
    from tests.support.run_state import state_hash

    losses: list[float] = []

    class Losses(Callback):
        def on_step_end(self, trainer: Trainer, result: Any) -> None:
            losses.extend([result.loss, result.grad_norm])

    run = build_run(configure(flags).config, device.install("cpu"))
    with SignalWatcher(None, None) as signals:
        Trainer(run, [*standard_callbacks(run, signals, RunStatus(run.rank)), Losses()]).fit()
    run.loaders.close()
    return losses, state_hash(run)


def _flags(folder: Path, layout: str, asks: bool, save: Path) -> list[str]:
    flags = [*shlex.split(FLAGS), *shlex.split(layout), "--data-path", str(folder / "corpus")]
    flags += ["--metrics-file", str(save / "metrics.jsonl"), "--tensorboard-dir", str(save)]
    if not asks:
        return flags
    asked = ["--eval-tasks", str(folder / "tasks.yaml"), "--sample-prompts", str(folder / "prompts.txt")]
    return [*flags, *asked, "--sample-interval", "2", "--sample-tokens", "7"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_corpus(folder)
    files = write_tasks(folder, 9, 32)
    tasks = {
        "lambada": {"task": "LAMBADA", "valid_data": files["lambada"], "strict_lambada": True},
        "wiki": {"task": "PERPLEXITY", "valid_data": [files["documents"]], "overlapping_eval": 16},
        "choices": {"task": "MULTIPLE_CHOICE", "valid_data": files["choices"]},
    }
    (folder / "tasks.yaml").write_text(json.dumps(tasks))
    (folder / "prompts.txt").write_text("import \ndef main(\n\nclass")
    return folder


def _check(folder: Path, tmp_path: Path, layouts: dict[str, str]) -> None:
    runs = []
    for number, layout in enumerate(layouts.values()):
        for asks in (False, True):
            runs.append(_flags(folder, layout, asks, tmp_path / f"{number}-{asks}"))
    ranks = run_ranks(2, in_turn, _run, runs)
    for results in ranks:
        for name, (without, having) in zip(layouts, zip(results[::2], results[1::2], strict=True), strict=True):
            assert len(without[0]) == 6
            assert without == having, name
    for number in range(len(layouts)):
        rows = [json.loads(line) for line in (tmp_path / f"{number}-True" / "metrics.jsonl").read_text().splitlines()]
        tasks = [row for row in rows if "tasks" in row]
        assert [row["iteration"] for row in tasks] == [2, 3]
        assert {name: found["items"] for name, found in tasks[0]["tasks"].items() if "items" in found} == {
            "lambada": 9,
            "choices": 9,
        }
        samples = [row for row in rows if "samples" in row]
        assert [row["iteration"] for row in samples] == [2]
        assert [sample["prompt"] for sample in samples[0]["samples"]] == ["import ", "def main(", "class"]


def test_the_training_does_not_notice(folder: Path, tmp_path: Path) -> None:
    _check(folder, tmp_path, LAYOUTS)
    _check_shown(tmp_path / "0-True")


@pytest.mark.slow  # schemes and techniques besides those above
def test_more_layouts_do_not_notice(folder: Path, tmp_path: Path) -> None:
    _check(folder, tmp_path, MORE_LAYOUTS)


def _check_shown(save: Path) -> None:
    """The run's page and TensorBoard show results and samples."""
    page = run_page(read_history(save / "metrics.jsonl"), "a run")
    assert "Task lambada" in page
    assert "Task wiki" in page
    assert "Samples" in page
    assert '<span class="prompt">def main(</span>' in page
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(save))
    shown.Reload()
    assert {"lambada/accuracy", "wiki/bits_per_byte", "choices/accuracy_normalized"} <= set(shown.Tags()["scalars"])
    assert "sample 0/text_summary" in shown.Tags()["tensors"]
