"""YAML and JSON that are too deep, too large or stand for too much end with an error, not with the process."""

import ast
import bz2
import gzip
import json
import lzma
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from backports import zstd

from megatron_ext.checkpoint.native import checkpoint_manifest
from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.parse.saved import read_saved
from megatron_ext.data.data_record import read_record
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.plugins.families.hf_config import read_hf_config
from megatron_ext.plugins.huggingface.huggingface_folder import _index
from megatron_ext.plugins.huggingface.safetensors import read_header
from megatron_ext.plugins.migrate.translate import read
from megatron_ext.plugins.prepare import documents
from megatron_ext.plugins.prepare.inputs import find_files
from megatron_ext.tokenizer.from_flags import build_tokenizer
from megatron_ext.untrusted.text import ExcessiveError, TextError, load_json, read_file
from megatron_ext.untrusted.untrusted_folder import file_inside
from megatron_ext.untrusted.yaml_text import MOST_YAML, load_yaml
from tests.support.syntax import nodes_of, source

_LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 30))
_EXCESSIVE = {
    "[" * 100_000: "nested more than 32 levels deep",
    "{a: " * 100_000: "nested more than 32 levels deep",
    "- " * 100_000: "nested more than 32 levels deep",
    "? " * 100_000: "nested more than 32 levels deep",
    _LAUGHS: "stands for more than 20,000 values",
    "&a [*a]": "*a stands in what it refers to",
    "&a {b: [1, *a]}": "*a stands in what it refers to",
    "x: " + ":".join(["1"] * 200_000): "a number of 399,999 digits",
    "x: 1" + "0" * 5000: "a number of 5,001 digits",
    "\n".join(f"k{n}: {n}" for n in range(10_001)): "stands for more than 20,000 values",
}


@pytest.mark.parametrize("text", _EXCESSIVE, ids=lambda text: text[:12])
def test_excessive_yaml_is_refused(text: str) -> None:
    started = time.process_time()
    with pytest.raises(ExcessiveError) as caught:
        load_yaml(text)
    assert _EXCESSIVE[text] in str(caught.value)
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\na: 2", "named twice: a"),
        ("a: {b: 1, b: 2}", "named twice: b"),
        ("- {'b': 1, b: 2}", "named twice: b"),
        ("a: [1", "while parsing"),
        ("!!python/object/apply:os.system [true]", "could not determine a constructor"),
        ("!!timestamp x", "NoneType"),
        ("!!bool x", "x"),
        ("2001-99-99", "month must be"),
        ("[]: 1", "unhashable key"),
    ],
)
def test_wrong_yaml_is_refused(text: str, problem: str) -> None:
    with pytest.raises(TextError, match=problem):
        load_yaml(text)


def test_ordinary_yaml_is_read() -> None:
    text = "a: &a {x: 1, y: [2, 3.5, null, true]}\nb:\n  <<: *a\n  x: 4\nc: [*a, *a]\nd: {<<: [*a], <<: *a}\n"
    a = {"x": 1, "y": [2, 3.5, None, True]}
    assert load_yaml(text) == {"a": a, "b": {**a, "x": 4}, "c": [a, a], "d": a}
    assert load_yaml("[" * 32 + "]" * 32)
    assert load_yaml("") is None


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a": ' * 100_000, b'["]", ' * 40 + b"1" + b"]" * 40])
def test_deep_json_is_refused(content: bytes) -> None:
    with pytest.raises(ExcessiveError, match="nested more than 32"):
        load_json(content)


def test_as_many_levels_and_values_as_are_allowed_are_read_and_one_more_is_not() -> None:
    for read_text in (lambda text: load_json(text.encode()), load_yaml):
        for opening, closing in (("[", "]"), ('{"a": ', "}")):
            value = read_text(opening * 32 + "1" + closing * 32)
            for _ in range(32):
                [value] = value if isinstance(value, list) else value.values()
            assert value == 1
            with pytest.raises(ExcessiveError, match=r"^it is nested more than 32 levels deep$"):
                read_text(opening * 33 + "1" + closing * 33)
        assert read_text("[" + ", ".join(["[[]]"] * 33) + "]") == [[[]]] * 33, "levels are left again"
    assert len(load_yaml(f"[{', '.join(['x'] * 19_999)}]")) == 19_999, "and the list itself"
    with pytest.raises(ExcessiveError, match=r"^it stands for more than 20,000 values$"):
        load_yaml(f"[{', '.join(['x'] * 20_000)}]")


