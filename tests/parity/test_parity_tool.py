"""tools/parity.py: it says that runs agree where they do, and names the right tensor for each planted fault."""

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.prove.commands import parity
from megatron_ext.plugins.prove.compared_models import MODELS, RECIPE
from megatron_ext.plugins.prove.first_difference import Proof, comparison, prove
from megatron_ext.plugins.prove.gather import LOSS, _in_order
from megatron_ext.plugins.prove.parity import GRADIENT_TOLERANCE, write_corpus
from megatron_ext.plugins.prove.recorded_training import RunRecord, record
from megatron_ext.train.configure import configure
from tests.support import planted_faults as planted
from tests.support.pages import texts
from tests.support.selection import marked

# Of the second tier: tests/parity/test_matrix.py compares.
pytestmark = pytest.mark.full

STEPS = 2
TP2, TP2_SP, PP2 = (
    "--tensor-model-parallel-size 2",
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "--pipeline-model-parallel-size 2",
)
QK = "query and key norm, QKV bias"


@pytest.fixture(scope="module")
def proof_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Proof]:
    """A function that compares a layout with one process, which is trained once for each model."""
    data = write_corpus(tmp_path_factory.mktemp("corpus"))

    @functools.cache
    def reference(model: str) -> RunRecord:
        return record(comparison(flags(model)).reference, 1, STEPS, outputs=True)

    def flags(model: str, layout: str = "") -> list[str]:
        return [*RECIPE.split(), *MODELS[model].split(), *data, *layout.split()]

    def proof(model: str, layout: str, sabotage: Callable[[], None] | None = None, world_size: int | None = None):
        both = comparison(flags(model, layout), world_size)
        other = record(both.other, both.world_size, STEPS, sabotage, outputs=True)
        return Proof(reference(model), other, GRADIENT_TOLERANCE)

    return proof


def skip_replicated_norms() -> None:
    """Gradients of norms whose copies see other heads, or other tokens, are not summed over tensor-parallel ranks."""
    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    module._allreduce_non_tensor_model_parallel_grads = lambda *_args, **_kwargs: None  # pyright: ignore


def forget_a_sum() -> None:
    """The second matrix of the third layer's MLP leaves partial sums as they are."""
    from megatron_ext.parts.linear.compute import RowLinear

    forward = RowLinear.forward

    def partial_forward(self: Any, input_: torch.Tensor) -> Any:
        third = getattr(self, "third_mlp", False)
        return (self._forward_impl(input_, self.weight), None) if third else forward(self, input_)

    RowLinear.forward = partial_forward  # pyright: ignore[reportAttributeAccessIssue]
    from megatron_ext.sharding import engine

    initialize = engine.initialize

    def mark_then_initialize(chunks: Any, *arguments: Any) -> None:
        chunks[0].decoder.layers[2].mlp.linear_fc2.third_mlp = True
        initialize(chunks, *arguments)

    engine.initialize = mark_then_initialize


def double_the_gradients() -> None:
    """Every gradient twice, which clipping and Adam hide from the loss."""
    from megatron_ext.train import build

    finalize = build.finalize_model_grads

    def finalize_doubled(model: Any, num_tokens: torch.Tensor, **kwargs: Any) -> None:
        finalize(model, num_tokens, **kwargs)
        for chunk in model:
            for buffer in chunk.buffers:
                buffer.grad_data.mul_(2.0)

    build.finalize_model_grads = finalize_doubled


FAULTS = {
    "QKV slice": (
        "untied",
        TP2,
        planted.shift_qkv,
        "initial weight",
        "decoder.layers.0.self_attention.linear_qkv.weight",
    ),
    "sum over tensor-parallel ranks": ("untied", TP2, forget_a_sum, "output", "decoder.layers.2.mlp.linear_fc2"),
    "norm under sequence parallelism": (
        "untied",
        TP2_SP,
        planted.forget_sequence_parallel_mark,
        "gradient",
        "decoder.final_layernorm.weight",
    ),
    "tied embedding": ("tied", PP2, planted.skip_tied_embedding_reduction, "gradient", planted.WORD_EMBEDDINGS),
    "query and key norm": (
        QK,
        TP2,
        skip_replicated_norms,
        "gradient",
        "decoder.layers.3.self_attention.k_layernorm.weight",
    ),
    "mean of means": ("untied", "", planted.average_per_microbatch, "loss", "loss"),
    "tokens of the own rank": ("untied", "", planted.count_tokens_of_own_rank_only, "gradient", "output_layer.weight"),
    "one expert": (
        "experts",
        "--expert-model-parallel-size 2",
        planted.double_the_gradient_of_one_expert,
        "gradient",
        "decoder.layers.3.mlp.experts.5.linear_fc2.weight",
    ),
    "chunks of a sequence": (
        "untied",
        "--context-parallel-size 2",
        planted.give_each_rank_two_neighbouring_chunks,
        "output",
        "embedding",
    ),
    "gradient scale": ("untied", "", double_the_gradients, "gradient", "output_layer.weight"),
}
"""Model, layout, fault, and what the report must name."""


