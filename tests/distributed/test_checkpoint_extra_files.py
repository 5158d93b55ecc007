"""A checkpoint is of use where nothing else of the run is: tokenizer, configuration, versions."""

import json
import platform
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.native import checkpoint_manifest
from megatron_ext.checkpoint.native.extra_files import HUGGINGFACE_FILES, keep_tokenizer, kept_tokenizer
from megatron_ext.checkpoint.native.load_checkpoint import load_checkpoint
from megatron_ext.checkpoint.native.save import save_checkpoint
from megatron_ext.config.schema import DataConfig
from megatron_ext.errors import DataError
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.plugins.huggingface.commands.convert_checkpoint import main as convert
from megatron_ext.plugins.prepare.tokenizer_training import train_bytelevel_bpe
from megatron_ext.train.configure import configure
from tests.support.checkpoints import MODEL, REST, SCHEDULE, build, flip, save_at, train

SETTINGS = [*REST, *SCHEDULE, "--train-iters", "10"]


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """A tokenizer's folder, with a file that is none of it."""
    folder = tmp_path / "original"
    train_bytelevel_bpe(["some text, some more text", "and other words, some more text"], 270, folder)
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_p": 0.9}')
    (folder / "pytorch_model.bin").touch()
    return folder


def _go_on(folder: str, flags: list[str]) -> None:
    """Resume at iteration 1 and save at 2."""
    run = build(flags)
    assert load_checkpoint(run, folder) == 1
    train(run, 1)
    save_checkpoint(run, folder)


def _as_served(exported: str) -> tuple[tuple[Any, ...], str]:
    """What servers take from the folder: how to sample, and the text of a conversation."""
    from transformers import AutoTokenizer, GenerationConfig

    found = GenerationConfig.from_pretrained(exported)
    messages = [{"role": "user", "content": "some text"}]
    prompt = AutoTokenizer.from_pretrained(exported).apply_chat_template(messages, tokenize=False)
    return (found.do_sample, found.temperature, found.top_p, found.eos_token_id), prompt


def _words(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_the_tokenizer_goes_along(original: Path, tmp_path: Path) -> None:
    save = tmp_path / "save"
    kept = {name: content for name, content in _words(original).items() if name != "pytorch_model.bin"}
    model = [*MODEL[:-2], "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(original)]
    run_ranks(1, save_at, str(save), [1], [*model, *SETTINGS])
    assert _words(save / "iter_0000001" / "tokenizer") == kept

    shutil.rmtree(original)  # the original path is gone: the checkpoint alone says what model and tokenizer it is
    resumed = [*SETTINGS, "--load", str(save), "--use-checkpoint-args"]
    data = configure(resumed).config.data
    assert (data.tokenizer_model, data.vocab_size) == (str(save / "iter_0000001" / "tokenizer"), 270)
    run_ranks(1, _go_on, str(save), resumed)
    shutil.rmtree(save / "iter_0000001")
    assert _words(save / "iter_0000002" / "tokenizer") == kept

    exported = tmp_path / "hf"
    assert convert(["to-hf", "--load", str(save), "--save", str(exported), "--no-verify"]) == 0
    sampling = json.loads(kept.pop("generation_config.json"))
    assert {name: (exported / name).read_bytes() for name in kept} == kept
    written = json.loads((exported / "generation_config.json").read_text())
    assert written == {"bos_token_id": None, **sampling, "eos_token_id": 0}, (
        "the end that it does not name is the model's"
    )
    generation, prompt = _as_served(str(exported))
    assert generation == (True, 0.6, 0.9, 0)
    assert prompt == "some text"
    assert "270" in (exported / "README.md").read_text()


def test_a_damaged_checkpoint_is_not_exported(original: Path, tmp_path: Path) -> None:
    run_ranks(1, save_at, str(tmp_path / "save"), [1], [*MODEL, *SETTINGS])
    flip(tmp_path / "save" / "iter_0000001" / "__0_0.distcp")
    with pytest.raises(DataError, match=r"is damaged \(__0_0.distcp has another checksum"):
        convert(["to-hf", "--load", str(tmp_path / "save"), "--save", str(tmp_path / "hf"), "--no-verify"])
    assert not (tmp_path / "hf").exists()


def test_its_files_are_in_the_manifest(original: Path, tmp_path: Path) -> None:
    model = [*MODEL[:-2], "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(original)]
    run_ranks(1, save_at, str(tmp_path / "save"), [1], [*model, *SETTINGS])
    checkpoint = tmp_path / "save" / "iter_0000001"
    versions = json.loads((checkpoint / "versions.json").read_text())
    assert versions["python"] == platform.python_version()
    assert versions["torch"] == torch.__version__.split("+")[0] or versions["torch"] == torch.__version__
    files = checkpoint_manifest.read(checkpoint)
    assert files is not None
    assert checkpoint_manifest.problems(checkpoint, files) == []
    path = checkpoint / "tokenizer" / "tokenizer.json"
    path.write_text(path.read_text().replace("some", "sume"))
    (checkpoint / "versions.json").unlink()
    problems = checkpoint_manifest.problems(checkpoint, files)
    assert len(problems) == 2
    assert "tokenizer/tokenizer.json has another checksum" in " ".join(problems)
    assert "versions.json is missing" in problems


def test_single_files_get_hugging_faces_names(tmp_path: Path) -> None:
    for name in ("gpt2-vocab.json", "gpt2-merges.txt", "spm32k.model"):
        (tmp_path / name).write_text(name)
    kinds = {
        "GPT2BPETokenizer": {"vocab_file": "gpt2-vocab.json", "merge_file": "gpt2-merges.txt"},
        "SentencePieceTokenizer": {"tokenizer_model": "spm32k.model"},
    }
    for kind, fields in kinds.items():
        checkpoint = tmp_path / kind
        checkpoint.mkdir()
        values: dict[str, Any] = {
            "tokenizer_type": kind,
            **{field: str(tmp_path / name) for field, name in fields.items()},
        }
        keep_tokenizer(DataConfig(**values), checkpoint, [])
        copies = kept_tokenizer(values, checkpoint)
        assert {field: Path(path).read_text() for field, path in copies.items()} == fields
        assert all(Path(path).name in HUGGINGFACE_FILES for path in copies.values())
