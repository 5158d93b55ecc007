"""Draws are functions of their seed, can all work, and hold what every plugin draws."""

import pytest

from megatron_ext.config.derived.optimizers import OPTIMIZERS
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.prove.draws import (
    LAYOUTS_OF_A_MODEL,
    ONE_PROCESS,
    Draws,
    Layout,
    draw,
    mended,
    reason,
    words,
)
from megatron_ext.plugins.prove.parity import write_corpus
from megatron_ext.registry import plugins


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_corpus(tmp_path_factory.mktemp("corpus"), 5)


def test_a_draw_follows_from_seed_and_number_alone(data: list[str]) -> None:
    in_order = [draw(Draws(7, data), number) for number in range(6)]
    assert draw(Draws(7, data), 5) == in_order[5] != draw(Draws(8, data), 5)
    assert in_order[0].model == in_order[LAYOUTS_OF_A_MODEL - 1].model != in_order[LAYOUTS_OF_A_MODEL].model


def test_every_plugin_with_a_kind_of_part_is_drawn_and_so_is_every_optimizer(data: list[str]) -> None:
    draws = Draws(7, data)
    models = [draws.model_of(LAYOUTS_OF_A_MODEL * number) for number in range(120)]
    asked = {" ".join(words(model)) for model, _ in models}
    for name, plugin in plugins().items():
        if {"mixers", "next_tokens"} & plugin.brings.keys():
            assert "draws" in plugin.brings, f"{name} brings a kind of part, and does not say how it is drawn"
    for flags in ("gated_delta_net", "kda", "--multi-latent-attention", "dsa", "--mtp-num-layers", "--mamba-num-heads"):
        assert any(flags in of_model for of_model in asked), flags
    assert {alone.optimizer.optimizer for _, alone in models} == OPTIMIZERS.keys()


def test_what_a_layout_refuses_is_counted_by_its_reason(data: list[str]) -> None:
    draws = Draws(7, data)
    with pytest.raises(ConfigurationError) as refused:
        draws.configured(draws.model_of(0)[0], Layout(3, ("--tensor-model-parallel-size 3",)))
    assert "3" in str(refused.value)
    assert "3" not in reason(refused.value)
    for number in range(8):
        draw(draws, number)
    assert draws.refused.total() > 0


def test_a_refused_draw_is_changed_as_its_refusal_says(data: list[str]) -> None:
    draws = Draws(7, data)
    plain = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --train-iters 20 --lr 1e-3"
    sizes = "--linear-key-head-dim 12 --linear-value-head-dim 10 --linear-num-key-heads 4 --linear-num-value-heads 8"
    kind = f"--experimental-attention-variant gated_delta_net --linear-attention-freq 2 {sizes}"
    pieces = (plain, "--micro-batch-size 1 --global-batch-size 8", kind)
    with pytest.raises(ConfigurationError, match="add --disable-bias-linear") as refused:
        draws.configured(pieces, ONE_PROCESS)
    whole = mended(pieces, refused.value, keeps=(kind,))
    assert whole == (*pieces, "--disable-bias-linear")
    draws.configured(whole, ONE_PROCESS)
    layout = Layout(2, ("--use-torch-fsdp2", "--ddp-bucket-size 1"))
    with pytest.raises(ConfigurationError, match="leave --ddp-bucket-size out") as refused:
        draws.configured(whole, layout)
    assert mended(layout.pieces, refused.value) == ("--use-torch-fsdp2",)
