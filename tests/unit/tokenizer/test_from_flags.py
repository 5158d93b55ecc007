import base64
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config.schema.data_flags import TOKENIZER_TYPES
from megatron_ext.errors import ConfigurationError
from megatron_ext.tokenizer.from_flags import build_tokenizer

GOLDEN = Path(__file__).parents[2] / "golden" / "preprocess"
HF = str(GOLDEN / "hf_bpe")
SPM = str(GOLDEN / "spm_unigram.model")
ROOT = Path(__file__).parents[3]


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
        "from megatron_ext.tokenizer.from_flags import build_tokenizer\n"
        f"build_tokenizer('HuggingFaceTokenizer', {HF!r})\n"
        f"build_tokenizer('SentencePieceTokenizer', {SPM!r})\n"
        "import megatron_ext.plugins.prepare.encode_many, megatron_ext.plugins.prepare.tokenizer_flags, tiktoken\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "False False\n"


def test_tiktokenizer_has_the_sizes_of_megatron_where_no_flag_says_otherwise(tmp_path: Path) -> None:
    """131,072 ids, the first 1,000 of which are special: seven with names, and <SPECIAL_7> and so on."""
    pieces = (base64.b64encode(bytes([number])).decode() for number in range(256))
    lines = [{"rank": rank, "token_bytes": piece, "token_str": ""} for rank, piece in enumerate(pieces)]
    path = tmp_path / "model.json"
    path.write_text(json.dumps(lines))
    with pytest.raises(ConfigurationError, match="special-tokens 1000 that is less than --vocab-size 131072; use"):
        build_tokenizer("TikTokenizer", str(path))
    tokenizer = build_tokenizer("TikTokenizer", str(path), 1256)
    assert tokenizer.encode("<unk><s></s><mask><pad><cls><sep><SPECIAL_7><SPECIAL_999>") == [*range(8), 999]
    assert tokenizer.identity() == build_tokenizer("TikTokenizer", str(path), 1256, tiktoken_pattern="v2").identity()


READ_BY = {
    "vocab_file": {"GPT2BPETokenizer"},
    "merge_file": {"GPT2BPETokenizer"},
    "special_tokens": {"HuggingFaceTokenizer", "GPT2BPETokenizer", "TikTokenizer"},
    "tiktoken_pattern": {"TikTokenizer"},
}


@pytest.mark.parametrize("type", TOKENIZER_TYPES)
@pytest.mark.parametrize("name", READ_BY)
def test_a_flag_that_a_type_does_not_read_is_refused(name: str, type: str) -> None:
    flag = "--tokenizer-special-tokens" if name == "special_tokens" else f"--{name.replace('_', '-')}"
    given: dict[str, Any] = {name: "x"}
    with pytest.raises(ConfigurationError) as caught:
        build_tokenizer(type, "no/such/model", 0, **given)
    refused = str(caught.value).startswith(f"{flag} x is not read by --tokenizer-type {type}, only by ")
    assert refused == (type not in READ_BY[name])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"type": "NullTokenizer"}, "NullTokenizer needs --vocab-size, the number of token ids"),
        ({"type": "NullTokenizer", "vocab_size": 0}, "NullTokenizer needs --vocab-size, the number of token ids"),
        ({"type": "GPT2BPETokenizer"}, "GPT2BPETokenizer needs --vocab-file and --merge-file"),
        ({"type": "GPT2BPETokenizer", "vocab_file": "x"}, "GPT2BPETokenizer needs --vocab-file and --merge-file"),
        ({"type": "GPT2BPETokenizer", "merge_file": "x"}, "GPT2BPETokenizer needs --vocab-file and --merge-file"),
    ],
)
def test_a_type_without_the_flags_that_it_needs_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^--tokenizer-type {message}"):
        build_tokenizer(**given)
    assert build_tokenizer("NullTokenizer", vocab_size=1).vocab_size == 1


