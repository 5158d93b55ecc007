"""The largest size, depth and number that is taken, and the next one, which is refused."""

import itertools
from pathlib import Path

import pytest

from megatron_ext.untrusted.text import DEPTH, ExcessiveError, TextError, load_json, read_file
from megatron_ext.untrusted.yaml_text import load_yaml


def test_bounds_are_the_last_that_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_file(path, 5) == b"12345"
    with pytest.raises(ExcessiveError, match="more than 4 bytes"):
        read_file(path, 4)
    for read, levels in itertools.product((lambda text: load_json(text.encode()), load_yaml), (DEPTH, DEPTH + 1)):
        for text in ("[" * levels + "]" * levels, '{"a":' * levels + "1" + "}" * levels):
            if levels == DEPTH:
                assert read(text)
                continue
            with pytest.raises(ExcessiveError, match=f"more than {DEPTH} levels"):
                read(text)
    assert load_json(b'[{"a": 1}, {"a": 2}, "a", {"b": {"a": 3}}]') == [{"a": 1}, {"a": 2}, "a", {"b": {"a": 3}}]
    for text in ('{"a": 1, "b": 2, "a": 3}', '[{"c": {"b": 1, "a": 1, "a": 1}}]'):
        for read in (lambda text: load_json(text.encode()), load_yaml):
            with pytest.raises(TextError, match=r"named twice: a$"):
                read(text)
    values = 19_999  # and the list itself
    assert len(load_yaml(f"[{'1,' * values}]")) == values
    with pytest.raises(ExcessiveError, match="more than 20,000 values"):
        load_yaml(f"[{'1,' * (values + 1)}]")
    assert load_yaml("9" * 400) == int("9" * 400)
    with pytest.raises(ExcessiveError, match="a number of 401 digits"):
        load_yaml("9" * 401)
