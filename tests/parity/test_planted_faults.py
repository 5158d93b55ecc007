"""The comparison finds what it is there to find: faults as they were made before, planted one at a time.

Each sabotage runs on every rank, before its model is built, and replaces one piece of the real program.
"""

from collections.abc import Callable
from typing import Any

import torch

from megatron_ext.verify.cases import CASES
from megatron_ext.verify.parity import FIRST_LOSS_TOLERANCE, GRADIENT_TOLERANCE, Differences, Experiment, compare

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"


def differences(experiment: Experiment, name: str, sabotage: Callable[[], None]) -> Differences:
    case = CASES[name]
    return compare(experiment.reference(case.model), experiment.train(case, sabotage=sabotage))


def wrong_gradients(found: Differences) -> set[str]:
    return {name for name, distance in found.gradients.items() if not distance <= GRADIENT_TOLERANCE}


def shift_qkv() -> None:
    """Every rank but the first takes its slice of QKV one row too early."""
    from megatron_ext.model import initialize

    fill = initialize.fill

    def fill_shifted(shard: torch.Tensor, parameter: Any, seed: int, tp_rank: int = 0, tp_size: int = 1) -> None:
        fill(shard, parameter, seed, tp_rank, tp_size)
        if parameter.name.endswith("linear_qkv.weight") and tp_rank > 0:
            whole = torch.empty(parameter.shape)
            fill(whole, parameter, seed)
            start = tp_rank * len(shard) - 1
            shard.copy_(whole[start : start + len(shard)])

    initialize.fill = fill_shifted


def test_qkv_slice_off_by_one(experiment: Experiment) -> None:
    found = differences(experiment, "TP2, untied", shift_qkv)
    assert found.weights == tuple(f"decoder.layers.{layer}.self_attention.linear_qkv.weight" for layer in range(4))
    assert found.problems()


def forget_sequence_parallel_mark() -> None:
    """The norms' parameters lack the mark by which megatron-core sums their gradients over tensor-parallel ranks."""
    from megatron_ext.model import norm

    make = norm._parameter

    def make_unmarked(config: Any, size: int) -> torch.nn.Parameter:
        parameter = make(config, size)
        parameter.sequence_parallel = False  # pyright: ignore[reportAttributeAccessIssue]
        return parameter

    norm._parameter = make_unmarked


def test_gradient_of_sequence_parallel_norm_not_reduced(experiment: Experiment) -> None:
    found = differences(experiment, "TP2 SP, untied", forget_sequence_parallel_mark)
    norms = {name for name in found.gradients if "layernorm" in name}
    assert len(norms) == 9
    assert wrong_gradients(found) == norms
    assert {f"first gradients: {name}: tensor-parallel ranks disagree" for name in norms} <= set(found.flaws)
    assert found.weights == ()
    assert found.first_loss <= FIRST_LOSS_TOLERANCE  # one step's loss says nothing: only gradients show the fault


def skip_tied_embedding_reduction() -> None:
    import importlib

    # The package exports a function of the same name, which hides the module.
    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    module._allreduce_word_embedding_grads = lambda *_args, **_kwargs: None  # pyright: ignore


def test_gradient_of_tied_embedding_not_reduced(experiment: Experiment) -> None:
    found = differences(experiment, "PP2, tied", skip_tied_embedding_reduction)
    assert wrong_gradients(found) == {WORD_EMBEDDINGS}
    assert f"first gradients: {WORD_EMBEDDINGS}: ranks disagree" in found.flaws
    assert f"final weights: {WORD_EMBEDDINGS}: ranks disagree" in found.flaws


def average_per_microbatch() -> None:
    """Mean of means: every microbatch counts alike, however many of its tokens do."""
    from megatron_ext.train import step

    token_loss = step.token_loss

    def mean_loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[Any, Any, dict[str, torch.Tensor]]:
        loss_sum, num_tokens, report = token_loss(loss_mask, losses)
        count = num_tokens.clamp(min=1)
        return loss_sum / count, torch.ones_like(count), {"lm loss": report["lm loss"] / count}

    step.token_loss = mean_loss


def test_loss_denominator_per_microbatch(experiment: Experiment) -> None:
    found = differences(experiment, "DP2, untied", average_per_microbatch)
    assert not found.first_loss <= FIRST_LOSS_TOLERANCE
    assert wrong_gradients(found) == set(found.gradients)


