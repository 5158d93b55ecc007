"""--stages on several ranks: groups, model and data are made anew where a stage begins; the curve is one process's."""

import shlex
from pathlib import Path

import pytest

from megatron_ext.train.pretrain import pretrain
from megatron_ext.verify.ranks import run_ranks
from tests.support.small_runs import MODEL

LAYOUTS = {
    "DP2, distributed optimizer": "--use-distributed-optimizer",
    "CP2": "--context-parallel-size 2 --cp-comm-type p2p",
    "PP2": "--pipeline-model-parallel-size 2",
}
FLAGS = "--train-iters 4 --eval-iters 0 --attention-dropout 0 --hidden-dropout 0"


def _losses(flags: list[str]) -> list[float]:
    return list(pretrain(flags).losses)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_of_stages_are_those_of_one_process(layout: str, tmp_path: Path) -> None:
    stages = tmp_path / "stages.yaml"
    stages.write_text("1: {seq_length: 32}\n3: {seq_length: 48, rotary_base: 70000, micro_batch_size: 1}")
    words = [*MODEL, *shlex.split(FLAGS), "--stages", str(stages)]
    [alone] = run_ranks(1, _losses, [*words, "--save", str(tmp_path / "alone")])
    ranks = run_ranks(2, _losses, [*words, *shlex.split(LAYOUTS[layout]), "--save", str(tmp_path / "ranks")])
    assert len(alone) == 4
    for losses in ranks:
        assert losses == pytest.approx(alone, rel=1e-5)
