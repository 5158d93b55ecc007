"""Data that another tokenizer made than the run's is refused: the manifest next to it knows."""

import json
import os
import shlex
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from megatron_ext.data.data_manifest import made_with
from megatron_ext.errors import DataError
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.plugins.prepare.commands.inspect_dataset import main as inspect_dataset
from megatron_ext.plugins.prepare.merge import merge_indexed_files
from megatron_ext.plugins.prepare.preprocess import EncodeJob, encode_files
from megatron_ext.train.configure import configure
from megatron_ext.train.datasets import datasets_of_run, tokenizer_of_run
from tests.support.program import Ended, run_program

GOLDEN = Path(__file__).parents[1] / "golden" / "preprocess"
FLAGS = """
    --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --train-iters 1
    --global-batch-size 2 --lr 1e-3 --eval-iters 1 --data-order formula
"""
HF = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {GOLDEN}/hf_bpe"
SPM = f"--tokenizer-type SentencePieceTokenizer --tokenizer-model {GOLDEN}/spm_unigram.model"
NAMES = {"hf": ("HuggingFaceTokenizer", "hf_bpe"), "byte": ("ByteTokenizer", None)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name, (kind, model) in NAMES.items():
        path = str(GOLDEN / model) if model else None
        encode_files(EncodeJob((str(GOLDEN / "input.jsonl"),), str(folder / name), kind, path, append_eod=True))
    return folder


def gpt2(folder: Path) -> str:
    """The model of the Hugging Face tokenizer as another type."""
    Tokenizer.from_file(str(GOLDEN / "hf_bpe/tokenizer.json")).model.save(str(folder))
    return f"--tokenizer-type GPT2BPETokenizer --vocab-file {folder}/vocab.json --merge-file {folder}/merges.txt"


def start(flags: str) -> None:
    config = configure(shlex.split(f"{FLAGS} {flags} --device cpu --dry-run")).config
    assert datasets_of_run(config, tokenizer_of_run(config)).train is not None


def refusal(flags: str) -> str:
    with pytest.raises(DataError) as caught:
        start(flags)
    return str(caught.value)


@pytest.mark.parametrize("tokenizer", [HF, SPM])
def test_another_tokenizer_is_refused(data: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The ids of bytes are below both vocabularies: nothing else would tell."""
    flags = f"--train-data-path {data}/byte_text_document {tokenizer}"
    said = refusal(flags)
    assert f"--train-data-path {data}/byte_text_document was made with ByteTokenizer (257 ids" in said
    assert f"as {data}/byte_manifest.json says, but the run's tokenizer is {tokenizer.split()[1]} " in said
    assert "add --accept-other-tokenizer" in said
    start(f"{flags} --accept-other-tokenizer")
    assert capsys.readouterr().err.startswith("warning: --train-data-path")


def test_every_split_and_every_part_of_a_blend_is_asked(data: Path) -> None:
    both = f"1 {data}/hf_text_document 2 {data}/byte_text_document"
    assert f"--data-path {data}/byte_text_document" in refusal(f"--data-path {both} --split 8,2,0 {HF}")
    valid = f"--train-data-path {data}/hf_text_document --valid-data-path {data}/byte_text_document {HF}"
    assert f"--valid-data-path {data}/byte_text_document was made with ByteTokenizer" in refusal(valid)


def test_the_same_tokenizer_elsewhere_or_of_another_type(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(GOLDEN / "hf_bpe", tmp_path / "copy"))
    path = f"--train-data-path {data}/hf_text_document --tokenizer-type HuggingFaceTokenizer --tokenizer-model"
    start(f"{path} {copy}")
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": "{{ messages }}"}))
    start(f"{path} {copy}")  # another hash of the files, the same ids
    start(f"--train-data-path {data}/hf_text_document {gpt2(tmp_path)}")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("change", ["two tokens swapped", "a merge less", "another end of document"])
def test_a_tokenizer_that_is_only_similar(data: Path, tmp_path: Path, change: str) -> None:
    copy = Path(shutil.copytree(GOLDEN / "hf_bpe", tmp_path / "copy"))
    model = json.loads((copy / "tokenizer.json").read_text())
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    vocabulary, merges = model["model"]["vocab"], model["model"]["merges"]
    if change == "two tokens swapped":
        a, b = list(vocabulary)[-2:]
        vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    elif change == "a merge less":
        del merges[20]
    else:
        settings["eos_token"] = list(vocabulary)[-1]
    (copy / "tokenizer.json").write_text(json.dumps(model))
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    path = f"--train-data-path {data}/hf_text_document --tokenizer-type HuggingFaceTokenizer --tokenizer-model {copy}"
    assert "the same ids are other text" in refusal(path)


def _run_on_own_copy(folder: str, flags: str) -> Ended:
    return run_program(
        shlex.split(f"{FLAGS} {flags} --train-data-path {folder}/{os.environ['RANK']}/byte_text_document")
    )


def test_all_ranks_agree_although_one_machine_has_no_manifest(data: Path, tmp_path: Path) -> None:
    for rank in range(2):
        shutil.copytree(data, tmp_path / str(rank))
    (tmp_path / "0/byte_manifest.json").unlink()
    ends = run_ranks(2, _run_on_own_copy, str(tmp_path), HF)
    assert [end.code for end in ends] == [65, 65]
    assert all(f"{tmp_path}/1/byte_text_document was made with ByteTokenizer" in end.errors for end in ends)
    ends = run_ranks(2, _run_on_own_copy, str(tmp_path), f"{HF} --accept-other-tokenizer")
    assert [end.code for end in ends] == [0, 0]
    assert [end.errors.count("was made with ByteTokenizer") for end in ends] == [1, 0]


def test_merging_keeps_the_tokenizer_and_refuses_two(data: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "all_text_document")
    parts = [str(data / f"{name}_text_document") for name in ("hf", "byte")]
    with pytest.raises(DataError, match=r"byte_text_document was made with ByteTokenizer .*, .*hf_text_document with"):
        merge_indexed_files(parts, out)
    assert not list(tmp_path.iterdir())
    merge_indexed_files([parts[1], parts[1]], out)
    assert "was made with ByteTokenizer" in refusal(f"--train-data-path {out} {HF}")
    merge_indexed_files(parts, out, accept_other_tokenizer=True)
    assert made_with(out) is None
    assert [path.suffix for path in sorted(tmp_path.iterdir())] == [".bin", ".idx"]


def test_inspecting_names_it(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspect_dataset(["show", f"{data}/byte_text_document"])
    assert "tokenizer ByteTokenizer (257 ids, end of document 256)" in capsys.readouterr().out
    inspect_dataset(["document", f"{data}/byte_text_document", "0", *HF.split()])
    assert capsys.readouterr().err.startswith(f"warning: {data}/byte_text_document was made with ByteTokenizer")
