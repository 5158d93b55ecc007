"""VaultGemma: Gemma 2 with norms before attention and MLP alone."""

from dataclasses import replace

from megatron_ext.plugins.families.gemma2 import GEMMA2

_AFTER = ("post_self_attn_layernorm", "post_mlp_layernorm")
_WITHOUT = ("norm_position",)

VAULTGEMMA = replace(
    GEMMA2,
    model_type="vaultgemma",
    architecture="VaultGemmaForCausalLM",
    names={ours: theirs for ours, theirs in GEMMA2.names.items() if ours not in _AFTER},
    flags={name: value for name, value in GEMMA2.flags.items() if name not in _WITHOUT},
    added={ours: one for ours, one in GEMMA2.added.items() if ours not in _AFTER},
    is_seldom=True,
)
