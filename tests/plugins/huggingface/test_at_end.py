"""--export-hf-at-end: the export of a training that has come to its end, and what is refused before it begins."""

import hashlib
from pathlib import Path

import pytest

from megatron_ext.errors import ConfigurationError, StorageError
from megatron_ext.plugins.huggingface import at_end
from megatron_ext.plugins.huggingface.commands.convert_checkpoint import main as convert
from megatron_ext.train.configure import configure
from megatron_ext.train.pretrain import pretrain
from tests.support.small_runs import MODEL

LLAMA = [*MODEL, "--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear", "--eval-iters", "0"]


def _hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_the_export_is_the_one_of_the_tool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save, folder = tmp_path / "save", tmp_path / "model-hf"
    pretrain([*LLAMA, "--save", str(save), "--export-hf-at-end", str(folder)])
    assert "LlamaForCausalLM" in capsys.readouterr().out
    convert(["to-hf", "--load", str(save), "--save", str(tmp_path / "again"), "--no-verify"])
    assert _hashes(folder) == _hashes(tmp_path / "again")
    with pytest.raises(ConfigurationError, match=f"--export-hf-at-end {folder} exists and is not an empty folder"):
        configure([*LLAMA, "--save", str(save), "--export-hf-at-end", str(folder)])


def test_a_run_that_is_stopped_early_exports_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "model-hf"
    pretrain([*LLAMA, "--exit-interval", "2", "--save", str(tmp_path / "save"), "--export-hf-at-end", str(folder)])
    assert not folder.exists()


def test_a_model_of_no_family_is_refused_before_the_training(tmp_path: Path) -> None:
    flags = [*LLAMA, *["--norm-position", "both", "--softmax-type", "off-by-one", "--attention-dropout", "0"]]
    flags += ["--save", str(tmp_path / "save")]
    with pytest.raises(ConfigurationError) as caught:
        configure([*flags, "--export-hf-at-end", str(tmp_path / "hf")])
    assert any(
        problem.startswith(f"--export-hf-at-end {tmp_path / 'hf'}: no Hugging Face family has this model's shape")
        for problem in caught.value.problems
    )
    configure(flags)


def test_a_folder_that_cannot_be_written_says_how_to_export_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "model.safetensors")

    monkeypatch.setattr("megatron_ext.plugins.huggingface.exporter.export_huggingface", full)
    save, folder = tmp_path / "save", tmp_path / "model-hf"
    with pytest.raises(StorageError, match=f"megatron-ext convert to-hf --load {save} --save {folder}"):
        pretrain([*LLAMA, "--save", str(save), "--export-hf-at-end", str(folder)])
    assert (save / "iter_0000003").is_dir()
    assert at_end.problem_of_folder(str(folder)) is None