def test_special_tokens_of_flags_are_appended_in_their_order() -> None:
    """And are part of what tells a tokenizer from others; those that the vocabulary has keep their ids."""
    tokenizer: Any = build_tokenizer("HuggingFaceTokenizer", HF, special_tokens=["<b>", "<|endoftext|>", "<a>"])
    assert tokenizer.encode("<a><b><|endoftext|>") == [1201, 1200, 0]
    assert tokenizer.vocab_size == 1202
    assert tokenizer.added_tokens() == ["<|endoftext|>", "<b>", "<a>"]
    others = [
        build_tokenizer("HuggingFaceTokenizer", HF, special_tokens=one) for one in (None, ["<b>"], ["<b>", "<a>"])
    ]
    assert len({json.dumps(one.identity()) for one in (tokenizer, *others)}) == 4
    assert tokenizer.decode([1201, 1200, 0]) == "<a><b><|endoftext|>"
    assert tokenizer.decode_plain([1201, *tokenizer.encode("text"), 0]) == "text"


def _changed(tmp_path: Path, model: Any = None, **config: Any) -> Any:
    """The tokenizer of HF with other settings; `model` changes tokenizer.json."""
    folder = tmp_path / f"changed{len(list(tmp_path.iterdir()))}"
    shutil.copytree(HF, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    if model is not None:
        model(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | config
    settings = {name: value for name, value in settings.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return build_tokenizer("HuggingFaceTokenizer", str(folder))


def test_saved_truncation_and_padding_are_not_for_training(tmp_path: Path) -> None:
    def shorten(content: dict[str, Any]) -> None:
        content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
        content["padding"] = {
            "strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
            "pad_type_id": 0, "pad_token": "<|endoftext|>",
        }  # fmt: skip

    text = "a text of more than three tokens"
    expected = build_tokenizer("HuggingFaceTokenizer", HF).encode(text)
    assert 3 < len(expected) < 50
    assert _changed(tmp_path, shorten).encode(text) == expected


def test_what_ends_and_begins_a_document(tmp_path: Path) -> None:
    """`eos_token`, else `sep_token`; there may be none that begins one."""
    assert _changed(tmp_path, eos_token="a", sep_token="b").end_of_document == "a"
    assert _changed(tmp_path, eos_token=None, sep_token="b").end_of_document == "b"
    assert _changed(tmp_path, eos_token={"content": "c"}).end_of_document == "c"
    ids = {text: _changed(tmp_path, bos_token=text).bos for text in ("a", "<new>")}
    assert ids == {"a": build_tokenizer("HuggingFaceTokenizer", HF).encode("a")[0], "<new>": 1200}
    assert _changed(tmp_path, bos_token={"content": "<new>"}).bos == 1200
    assert _changed(tmp_path, bos_token=None).bos is None


def test_special_tokens_are_characters_where_the_folder_says_so(tmp_path: Path) -> None:
    ids = [_changed(tmp_path, split_special_tokens=value).encode("<|endoftext|>") for value in (None, False, True)]
    assert ids[0] == ids[1] == [0]
    assert 0 not in ids[2]


def test_tokens_of_the_config_are_appended_by_number(tmp_path: Path) -> None:
    """1200 before 999 only as texts; how one is found in a text is its own."""
    token = {"normalized": False, "special": False}
    decoder = {
        "1200": {"content": "<x>", **token, "single_word": True},
        "999": {"content": "<y>", **token, "rstrip": True},
        "10000": {"content": "<z>", **token, "lstrip": True},
    }
    tokenizer = _changed(tmp_path, added_tokens_decoder=decoder)
    added = tokenizer._tokenizer.get_added_tokens_decoder()
    assert [added[number].content for number in (1200, 1201, 1202)] == ["<y>", "<x>", "<z>"]
    assert [added[number].single_word for number in (1200, 1201, 1202)] == [False, True, False]
    assert [added[number].rstrip for number in (1200, 1201, 1202)] == [True, False, False]
    assert [added[number].lstrip for number in (1200, 1201, 1202)] == [False, False, True]
    assert not any(added[number].special or added[number].normalized for number in (1200, 1201, 1202))
    unsaid = {"1200": {"content": "<x>"}}
    assert not _changed(tmp_path, added_tokens_decoder=unsaid)._tokenizer.get_added_tokens_decoder()[1200].special


def _template(content: dict[str, Any]) -> None:
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "B", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"B": {"id": "B", "ids": [5], "tokens": ["B"]}},
    }


def test_a_rendered_text_has_its_special_tokens_already(tmp_path: Path) -> None:
    tokenizer = _changed(tmp_path, _template)
    ids = tokenizer.encode("one two")
    assert tokenizer.frame() == ([5], [])
    assert ids[0] == 5
    rendered, offsets = tokenizer.encode_rendered("one two")
    assert rendered == ids[1:]
    assert (offsets[0][0], offsets[-1][1]) == (0, 7)
    assert build_tokenizer("HuggingFaceTokenizer", HF).frame() == ([], [])  # type: ignore[attr-defined]


def _with(name: str, value: Any) -> Any:
    return lambda content: content.__setitem__(name, value)


def _added(**options: Any) -> Any:
    token = {
        "id": 1200, "content": "<x>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
        "special": True,
    }  # fmt: skip
    return lambda content: content["added_tokens"].append(token | options)


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


@pytest.mark.parametrize(
    ("change", "cuts"),
    [
        (None, True),
        (_added(), True),
        (_added(content="<x y>"), False),
        (_added(lstrip=True), False),
        (_added(rstrip=True), False),
        (_with("normalizer", {"type": "NFC"}), False),
        (_with("pre_tokenizer", {**BYTE_LEVEL, "add_prefix_space": True}), False),
        (_with("pre_tokenizer", {**BYTE_LEVEL, "use_regex": False}), False),
        (_with("pre_tokenizer", {"type": "Whitespace"}), False),
        (_template, False),
    ],
)
def test_a_text_may_be_cut_only_where_no_token_looks_around(tmp_path: Path, change: Any, cuts: bool) -> None:
    assert _changed(tmp_path, change).splits_between_words() == cuts


def test_a_file_that_cannot_be_read_is_named_with_its_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"^--vocab-file none cannot be read for --tokenizer-type GPT2BPETok"):
        build_tokenizer("GPT2BPETokenizer", vocab_file="none", merge_file=str(tmp_path / "m"))
    (tmp_path / "v").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"^--merge-file .*/m cannot be read for --tokenizer-type GPT2BPETok"):
        build_tokenizer("GPT2BPETokenizer", vocab_file=str(tmp_path / "v"), merge_file=str(tmp_path / "m"))
    with pytest.raises(UnicodeEncodeError):
        build_tokenizer("SentencePieceTokenizer", SPM).encode("a\ud800")


@pytest.mark.parametrize(("id", "is_read"), [(200_000, True), (3_000_000, False)])
def test_ids_far_beyond_the_entries_are_refused(tmp_path: Path, id: int, is_read: bool) -> None:
    """The library writes a line for every hole below the highest id."""

    def far(content: dict[str, Any]) -> None:
        content["model"]["vocab"]["<far>"] = id

    vocabulary = json.loads((Path(HF) / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary["vocab"] | {"<far>": id}))
    (tmp_path / "merges.txt").write_text("")
    files: dict[str, Any] = {"vocab_file": str(tmp_path / "vocab.json"), "merge_file": str(tmp_path / "merges.txt")}
    if is_read:
        assert _changed(tmp_path, far).eod == 0
        assert build_tokenizer("GPT2BPETokenizer", **files).eod == 0
        return
    message = f"'<far>' has the id {id}, and the vocabulary 1201 entries; ids over 264546 are not read"
    with pytest.raises(ConfigurationError, match=rf"--tokenizer-model .*: {message}"):
        _changed(tmp_path, far)
    with pytest.raises(ConfigurationError, match=rf"--vocab-file .*: {message}"):
        build_tokenizer("GPT2BPETokenizer", **files)
