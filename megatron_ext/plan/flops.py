"""Operations of one microbatch on one rank, chunk by chunk; summed over all ranks they are config/flops.py's."""

from megatron_ext.config.schema import Config
from megatron_ext.plan.shapes import Shapes


def repeated(config: Config, layers: int) -> dict[str, float]:
    """How many of so many layers run their attention's core, the rest of their attention, and their MLP once more."""
    training = config.training
    if training.recompute_granularity == "full":
        again = min(training.recompute_num_layers or 1, layers) if training.recompute_method == "block" else layers
        return {"core": again, "attention": again, "mlp": again}
    parts: tuple[str, ...] = ()
    if training.recompute_granularity == "selective":
        parts = training.recompute_modules or ("core_attn",)
    return {"core": layers * ("core_attn" in parts), "attention": 0, "mlp": layers * ("mlp" in parts)}


def forward_flops(config: Config, shapes: Shapes, stage: int, chunk: int, *, again: bool = False) -> float:
    """Floating-point operations of a forward pass, a multiplication and an addition counted as two.

    Args:
        again: of what recomputation repeats in the backward pass instead.
    """
    layers = shapes.counts[stage][chunk]
    times = repeated(config, layers) if again else {"core": layers, "attention": layers, "mlp": layers}
    model, layout = config.model, config.layout
    tensor = layout.tensor_model_parallel_size
    tokens = model.seq_length // layout.context_parallel_size * config.training.micro_batch_size
    # Under causality a token sees half of the sequence: two products with as many keys.
    core = 2 * tokens * model.seq_length * model.num_attention_heads * model.kv_channels / tensor
    total = times["core"] * core
    total += 2 * tokens * (times["attention"] * shapes.layer.attention + times["mlp"] * shapes.layer.mlp)
    if model.num_experts is not None:
        whole = shapes.layer.experts * layout.expert_model_parallel_size * layout.expert_tensor_size / model.num_experts
        total += 2 * times["mlp"] * model.moe_router_topk * tokens / tensor * whole
    if shapes.is_last(stage, chunk) and not again:
        total += 2 * tokens * shapes.table
    return total