# What is named as in other cases; test_planted_faults.py plants these in every run.
REPEATED = {
    "query and key norm",
    "tokens of the own rank",
    "one expert",
    "chunks of a sequence",
    "tied embedding",
    "norm under sequence parallelism",
    "mean of means",
}


@pytest.mark.parametrize("fault", marked(FAULTS, slow=REPEATED))
def test_the_report_names_the_tensor(fault: str, proof_of: Callable[..., Proof]) -> None:
    model, layout, sabotage, what, name = FAULTS[fault]
    found = proof_of(model, layout, sabotage).first_difference()
    assert found is not None
    assert (found.what, found.name) == (what, name), found.sentence
    assert fault != "gradient scale" or "all gradients are 2 times" in found.sentence


def test_swapped_sends_are_found_where_a_stage_receives(proof_of: Callable[..., Proof]) -> None:
    proof = proof_of(
        "untied", f"{PP2} --num-virtual-stages-per-pipeline-rank 2", planted.batch_sends_between_two_stages
    )
    found = proof.first_difference()
    assert found is not None
    # With two chunks on each of two stages every layer is a stage's first.
    assert found.what in ("output", "gradient")
    assert found.name.startswith("decoder.layers.")


def test_agreement_of_a_layout_that_divides_everything(proof_of: Callable[..., Proof]) -> None:
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    proof = proof_of("untied", f"{TP2_SP} --use-distributed-optimizer {recompute}", world_size=4)
    assert proof.first_difference() is None
    assert len(proof.outputs) == 4 * 9 + 3
    assert LOSS in proof.outputs
    assert len(proof.gradients) == len(proof.weights) == 27
    assert max(proof.outputs.values()) > 0.0  # two computations, not one compared with itself


def test_parts_of_a_sum_over_ranks_are_not_compared_with_the_sum(proof_of: Callable[..., Proof]) -> None:
    proof = proof_of("Falcon-H1", TP2)
    assert proof.first_difference() is None
    assert not any(name.endswith("self_attention.linear_proj") for name in proof.outputs)


@pytest.mark.parametrize(
    "layout",
    [
        "--use-megatron-fsdp",
        "--use-torch-fsdp2",
        "--recompute-granularity selective --recompute-modules core_attn mlp layernorm",
    ],
)
def test_outputs_are_found_inside_of_wrappers_and_before_they_are_dropped(
    layout: str, proof_of: Callable[..., Proof]
) -> None:
    proof = proof_of("untied", layout)
    assert proof.first_difference() is None
    assert len(proof.outputs) == 4 * 9 + 3
    assert len(proof.gradients) == len(proof.weights) == 27


def test_words_embedded_again_for_later_tokens_are_not_taken_for_another_microbatchs(
    proof_of: Callable[..., Proof],
) -> None:
    """The last stage embeds words, too; and microbatches are divided over data-parallel ranks."""
    proof = proof_of("two tokens ahead", PP2, world_size=4)
    assert proof.first_difference() is None
    assert len(proof.outputs) == 4 * 9 + 3


def test_the_program_prints_a_verdict_and_exits_with_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    words = (
        f"{RECIPE} {MODELS['untied']} --seq-length 32 --mock-data --tokenizer-type NullTokenizer --vocab-size 250 "
        f"--bf16 --save nowhere {TP2}"
    )
    argv = ["--steps", "1", "--html", str(page), "--", *words.split()]
    assert parity.main(argv) == 0
    seen = texts(page.read_text())
    assert "verdict: they agree within 1e-05" in seen
    assert "Loss by step" in seen
    assert "step 1: 2 ranks " in seen
    assert "without --bf16" in (text := capsys.readouterr().out)
    assert text.splitlines()[-1] == "verdict: they agree within 1e-05"
    monkeypatch.setattr(parity, "prove", functools.partial(prove, sabotage=planted.shift_qkv))
    assert parity.main(argv) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert "THEY PART" in last
    assert "the initial weight decoder.layers.0.self_attention.linear_qkv.weight" in last


_WORDS = ("--", *f"{RECIPE} --num-layers 4 --seq-length 32 --mock-data --vocab-size 250".split())


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--steps", "1"], "no training flags"),
        (["--world-size", "3", *_WORDS, "--tensor-model-parallel-size", "2"], "world size 3 is not a multiple"),
        (["--device", "cuda", "--world-size", "99", *_WORDS, "--global-batch-size", "198"], "needs 99 GPUs"),
    ],
)
def test_wrong_use_is_a_configuration_error(argv: list[str], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        parity.main(argv)


def test_the_one_process_does_without_what_saves_memory() -> None:
    offload = "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads --no-pin-cpu-params"
    others = "--use-torch-optimizer-for-cpu-offload --recompute-granularity full --recompute-method uniform"
    both = comparison([*_WORDS[1:], *offload.split(), *others.split(), "--recompute-num-layers", "1"])
    alone = configure([*both.reference, "--device", "cpu", "--dry-run"]).config
    assert alone.optimizer.optimizer_cpu_offload is False
    assert alone.training.recompute_granularity is None


def test_chunks_of_a_divided_sequence_come_back_in_order() -> None:
    whole = np.arange(8)
    assert np.array_equal(_in_order([whole[[0, 1, 6, 7]], whole[[2, 3, 4, 5]]]), whole)
