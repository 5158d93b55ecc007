"""What a gated delta rule says of itself: sizes, operations, what is saved and decayed, and the layers that have it."""

import pytest

from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.config.schema import Config
from megatron_ext.cost.flops import flops_per_token
from megatron_ext.parts.catalogue import count, parameters
from megatron_ext.parts.stack import layers
from megatron_ext.rules.validate import problems

LINE = (
    "--num-layers 4 --hidden-size 60 --num-attention-heads 5 --seq-length 128 --micro-batch-size 1 --train-iters 1 "
    "--lr 1e-3 --mock-data --vocab-size 100 --device cpu --position-embedding-type rope --normalization RMSNorm "
    "--disable-bias-linear --attention-dropout 0 --experimental-attention-variant gated_delta_net "
    "--linear-attention-freq 2 --linear-num-key-heads 3 --linear-num-value-heads 6 --linear-key-head-dim 7 "
    "--linear-value-head-dim 11 --linear-conv-kernel-dim 5"
)


def _config(more: str = "") -> Config:
    typed = parse(f"{LINE} {more}".split()).values
    return resolve({"world_size": 1, **typed}, Facts())


def test_sizes_are_those_of_megatrons_flags() -> None:
    own = [p for p in parameters(_config()) if p.stage == 0 and "self_attention." in p.name]
    assert {p.name.partition("self_attention.")[2]: p.shape for p in own} == {
        "in_proj.weight": (2 * 3 * 7 + 2 * 6 * 11 + 2 * 6, 60),
        "conv1d.weight": (2 * 3 * 7 + 6 * 11, 1, 5),
        "dt_bias": (6,),
        "A_log": (6,),
        "out_norm.weight": (11,),
        "out_proj.weight": (60, 6 * 11),
    }
    decayed = {p.name.rpartition("self_attention.")[2] for p in own if p.decay}
    assert decayed == {"in_proj.weight", "conv1d.weight", "out_proj.weight"}, "megatron-core decays all but vectors"


def test_sizes_with_decays_of_channels_are_those_of_megatrons_flags() -> None:
    config = _config("--experimental-attention-variant kda")
    own = [p for p in parameters(config) if p.stage == 0 and "self_attention." in p.name]
    assert {p.name.partition("self_attention.")[2]: p.shape for p in own} == {
        "in_proj.weight": (2 * 3 * 7 + 6 * 11 + 6, 60),
        "gates_in_proj.weight": (2 * 11, 60),
        "decay_out_proj.weight": (6 * 7, 11),
        "gate_out_proj.weight": (6 * 11, 11),
        "conv1d.weight": (2 * 3 * 7 + 6 * 11, 1, 5),
        "dt_bias": (6 * 7,),
        "A_log": (6,),
        "out_norm.weight": (11,),
        "out_proj.weight": (60, 6 * 11),
    }
    assert not problems(config, Facts())


def test_layers_are_dealt_as_megatron_deals_them() -> None:
    assert [layer.has_attention for layer in layers(_config())] == [False, True, False, True]
    assert [layer.has_attention for layer in layers(_config("--linear-attention-freq [0,1,1,0]"))] == [
        *(True, False),
        *(False, True),
    ]
    assert [layer.has_attention for layer in layers(_config("--linear-attention-freq 4"))] == [False] * 3 + [True]


def test_flops_grow_with_the_length() -> None:
    """Besides products with weights, the same for every token, whatever the length; attention has more."""
    all_delta = "--linear-attention-freq [1]*4"
    config = _config(all_delta)
    vectors = sum(p.size for p in parameters(config) if len(p.shape) == 1)
    embedding = (config.model.padded_vocab_size - 100) * 60
    of_layer = 6 * 6 * 7 * 11 + 64 * (2 * 3 * 7 + 6 * (7 + 2 * 11))
    assert flops_per_token(config) == 6 * (count(config) - vectors - embedding) + 3 * 4 * of_layer
    assert flops_per_token(_config(f"{all_delta} --seq-length 4096")) == flops_per_token(config)
    assert flops_per_token(_config("--seq-length 4096")) > flops_per_token(_config())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--linear-num-value-heads 7", "--linear-num-value-heads 7 is not divisible by --linear-num-key-heads 3"),
        (
            "--linear-attention-freq [1,0]",
            "--linear-attention-freq [1,0] is neither a number of layers nor a",
        ),
        ("--linear-attention-freq 1", "that --linear-attention-freq names, but 1 names none"),
        ("--bf16 --fp8-format hybrid --fp8-recipe blockwise", "in gated delta rules"),
        (
            "--context-parallel-size 2 --world-size 2 --seq-length 12",
            "--linear-conv-kernel-dim 5 reaches beyond the 3 positions of a part of a sample",
        ),
        (
            "--tensor-model-parallel-size 5 --world-size 5 --sequence-parallel --seq-length 20",
            "--linear-num-key-heads 3 is not divisible by --tensor-model-parallel-size 5",
        ),
    ],
)
def test_what_cannot_be_is_refused(flags: str, said: str) -> None:
    found = problems(_config(flags), Facts())
    assert any(said in problem for problem in found), found
    assert all("; " in problem for problem in found)
