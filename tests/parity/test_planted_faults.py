"""The comparison finds what it is there to find: faults as they were made before, planted one at a time.

Three of them in a plain run: a gradient of one rank, a scale, and a wrong number of tokens; --all plants the others.
Each sabotage runs on every rank, before its model is built, and replaces one piece of the real program.
"""

from collections.abc import Callable

import pytest

from megatron_ext.plugins.prove.cases import CASES
from megatron_ext.plugins.prove.parity import (
    CURVE_TOLERANCE,
    FIRST_LOSS_TOLERANCE,
    GRADIENT_TOLERANCE,
    Differences,
    Experiment,
    compare,
)
from tests.support import planted_faults as planted

# Of the second tier: it guards the comparison, not the program.
pytestmark = pytest.mark.full


def differences(experiment: Experiment, name: str, sabotage: Callable[[], None]) -> Differences:
    case = CASES[name]
    return compare(experiment.reference(case.model), experiment.train(case, sabotage=sabotage))


def wrong_gradients(found: Differences) -> set[str]:
    return {name for name, distance in found.gradients.items() if not distance <= GRADIENT_TOLERANCE}


@pytest.mark.slow
def test_qkv_slice_off_by_one(first_steps: Experiment) -> None:
    found = differences(first_steps, "TP2, untied", planted.shift_qkv)
    assert found.weights == tuple(f"decoder.layers.{layer}.self_attention.linear_qkv.weight" for layer in range(4))
    assert found.problems()


def test_gradient_of_sequence_parallel_norm_not_reduced(first_steps: Experiment) -> None:
    found = differences(first_steps, "TP2 SP, untied", planted.forget_sequence_parallel_mark)
    norms = {name for name in found.gradients if "layernorm" in name}
    assert len(norms) == 9
    assert wrong_gradients(found) == norms
    assert {f"first gradients: {name}: tensor-parallel ranks disagree" for name in norms} <= set(found.flaws)
    assert found.weights == ()
    assert found.first_loss <= FIRST_LOSS_TOLERANCE  # one step's loss says nothing: only gradients show the fault


def test_gradient_of_keys_that_heads_of_all_ranks_share(first_steps: Experiment) -> None:
    found = differences(first_steps, "TP2, latents", planted.keep_the_gradient_of_shared_keys_apart)
    down = {f"decoder.layers.{layer}.self_attention.linear_kv_down_proj.weight" for layer in range(4)}
    assert down <= wrong_gradients(found)
    assert f"first gradients: {min(down)}: tensor-parallel ranks disagree" in found.flaws
    assert found.first_loss <= FIRST_LOSS_TOLERANCE


@pytest.mark.slow
def test_gradient_of_tied_embedding_not_reduced(first_steps: Experiment) -> None:
    found = differences(first_steps, "PP2, tied", planted.skip_tied_embedding_reduction)
    assert wrong_gradients(found) == {planted.WORD_EMBEDDINGS}
    assert f"first gradients: {planted.WORD_EMBEDDINGS}: ranks disagree" in found.flaws
    assert f"final weights: {planted.WORD_EMBEDDINGS}: ranks disagree" in found.flaws


def test_labels_of_multi_token_prediction_shifted_too_little(first_steps: Experiment) -> None:
    name = "CP2 all_gather, two tokens ahead, packed"
    found = differences(first_steps, name, planted.shift_labels_of_depths_too_little)
    assert found.first_loss <= FIRST_LOSS_TOLERANCE
    assert wrong_gradients(found) == set(found.gradients)


def test_losses_of_multi_token_prediction_scaled_by_local_counts(first_steps: Experiment) -> None:
    name = "CP2 all_gather, two tokens ahead, packed"
    found = differences(first_steps, name, planted.scale_depths_by_counts_of_own_rank)
    assert found.first_loss <= FIRST_LOSS_TOLERANCE
    assert "mtp.layers.0.eh_proj.weight" in wrong_gradients(found)


