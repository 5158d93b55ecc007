"""A draw that differs is made as small as what makes it differ."""

from megatron_ext.plugins.prove.commands.parity_fuzz import command, layout_of
from megatron_ext.plugins.prove.draws import ONE_PROCESS, Draw, Layout
from megatron_ext.plugins.prove.smaller import smaller

LARGE = Draw(
    ("--hidden-size 64 --num-attention-heads 4", "--num-layers 8", "--swiglu --ffn-hidden-size 96", "--optimizer lion"),
    Layout(4, ("--tensor-model-parallel-size 2", "--sequence-parallel", "--use-distributed-optimizer")),
    Layout(8, ("--pipeline-model-parallel-size 4 --pipeline-schedule gpipe",)),
)


def _differs(drawn: Draw) -> bool:
    return {"--swiglu"} <= {*drawn.flags} and {"--tensor-model-parallel-size"} <= {*drawn.first.flags}


def test_all_is_left_out_but_what_differs() -> None:
    found = smaller(LARGE, _differs)
    assert found.flags == ["--swiglu"]
    assert found.first == Layout(1, ("--tensor-model-parallel-size 2",))
    assert found.second == ONE_PROCESS


def test_a_limit_of_tries_is_kept() -> None:
    asked: list[Draw] = []
    assert smaller(LARGE, lambda drawn: asked.append(drawn) is not None, tries=3) == LARGE
    assert len(asked) == 3


def test_a_draw_is_printed_as_a_command_that_names_it() -> None:
    words = command(LARGE)
    assert words.startswith("megatron-ext parity-fuzz --first '4 --tensor-model-parallel-size 2 --sequence-parallel")
    assert layout_of("8 --pipeline-model-parallel-size 4") == Layout(8, ("--pipeline-model-parallel-size 4",))