def test_a_name_stands_for_as_many_values_as_it_was_given() -> None:
    """A list of nine is ten values. The names of one line do not count for what stands before or after them."""
    before = ", ".join(["x"] * 100)
    name = "&a [1, 2, 3, 4, 5, 6, 7, 8, 9]"
    for number, is_read in ((1988, True), (1989, False)):  # 1 + 1 + 100 + 10 + 10 times as many: 20,000 at most
        text = f"[[{before}], {name}, {', '.join(['*a'] * number)}, {', '.join(['y'] * 8)}]"
        if is_read:
            assert len(load_yaml(text)) == 1998
        else:
            with pytest.raises(ExcessiveError):
                load_yaml(text)
    assert load_yaml(f"[{', '.join(['&b 7'] + ['*b'] * 19_998)}]") == [7] * 19_999
    with pytest.raises(ExcessiveError):
        load_yaml(f"[{', '.join(['&b 7'] + ['*b'] * 19_999)}]")


@pytest.mark.parametrize("number", ["{}", "{}.5", "-{}"])
def test_a_number_has_at_most_400_characters(number: str) -> None:
    longest = number.format("1" * (400 - len(number) + 2))
    assert len(longest) == 400
    assert load_yaml(f"a: {longest}") == {"a": float(longest) if "." in longest else int(longest)}
    with pytest.raises(ExcessiveError, match=r"^it has a number of 401 digits$"):
        load_yaml(f"a: {number.format('1' * (401 - len(number) + 2))}")
    assert load_yaml(f"a: '{'1' * 5000}'") == {"a": "1" * 5000}, "a text may be longer"


def test_only_keys_of_one_mapping_have_to_differ() -> None:
    assert load_yaml("{a: b, b: b, c: a}") == {"a": "b", "b": "b", "c": "a"}
    assert load_yaml("[{a: 1}, {a: 1}, a, a]") == [{"a": 1}, {"a": 1}, "a", "a"]
    assert load_yaml("{a: {a: 1, b: [a, a]}, b: {a: 1}}") == {"a": {"a": 1, "b": ["a", "a"]}, "b": {"a": 1}}
    assert load_yaml("a: {b: 1}\nc: 2") == {"a": {"b": 1}, "c": 2}
    for text in ("{a: [x], b: 1, a: 2}", "{a: {x: 1}, b: 1, a: 2}", "[{a: 1}, {x: {a: 1, c: 2, a: 3}}]"):
        with pytest.raises(TextError, match=r"^named twice: a$"):
            load_yaml(text)


def test_the_names_that_stand_twice_are_told_and_no_others() -> None:
    with pytest.raises(TextError, match=r"^named twice: a, c$"):
        load_json(b'{"c": 1, "a": 1, "b": 1, "a": 2, "c": 3, "c": 4}')
    for number, said in ((999, "k5"), (1000, "a key of many")):
        pairs = ", ".join(f'"k{min(place, number - 2) if place < number - 1 else 5}": 1' for place in range(number))
        with pytest.raises(TextError, match=f"^named twice: {said}$"):
            load_json(f"{{{pairs}}}".encode())


def test_a_mark_at_the_beginning_is_no_part_of_the_text() -> None:
    """Windows programs write one."""
    assert load_json(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


def test_a_file_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 1000)
    assert read_file(path, 1000) == b"x" * 1000
    with pytest.raises(ExcessiveError, match=r"^it has more than 999 bytes$"):
        read_file(path, 999)
    with pytest.raises(ExcessiveError, match=r"^it is no regular file$"):
        read_file(tmp_path, 1000)
    reader, writer = os.pipe()
    os.write(writer, b"of a pipe")
    os.close(writer)
    assert read_file(f"/proc/self/fd/{reader}", 9, pipes=True) == b"of a pipe"
    with pytest.raises(ExcessiveError, match="no regular file"):
        read_file(f"/proc/self/fd/{reader}", 9)
    os.close(reader)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ExcessiveError, match="no regular file"):
        read_file(tmp_path / "pipe", 9, pipes=True)


def test_brackets_in_texts_are_texts() -> None:
    value = {"a": "[" * 1000, "b\\": ['"' + "{" * 1000, "\\"], "c": [[1]]}
    assert load_json(json.dumps(value).encode()) == value
    for wrong in (b"{", b"[1,]", b'{"a": 1, "a": 2}', b'{"a": {"b": 1, "b": 2}}', b"\xff", b"1" * 5000, b'"' * 99):
        with pytest.raises(TextError):
            load_json(wrong)


def _flags_file(tmp_path: Path, text: str) -> str:
    (tmp_path / "config.yaml").write_text(text)
    return str(tmp_path / "config.yaml")