@pytest.mark.slow
def test_gradient_of_the_embedding_for_multi_token_prediction_not_reduced(first_steps: Experiment) -> None:
    found = differences(first_steps, "PP2 VPP2, two tokens ahead", planted.skip_tied_embedding_reduction)
    assert wrong_gradients(found) == {planted.WORD_EMBEDDINGS}
    assert f"first gradients: {planted.WORD_EMBEDDINGS}: ranks disagree" in found.flaws


@pytest.mark.slow
def test_loss_denominator_per_microbatch(first_steps: Experiment) -> None:
    found = differences(first_steps, "DP2, untied", planted.average_per_microbatch)
    assert not found.first_loss <= FIRST_LOSS_TOLERANCE
    assert wrong_gradients(found) == set(found.gradients)


def test_loss_denominator_per_rank(first_steps: Experiment) -> None:
    found = differences(first_steps, "DP2, untied", planted.count_tokens_of_own_rank_only)
    assert found.first_loss <= FIRST_LOSS_TOLERANCE
    assert wrong_gradients(found) == set(found.gradients)
    assert f"first gradients: {planted.WORD_EMBEDDINGS}: ranks disagree" in found.flaws


@pytest.mark.slow
def test_sends_between_stages_in_the_wrong_order(first_steps: Experiment) -> None:
    found = differences(first_steps, "PP2 VPP2, untied", planted.batch_sends_between_two_stages)
    assert wrong_gradients(found)
    assert found.problems()


@pytest.mark.slow
def test_gradient_of_one_expert(first_steps: Experiment) -> None:
    found = differences(first_steps, "EP2, experts", planted.double_the_gradient_of_one_expert)
    matrices = [f"mlp.experts.5.linear_{matrix}.weight" for matrix in ("fc1", "fc2")]
    assert wrong_gradients(found) == {f"decoder.layers.{layer}.{name}" for layer in range(4) for name in matrices}
    assert found.first_loss <= FIRST_LOSS_TOLERANCE


def test_bias_of_experts_moved_by_local_counts(first_steps: Experiment) -> None:
    found = differences(first_steps, "EP2, routing by groups", planted.move_the_bias_by_local_counts)
    assert found.first_loss <= FIRST_LOSS_TOLERANCE
    assert not wrong_gradients(found)  # of the first step, before any bias has moved
    assert not found.loss <= CURVE_TOLERANCE


@pytest.mark.slow
def test_chunks_in_the_wrong_order(first_steps: Experiment) -> None:
    found = differences(first_steps, "CP2 p2p, untied", planted.give_each_rank_two_neighbouring_chunks)
    assert not found.first_loss <= FIRST_LOSS_TOLERANCE
    assert {name for name in found.gradients if "linear_qkv" in name} <= wrong_gradients(found)


@pytest.mark.slow
def test_ring_in_the_wrong_order(first_steps: Experiment) -> None:
    found = differences(first_steps, "CP4 p2p, untied", planted.turn_the_ring_around)
    assert not found.first_loss <= FIRST_LOSS_TOLERANCE
    assert {name for name in found.gradients if "linear_qkv" in name} <= wrong_gradients(found)


def test_gradient_scale_of_fsdp2(first_steps: Experiment) -> None:
    found = differences(first_steps, "FSDP2, untied", planted.average_over_ranks)
    assert found.first_loss <= FIRST_LOSS_TOLERANCE  # and Adam hides it ever after
    assert wrong_gradients(found) == set(found.gradients)
    assert all(abs(distance - 0.5) < 1e-3 for distance in found.gradients.values())


@pytest.mark.slow
def test_bias_of_experts_added_by_every_rank_that_divides_them(all_steps: Experiment) -> None:
    name = "TP2 SP, tensor-parallel experts, experts with biases"
    found = differences(all_steps, name, planted.add_the_bias_of_experts_on_every_rank)
    assert not wrong_gradients(found)  # of the first step, before any bias is another number than 0
    assert found.loss > CURVE_TOLERANCE


