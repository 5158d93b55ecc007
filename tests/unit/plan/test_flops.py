"""The products that the planner times are those of the formula by which throughput is reported."""

import pytest

from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.plan.flops import Products, flops_per_token
from megatron_ext.plan.search_input import placeholders
from megatron_ext.plan.stage_parameters import Shapes
from megatron_ext.rules.validate import problems

MODEL = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --vocab-size 1024 --micro-batch-size 2 "
    "--global-batch-size 32 --swiglu --normalization RMSNorm --disable-bias-linear --hidden-dropout 0 "
    "--untie-embeddings-and-output-weights --position-embedding-type rope --attention-dropout 0 --bf16 --world-size 8"
)


@pytest.mark.parametrize(
    "layout",
    [
        "",
        "--tensor-model-parallel-size 4",
        "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2",
        "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2",
        "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2",
        "--num-experts 4 --moe-router-topk 2 --moe-layer-freq ([0]*3+[1]*5) --pipeline-model-parallel-size 2",
        "--num-experts 4 --moe-shared-expert-intermediate-size 32 --tensor-model-parallel-size 2 --sequence-parallel "
        "--expert-tensor-parallel-size 1 --pipeline-model-parallel-size 2",
        "--num-experts 4 --tensor-model-parallel-size 2 --sequence-parallel",
    ],
)
def test_the_products_of_all_ranks_are_the_operations_of_the_model(layout: str) -> None:
    values = parse(f"{MODEL} {layout}".split()).values
    config = resolve({**values, **placeholders(values)}, Facts())
    assert not problems(config, Facts())
    shapes, sizes = Shapes(config), config.layout
    products = Products(config, shapes)
    forward = products.output().flops
    for layers in (chunk for stage in shapes.stacks for chunk in stage):
        for layer, number in layers.kinds:
            assert layer.mixer is not None
            core = layer.mixer.core(products.share)
            assert core is not None
            listed = [*products.of(layer.mixer), *products.of(layer.mlp)]
            forward += number * (core.flops + sum(product.flops for product in listed))
    ranks = sizes.tensor_model_parallel_size * sizes.context_parallel_size
    tokens = config.model.seq_length * config.training.micro_batch_size
    assert 3 * forward * ranks == flops_per_token(config) * tokens
    back = products.output().backward()
    assert sum(product.flops for product in back) == 2 * products.output().flops
