"""GLM-4 (0414): GLM with norms on both sides (`--norm-position both`)."""

from dataclasses import replace

from megatron_ext.plugins.families.glm import GLM

_AFTER = {name: (name,) for name in ("post_self_attn_layernorm", "post_mlp_layernorm")}

GLM4 = replace(
    GLM,
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    names={**GLM.names, **_AFTER},
    flags={**GLM.flags, "norm_position": "both"},
    other_names={"glm4v_text": {}},
)