def count_tokens_of_own_rank_only() -> None:
    """The logged loss is right, but each rank divides its gradients by its own tokens times the number of ranks."""
    import importlib

    from megatron_ext.train import build

    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    all_reduce = torch.distributed.all_reduce

    def finalize(model: Any, num_tokens: torch.Tensor, **kwargs: Any) -> None:
        def all_reduce_but_tokens(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            if tensor.data_ptr() == num_tokens.data_ptr():
                tensor.mul_(torch.distributed.get_world_size())
                return None
            return all_reduce(tensor, *args, **options)

        torch.distributed.all_reduce = all_reduce_but_tokens
        try:
            module.finalize_model_grads(model, num_tokens, **kwargs)
        finally:
            torch.distributed.all_reduce = all_reduce

    build.finalize_model_grads = finalize


def test_loss_denominator_per_rank(experiment: Experiment) -> None:
    found = differences(experiment, "DP2, untied", count_tokens_of_own_rank_only)
    assert found.first_loss <= FIRST_LOSS_TOLERANCE
    assert wrong_gradients(found) == set(found.gradients)
    assert f"first gradients: {WORD_EMBEDDINGS}: ranks disagree" in found.flaws


def batch_sends_between_two_stages() -> None:
    """With two stages the next rank is also the previous one, and batched sends over gloo carry no tag: they swap."""
    from megatron_ext.train import build

    transformer_config = build.transformer_config

    def batched(*args: Any, **settings: Any) -> Any:
        config = transformer_config(*args, **settings)
        config.batch_p2p_comm, config.overlap_p2p_comm = True, False
        return config

    build.transformer_config = batched


def test_sends_between_stages_in_the_wrong_order(experiment: Experiment) -> None:
    found = differences(experiment, "PP2 VPP2, untied", batch_sends_between_two_stages)
    assert wrong_gradients(found)
    assert found.problems()


def double_the_gradient_of_one_expert() -> None:
    """The second expert of the second expert-parallel rank: number 5 of 8."""
    from megatron_ext.model import moe

    build = moe.ExpertMatrices.__init__

    def build_with_fault(self: Any, *sizes: Any, groups: Any, **settings: Any) -> None:
        build(self, *sizes, groups=groups, **settings)
        if groups.ep.rank() == 1:
            factors = torch.ones(len(self.weight), 1, 1)
            factors[1] = 2.0
            self.weight.register_hook(lambda gradient: gradient * factors)

    moe.ExpertMatrices.__init__ = build_with_fault


def test_gradient_of_one_expert(experiment: Experiment) -> None:
    found = differences(experiment, "EP2, experts", double_the_gradient_of_one_expert)
    matrices = [f"mlp.experts.5.linear_{matrix}.weight" for matrix in ("fc1", "fc2")]
    assert wrong_gradients(found) == {f"decoder.layers.{layer}.{name}" for layer in range(4) for name in matrices}
    assert found.first_loss <= FIRST_LOSS_TOLERANCE


def give_each_rank_two_neighbouring_chunks() -> None:
    """Ranks read chunks 2r and 2r + 1, while attention and positions think of r and 2 x size - 1 - r."""
    from megatron_ext.data import batch

    batch.context_chunks = lambda rank, size: (2 * rank, 2 * rank + 1)


def test_chunks_in_the_wrong_order(experiment: Experiment) -> None:
    found = differences(experiment, "CP2 p2p, untied", give_each_rank_two_neighbouring_chunks)
    assert not found.first_loss <= FIRST_LOSS_TOLERANCE
    assert {name for name in found.gradients if "linear_qkv" in name} <= wrong_gradients(found)


def turn_the_ring_around() -> None:
    """Keys travel the other way than the ranks believe. With two ranks both ways are the same: it takes four."""
    from megatron_ext.model import context_parallel

    context_parallel._neighbours = lambda rank, size: ((rank - 1) % size, (rank + 1) % size)


def test_ring_in_the_wrong_order(experiment: Experiment) -> None:
    found = differences(experiment, "CP4 p2p, untied", turn_the_ring_around)
    assert not found.first_loss <= FIRST_LOSS_TOLERANCE
    assert {name for name in found.gradients if "linear_qkv" in name} <= wrong_gradients(found)


def average_over_ranks() -> None:
    """torch's own default, which megatron-core's wrapper keeps: the mean over the ranks, where the sum belongs."""
    from torch.distributed.fsdp import FSDPModule

    FSDPModule.set_gradient_divide_factor = lambda *_args: None  # pyright: ignore[reportAttributeAccessIssue]
    FSDPModule.set_force_sum_reduction_for_comms = lambda *_args: None  # pyright: ignore[reportAttributeAccessIssue]


def test_gradient_scale_of_fsdp2(experiment: Experiment) -> None:
    found = differences(experiment, "FSDP2, untied", average_over_ranks)
    assert found.first_loss <= FIRST_LOSS_TOLERANCE  # and Adam hides it ever after
    assert wrong_gradients(found) == set(found.gradients)
    assert all(abs(distance - 0.5) < 1e-3 for distance in found.gradients.values())