@pytest.mark.parametrize("text", ["[" * 200_000, "x: " + "{a: " * 100_000, _LAUGHS, " " * (MOST_YAML + 1)])
def test_every_reader_of_yaml_is_bounded(text: str, tmp_path: Path) -> None:
    path = _flags_file(tmp_path, text)
    with pytest.raises(ConfigurationError, match=rf"--config {path} is not read: it "):
        parse(["--config", path])
    with pytest.raises(ConfigurationError, match=rf"the checkpoint's {path} is not read: it "):
        read_saved(Path(path))
    with pytest.raises(ConfigurationError, match=rf"{path}: it "):
        read(path)


@pytest.mark.parametrize("text", ["a: [1", "lr: 1\nlr: 2\n", "[1, 2]"])
def test_a_damaged_saved_configuration_is_left_to_the_manifest(text: str, tmp_path: Path) -> None:
    assert read_saved(Path(_flags_file(tmp_path, text))) is None


def test_a_deep_config_ends_the_program_with_64(tmp_path: Path) -> None:
    """The process itself: a parser that runs out of stack is no exception."""
    path = _flags_file(tmp_path, "num_layers: " + "[" * 200_000)
    command = [sys.executable, "pretrain_gpt.py", "--config", path, "--dry-run", "--world-size", "1"]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False)
    assert done.returncode == 64
    assert f"--config {path} is not read: it is nested more than 32 levels deep" in done.stderr


def test_every_reader_of_json_is_bounded(tmp_path: Path) -> None:
    deep = '{"model_type": ' + "[" * 100_000
    (tmp_path / "config.json").write_text(deep)
    with pytest.raises(ConfigurationError, match=r"config\.json is not valid JSON: it is nested"):
        read_hf_config(tmp_path)
    with pytest.raises(ConfigurationError, match=r"config\.json: it is nested"):
        read(str(tmp_path / "config.json"))
    with pytest.raises(DataError, match="is not the index of a sharded model"):
        _index(tmp_path / "config.json")
    (tmp_path / "manifest.json").write_text(deep)
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        checkpoint_manifest.read(tmp_path)
    assert read_record(tmp_path / "config.json") is None


def test_a_device_has_no_end(tmp_path: Path) -> None:
    with pytest.raises(ExcessiveError, match="no regular file"):
        read_file("/dev/zero", 10)
    with pytest.raises(ExcessiveError, match="more than 10 bytes"):
        read_file("/dev/zero", 10, pipes=True)
    with pytest.raises(ConfigurationError, match="--config /dev/zero is not read: it has more than 1,048,576 bytes"):
        parse(["--config", "/dev/zero"])


def test_half_a_character_is_refused() -> None:
    for wrong in (rb'{"\ud800": 1}', rb'["\udfff"]', rb'["a\uD83D b"]'):
        with pytest.raises(TextError, match="surrogates not allowed"):
            load_json(wrong)
    assert load_json(rb'["\ud83d\ude00", "\\ud800"]') == ["\U0001f600", "\\ud800"]


_READERS = {"json.load", "json.loads", "orjson.loads", "yaml.load", "yaml.safe_load", "yaml.full_load", "yaml.load_all"}
_OTHERS = {
    "parallel/rendezvous.py": "what this run's own ranks have put into their store",
    "resilience/rank_reports.py": "the same",
    "plugins/prepare/documents.py": "lines of a corpus, of any depth that the parser bears and of bounded size",
    "plugins/prepare/long_texts.py": "the same lines",
}


def _calls(path: Path) -> list[str]:
    """The names of the functions that a file calls; one that is computed has no name of a reader."""
    functions = (node.func for node in nodes_of(source(path)) if isinstance(node, ast.Call))
    return [ast.unparse(function) for function in functions if isinstance(function, ast.Name | ast.Attribute)]


def test_nobody_else_reads_text_that_others_wrote() -> None:
    package = Path(__file__).parents[3] / "megatron_ext"
    found = {path.relative_to(package).as_posix(): _READERS & set(_calls(path)) for path in package.rglob("*.py")}
    reading = {name for name, readers in found.items() if readers and not name.startswith("untrusted/")}
    others = {name for name in reading if name.startswith(tuple(_OTHERS))}
    assert reading == others, "use megatron_ext.untrusted.text, which bounds what it reads"
    assert sorted(others) == sorted(_OTHERS), "a file that reads no text any more has no place in the list"


