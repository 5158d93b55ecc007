"""For how many iterations Muon's lists of coefficients are made."""

import pytest

from megatron_ext.config.derived.newton_schulz import COEFFICIENT_TYPES, coefficients, made_for, mismatch


def test_a_list_at_the_number_it_is_made_for_is_taken_without_a_word() -> None:
    assert [kind for kind in COEFFICIENT_TYPES if mismatch(kind, made_for(kind)) is not None] == []
    assert [mismatch("simple", 7), mismatch("quintic", 10), mismatch("polar_express", 5)] == [None] * 3


@pytest.mark.parametrize(
    ("kind", "steps", "said"),
    [
        ("deepseekv4", 5, "made for 10 iterations, of which these are the first 5, to the bit simple"),
        ("aol", 5, "made for 4 iterations, and later ones begin it anew"),
        ("cans", 7, "made for 5 iterations, and later ones repeat its last"),
        ("quintic", 3, "made for 5 iterations, of which these are the first 3"),
    ],
)
def test_another_number_is_said(kind: str, steps: int, said: str) -> None:
    assert mismatch(kind, steps) == said
    assert (coefficients(kind, steps) == coefficients("simple", steps)) == said.endswith("simple")
