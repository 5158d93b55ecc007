"""`tools/plan.py --hf-config FOLDER`: a published config.json says what the flags say."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.planner.commands.plan import main

_RUN = "--seq-length 4096 --global-batch-size 64 --micro-batch-size 1 --bf16 --use-distributed-optimizer"
_ROPE = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
_DRY = "--hidden-dropout 0 --attention-dropout 0"

PUBLISHED = json.loads((Path(__file__).parents[3] / "golden/published_configs.json").read_text())
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "Llama 3.1 8B": (
        PUBLISHED["Llama-3.1-8B"],
        f"--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 {_ROPE} {_DRY} "
        "--group-query-attention --num-query-groups 8 --vocab-size 128256 --untie-embeddings-and-output-weights",
    ),
    "GPT-2": (
        {
            "model_type": "gpt2",
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_positions": 4096,
            "vocab_size": 50257,
            "layer_norm_epsilon": 1e-05,
            "activation_function": "gelu_new",
            "resid_pdrop": 0.1,
            "embd_pdrop": 0.1,
            "attn_pdrop": 0.1,
        },
        "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --max-position-embeddings 4096 --vocab-size 50257 "
        f"--openai-gelu {_DRY}",
    ),
}
"""Two families, one of which is published with dropout; tests of families/ have what a config.json of each means."""


def evaluated(capsys: pytest.CaptureFixture[str], own: list[str], flags: str) -> dict[str, Any]:
    assert main(["--evaluate", "--world-size", "8", "--json", "-", *own, "--", *flags.split()]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_stands_for_the_flags_of_its_model(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dropout is none: Megatron's default of 0.1 made a step of these models up to 2.3 times as long."""
    content, flags = FAMILIES[family]
    (tmp_path / "config.json").write_text(json.dumps(content))
    found = evaluated(capsys, ["--hf-config", str(tmp_path)], _RUN)
    assert found == evaluated(capsys, [], f"{flags} {_RUN}")
    assert found["step_seconds"] > 0


def test_a_flag_after_the_dashes_goes_before_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half the layers of the model: what a user tries first of a model that does not fit."""
    content, flags = FAMILIES["Llama 3.1 8B"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    found = evaluated(capsys, ["--hf-config", str(tmp_path)], f"--num-layers 16 {_RUN}")
    assert found == evaluated(capsys, [], f"{flags} --num-layers 16 {_RUN}")


def test_the_search_takes_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen2.5-0.5B"]))
    own = ["--world-size", "1", "--number", "1", "--hf-config", str(tmp_path)]
    assert main([*own, "--", "--seq-length", "1024", "--global-batch-size", "8", "--bf16"]) == 0
    assert "model of 494,032,768 parameters" in capsys.readouterr().out


def test_a_folder_that_is_no_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.json: No such file"):
        main(["--evaluate", "--world-size", "8", "--hf-config", str(tmp_path), "--", *_RUN.split()])
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(ConfigurationError, match='model_type "t5" is not supported'):
        main(["--evaluate", "--world-size", "8", "--hf-config", str(tmp_path), "--", *_RUN.split()])
