"""IQuest-Coder: llama's class."""

from dataclasses import replace

from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.llama import LLAMA

_READ, _WRITE = shared.keys(
    (LLAMA.read, LLAMA.write), shared.in_one_form({"clip_qkv": None, "use_sliding_window": False})
)

IQUESTCODER = replace(
    LLAMA,
    model_type="iquestcoder",
    read=_READ,
    write=_WRITE,
    is_common=False,
    other_names={},
    defaults={"rms_norm_eps": 1e-5, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 131072},
    is_seldom=True,
)
