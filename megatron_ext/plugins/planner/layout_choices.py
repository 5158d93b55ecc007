"""Lists the choices of a plan, as values of flags: every combination is then put before the program's own rules."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_ext.config.derived.sharding import SCHEMES
from megatron_ext.config.parse.options import flag_of, options_by_name
from megatron_ext.rules.suggest import divisors

Choice = dict[str, Any]
"""Values by field name."""

SHARDINGS: dict[str, Choice] = {
    scheme.title: {**scheme.values, **dict.fromkeys(scheme.overlaps, True)} for scheme in SCHEMES if scheme.title
}
"""Flags of each sharding scheme (what data-parallel ranks divide) by its title, simplest first."""

BETTER = {"DDP": "ZeRO-1", "ZeRO-3": "FSDP2"}
"""Pairs of schemes: where the second is legal, the first is not looked at, since it needs more and sends no less."""

_DIVIDE = {name for scheme in SCHEMES for name in scheme.values}

RECOMPUTATIONS: dict[str, Choice] = {
    "none": {},
    "norms": {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)},
    "MLP and norms": {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "mlp")},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
"""Kinds of recomputation: each holds less than the one before, and computes more."""

_MICRO_BATCHES = (1, 2, 4, 8, 16, 32)

_MOST_CHUNKS = 8  # each halving of what is left of the bubble doubles what is sent


def layouts(values: Mapping[str, Any], world_size: int, gpus_per_node: int) -> Iterator[Choice]:
    """Yield the ways in which ranks may share the model: TP inside a node, CP, PP, chunks, EP. What the user gave stays
    as it is."""
    heads, layers, length = (values.get(name) or 1 for name in ("num_attention_heads", "num_layers", "seq_length"))
    tensor_sizes = [size for size in divisors(heads) if size <= gpus_per_node and gpus_per_node % size == 0]
    for tensor in _given(values, "tensor_model_parallel_size", tensor_sizes):
        for context in _given(values, "context_parallel_size", _context_sizes(length, world_size // tensor)):
            stage_sizes = [size for size in divisors(world_size // (tensor * context) or 1) if size <= layers]
            for stages in _given(values, "pipeline_model_parallel_size", stage_sizes):
                if world_size % (tensor * context * stages):
                    continue
                for split, units in _splits(values, layers, stages):
                    for chunks in _chunks({**values, **split}, units, stages):
                        for experts in _experts(values, world_size // stages):
                            yield {
                                **_sequence_parallel(values, tensor),
                                "tensor_model_parallel_size": tensor,
                                "context_parallel_size": context,
                                "pipeline_model_parallel_size": stages,
                                **split,
                                **chunks,
                                **experts,
                            }


def shardings(values: Mapping[str, Any]) -> dict[str, Choice]:
    """Return by name the schemes that contradict nothing that the user gave, the simplest first; what was given, if all
    do."""
    needed = {name: value for name, value in values.items() if name in _DIVIDE}
    schemes = {
        name: _without(choice, values)
        for name, choice in SHARDINGS.items()
        if all(choice.get(flag, False) == value for flag, value in needed.items())
    }
    return schemes or {"as given": {}}


def recomputations(values: Mapping[str, Any]) -> dict[str, Choice]:
    """Return the kinds of recomputation by name; the user's alone where one was given, None being none."""
    if values.get("recompute_granularity") or values.get("recompute_activations"):
        return {"as given": {}}
    return {"none": {}} if "recompute_granularity" in values else RECOMPUTATIONS


def micro_batches(values: Mapping[str, Any], samples: int) -> list[int]:
    """Return the sizes that divide the samples of a data-parallel rank in a step."""
    return list(_given(values, "micro_batch_size", [size for size in _MICRO_BATCHES if samples % size == 0]))


def flags(choice: Choice) -> list[str]:
    """Return the words of a command line, without values that are the default anyway."""
    words = []
    for name, value in choice.items():
        option = options_by_name()[name]
        if value == option.default or value is None:
            continue
        words.append(flag_of(name))
        if not option.is_switch:
            words += [str(item) for item in value] if option.many else [str(value)]
    return words


