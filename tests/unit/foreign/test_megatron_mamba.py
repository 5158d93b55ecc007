"""Scripts of Megatron-LM's pretrain_mamba.py are taken where they name the layers, and told how to elsewhere."""

import shlex

import pytest

from megatron_ext.errors import ConfigurationError
from megatron_ext.train.configure import configure
from tests.support.small_runs import MODEL

HYBRID = "--normalization RMSNorm --disable-bias-linear --mamba-head-dim 8 --mamba-num-groups 2 --is-hybrid-model"


@pytest.mark.parametrize(
    "module", ["mamba.mamba_layer_specs mamba_stack_spec", "hybrid.hybrid_layer_specs hybrid_stack_spec"]
)
@pytest.mark.parametrize("flag", ["--hybrid-override-pattern", "--hybrid-layer-pattern"])
def test_a_pattern_is_what_counts(flag: str, module: str) -> None:
    script = (
        f"{HYBRID} {flag} M- --hybrid-attention-ratio 0.5 --spec megatron.core.models.{module} --hybrid-mlp-ratio 0.5"
    )
    configured = configure([*MODEL, *shlex.split(script)])
    assert configured.config.model.hybrid_layer_pattern == "M-"
    for taken in ("--spec", "--hybrid-attention-ratio", "--hybrid-mlp-ratio"):
        text = f"{taken} changes nothing here: --hybrid-layer-pattern says what each layer is"
        assert configured.typed.warnings.count(text) == 1


def test_without_a_pattern_the_flag_to_use_is_named() -> None:
    """Without it the layers would have attention."""
    script = "--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec --hybrid-attention-ratio 0.5"
    with pytest.raises(ConfigurationError) as found:
        configure([*MODEL, *shlex.split(script)])
    assert len(found.value.problems) == 2
    assert all("--hybrid-layer-pattern" in problem for problem in found.value.problems)


def test_a_spec_of_ones_own_stays_refused() -> None:
    script = f"{HYBRID} --hybrid-layer-pattern M- --spec my.specs mamba_stack_spec"
    with pytest.raises(ConfigurationError, match="layer specs are not loaded"):
        configure([*MODEL, *shlex.split(script)])
