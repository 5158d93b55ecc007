import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.errors import ConfigurationError
from megatron_ext.tokenizer import exported
from megatron_ext.tokenizer.build import build_tokenizer
from megatron_ext.tokenizer.byte import ByteTokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "preprocess"
HF = str(GOLDEN / "hf_bpe")
SPM = str(GOLDEN / "spm_unigram.model")
ROOT = Path(__file__).parents[2]


def test_bytes_are_utf8_and_256_ends_a_document():
    tokenizer = build_tokenizer("ByteTokenizer")
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    assert tokenizer.encode("aé\0") == [97, 0xC3, 0xA9, 0]
    assert tokenizer.decode([97, 0xC3, 0xA9, 256]) == "aé"
    assert tokenizer.decode([0xFF]) == "\ufffd"


def test_null_reads_numbers():
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=100)
    assert (tokenizer.vocab_size, tokenizer.eod) == (100, 99)
    assert tokenizer.encode("3 0 99") == [3, 0, 99]
    assert tokenizer.decode([3, 0, 99]) == "3 0 99"


@pytest.mark.parametrize(("type", "model"), [("HuggingFaceTokenizer", HF), ("SentencePieceTokenizer", SPM)])
def test_text_comes_back(type: str, model: str):
    tokenizer = build_tokenizer(type, model)
    text = "First Citizen: Before we proceed any further, hear me speak."
    ids = tokenizer.encode(text)
    assert 0 < len(ids) < len(text)
    assert max(ids) < tokenizer.vocab_size
    assert tokenizer.decode(ids) == text


def test_huggingface_special_tokens():
    tokenizer = build_tokenizer("HuggingFaceTokenizer", HF)
    assert (tokenizer.vocab_size, tokenizer.eod) == (1200, 0)
    assert 0 in tokenizer.encode("one<|endoftext|>two")


def test_tokens_that_only_the_config_names_are_added_in_transformers_order(tmp_path: Path):
    # Ids as transformers 5.23's AutoTokenizer gives them: added_tokens_decoder by id, then the special tokens.
    folder = tmp_path / "tokenizer"
    shutil.copytree(HF, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {
        "pad_token": "<pad>",
        "eos_token": {"content": "</s>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False},
        "added_tokens_decoder": {
            "1201": {"content": "<x>", "normalized": True, "special": False},
            "1200": {"content": "<y>", "normalized": False, "lstrip": True, "special": True},
        },
        "auto_map": {"AutoTokenizer": ["no_such_module.Tokenizer", None]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(folder))
    assert (tokenizer.vocab_size, tokenizer.eod) == (1204, 1202)
    assert tokenizer.encode("<x>  <y><pad></s>") == [1201, 1200, 1203, 1202]


def test_identity_follows_the_content_not_the_path(tmp_path: Path):
    copy = tmp_path / "copy"
    shutil.copytree(HF, copy)
    original = build_tokenizer("HuggingFaceTokenizer", HF)
    assert build_tokenizer("HuggingFaceTokenizer", str(copy)).identity() == original.identity()
    (copy / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    assert build_tokenizer("HuggingFaceTokenizer", str(copy)).identity() != original.identity()
    shutil.copy(SPM, tmp_path / "other.model")
    others = [build_tokenizer("ByteTokenizer"), build_tokenizer("SentencePieceTokenizer", SPM)]
    assert len({json.dumps(tokenizer.identity()) for tokenizer in [original, *others]}) == 3
    moved = build_tokenizer("SentencePieceTokenizer", str(tmp_path / "other.model"))
    assert moved.identity() == others[1].identity()


@pytest.mark.parametrize(
    ("type", "model", "message"),
    [
        ("Bytetokenizer", None, "--tokenizer-type Bytetokenizer is not one of ByteTokenizer"),
        (None, None, "--tokenizer-type None is not one of"),
        ("NullTokenizer", None, "needs --vocab-size"),
        ("HuggingFaceTokenizer", None, "needs --tokenizer-model, a local folder with tokenizer.json"),
        ("HuggingFaceTokenizer", "no/such/folder", "--tokenizer-model no/such/folder does not exist"),
        ("HuggingFaceTokenizer", SPM, "is a file; --tokenizer-type HuggingFaceTokenizer needs a local folder"),
        ("HuggingFaceTokenizer", str(GOLDEN), "tokenizer.json: No such file or directory"),
        ("SentencePieceTokenizer", HF, "is a folder; --tokenizer-type SentencePieceTokenizer needs"),
        ("SentencePieceTokenizer", str(GOLDEN / "README.md"), "is not a SentencePiece model"),
    ],
)
def test_errors_name_the_flag_and_what_it_needs(type: str | None, model: str | None, message: str):
    with pytest.raises(ConfigurationError) as caught:
        build_tokenizer(type, model)
    assert message in str(caught.value)


def test_huggingface_folder_without_end_of_document(tmp_path: Path):
    shutil.copy(Path(HF) / "tokenizer.json", tmp_path)
    with pytest.raises(ConfigurationError, match=r'set "eos_token" in its tokenizer_config\.json'):
        build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"does not hold a readable tokenizer\.json"):
        build_tokenizer("HuggingFaceTokenizer", str(tmp_path))


def test_no_tokenizer_imports_torch():
    program = (
        "import sys\n"
        "from megatron_ext.tokenizer.build import build_tokenizer\n"
        f"build_tokenizer('HuggingFaceTokenizer', {HF!r})\n"
        f"build_tokenizer('SentencePieceTokenizer', {SPM!r})\n"
        "import megatron_ext.tokenizer.batch, megatron_ext.tokenizer.flags, tiktoken\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "False False\n"


def test_the_end_of_a_document_is_no_text_of_an_exported_tokenizer() -> None:
    """Whoever generates with it leaves special tokens out."""
    made = exported._bytes(ByteTokenizer())
    assert made.decode([97, 256, 98]) == "ab"
    assert made.decode([97, 256], skip_special_tokens=False) == "a<|endoftext|>"
