"""What latent attention says of itself, and what it refuses, each with a setting that works."""

import pytest

from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.config.schema import Config
from megatron_ext.cost.flops import flops_per_token
from megatron_ext.parts.catalogue import count, parameters
from megatron_ext.parts.stack import layers
from megatron_ext.plugins.latent_attention.describe import LatentAttention
from megatron_ext.rules.validate import problems

LINE = (
    "--num-layers 2 --hidden-size 60 --num-attention-heads 5 --seq-length 16 --micro-batch-size 1 --train-iters 1 "
    "--lr 1e-3 --mock-data --vocab-size 100 --device cpu --position-embedding-type rope --multi-latent-attention "
    "--normalization RMSNorm --disable-bias-linear --attention-dropout 0"
)


def _config(more: str = "") -> Config:
    return resolve({**parse(f"{LINE} {more}".split()).values, "world_size": 1}, Facts())


def test_sizes_are_those_of_megatrons_flags() -> None:
    sizes = "--q-lora-rank 7 --kv-lora-rank 11 --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 3 --qk-layernorm"
    shapes = {p.name.partition("self_attention.")[2]: p.shape for p in parameters(_config(sizes)) if p.stage == 1}
    assert {name: shape for name, shape in shapes.items() if name} == {
        "linear_proj.weight": (60, 5 * 3),
        "linear_q_down_proj.weight": (7, 60),
        "linear_q_up_proj.weight": (5 * (6 + 4), 7),
        "linear_kv_down_proj.weight": (11 + 4, 60),
        "linear_kv_up_proj.weight": (5 * (6 + 3), 11),
        "q_layernorm.weight": (7,),
        "kv_layernorm.weight": (11,),
    }
    defaults = {p.name.partition("self_attention.")[2]: p.shape for p in parameters(_config()) if p.stage == 1}
    assert defaults["linear_q_proj.weight"] == (5 * (128 + 64), 60)
    assert defaults["linear_kv_down_proj.weight"] == (32 + 64, 60)
    assert not any("layernorm" in name for name in defaults if name)


def test_flops_count_matrices_and_heads_of_two_sizes() -> None:
    config = _config("--kv-lora-rank 11 --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 3")
    vectors = sum(p.size for p in parameters(config) if len(p.shape) == 1)
    embedding = (config.model.padded_vocab_size - 100) * 60
    heads = 3 * 2 * 2 * 5 * (10 + 3) * 16 / 2
    assert flops_per_token(config) == 6 * (count(config) - vectors - embedding) + heads


def test_scores_are_multiplied_as_published() -> None:
    """DeepSeek-V3: 192 channels, a factor of 40, mscale and mscale_all_dim 1: 0.1 ln 40 + 1 = 1.3689, squared."""
    asked = "--rotary-scaling-factor 40 --mscale 1 --mscale-all-dim 1"
    attention = layers(_config(asked))[0].attention
    assert isinstance(attention, LatentAttention)
    assert attention.score_scale == pytest.approx(1.3689 * 1.3689 / 192**0.5, rel=1e-4)
    plain = layers(_config(f"{asked} --rope-type rope"))[0].attention
    assert isinstance(plain, LatentAttention)
    assert plain.score_scale == 192**-0.5


@pytest.mark.parametrize(
    ("flags", "said", "fix"),
    [
        ("--qk-pos-emb-head-dim 7", "--qk-pos-emb-head-dim 7 is odd", "--qk-pos-emb-head-dim 8"),
        ("--qk-pos-emb-head-dim 0", "--qk-pos-emb-head-dim 0 is below 1", "--qk-pos-emb-head-dim 2"),
        ("--kv-lora-rank 0", "--kv-lora-rank 0 is below 1", "--kv-lora-rank 1"),
        ("--rotary-scaling-factor 0.5", "--rotary-scaling-factor 0.5 is below 1", "--rotary-scaling-factor 1"),
        ("--beta-fast 1 --beta-slow 2", "--beta-fast 1 is below --beta-slow 2", "--beta-fast 32 --beta-slow 1"),
        ("--rotary-base 1", "--rotary-base is 1", "--rotary-base 10000"),
        ("--softmax-scale 0.5", "--softmax-scale 0.5 with --multi-latent-attention", None),
        ("--no-rope-freq 2", "--no-rope-freq 2 with --multi-latent-attention", None),
        ("--group-query-attention --num-query-groups 5", "leave out --group-query-attention", None),
        ("--rotary-interleaved", "leave out --rotary-interleaved", None),
        ("--use-rope-scaling", "leave out --use-rope-scaling", None),
        ("--add-qkv-bias", "leave out --add-qkv-bias", None),
        ("--position-embedding-type alibi", "use --position-embedding-type rope", "--position-embedding-type rope"),
        ("--tensor-model-parallel-size 2 --world-size 2", "--num-attention-heads 5 is not divisible", None),
        ("--rotary-base-local 9", "--rotary-base-local with --multi-latent-attention", None),
        ("--value-channels 9", "--value-channels with --multi-latent-attention", None),
    ],
)
def test_what_cannot_be_is_refused_with_a_setting_that_works(flags: str, said: str, fix: str | None) -> None:
    assert problems(_config(), Facts()) == []
    found = problems(_config(flags), Facts())
    assert any(said in problem for problem in found), found
    if fix is not None:
        assert not any(said in problem for problem in problems(_config(f"{flags} {fix}"), Facts()))
