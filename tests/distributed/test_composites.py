"""Text models inside of models of text and images: read as transformers computes them without an image, and written
back."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_ext.errors import ConfigurationError
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.plugins.huggingface.commands.convert_checkpoint import main as convert
from megatron_ext.plugins.huggingface.huggingface_folder import HFFolder, read_model
from tests.support.hf_composites import COMPOSITES, write_composite
from tests.support.hf_models import flags, our_logits, quiet_transformers, reference_logits, whole_vocabulary
from tests.support.several_models import in_turn

# Of the second tier: a type in tests/distributed/test_huggingface.py.
pytestmark = pytest.mark.full

quiet_transformers()

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, torch.Tensor]]:
    """Folder and logits of every composite."""
    made = {kind: tmp_path_factory.mktemp(kind) for kind in COMPOSITES}
    return {kind: (folder, reference_logits(write_composite(folder, kind))) for kind, folder in made.items()}


@pytest.fixture(scope="module")
def ours(folders: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Our logits of every composite."""
    runs = [flags(["--load-hf", str(folder)]) for folder, _ in folders.values()]
    [found] = run_ranks(1, in_turn, our_logits, runs, timeout=550)
    return {kind: whole_vocabulary([logits]) for kind, logits in zip(folders, found, strict=True)}


@pytest.mark.parametrize("kind", COMPOSITES)
def test_a_text_without_images(kind: str, folders: dict[str, Any], ours: dict[str, torch.Tensor]) -> None:
    expected = folders[kind][1]
    assert expected.abs().max() > 0.5, "logits near zero would agree with anything"
    assert (ours[kind] - expected).abs().max() < TOLERANCE


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("kind", ["qwen3_5", "mistral3", "qwen3_vl_moe"])
def test_text_goes_back_into_a_copy_of_the_whole(
    kind: str, folders: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of other weights than the checkpoint's: then all but the text model's tensors stay, and these are the trained
    ones, in files that are alike otherwise to the byte."""
    trained, whole, written = folders[kind][0], tmp_path / "whole", tmp_path / "written"
    assert convert(["from-hf", "--load", str(trained), "--save", str(tmp_path / "ours")]) == 0
    said = capsys.readouterr().out
    assert "not of the text model" in said
    assert "only text is trained" in said
    shutil.copytree(trained, whole)
    others = {
        name: tensor + 1.0 if tensor.is_floating_point() else tensor for name, tensor in _tensors(trained).items()
    }
    if kind == "qwen3_vl_moe":  # as published, transposed
        others = {name: one.mT.contiguous() if ".experts." in name else one for name, one in others.items()}
    save_file(others, whole / "model.safetensors", {"format": "pt"})
    (whole / "preprocessor_config.json").write_text('{"a": 1}')
    into = ["--into", str(whole), "--save", str(written), "--no-verify"]
    assert convert(["to-hf", "--load", str(tmp_path / "ours"), *into]) == 0
    found, expected, text = _tensors(written), _tensors(trained), set(HFFolder(trained).others)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        wanted = others[name] if name in text else expected[name]
        if kind == "qwen3_vl_moe" and ".experts." in name:
            tensor = tensor.mT
        assert torch.equal(tensor, wanted) or (tensor - wanted).abs().max() <= 2.0**-24, name
    size = (whole / "model.safetensors").stat().st_size
    assert (written / "model.safetensors").stat().st_size == size
    for name in ("config.json", "preprocessor_config.json"):
        assert (written / name).read_bytes() == (whole / name).read_bytes()


# Slow: the comparison takes an interpreter of its own; test_a_text_without_images has the logits of every kind.
@pytest.mark.slow
def test_a_copy_of_the_whole_is_compared_with_transformers(
    folders: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = str(folders["gemma3"][0])
    assert convert(["from-hf", "--load", whole, "--save", str(tmp_path / "ours")]) == 0
    said = capsys.readouterr().out
    assert "keys next to text_config that are not read: " in said
    assert "image_token_index" in said
    assert convert(["to-hf", "--load", str(tmp_path / "ours"), "--into", whole, "--save", str(tmp_path / "hf")]) == 0
    assert "largest difference of logits to transformers: " in capsys.readouterr().out


def test_another_text_model_is_refused_with_what_differs(folders: dict[str, Any], tmp_path: Path) -> None:
    for kind in ("mistral3", "llava"):
        assert convert(["from-hf", "--load", str(folders[kind][0]), "--save", str(tmp_path / kind)]) == 0
    into = ["--into", str(folders["mistral3"][0]), "--save", str(tmp_path / "written"), "--no-verify"]
    with pytest.raises(ConfigurationError, match=r"another one than the checkpoint's: .*--num-query-groups is 6 and"):
        convert(["to-hf", "--load", str(tmp_path / "llava"), *into])
    assert not (tmp_path / "written").exists()


@pytest.mark.parametrize("outer", [True, False, None])
@pytest.mark.parametrize("inner", [True, False])
def test_embeddings_are_tied_as_transformers_ties_them(
    outer: bool | None, inner: bool, folders: dict[str, Any], tmp_path: Path
) -> None:
    """What stands next to `text_config` counts, and a head in the files that differs is no embedding."""
    from transformers import AutoModelForImageTextToText

    for kind in ("qwen3_5", "mistral3"):  # tied, and not
        folder = tmp_path / kind
        shutil.copytree(folders[kind][0], folder)
        content = json.loads((folder / "config.json").read_text())
        content |= {
            "tie_word_embeddings": outer,
            "text_config": {**content["text_config"], "tie_word_embeddings": inner},
        }
        (folder / "config.json").write_text(json.dumps({key: one for key, one in content.items() if one is not None}))
        if kind == "qwen3_5" and outer is not True:
            continue  # without a head in the files, which transformers would draw
        theirs = AutoModelForImageTextToText.from_pretrained(folder)
        apart = theirs.get_input_embeddings().weight is not theirs.get_output_embeddings().weight
        assert read_model(folder)[1]["untie_embeddings_and_output_weights"] == apart, kind


@pytest.mark.parametrize("kind", ["aya_vision", "cohere2_vision", "paligemma"])
def test_text_models_that_compute_something_else_inside_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "text_config": {"model_type": "cohere2"}}))
    with pytest.raises(ConfigurationError, match=f"model_type {kind} is not read: .*transformers 5.23.0.*line "):
        read_model(tmp_path)
