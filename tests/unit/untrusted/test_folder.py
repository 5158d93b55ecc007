"""Files that anybody may have written: the folder they lie in, the last size and depth that is taken, where lines end;
and which file is replaced."""

import itertools
import os
from pathlib import Path

import pytest

from megatron_ext.durable import replacing
from megatron_ext.errors import DataError
from megatron_ext.inference import files
from megatron_ext.untrusted.folder import file_inside, is_plain
from megatron_ext.untrusted.text import DEPTH, ExcessiveError, TextError, load_json, read_file
from megatron_ext.untrusted.yaml_text import load_yaml

YES_NO = (False, True)


def test_a_name_leads_to_what_lies_in_the_folder(tmp_path: Path) -> None:
    """Or to one of the further folders themselves; a folder whose name begins alike is another one."""
    home, also = tmp_path / "home", tmp_path / "also"
    places = (home, home / "inner", tmp_path / "home2", also, also / "below", tmp_path / "also2")
    for place in places:
        place.mkdir(parents=True, exist_ok=True)
        (place / "file").write_text(str(place))
    for number, place in enumerate(places):
        (home / f"link{number}").symlink_to(place / "file")
        (home / f"folder{number}").symlink_to(place)
    for (number, place), further, nested in itertools.product(enumerate(places), YES_NO, YES_NO):
        inside = place in (home, home / "inner") or (further and place == also)
        for name in (f"link{number}", f"folder{number}/file"):
            plain = nested or "/" not in name
            assert is_plain(name, nested=nested) == plain
            if inside and plain:
                assert file_inside(home, name, also=[also] if further else [], nested=nested) == home / name
                continue
            with pytest.raises(DataError, match="out of its folder" if plain else "is not the plain name"):
                file_inside(home, name, also=[also] if further else [], nested=nested)


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


def test_a_file_is_replaced_by_the_name_that_is_given(tmp_path: Path) -> None:
    """And what lies under that name before is no way out."""
    (tmp_path / "outside").write_text("outside")
    for temporary, name in ((None, ".file.tmp"), (tmp_path / "mine", "mine")):
        (tmp_path / name).symlink_to(tmp_path / "outside")
        with replacing(tmp_path / "file", temporary) as file:
            assert sorted(os.listdir(tmp_path)) == sorted({"outside", name, *(["file"] if temporary else [])})
            file.write(name.encode())
        assert (tmp_path / "file").read_text() == name
        assert (tmp_path / "outside").read_text() == "outside"
        assert sorted(os.listdir(tmp_path)) == ["file", "outside"]


def test_lines_of_files_end_with_line_feeds_alone(tmp_path: Path) -> None:
    """Unicode has other ends of lines, which may stand in a text; a mark of the byte order is no part of it."""
    odd = "a\u2028b\u0085c\x0cd"
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(f'\ufeff{{"prompt": "{odd.replace(chr(12), "")}"}}\n \n\r\n{{"prompt": ""}}\r\n'.encode())
    found = list(files.read_items(path, ["prompt"]))
    assert found == [
        (f"{path}:1", {"prompt": odd.replace("\x0c", "")}),
        (f"{path}:4", {"prompt": ""}),
    ]
    for name in ("p.json", "p.jsonl"):
        (tmp_path / name).write_text('{"prompt": "x", "text": "y"}')
        assert files.read_prompts(tmp_path / name) == ["x"]
        assert files.read_documents(tmp_path / name) == ["y"]
    (tmp_path / "p.txt").write_bytes(f"\ufeff{odd}\r\n\n  \nlast".encode())
    assert files.read_prompts(tmp_path / "p.txt") == [odd, "  ", "last"]
    assert files.read_documents(tmp_path / "p.txt") == [f"{odd}\r\n\n  \nlast"]
    for wrong in ('["prompt"]', '"prompt"', "{}"):
        path.write_text(f"\n{wrong}\n")
        with pytest.raises(DataError, match=r"jsonl:2: no prompt; a line must be an object with prompt"):
            list(files.read_items(path, ["prompt"]))
