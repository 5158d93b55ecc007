"""A name that somebody else wrote leads to what lies in its folder, and to nothing else."""

import itertools
from pathlib import Path

import pytest

from megatron_ext.errors import DataError
from megatron_ext.untrusted.untrusted_folder import file_inside, is_plain

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
