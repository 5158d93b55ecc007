"""Takes what scripts of Megatron-LM's pretrain_mamba.py say of layers next to --hybrid-layer-pattern, which counts."""

from megatron_ext.foreign.script import Script

_SPECS = tuple(f"megatron.core.models.{one}.{one}_layer_specs" for one in ("mamba", "hybrid"))
"""Modules of megatron-core whose layers are those that the letters name."""


def read_mamba(script: Script) -> None:
    """Take the layer spec and the shares of kinds of layers, where a pattern is given, whose letters count there, too.

    Without a pattern they stay, to be refused by their names.
    """
    if not any(flag in script for flag in ("--hybrid-layer-pattern", "--hybrid-override-pattern")):
        return
    spec = (script.values("--spec") or [""])[0]
    for flag in ("--spec", "--hybrid-attention-ratio", "--hybrid-mlp-ratio"):
        if flag in script and (flag != "--spec" or spec in _SPECS):
            script.take(flag)
            script.warnings.append(f"{flag} changes nothing here: --hybrid-layer-pattern says what each layer is")
