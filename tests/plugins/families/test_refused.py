"""Types that are refused by name: the reason stands where it says that it does."""

import importlib.util
import json
from pathlib import Path

import pytest

from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.families.hf_config import read_hf_config
from megatron_ext.plugins.families.refused import REFUSED
from megatron_ext.plugins.families.registry import FAMILIES

_THERE = {
    "aya_vision": "logits = self.lm_head(",
    "cohere2_vision": "logits = self.lm_head(",
    "paligemma": "bidirectionally in prefix",
    "axk2": "self.q_gate_proj(torch.cat([q_resid, q_compressed]",
    "bailing_hybrid": "self.lower_bound * torch.sigmoid(",
    "deepseek_v4": "class DeepseekV4HyperConnection",
    "diffllama": "lambda_1 - lambda_2",
    "dots3_note_text": "config.per_layer_config[layer_type]",
    "gemma4_text": "config.num_kv_shared_layers",
    "jetmoe": "self.experts.map(",
    "laguna": "F.softplus(self.g_proj(",
    "longcat_flash": "config.zero_expert_num",
    "minimax": "class MiniMaxLightningAttention",
    "bitnet": "attn_output = self.attn_sub_norm(",
    "ctrl": "sines = torch.sin(angle_rads",
    "dbrx": "self.rope_theta = attn_config.rope_theta",
    "doge": "def prepare_dynamic_mask(",
    "gemma3n_text": "class Gemma3nTextAltUp",
    "gpt_neox_japanese": "self.dense_bias = nn.Parameter(",
    "hrm_text": "self.L_module = HrmTextStack(",
    "hy_v4": "class HYV4HyperConnection",
    "inkling_text": "class InklingRelativeLogits",
    "lfm3": "rope_init_fn(config, device, layer_type",
    "modernbert-decoder": "else nn.Identity()",
    "openai-gpt": "n = self.ln_1(x + a)",
    "recurrent_gemma": "class RecurrentGemmaRglru",
    "rwkv": "def rwkv_linear_attention(",
    "xglm": "class XGLMSinusoidalPositionalEmbedding",
    "xlstm": "class xLSTMBlock",
    "zaya": "class ZayaCCAProjection",
    "zamba": "shared_transf: ZambaAttentionDecoderLayer",
    "zamba2": "shared_transformer: Zamba2AttentionDecoderLayer",
}
"""Type -> what is in the line of transformers 5.23.0 that the reason names."""


@pytest.mark.parametrize("kind", REFUSED)
def test_a_type_is_refused_with_the_line_of_transformers_that_it_differs_by(kind: str, tmp_path: Path) -> None:
    assert kind not in FAMILIES
    said = []
    for content in ({"model_type": kind}, {"model_type": "of_images", "text_config": {"model_type": kind}}):
        (tmp_path / "config.json").write_text(json.dumps(content))
        with pytest.raises(ConfigurationError, match=f"model_type {kind} is not read: .*transformers 5.23.0") as caught:
            read_hf_config(tmp_path)
        said.append(str(caught.value))
    assert said[0] == said[1]
    file, _, line = said[0].rpartition("(")[2].removeprefix("transformers 5.23.0, ").rstrip(")").partition(", line ")
    found = importlib.util.find_spec("transformers")
    assert found is not None
    assert found.origin is not None
    path = Path(found.origin).parent / "models" / file.removeprefix("modeling_").removesuffix(".py") / file
    assert _THERE[kind] in path.read_text().splitlines()[int(line) - 1]
