"""Lists what a plan may choose, as values of flags: every combination is then put before the program's own rules."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_ext.config.options import flag_of, options_by_name
from megatron_ext.rules.suggest import divisors

Choice = dict[str, Any]
"""Values by field name."""

SHARDINGS: dict[str, Choice] = {
    "DDP": {"overlap_grad_reduce": True},
    "ZeRO-1": {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
    "ZeRO-2": {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads"},
    "ZeRO-3": {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"},
    "FSDP2": {"use_torch_fsdp2": True},
}
"""What data-parallel ranks divide, the simplest first. ZeRO-2 and ZeRO-3 are Megatron-FSDP's."""

BETTER = {"DDP": "ZeRO-1", "ZeRO-3": "FSDP2"}
"""Pairs of schemes: where the second is legal, the first is not looked at, since it needs more and sends no less."""

_DIVIDE = {name for choice in SHARDINGS.values() for name in choice if not name.startswith("overlap_")}

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
            for stages in _given(values, "pipeline_model_parallel_size", divisors(layers)):
                if world_size % (tensor * context * stages):
                    continue
                for chunks in _chunks(values, layers, stages):
                    for experts in _experts(values, world_size // stages):
                        yield {
                            **_sequence_parallel(values, tensor),
                            "tensor_model_parallel_size": tensor,
                            "context_parallel_size": context,
                            "pipeline_model_parallel_size": stages,
                            **chunks,
                            **experts,
                        }


def shardings(values: Mapping[str, Any]) -> dict[str, Choice]:
    """Return by name the schemes that contradict nothing that the user gave, the simplest first; what was given, if all
    do."""
    needed = {name: value for name, value in values.items() if name in _DIVIDE}
    found = {
        name: _without(choice, values)
        for name, choice in SHARDINGS.items()
        if all(choice.get(flag, False) == value for flag, value in needed.items())
    }
    return found or {"as given": {}}


def recomputations(values: Mapping[str, Any]) -> dict[str, Choice]:
    """Return the kinds of recomputation by name; the user's alone where one was given."""
    if values.get("recompute_granularity") or values.get("recompute_activations"):
        return {"as given": {}}
    return RECOMPUTATIONS


def micro_batches(values: Mapping[str, Any], samples: int) -> list[int]:
    """Return the sizes that divide the samples of a data-parallel rank in a step."""
    return list(_given(values, "micro_batch_size", [size for size in _MICRO_BATCHES if samples % size == 0]))


def flags(choice: Choice) -> list[str]:
    """Return the words of a command line, without what is the default anyway."""
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
    """Return the sizes that leave a rank 1,024 positions or more: below, what is sent outweighs what is computed."""
    return [size for size in divisors(ranks) if size == 1 or length // size >= 1024]


def _chunks(values: Mapping[str, Any], layers: int, stages: int) -> list[Choice]:
    said = ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage")
    if any(values.get(name) is not None for name in (*said, "pipeline_model_parallel_layout")):
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
    rest: Choice = {"expert_tensor_parallel_size": 1, "moe_token_dispatcher_type": "alltoall"}
    rest = _without(rest, values)
    return [
        {"expert_model_parallel_size": size, **rest} for size in _given(values, "expert_model_parallel_size", sizes)
    ]
