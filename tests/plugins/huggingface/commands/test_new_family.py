"""`megatron-ext new-family`: what it writes for a type that is read, compared with the committed file, and what it says
of a type that no family has."""

from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.reading import Reading
from megatron_ext.plugins.families.registry import FAMILIES
from megatron_ext.plugins.families.state_dict_mapping import state_dict_mapping
from megatron_ext.plugins.huggingface.commands.new_family import begun, main
from tests.support.family_configs import WRITTEN
from tests.support.plain_process import in_plain_process

# Of the second tier: it takes transformers' models in a process of their own, and ours in another one.
pytestmark = pytest.mark.full


def _family(text: str) -> Family:
    module: dict[str, Any] = {}
    exec(text, module)
    [family] = [one for name, one in module.items() if isinstance(one, Family) and f"\n{name} = " in text]
    return family


def _read(family: Family, content: dict[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """The flags of a configuration, and the tensors of its files."""
    reading = Reading(content, family.defaults, family.aliases, family.renamed)
    values = {**family.fixed, **family.read(reading)}
    assert not reading.found()
    mapped = state_dict_mapping(resolve(values, Facts()), family)
    return values, {name: shape for one in mapped for name, shape in one.tensor_shapes().items()}


@pytest.mark.parametrize("kind", ["iquestcoder", "mistral"])
def test_a_type_begun_again_is_the_committed_one(kind: str) -> None:
    text, notes = in_plain_process(begun, kind, {}, (), timeout=500)
    assert not [note for note in notes if note.startswith("not known")]
    assert [note for note in notes if note.startswith("the tiny model; the draft computes the same")]
    drafted, committed = _family(text), FAMILIES[kind]
    assert (drafted.model_type, drafted.architecture) == (committed.model_type, committed.architecture)
    # Sizes, and the lengths of which mistral takes 2048 and its class 131072: they have no weights.
    sizes = {key: value for key, value in WRITTEN.items() if "_size" in key or key.startswith(("num_h", "max_"))}
    for content in (WRITTEN, sizes):
        content = {**content, "num_attention_heads": 8}
        assert _read(drafted, content) == _read(committed, content)


def test_what_no_family_has_is_named(tmp_path: Path) -> None:
    """Next to nothing but llama's class Qwen2's biases have no place."""
    others = tuple(one for one in FAMILIES if one != "olmo")
    notes = in_plain_process(begun, "qwen2", {"num_hidden_layers": 1}, others, timeout=500)[1]
    assert notes[0] == "nearest: olmo, 9 of 15 tensors have a place"
    assert "not known: tensor model.layers.0.self_attn.q_proj.bias has no place" in notes
    assert [note for note in notes if note.startswith("the tiny model; refused")]


def test_a_type_that_transformers_does_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigurationError, match="--type qwen9 is no type of the installed transformers"):
        main(["--type", "qwen9"])
    with pytest.raises(ConfigurationError, match="--set num_experts=many: the value is no JSON"):
        main(["--type", "qwen2", "--set", "num_experts=many"])
    assert not capsys.readouterr().out
