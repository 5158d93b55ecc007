"""Operations of one microbatch on one rank, chunk by chunk; summed over all ranks they are config/flops.py's."""

from megatron_ext.config.layers import Stack
from megatron_ext.config.schema import Config
from megatron_ext.plan.shapes import Shapes


def repeated(config: Config, held: Stack) -> dict[str, Stack]:
    """Which layers of a chunk run their attention's core, the rest of their attention, and their MLP once more."""
    training, none = config.training, held[:0]
    if training.recompute_granularity == "full":
        again = held[: training.recompute_num_layers or 1] if training.recompute_method == "block" else held
        return {"core": again, "attention": again, "mlp": again}
    parts: tuple[str, ...] = ()
    if training.recompute_granularity == "selective":
        parts = training.recompute_modules or ("core_attn",)
    return {"core": held if "core_attn" in parts else none, "attention": none, "mlp": held if "mlp" in parts else none}


def forward_flops(config: Config, shapes: Shapes, stage: int, chunk: int, *, again: bool = False) -> float:
    """Floating-point operations of a forward pass, a multiplication and an addition counted as two.

    Args:
        again: of what recomputation repeats in the backward pass instead.
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
