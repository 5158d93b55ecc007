"""What training costs: floating-point operations per token, and bytes of weights, gradients and optimizer state."""

from megatron_ext.config.parameters import Parameter, parameters
from megatron_ext.config.schema import Config


def flops_per_token(config: Config) -> int:
    """Floating-point operations of forward and backward for one token, recomputation not counted.

    Every weight of a matrix product costs 2 operations forward and 4 backward: 6 x weights, the output layer included
    (tied or not) and the embedding lookup not. Attention adds the products Q K^T and A V over the keys that causality
    leaves, on average half the sequence: 6 x layers x (heads x head size) x sequence length ("causal"; the "full"
    convention has 12). Of a mixture of experts the top k count, and the router. The vocabulary is the true
    one, without padding.
    Source: Chowdhery et al. 2022, PaLM (arXiv:2204.02311), appendix B, halved there for causality. Megatron-LM's own
    formula agrees in the matrices, but counts padded rows.
    """
    model, vocabulary = config.model, config.data.vocab_size
    assert vocabulary is not None, "the vocabulary's size is known once the configuration is resolved"
    matrices = vocabulary * model.hidden_size
    matrices += sum(p.size for p in _active(config) if isinstance(p.stage, int) and len(p.shape) > 1)
    return 6 * matrices + 6 * model.num_layers * model.num_attention_heads * model.kv_channels * model.seq_length


def active_parameters(config: Config) -> int:
    """Parameters that compute one token: those of all experts but the top k are left out."""
    return sum(parameter.size for parameter in _active(config))


def _active(config: Config) -> list[Parameter]:
    # All experts are of one size.
    used = config.model.moe_router_topk
    return [p for p in parameters(config) if p.expert is None or p.expert < used]


def parameters_without_embeddings(config: Config) -> int:
    """Parameters of the layers and the final norm: what scaling laws call N."""
    return sum(p.size for p in parameters(config) if isinstance(p.stage, int) or "layernorm" in p.name)


def state_bytes_per_parameter(config: Config, *, expert: bool = False) -> float:
    """Bytes of weights, gradients and optimizer state that a rank holds for each of its parameters.

    Mixed precision with Adam: 2 (weight) + 4 (fp32 gradient) + 12 (fp32 master and two moments) = 18, and 6 + 12/d
    with the distributed optimizer over d data- times context-parallel ranks (Megatron-LM's documentation of its
    distributed optimizer). fp16 without --accumulate-allreduce-grads-in-fp32 has 2-byte gradients. fp32 has no master:
    8 + 8, or 8 + 8/d. SGD keeps one moment, not two. For a routed expert, d is the expert-data-parallel size.
    """
    training, layout = config.training, config.layout
    mixed = training.bf16 or training.fp16
    held = 8 if not mixed else 2 + (4 if training.accumulate_allreduce_grads_in_fp32 else 2)
    moments = 2 if config.optimizer.optimizer == "adam" else 1
    shared = 4 * moments + (4 if mixed else 0)
    replicas = layout.data_parallel_size * layout.context_parallel_size
    ranks = layout.expert_data_parallel_size if expert else replicas
    return held + shared / (ranks if layout.use_distributed_optimizer else 1)
