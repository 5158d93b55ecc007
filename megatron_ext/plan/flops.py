"""Floating-point operations of training: of one token in the whole model, and of one microbatch in a chunk of it.

Throughput is reported by `flops_per_token`; the forward passes of all ranks and the backward passes, which cost twice
as much, add up to it.
"""

from collections.abc import Iterator

from megatron_ext.config.schema import Config
from megatron_ext.parts.catalogue import Parameter, kinds_of_parameters
from megatron_ext.parts.stack import Stack, stack
from megatron_ext.plan.shapes import Shapes


def flops_per_token(config: Config) -> int:
    """Return the floating-point operations of forward and backward for one token, recomputation not counted.

    Every weight of a matrix product costs 2 operations forward and 4 backward: 6 x weights, the output layer included
    (tied or not) and the embedding lookup not. Attention adds the products Q K^T and A V over the keys that causality
    leaves, on average half the sequence: for each layer 6 x (heads x head size) x sequence length ("causal"; the "full"
    convention has 12), less with a window. Of a mixture of experts the top k count, and the router. The vocabulary is
    the true one, without padding.
    Source: Chowdhery et al. 2022, PaLM (arXiv:2204.02311), appendix B, halved there for causality. Megatron-LM's own
    formula agrees in the matrices, but counts padded rows.
    """
    model, vocabulary = config.model, config.data.vocab_size
    assert vocabulary is not None, "the vocabulary's size is known once the configuration is resolved"
    matrices = vocabulary * model.hidden_size
    matrices += sum(n * p.size for p, n in _active(config) if isinstance(p.stage, int) and len(p.shape) > 1)
    return 6 * matrices + round(stack(config).total(lambda layer: 3 * layer.attention.core_flops(model.seq_length)))


def active_parameters(config: Config) -> int:
    """Return the parameters that compute one token: those of all experts but the top k are left out."""
    return sum(number * parameter.size for parameter, number in _active(config))


def _active(config: Config) -> Iterator[tuple[Parameter, int]]:
    """Yield what computes one token, as `kinds_of_parameters` does. All experts of a layer are of one size."""
    kinds = {kind.number: kind.experts for kind, _ in stack(config).kinds}
    for parameter, number in kinds_of_parameters(config):
        experts = kinds.get(parameter.stage) if isinstance(parameter.stage, int) else None
        if parameter.expert is None or experts is None:
            yield parameter, number
        else:
            yield parameter, number // experts.count * min(experts.top_k, experts.count)


def parameters_without_embeddings(config: Config) -> int:
    """Return the parameters of the layers and the final norm: what scaling laws call N."""
    kinds = kinds_of_parameters(config)
    return sum(number * p.size for p, number in kinds if isinstance(p.stage, int) or "layernorm" in p.name)


def repeated(config: Config, held: Stack) -> dict[str, Stack]:
    """Return which layers of a chunk run their attention's core, the rest of their attention, and their MLP once
    more."""
    training, none = config.training, held[:0]
    if training.recompute_granularity == "full":
        again = held[: training.recompute_num_layers or 1] if training.recompute_method == "block" else held
        return {"core": again, "attention": again, "mlp": again}
    parts: tuple[str, ...] = ()
    if training.recompute_granularity == "selective":
        parts = training.recompute_modules or ("core_attn",)
    return {"core": held if "core_attn" in parts else none, "attention": none, "mlp": held if "mlp" in parts else none}


def forward_flops(config: Config, shapes: Shapes, stage: int, chunk: int, *, again: bool = False) -> float:
    """Return the floating-point operations of a forward pass, a multiplication and an addition counted as two.

    Args:
        again: whether to count what recomputation repeats in the backward pass instead.
    """
    held = shapes.stacks[stage][chunk]
    run = repeated(config, held) if again else {"core": held, "attention": held, "mlp": held}
    model, layout = config.model, config.layout
    tensor = layout.tensor_model_parallel_size
    tokens = model.seq_length // layout.context_parallel_size * config.training.micro_batch_size
    total = run["core"].total(lambda layer: tokens * layer.attention.core_flops(model.seq_length) / tensor)
    matrices = run["attention"].total(lambda layer: shapes.part(layer).attention)
    total += 2 * tokens * (matrices + run["mlp"].total(lambda layer: shapes.part(layer).mlp))
    ranks = layout.expert_model_parallel_size * layout.expert_tensor_size
    for layer, number in run["mlp"].kinds:
        if layer.experts is not None:
            one_expert = shapes.part(layer).experts * ranks / layer.experts.count
            total += 2 * number * layer.experts.top_k * tokens / tensor * one_expert
    if shapes.is_last(stage, chunk) and not again:
        total += 2 * tokens * shapes.table
    return total