def _given(values: Mapping[str, Any], name: str, otherwise: list[int]) -> list[int]:
    return [values[name]] if values.get(name) is not None else otherwise


def _without(choice: Choice, values: Mapping[str, Any]) -> Choice:
    return {name: value for name, value in choice.items() if name not in values}


def _sequence_parallel(values: Mapping[str, Any], tensor: int) -> Choice:
    """Return whether to use sequence parallelism: with tensor parallelism always, as the same ranks hold less."""
    return {} if "sequence_parallel" in values else {"sequence_parallel": tensor > 1}


def _context_sizes(length: int, ranks: int) -> list[int]:
    """Return the sizes that leave a rank 1,024 positions or more: with fewer, sending takes longer than computing."""
    return [size for size in divisors(ranks) if size == 1 or length // size >= 1024]


_SPLITS = (
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def _splits(values: Mapping[str, Any], layers: int, stages: int) -> list[tuple[Choice, int]]:
    """Return the ways in which stages may divide the layers, each with the number of units to divide evenly: the layers
    alone; with embedding and loss, or the loss alone, counted as a layer each; or all stages but the last, which has
    fewer layers and the loss."""
    if stages == 1 or any(values.get(name) for name in _SPLITS):
        return [({}, layers)]
    both = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    loss = {"account_for_loss_in_pipeline_split": True}
    counted: list[tuple[Choice, int]] = [({}, layers), (both, layers + 2), (loss, layers + 1)]
    splits = [(split, units) for split, units in counted if units % stages == 0 and units // stages > 1]
    if not splits and layers % stages == 0:
        return [({}, layers)]
    most = -(-layers // stages)
    last = layers - most * (stages - 1)
    if not splits and last > 0:
        return [({"decoder_last_pipeline_num_layers": last}, layers)]
    return splits


def _chunks(values: Mapping[str, Any], layers: int, stages: int) -> list[Choice]:
    said = ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage")
    uneven = ("pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    if any(values.get(name) is not None for name in (*said, *uneven)):
        return [{}]
    if stages == 1:
        return [{"num_virtual_stages_per_pipeline_rank": None}]
    counts = [chunks for chunks in divisors(max(layers // stages, 1)) if 1 < chunks <= _MOST_CHUNKS]
    ends = dict.fromkeys([*counts[:1], *counts[-1:]])
    return [{"num_virtual_stages_per_pipeline_rank": chunks} for chunks in (None, *ends)]


def _experts(values: Mapping[str, Any], ranks: int) -> list[Choice]:
    """Return the expert-parallel sizes, with whole experts and tokens that go where they are needed."""
    experts = values.get("num_experts")
    if experts is None:
        return [{}]
    sizes = [size for size in divisors(experts) if ranks % size == 0]
    rest: Choice = {"expert_tensor_parallel_size": 1}
    # Gathering all tokens sends (E - 1) parts where exchanging the tokens of k experts sends twice k (E - 1)/E.
    few = 2 * (values.get("moe_router_topk") or 1)
    return [
        _without(
            {
                "expert_model_parallel_size": size,
                **rest,
                "moe_token_dispatcher_type": "allgather" if 1 < size < few else "alltoall",
            },
            {name: value for name, value in values.items() if name != "expert_model_parallel_size"},
        )
        for size in _given(values, "expert_model_parallel_size", sizes)
    ]


def hybrid(values: Mapping[str, Any], layout: Choice, world_size: int, gpus_per_node: int) -> Choice | None:
    """Return the flags of HSDP: FSDP2 inside of each node, and a copy of it in each; None where a node holds all ranks
    that share, or one, or the flags that were given say otherwise."""
    sharing = gpus_per_node // layout["tensor_model_parallel_size"]
    ranks = world_size // (layout["tensor_model_parallel_size"] * layout["pipeline_model_parallel_size"])
    if "num_distributed_optimizer_instances" in values or sharing <= 1 or ranks <= sharing or ranks % sharing:
        return None
    return {**SHARDINGS["FSDP2"], "num_distributed_optimizer_instances": ranks // sharing}
