"""What training costs in floating-point operations per token, and the parameters that these come from."""

from megatron_ext.config.layers import layers, stack
from megatron_ext.config.parameters import Parameter, parameters
from megatron_ext.config.schema import Config


def flops_per_token(config: Config) -> int:
    """Floating-point operations of forward and backward for one token, recomputation not counted.

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
    matrices += sum(p.size for p in _active(config) if isinstance(p.stage, int) and len(p.shape) > 1)
    return 6 * matrices + round(stack(config).total(lambda layer: 3 * layer.attention.core_flops(model.seq_length)))


def active_parameters(config: Config) -> int:
    """Parameters that compute one token: those of all experts but the top k are left out."""
    return sum(parameter.size for parameter in _active(config))


def _active(config: Config) -> list[Parameter]:
    # All experts of a layer are of one size.
    top_k = [layer.experts.top_k if layer.experts else 0 for layer in layers(config)]
    return [p for p in parameters(config) if p.expert is None or p.expert < top_k[int(p.stage)]]


def parameters_without_embeddings(config: Config) -> int:
    """Parameters of the layers and the final norm: what scaling laws call N."""
    return sum(p.size for p in parameters(config) if isinstance(p.stage, int) or "layernorm" in p.name)
