"""Rules about a mixture of experts, and the ranks that share it."""

from collections.abc import Iterator

from megatron_ext.config.derived.layer_patterns import read_pattern
from megatron_ext.config.resolve import Facts, positive
from megatron_ext.config.schema import Config
from megatron_ext.parts.experts.describe import asked
from megatron_ext.rules.reads import all_read_the_layout
from megatron_ext.rules.suggest import divisors, listed, nearest_multiples, unreadable_pattern, use


def auxiliary_losses_are_losses(config: Config, facts: Facts) -> Iterator[str]:
    """Require load-balancing losses that can be added up, each with a coefficient of the right sign."""
    model = config.model
    kinds, weights = model.load_balancing, list(model.moe_aux_loss_coeff or ())
    asked = f"--moe-router-load-balancing-type {' '.join(kinds)}"
    given = f"{asked} with --moe-aux-loss-coeff {' '.join(f'{weight:g}' for weight in weights) or 0}"
    if len(kinds) > 1 and not all(kind.endswith("aux_loss") for kind in kinds):
        yield f"{asked}: losses alone can be added up; use --moe-router-load-balancing-type aux_loss"
    elif len({*kinds}) < len(kinds):
        yield f"{asked}: the same loss twice; name each once"
    elif len(weights) != len(kinds) and (len(kinds) > 1 or weights):
        yield (
            f"{given}: each loss has a coefficient; use --moe-router-load-balancing-type aux_loss "
            "--moe-aux-loss-coeff 0.01"
        )
    elif model.is_sinkhorn and any(weights):
        yield f"{given}: its assignment is balanced without a loss; leave --moe-aux-loss-coeff out"
    for weight in weights:
        if weight < 0:
            yield f"--moe-aux-loss-coeff {weight:g} is below 0; use --moe-aux-loss-coeff 0.01"
            break
    if model.moe_z_loss_coeff is not None and model.moe_z_loss_coeff <= 0:
        yield f"--moe-z-loss-coeff {model.moe_z_loss_coeff:g} is not above 0; use --moe-z-loss-coeff 1e-3"


