"""Models of a draw get the shape of a family of Hugging Face near them, and keep what its config.json can say."""

from pathlib import Path

import pytest

from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.families.registry import FAMILIES, written_as
from megatron_ext.plugins.prove.draws import LAYOUTS_OF_A_MODEL, ONE_PROCESS, Draws
from megatron_ext.plugins.prove.family_draws import with_flags_of
from megatron_ext.plugins.prove.parity import write_corpus

PIECES = (
    "--hidden-size 64 --num-attention-heads 4 --train-iters 20 --lr 1e-3 --num-layers 4",
    "--position-embedding-type alibi",
    "--group-query-attention --num-query-groups 2 --qkv-clip 1",
    "--geglu --ffn-hidden-size 96",
    "--micro-batch-size 1 --global-batch-size 8",
)


@pytest.mark.parametrize("name", ["llama", "gemma", "qwen2", "stablelm", "olmo2"])
def test_a_model_gets_the_flags_of_a_family_and_keeps_its_sizes(name: str, tmp_path: Path) -> None:
    draws = Draws(7, write_corpus(tmp_path, 5))
    alone = draws.configured(PIECES, ONE_PROCESS)
    with pytest.raises(ConfigurationError, match="no Hugging Face family has this model's shape"):
        written_as(alone)
    pieces = with_flags_of(FAMILIES[name], PIECES, alone)
    config = draws.configured(pieces, ONE_PROCESS)
    assert written_as(config)[0] == FAMILIES[name]
    kept = (config.model.hidden_size, config.model.num_query_groups, config.model.ffn_hidden_size)
    assert kept == (64, 2, 96)
    assert config.training.global_batch_size == 8


def test_many_draws_are_of_many_families(tmp_path: Path) -> None:
    draws, found = Draws(7, write_corpus(tmp_path, 5)), list[str]()
    for number in range(24):
        try:
            found.append(written_as(draws.model_of(LAYOUTS_OF_A_MODEL * number)[1])[0].model_type)
        except ConfigurationError:
            continue
    assert len(found) >= 6
    assert len({*found}) >= 4


def test_the_one_expert_of_a_token_has_its_score_for_a_weight_in_the_export_too(tmp_path: Path) -> None:
    flags = "--hidden-size 64 --num-attention-heads 4 --num-layers 4 --train-iters 20 --lr 1e-3 --micro-batch-size 1"
    flags += " --global-batch-size 8 --num-experts 8 --moe-ffn-hidden-size 48 --moe-router-score-function sigmoid"
    flags += " --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
    flags += " --untie-embeddings-and-output-weights --moe-router-enable-expert-bias --hf-model-type mimo_v2_flash"
    draws = Draws(7, write_corpus(tmp_path, 5))
    for used in (1, 2):
        family, config = written_as(draws.configured((flags, f"--moe-router-topk {used}"), ONE_PROCESS))
        assert family.write(config)["norm_topk_prob"] == (used > 1)
