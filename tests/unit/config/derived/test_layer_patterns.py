"""Windows, and patterns over the layers, as Megatron's flags write them."""

import pytest
import torch

from megatron_ext.config.derived.layer_patterns import read_pattern, read_window
from megatron_ext.data.packing import Segment
from megatron_ext.parts.attention.segments import attend_window
from megatron_ext.parts.stack import layers
from tests.support.masked_attention import attend_segments_reference
from tests.support.small_models import LLAMA, small_config


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("2", [1, 0, 1, 0]),
        ("4", [1, 1, 1, 0]),
        ("1", [0, 0, 0, 0]),
        ("[1,0,0,1]", [1, 0, 0, 1]),
        ("([1]*3+[0])*1", [1, 1, 1, 0]),
        ("2*[0,1]", [0, 1, 0, 1]),
    ],
)
def test_patterns_are_megatrons(text: str, pattern: list[int]) -> None:
    from megatron.core.transformer.utils import is_layer_window_attention

    assert read_pattern(text, 4) == tuple(map(bool, pattern))
    theirs = int(text) if text.isdigit() else pattern
    assert [is_layer_window_attention((7, 0), theirs, number + 1) for number in range(4)] == list(map(bool, pattern))


@pytest.mark.parametrize(("text", "pattern"), [("2", [0, 1, 0, 1]), ("3", [0, 0, 1, 0]), ("[1,0,0,1]", [1, 0, 0, 1])])
def test_a_number_may_stand_for_the_last_layer_of_so_many(text: str, pattern: list[int]) -> None:
    """As in Megatron's --no-rope-freq."""
    assert read_pattern(text, 4, "the last") == tuple(map(bool, pattern))
    config = small_config({**LLAMA, "no_rope_freq": text})
    assert [int(layer.attention.rotary is None) for layer in layers(config)] == pattern


@pytest.mark.parametrize(
    ("text", "pattern"),
    [("1", [1, 1, 1, 1]), ("2", [1, 0, 1, 0]), ("3", [1, 0, 0, 1]), ("[0]+[1]*3", [0, 1, 1, 1]), ("-1", [1, 1, 1, 1])],
)
def test_a_number_may_stand_for_the_first_layer_of_so_many(text: str, pattern: list[int]) -> None:
    """As in Megatron's --moe-layer-freq; -1 is MindSpeed's word for all layers."""
    found = layers(small_config({**LLAMA, "num_experts": 4, "moe_layer_freq": text}))
    assert [int(layer.experts is not None) for layer in found] == pattern


@pytest.mark.parametrize(
    "text",
    ["", "0", "-2", "[1,0]", "[1,1,1,2]", "[1]*10**9", "[1]*1000000000", "__import__('os')", "[1" * 500, "True", "1.5"],
)
def test_what_is_no_pattern_of_four_layers(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        read_pattern(text, 4)


def test_a_window_counts_the_querys_own_position() -> None:
    assert (read_window("4095,0"), read_window("(0, 0)"), read_window("-1,0")) == (4096, 1, None)
    for text in ("", "7", "7,1", "-2,0", "a,0", "1,0,0"):
        with pytest.raises(ValueError, match=r".*"):
            read_window(text)
    model = {**LLAMA, "window_size": "3,0", "window_attn_skip_freq": "3"}
    assert [layer.attention.window for layer in layers(small_config(model))] == [4, 4, None, 4]


@pytest.mark.parametrize(("length", "window"), [(300, 17), (300, 200), (130, 1), (64, 64), (257, 128), (20, 100)])
def test_a_window_is_that_of_one_mask(length: int, window: int) -> None:
    """Whole sequences, in blocks of queries: values and gradients."""
    torch.manual_seed(0)
    query, key, value = heads = [
        torch.randn(2, number, length, 8, dtype=torch.float64, requires_grad=True) for number in (4, 2, 2)
    ]
    gradient = torch.randn(2, 4, length, 8, dtype=torch.float64)
    found = attend_window(query, key, value, 0.3, window)
    expected = attend_segments_reference(query, key, value, [Segment(0, length, 0, length)], 0.3, window)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    of_found, of_expected = (torch.autograd.grad(out, heads, gradient) for out in (found, expected))
    torch.testing.assert_close(of_found, of_expected, rtol=1e-12, atol=1e-12)
