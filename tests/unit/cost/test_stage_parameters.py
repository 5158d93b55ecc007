"""The planner's quick count of parameters is the catalogue's."""

import pytest

from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.cost.stage_parameters import Shapes
from megatron_ext.parts.catalogue import count_per_rank, parameters, stages
from megatron_ext.rules.validate import problems

BASE = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --micro-batch-size 1 "
    "--global-batch-size 64 --lr 1e-3 --train-iters 100 --mock-data --vocab-size 1000 --device cpu --world-size 16 "
)
_PIPELINE = "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2"


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--tensor-model-parallel-size 4 --swiglu --qk-layernorm",
        _PIPELINE,
        f"{_PIPELINE} --untie-embeddings-and-output-weights --position-embedding-type rope "
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3",
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*3|t*4|t|L",
        "--num-experts 8 --disable-bias-linear --expert-model-parallel-size 4 --tensor-model-parallel-size 2 "
        "--sequence-parallel --expert-tensor-parallel-size 1 --moe-shared-expert-intermediate-size 32 "
        "--pipeline-model-parallel-size 2",
    ],
)
def test_parameters_of_every_stage(flags: str) -> None:
    config = resolve(parse((BASE + flags).split()).values, Facts())
    assert not problems(config, Facts())
    shapes = Shapes(config)
    held = [shapes.parameters_of_stage(stage) for stage in range(config.layout.pipeline_model_parallel_size)]
    assert [dense + experts for dense, experts in held] == count_per_rank(config)
    assert [experts for _, experts in held] == count_per_rank(config, experts=True)
    norms = [p for p in parameters(config) if p.sequence_parallel or "layernorm" in p.name]
    assert [shapes.norms_of_stage(stage) for stage in range(len(held))] == [
        sum(p.size for p in norms if stage in stages(config, p)) for stage in range(len(held))
    ]