# Slow: what a rank leaves out of a piece is found by the same comparison as the faults above.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("EP2, routing by groups", planted.choose_groups_by_another_rank),
        ("EP2, routing by groups", planted.scale_weights_of_experts_twice),
        ("EP2, experts with biases", planted.weigh_no_bias_of_an_expert),
        ("EP2, experts with a capacity", planted.keep_what_another_rank_would),
        ("TP2 SP PP2 VPP2, GeGLU and multipliers", planted.multiply_nothing_on_the_last_stage),
        ("TP2 SP PP2 VPP2, interleaved half rotation, none in layer 2", planted.rotate_every_layer),
        ("TP4 SP, query and key norm after rotation", planted.leave_rotated_heads_as_they_are),
        ("TP2 SP PP2 VPP2, ALiBi", planted.give_every_rank_the_slopes_of_the_first),
        ("CP2 p2p, ALiBi", planted.count_positions_from_each_chunk),
        ("CP2 p2p, sinks and gates", planted.leave_out_the_sink_of_the_ring),
        ("TP2 SP PP2 VPP2, sinks and gates", planted.open_every_gate),
        ("TP2 SP PP2 VPP2, gates of heads", planted.gate_heads_in_the_order_of_the_last),
        ("TP4, Command R", planted.sum_attention_over_the_ranks_before_the_mlp_too),
        ("TP4, GPT-NeoX", planted.normalize_for_the_mlp_as_for_attention),
        ("TP4, Phi", planted.leave_the_bias_of_logits_out),
        ("TP2 SP PP2 VPP2, caps and clips", planted.let_logits_grow),
        ("CP2 all_gather, caps and clips", planted.clip_nothing),
        ("TP2 SP PP2 VPP2, some biases", planted.add_the_bias_of_attention_on_every_rank),
    ],
)
def test_a_piece_that_ranks_compute_otherwise(name: str, fault: Callable[[], None], first_steps: Experiment) -> None:
    found = differences(first_steps, name, fault)
    assert wrong_gradients(found)


# Slow but for three: what each finds is the same comparison, of what the updates leave.
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("TP2 SP, untied, Muon", planted.leave_parts_of_the_momentum_on_their_ranks),
        pytest.param("TP2 SP, untied, Muon", planted.scale_by_the_shape_of_a_part, marks=pytest.mark.slow),
        pytest.param("TP2 SP, untied, Muon", planted.take_keys_for_queries, marks=pytest.mark.slow),
        pytest.param("FSDP2, untied, Muon", planted.leave_rows_of_the_momentum_on_their_ranks, marks=pytest.mark.slow),
        pytest.param("DP2, untied, Muon", planted.give_every_rank_its_own_momentum, marks=pytest.mark.slow),
        ("TP2 SP FSDP2, untied, Adafactor", planted.take_means_of_parts),
        pytest.param("TP2 SP FSDP2, untied, NorMuon", planted.take_means_of_parts, marks=pytest.mark.slow),
        pytest.param("TP2 SP, untied, AdaptiveMuon", planted.take_parts_for_matrices, marks=pytest.mark.slow),
        ("ZeRO-3, clipped products", planted.bound_the_products_of_own_tokens),
        pytest.param("CP2 p2p, clipped products", planted.look_at_the_keys_of_own_positions, marks=pytest.mark.slow),
        pytest.param("ZeRO-3, clipped products", planted.rescale_rows_of_another_rank, marks=pytest.mark.slow),
    ],
)
def test_updates_of_matrices(name: str, fault: Callable[[], None], first_steps: Experiment) -> None:
    found = differences(first_steps, name, fault)
    assert found.first_loss <= FIRST_LOSS_TOLERANCE
    assert not wrong_gradients(found)
    assert found.problems()
