"""What a gated short convolution says of itself: sizes, operations, the layers that have it, and what is refused."""

import pytest

from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.config.schema import Config
from megatron_ext.cost.flops import flops_per_token
from megatron_ext.parts.catalogue import parameters
from megatron_ext.parts.stack import layers
from megatron_ext.rules.validate import problems

LINE = (
    "--num-layers 4 --hidden-size 60 --num-attention-heads 5 --seq-length 128 --micro-batch-size 1 --train-iters 1 "
    "--lr 1e-3 --mock-data --vocab-size 100 --device cpu --position-embedding-type rope --normalization RMSNorm "
    "--disable-bias-linear --attention-dropout 0"
)


def _config(more: str = "--full-attn-idxs 2", ranks: int = 1) -> Config:
    typed = parse(f"{LINE} {more}".split()).values
    return resolve({"world_size": ranks, **typed}, Facts())


def test_sizes_are_those_of_the_flags() -> None:
    config = _config("--full-attn-idxs 2 --conv-L-cache 5 --conv-bias")
    own = [p for p in parameters(config) if p.stage == 0 and "self_attention." in p.name]
    assert {p.name.partition("self_attention.")[2]: p.shape for p in own} == {
        "in_proj.weight": (180, 60),
        "in_proj.bias": (180,),
        "conv1d.weight": (60, 1, 5),
        "conv1d.bias": (60,),
        "out_proj.weight": (60, 60),
        "out_proj.bias": (60,),
    }
    assert [layer.has_attention for layer in layers(config)] == [False, False, True, False]
    assert not problems(config, Facts())


def test_operations_are_those_of_products_convolution_and_gates() -> None:
    """Against attention in all layers: 3 times forward, 2 operations for each weight, and 2 gates of each channel."""
    width, kernel, length = 60, 3, 128
    attention = 2 * 4 * width**2 + 2 * width * length
    convolution = 2 * (4 * width**2 + kernel * width) + 2 * width
    difference = flops_per_token(_config()) - flops_per_token(_config(""))
    assert difference == 3 * 3 * (convolution - attention)


def test_layers_by_letters_are_the_same() -> None:
    by_letters = layers(_config("--hybrid-layer-pattern C-*- --conv-l-cache 4"))
    of_indices = layers(_config("--full-attn-idxs 1 --conv-l-cache 4"))
    assert [by_letters[0].mixer, by_letters[2].mixer] == [of_indices[0].mixer, of_indices[1].mixer]
    assert by_letters[0].mixer != by_letters[2].mixer
    assert not problems(_config("--hybrid-layer-pattern C-*-"), Facts())


@pytest.mark.parametrize(
    ("flags", "ranks", "message"),
    [
        (
            "--full-attn-idxs 1 4",
            1,
            "names layer 4, but --num-layers is 4, and the last one is 3; use --full-attn-idxs 3",
        ),
        ("--full-attn-idxs 0 1 2 3", 1, "--full-attn-idxs 0 1 2 3 names all layers"),
        ("--full-attn-idxs -1", 1, "--full-attn-idxs -1 is below 0; use 0 or more"),
        ("--full-attn-idxs 1 --hybrid-layer-pattern C-*-", 1, "says what each layer is, but --full-attn-idxs 1"),
        (
            "--full-attn-idxs 1 --experimental-attention-variant kda --linear-attention-freq 2",
            1,
            "--experimental-attention-variant is kda",
        ),
        ("--full-attn-idxs 1 --tensor-model-parallel-size 7", 7, "--hidden-size 60 is not divisible by --tensor-model"),
        (
            "--full-attn-idxs 1 --conv-l-cache 34 --context-parallel-size 2",
            2,
            "--conv-l-cache 34 reaches beyond the 32 positions of a part of a sample with --context-parallel-size 2; "
            "use --seq-length 136",
        ),
        (
            "--full-attn-idxs 1 --fp8-format hybrid --bf16",
            1,
            "never compared with another layout in gated short convolutions, but --full-attn-idxs is 1; leave",
        ),
    ],
)
def test_what_cannot_work_is_refused(flags: str, ranks: int, message: str) -> None:
    assert message in "\n".join(problems(_config(flags, ranks), Facts()))


def test_the_program_computes_the_layers_itself() -> None:
    assert _config("--full-attn-idxs 1 --transformer-impl transformer_engine").model.transformer_impl == "local"


def test_sizes_without_such_a_layer_are_warned_of() -> None:
    warnings = parse(f"{LINE} --conv-l-cache 4 --conv-bias".split()).warnings
    assert [text.split()[0] for text in warnings] == ["--conv-l-cache", "--conv-bias"]
    assert not parse(f"{LINE} --hybrid-layer-pattern C-*- --conv-l-cache 4".split()).warnings