def groups_of_experts_hold_the_experts_of_a_token(config: Config, facts: Facts) -> Iterator[str]:
    """Require expert groups of one size, and enough experts in the groups that are chosen for a token."""
    model, experts, topk = config.model, config.model.num_experts, config.model.moe_router_topk
    groups, chosen, scores = model.moe_router_num_groups, model.moe_router_group_topk, model.moe_router_group_scores
    if experts is None:
        return  # one problem, which `expert_flags_need_experts` names
    if (groups is None) != (chosen is None):
        given, missing = ("--moe-router-num-groups", "--moe-router-group-topk")[:: -1 if groups is None else 1]
        yield f"{given} without {missing}: a token takes its experts from some of the groups; add {missing} 1"
    if groups is None and scores is not None:
        yield f"--moe-router-group-scores {scores} without --moe-router-num-groups: there are no groups; leave it out"
    if groups is None or chosen is None or not positive(experts, groups, chosen, topk):
        return
    of_group = experts // groups
    if experts % groups:
        yield (
            f"--num-experts {experts} is not divisible by --moe-router-num-groups {groups}; "
            f"use --moe-router-num-groups {listed(divisors(experts))}"
        )
    elif not -(-topk // of_group) <= chosen <= groups:
        yield (
            f"--moe-router-group-topk {chosen} of --moe-router-num-groups {groups} groups of {of_group} experts for "
            f"--moe-router-topk {topk}: use --moe-router-group-topk {-(-topk // of_group)}"
        )
    elif not 1 <= (scores or topk // chosen) <= of_group:
        yield (
            f"a group is judged by {scores or topk // chosen} of its {of_group} experts (--moe-router-topk {topk} / "
            f"--moe-router-group-topk {chosen}); use --moe-router-group-scores 1"
        )


def what_sinkhorn_chooses_is_asked_of_it_alone(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse other ways of choosing experts next to Sinkhorn's assignment, which has scores of its own."""
    model = config.model
    if not model.is_sinkhorn:
        return
    others = ("moe_router_num_groups", "moe_router_topk_scaling_factor", "moe_expert_capacity_factor")
    if flags := asked(model, "moe_router_enable_expert_bias", *others):
        yield (
            f"--moe-router-load-balancing-type sinkhorn with {', '.join(flags)}: its assignment reads none of them; "
            f"use --moe-router-load-balancing-type none, or leave {'it' if len(flags) == 1 else 'them'} out"
        )


_SHAPES = ("moe_layer_freq", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate")
_CHOICES = (
    *("moe_z_loss_coeff", "moe_router_enable_expert_bias", "moe_router_num_groups", "moe_router_group_topk"),
    *("moe_router_group_scores", "moe_router_topk_scaling_factor", "moe_input_jitter_eps"),
    *("moe_router_sparsemixer_eps", "moe_expert_capacity_factor", "moe_router_force_load_balancing", "moe_latent_size"),
)


def expert_flags_need_experts(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse flags of experts without --num-experts."""
    model, layout = config.model, config.layout
    if model.num_experts is not None:
        return
    flags = [
        *(["--expert-model-parallel-size"] if layout.expert_model_parallel_size > 1 else []),
        *asked(model, *_SHAPES),
        *(["--moe-aux-loss-coeff"] if model.load_balancing_losses else []),
        *asked(model, *_CHOICES),
        *(["--moe-use-upcycling"] if config.checkpoint.moe_use_upcycling else []),
    ]
    if flags:
        ranks = max(layout.expert_model_parallel_size, 1)
        experts = f"--num-experts {-(-8 // ranks) * ranks}"
        biases = "" if model.disable_bias_linear else " --disable-bias-linear"
        yield (
            f"{', '.join(flags)} without --num-experts: there are no experts; add {experts}{biases}, or leave "
            f"{'it' if len(flags) == 1 else 'them'} out"
        )


_NOT_OF_AN_MLP = {
    "moe_shared_expert_intermediate_size": "a dense model has no shared experts",
    "moe_layer_freq": "every layer gets experts",
    "moe_latent_size": "a dense model has no projections for it",
}


def experts_come_from_an_mlp(config: Config, facts: Facts) -> Iterator[str]:
    """Require for --moe-use-upcycling experts that are nothing but pieces of the dense model's MLPs."""
    model, flags, experts = config.model, config.checkpoint, config.model.num_experts
    granularity = flags.moe_upcycling_granularity
    if not flags.moe_use_upcycling or experts is None or not positive(granularity, model.ffn_hidden_size):
        return
    if flags.load_hf is not None:
        yield (
            f"--moe-use-upcycling with --load-hf {flags.load_hf}: experts come from a checkpoint; convert the folder "
            "by megatron-ext convert from-hf, and give what that writes as --load"
        )
    for name, reason in _NOT_OF_AN_MLP.items():
        for flag in asked(model, name):
            yield f"--moe-use-upcycling with {flag} {getattr(model, name)}: {reason}; leave {flag} out"
    width, whole = model.expert_ffn_hidden_size, model.ffn_hidden_size
    if whole % granularity:
        yield (
            f"--moe-upcycling-granularity {granularity} does not divide --ffn-hidden-size {whole} of the dense model; "
            f"use --moe-upcycling-granularity {listed(divisors(whole)[:4])}"
        )
    elif width * granularity != whole:
        yield (
            f"--moe-ffn-hidden-size {width} x --moe-upcycling-granularity {granularity} is not --ffn-hidden-size "
            f"{whole} of the dense model; use --moe-ffn-hidden-size {whole // granularity}"
        )
    for flag, number in (("--num-experts", experts), ("--moe-router-topk", model.moe_router_topk)):
        if number % granularity:
            yield (
                f"{flag} {number} is not divisible by --moe-upcycling-granularity {granularity}, the experts of one "
                f"MLP; use {flag} {listed(nearest_multiples(number, granularity))}"
            )


def a_gate_has_shared_experts(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse a gate of shared experts where there are none."""
    model = config.model
    if model.moe_shared_expert_gate and model.moe_shared_expert_intermediate_size is None and model.num_experts:
        yield (
            "--moe-shared-expert-gate without --moe-shared-expert-intermediate-size: there are no shared experts; add "
            f"--moe-shared-expert-intermediate-size {model.expert_ffn_hidden_size}, or leave it out"
        )


def layers_with_experts_are_named(config: Config, facts: Facts) -> Iterator[str]:
    """Require a pattern of the layers with experts which can be read, and names some."""
    model, pattern = config.model, config.model.moe_layer_freq
    if pattern in (None, "-1") or not positive(model.num_layers):  # -1 is MindSpeed's word for all
        return
    fix, experts = f"1, or [0]+[1]*{model.num_layers - 1}", model.num_experts
    unreadable = [*unreadable_pattern("--moe-layer-freq", pattern, model.num_layers, fix, "the first")]
    yield from unreadable
    named = bool(unreadable) or any(read_pattern(pattern, min(model.num_layers, 100_000), "the first"))
    if experts is not None and not named:
        yield f"--moe-layer-freq {pattern} gives no layer its --num-experts {experts}; use --moe-layer-freq 1"


def experts_divide_over_ranks(config: Config, facts: Facts) -> Iterator[str]:
    """Require that the experts divide over the expert-parallel ranks."""
    layout, experts, ranks = config.layout, config.model.num_experts, config.layout.expert_model_parallel_size
    if experts is not None and positive(experts, ranks) and experts % ranks:
        others = max(layout.pipeline_model_parallel_size * layout.expert_tensor_size, 1)
        working = [n for n in divisors(experts) if layout.world_size % (n * others) == 0] or [1]
        yield (
            f"--num-experts {experts} is not divisible by --expert-model-parallel-size {ranks}; "
            f"use --expert-model-parallel-size {listed(working)}"
        )


def a_token_has_enough_experts(config: Config, facts: Facts) -> Iterator[str]:
    """Require at least as many experts as compute each token."""
    model, experts, topk = config.model, config.model.num_experts, config.model.moe_router_topk
    if experts is None or not positive(experts, topk):
        return
    if topk > experts:
        yield f"--moe-router-topk {topk} is above --num-experts {experts}; use --moe-router-topk {experts}"
    only_one_weight = model.moe_router_score_function == "softmax" and not model.moe_router_pre_softmax
    if topk == 1 and only_one_weight and not model.is_sinkhorn:
        yield (
            "--moe-router-topk 1 without --moe-router-pre-softmax gives every expert the weight 1, so that the router "
            "learns nothing; add --moe-router-pre-softmax"
        )


def expert_ranks_fit_the_stage(config: Config, facts: Facts) -> Iterator[str]:
    """Require that the ranks of a pipeline stage divide by those that share the experts."""
    layout = config.layout
    stages, tensor = layout.pipeline_model_parallel_size, layout.tensor_model_parallel_size
    world, experts, expert_tensor = layout.world_size, layout.expert_model_parallel_size, layout.expert_tensor_size
    if not positive(world, stages, tensor, experts, expert_tensor, config.model.num_experts):
        return
    if world % (stages * tensor) or world // stages % (experts * expert_tensor) == 0:
        return
    stage = world // stages
    working = [n for n in divisors(config.model.num_experts or 1) if stage % (n * expert_tensor) == 0]
    fix = use("--expert-model-parallel-size", working, use("--expert-tensor-parallel-size", divisors(stage)[:4]))
    by_default = layout.expert_tensor_parallel_size is None and expert_tensor > 1
    default = " (as --tensor-model-parallel-size)" if by_default else ""
    if by_default and stage % experts == 0:
        fix = f"add --expert-tensor-parallel-size 1, or {fix}"
    yield (
        f"--expert-model-parallel-size {experts} x --expert-tensor-parallel-size {expert_tensor}{default} = "
        f"{experts * expert_tensor} does not divide the {stage} ranks of a pipeline stage, among which the experts are "
        f"shared (world size {world} / --pipeline-model-parallel-size {stages}); {fix}"
    )


def expert_width_divides_by_tensor_size(config: Config, facts: Facts) -> Iterator[str]:
    """Require that an expert's width divides by the expert-tensor-parallel size."""
    model, layout = config.model, config.layout
    if model.num_experts is None:
        return
    width, size = model.expert_ffn_hidden_size, layout.expert_tensor_size
    if positive(width, size) and width % size:
        yield (
            f"--moe-ffn-hidden-size {width} is not divisible by --expert-tensor-parallel-size {size}; "
            f"use --moe-ffn-hidden-size {listed(nearest_multiples(width, size))}, or --expert-tensor-parallel-size 1"
        )
    shared, size = model.moe_shared_expert_intermediate_size, layout.tensor_model_parallel_size
    if shared is not None and positive(shared, size) and shared % size:
        yield (
            f"--moe-shared-expert-intermediate-size {shared} is not divisible by --tensor-model-parallel-size {size}; "
            f"use --moe-shared-expert-intermediate-size {listed(nearest_multiples(shared, size))}"
        )


def stages_between_data_parallel_ranks_have_their_experts(config: Config, facts: Facts) -> Iterator[str]:
    """Require, as megatron-core does, of --use-tp-pp-dp-mapping with experts on several stages that experts have as
    many data-parallel ranks as all other parameters."""
    model, layout = config.model, config.layout
    stages, experts = layout.pipeline_model_parallel_size, layout.expert_model_parallel_size * layout.expert_tensor_size
    has_both = model.num_experts is not None and layout.use_tp_pp_dp_mapping and stages > 1
    if not has_both or not positive(experts, layout.model_parallel_size, layout.world_size):
        return
    if layout.expert_data_parallel_size != layout.data_parallel_size:
        yield (
            f"--use-tp-pp-dp-mapping with --pipeline-model-parallel-size {stages} and experts divided over {experts} "
            f"ranks, not over tensor- and context-parallel ranks alone: leave --use-tp-pp-dp-mapping out"
        )


RULES = all_read_the_layout(
    (
        auxiliary_losses_are_losses,
        groups_of_experts_hold_the_experts_of_a_token,
        what_sinkhorn_chooses_is_asked_of_it_alone,
        layers_with_experts_are_named,
        expert_flags_need_experts,
        experts_come_from_an_mlp,
        a_gate_has_shared_experts,
        experts_divide_over_ranks,
        a_token_has_enough_experts,
        expert_ranks_fit_the_stage,
        expert_width_divides_by_tensor_size,
        stages_between_data_parallel_ranks_have_their_experts,
    )
)
