"""Floating-point operations of training: of one token in the whole model, and the matrix products that a rank computes
in the forward pass of one microbatch, with their sizes.

Throughput is reported by `flops_per_token`; the forward passes of all ranks and the backward passes, which cost twice
as much, add up to it.

A product of an (M, K) by a (K, N) matrix costs 2 M N K operations. Its backward pass is two products of as many
operations: (M, N) by (N, K) for the input's gradient, and (K, M) by (M, N) for the weight's. How near a product comes
to the peak depends on its sizes (`cost/kernel_times.py`): tensor parallelism makes N or K smaller, context parallelism
and experts make M smaller.
"""

from dataclasses import replace

from megatron_ext.config.schema import Config
from megatron_ext.cost.stage_parameters import Shapes
from megatron_ext.parts.catalogue import active_kinds_of_parameters, kinds_of_parameters
from megatron_ext.parts.protocol import Part, Product, Share
from megatron_ext.parts.stack import Stack, stack


def flops_per_token(config: Config) -> int:
    """Return the floating-point operations of forward and backward for one token, recomputation not counted.

    Every weight of a matrix product costs 2 operations forward and 4 backward: 6 x weights, the output layer included
    (tied or not) and the embedding lookup not. Attention adds the products Q K^T and A V over the keys that causality
    leaves, on average half the sequence: for each layer 6 x (heads x head size) x sequence length ("causal"; the "full"
    convention has 12), less with a window. Of a mixture of experts the top k count, and the router. The vocabulary is
    the true one, without padding. Each depth of multi-token prediction has the output layer's work once more, and that
    of its own layers, whether or not their weights are another depth's.
    Source: Chowdhery et al. 2022, PaLM (arXiv:2204.02311), appendix B, with its attention term halved for causality.
    Megatron-LM's own formula agrees in the matrices, but counts padded rows.
    """
    model, vocabulary = config.model, config.data.vocab_size
    matrices = vocabulary * model.hidden_size * (1 + (model.mtp_num_layers or 0))
    applied = replace(config, model=replace(model, mtp_use_repeated_layer=False))
    matrices += sum(
        n * p.size for p, n in active_kinds_of_parameters(applied) if isinstance(p.stage, int) and len(p.shape) > 1
    )
    return 6 * matrices + round(stack(config).total(lambda layer: 3 * layer.core_flops(model.seq_length)))


def active_parameters(config: Config) -> int:
    """Return the number of parameters that compute one token: of routed experts, the parameters of the top k."""
    return sum(number * parameter.size for parameter, number in active_kinds_of_parameters(config))


def parameters_without_embeddings(config: Config) -> int:
    """Return the number of parameters of the layers and the final norm: N of the scaling laws."""
    kinds = kinds_of_parameters(config)
    return sum(number * p.size for p, number in kinds if isinstance(p.stage, int) or "layernorm" in p.name)


def repeated(config: Config, stack: Stack) -> dict[str, Stack]:
    """Return which layers of a chunk run their mixer's core, the rest of their mixer, and their MLP once more."""
    training, none = config.training, stack[:0]
    if training.recompute_granularity == "full":
        again = stack[: training.recompute_num_layers or 1] if training.recompute_method == "block" else stack
        return {"core": again, "mixer": again, "mlp": again}
    parts: tuple[str, ...] = ()
    if training.recompute_granularity == "selective":
        parts = training.recompute_modules or ("core_attn",)
    expanded = Stack(tuple(one for one in stack if ("mlp" if one.experts is None else "moe") in parts))
    return {"core": stack if "core_attn" in parts else none, "mixer": none, "mlp": expanded}


class Products:
    """The products of one resolved configuration."""

    def __init__(self, config: Config, shapes: Shapes):
        self.share = Share(config)
        self.table = shapes.table // config.model.hidden_size

    def of(self, part: Part | None) -> list[Product]:
        """Return the products of a part of a layer; an even load of experts is assumed."""
        return [] if part is None else part.products(self.share)

    def output(self) -> Product:
        """Return the output layer's, once for the next token and for each further one."""
        times = 1 + (self.share.config.model.mtp_num_layers or 0)
        return Product(self.share.tokens, self.table, self.share.hidden, times)
