"""What an export of MPT says of its dropout."""

import json
from pathlib import Path

import pytest

from megatron_ext.plugins.families.hf_config import hf_config
from megatron_ext.plugins.families.registry import FAMILIES
from tests.support.small_models import small_config


def test_transformers_reads_an_export_of_a_model_that_was_trained_with_dropout(tmp_path: Path) -> None:
    # Two seconds, which only the process that runs this test shall spend.
    from transformers import AutoConfig

    model = {"position_embedding_type": "alibi", "norm_parameters": "weight", "disable_bias_linear": True}
    config = small_config({**model, "attention_dropout": 0.1})
    assert config.model.attention_dropout == 0.1
    written = hf_config(config, FAMILIES["mpt"], "float32")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(written))
    assert AutoConfig.from_pretrained(tmp_path, local_files_only=True).n_heads == 4
    stated = {**written, "attn_config": {**written["attn_config"], "attn_pdrop": 0.1}}
    path.write_text(json.dumps(stated))
    with pytest.raises(Exception, match="attn_pdrop"):
        AutoConfig.from_pretrained(tmp_path, local_files_only=True)