def _header(path: Path, text: bytes, size: int = 0) -> Path:
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    return path


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (lambda: b'{"a": ' + b"[" * 100_000, "nested more than 32 levels deep"),
        (
            lambda: b'{"a": {"dtype": "F32", "shape": [1%s], "data_offsets": [0, 0]}}' % (b"0" * 4299),
            "contradicts itself",
        ),
        (
            lambda: (
                b'{"a": {"dtype": "F32", "shape": [%s1], "data_offsets": [0, 4]}}' % (b"1%s," % (b"0" * 4290) * 500)
            ),
            "contra",
        ),
        (
            lambda: b'{"a": {"dtype": "F32", "shape": [%s1], "data_offsets": [0, 4]}}' % (b"1," * 100_000),
            "contradicts itself",
        ),
        (lambda: b"{%s}" % b",".join(b'"%d":0' % n for n in range(400_000)), "its header names 400,000 tensors"),
        (
            lambda: (
                b"{%s}"
                % b",".join(b'"%d":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}' % n for n in range(400_000))
            ),
            "its header names more than the 200,000 tensors",
        ),
        (lambda: b'{"a": 1, "a": 2}', "named twice: a"),
    ],
    ids=["deep", "a long number", "many long numbers", "many dimensions", "many names", "many tensors", "twice"],
)
def test_headers_of_safetensors_are_bounded(write: Callable[[], bytes], problem: str, tmp_path: Path) -> None:
    path = _header(tmp_path / "x.safetensors", write(), 4)
    started = time.process_time()
    with pytest.raises(DataError, match=problem) as caught:
        read_header(path)
    assert len(str(caught.value)) < 1000
    assert time.process_time() - started < 2


def test_pipes_and_devices_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(ConfigurationError, match="no regular file"):
        build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    with pytest.raises(ConfigurationError, match="no regular file"):
        build_tokenizer("SentencePieceTokenizer", "/dev/zero")
    with pytest.raises(ConfigurationError, match="no regular file"):
        build_tokenizer("TikTokenizer", str(tmp_path / "tokenizer.json"))
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigurationError, match="no regular file"):
        read_hf_config(tmp_path)
    assert read_record(tmp_path / "config.json") is None


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.xz", "jsonl.bz2", "jsonl.zst", "txt", "txt.gz"])
def test_a_record_without_end_is_refused(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bomb: 64 MB of one byte in some kilobytes, at a bound of 8 MB in place of 1 GB."""
    monkeypatch.setattr(documents, "MOST_RECORD", 8 << 20)
    compress = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress, "zst": zstd.compress}
    content = b'{"text": "' + b"a" * (64 << 20)
    path = tmp_path / f"bomb.{ending}"
    path.write_bytes(compress.get(ending.split(".")[-1], bytes)(content))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=rf"bomb\.{ending}:1: a (line|text) of more than 8,388,608 bytes"):
        list(documents.read_documents(find_files([str(path)])))
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 48 << 20


# What the fuzzer has found (tests/fuzz).


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"num_hidden_layers": 10**30}, "num_hidden_layers is 1000000000000000000000000000000, above 1000000000000000"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
        ({"hidden_size": 10**4000}, r"hidden_size is 10+\.\.\., above 1000000000000000"),
    ],
    ids=["layers", "a float beyond floats", "a long number"],
)
def test_sizes_in_a_model_folder_are_bounded(values: dict[str, int], problem: str, tmp_path: Path) -> None:
    content = {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 61,
        "max_position_embeddings": 64,
        "hidden_act": "silu",
    }
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert read_hf_config(tmp_path)[1]["num_layers"] == 2
    (tmp_path / "config.json").write_text(json.dumps({**content, **values}))
    with pytest.raises(ConfigurationError, match=problem):
        read_hf_config(tmp_path)


@pytest.mark.parametrize("ending", ["gz", "xz", "bz2", "zst"])
def test_an_empty_compressed_file_is_damaged(ending: str, tmp_path: Path) -> None:
    (tmp_path / f"x.jsonl.{ending}").touch()
    with pytest.raises(DataError, match="damaged or ends too soon, at or before byte 0: it is empty"):
        list(documents.read_documents(find_files([str(tmp_path)])))


@pytest.mark.parametrize(
    "settings",
    [{"added_tokens_decoder": {"0../../x": {"content": "a"}}}, {"added_tokens_decoder": 3}, [], {"eos_token": 7}],
    ids=["no number", "no table", "a list", "a number"],
)
def test_settings_of_a_tokenizer_that_make_no_sense_are_refused(settings: Any, tmp_path: Path) -> None:
    model = {"type": "BPE", "vocab": {"<eod>": 0, "a": 1}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigurationError, match=r"does not hold a readable|names no token that ends a document"):
        build_tokenizer("HuggingFaceTokenizer", str(tmp_path))


def test_a_name_that_no_file_can_have_is_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for name in ("a" * 600, "loop"):
        with pytest.raises(DataError, match="is missing"):
            file_inside(tmp_path, name)
