"""The products that the planner times are those of the formula by which throughput is reported."""

import pytest

from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.config.schema import Config
from megatron_ext.cost.flops import Products, flops_per_token
from megatron_ext.cost.stage_parameters import Shapes
from megatron_ext.parts.catalogue import active_kinds_of_parameters
from megatron_ext.plugins.planner.search_input import placeholders
from megatron_ext.plugins.prove.compared_models import MODELS, RECIPE
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
    config = _config(f"{MODEL} {layout}")
    sizes = config.layout
    ranks = sizes.tensor_model_parallel_size * sizes.context_parallel_size
    assert 3 * _forward(config) * ranks == flops_per_token(config) * _tokens(config)
    output = Products(config, Shapes(config)).output()
    assert sum(product.flops for product in output.backward()) == 2 * output.flops


def test_every_models_products_are_its_operations() -> None:
    """But for convolutions, rates of states, gates of one output and norms of heads: no products of matrices, and not
    timed as such."""
    for name, flags in MODELS.items():
        config = _config(f"{RECIPE} {flags} --seq-length 64 --vocab-size 512 --global-batch-size 32 --world-size 8")
        others = sum(
            number * parameter.size
            for parameter, number in active_kinds_of_parameters(config)
            if isinstance(parameter.stage, int)
            and len(parameter.shape) > 1
            and parameter.name.endswith(("conv1d.weight", ".A_log", ".gate_weight", "_layernorm.weight"))
        )
        assert 3 * _forward(config) == (flops_per_token(config) - 6 * others) * _tokens(config), name


def _config(words: str) -> Config:
    values = parse(words.split()).values
    config = resolve({**values, **placeholders(values)}, Facts())
    assert not problems(config, Facts())
    return config


def _tokens(config: Config) -> int:
    return config.model.seq_length * config.training.micro_batch_size


def _forward(config: Config) -> float:
    """Operations of a rank's forward pass of one microbatch, as the planner times them."""
    shapes = Shapes(config)
    products = Products(config, shapes)
    forward = products.output().flops
    for layers in (chunk for stage in shapes.stacks for chunk in stage):
        for layer, number in layers.kinds:
            core = layer.mixer and layer.mixer.core(products.share)
            listed = [product for part in (layer.mixer, layer.mlp, layer.around) for product in products.of(part)]
            forward += number * ((core.flops if core else 0.0) + sum(product.flops for product in listed))
    return forward
