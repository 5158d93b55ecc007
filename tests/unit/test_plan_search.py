"""What the search tries beyond stages that are alike, and what it says of its own assumptions."""

from dataclasses import replace

import pytest

from megatron_ext.config.arguments import parse
from megatron_ext.config.resolve import Facts
from megatron_ext.errors import ConfigurationError
from megatron_ext.plan.choices import hybrid, layouts
from megatron_ext.plan.hardware import Machine, hardware
from megatron_ext.plan.question import question
from megatron_ext.plan.search import Question, search
from megatron_ext.plan.sensitivity import alternatives, hinges
from tools.plan import main

_LLAMA = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --bf16 "
    "--position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 --group-query-attention "
    "--num-query-groups 8 --seq-length 8192 --vocab-size 128256"
)
BIG = f"--num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128 {_LLAMA}"
SMALL = f"--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 {_LLAMA}"


def asked(world_size: int, line: str, memory_gb: float = 85.0) -> Question:
    machine = Machine(hardware("h100", memory_gb=memory_gb))
    return question(parse(line.split()).values, Facts(), world_size, machine, 0.92)


def test_126_layers_with_embedding_and_loss_divide_over_16_stages() -> None:
    """Llama 3 405B: 128 units are 16 stages of 8 chunks; the layers alone are not."""
    values = asked(16384, f"{BIG} --global-batch-size 2048").values
    given = {**values, "tensor_model_parallel_size": 8, "context_parallel_size": 1, "pipeline_model_parallel_size": 16}
    found = list(layouts(given, 16384, 8))
    assert found
    assert all(choice["account_for_embedding_in_pipeline_split"] for choice in found)
    assert all(choice["account_for_loss_in_pipeline_split"] for choice in found)
    assert {choice["num_virtual_stages_per_pipeline_rank"] for choice in found} == {None, 2, 8}


def test_the_405b_of_16384_is_as_fast_as_what_was_trained() -> None:
    """Dubey et al. 2024 (arXiv:2407.21783, table 4): TP8 PP16 took 6.46 s."""
    question = asked(16384, f"{BIG} --global-batch-size 2048 --tensor-model-parallel-size 8 --micro-batch-size 1")
    best = search(question, 3).best
    assert best[0].seconds < 6.46
    assert all(candidate.memory.total <= question.usable_bytes for candidate in best)


def test_hsdp_has_a_copy_in_each_node() -> None:
    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "context_parallel_size": 1}
    assert hybrid({}, layout, 64, 8) == {"use_torch_fsdp2": True, "num_distributed_optimizer_instances": 8}
    assert hybrid({}, layout, 8, 8) is None
    assert hybrid({"num_distributed_optimizer_instances": 2}, layout, 64, 8) is None


def test_a_batch_that_nothing_divides_has_alternatives() -> None:
    line = f"{SMALL} --global-batch-size 1024"
    said = "\n".join(alternatives(asked(1000, line)))
    assert "0 divide --global-batch-size 1,024" in said
    assert "--global-batch-size 1,000: data-parallel sizes" in said
    assert "devices and the same batch" in said
    assert alternatives(asked(1024, line)) == []
    with pytest.raises(ConfigurationError, match="--global-batch-size 1,000: data-parallel sizes"):
        main(["--world-size", "1000", "--", *line.split()])


def test_the_winner_hangs_on_what_another_assumption_would_change() -> None:
    """The same layouts, the second put first: the assumption that it is best is broken at once."""
    question = asked(8, f"{SMALL} --global-batch-size 128")
    answer = search(question, 4)
    assert answer.best[1].seconds > 1.0005 * answer.best[0].seconds
    slowest = max(answer.contenders, key=lambda candidate: candidate.seconds)
    said = hinges(question, replace(answer, best=[slowest]))
    assert said[0] == "the winner hangs on assumptions:"
    assert any("10% more efficiency of matrix products" in line and "wins by" in line for line in said)
