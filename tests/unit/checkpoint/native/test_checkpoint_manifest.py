"""What is said of the files that a manifest names, and whether flags may be taken from a checkpoint then."""

import hashlib
from pathlib import Path

import pytest

from megatron_ext.checkpoint.native import checkpoint_manifest, resume

# Files of a checkpoint whose names begin alike, in folders too, and all of one size.
FILES = ("__0_0.distcp", "__0_1.distcp", "__10_0.distcp", "config.yaml", "config.yaml.old", "data.json", "data.json2")
FILES += ("tokenizer/vocab.json", "tokenizer/merges.txt", "tokenizer.json", "tokenizers/vocab.json", "versions.json")
OF_THE_FLAGS = ("config.yaml", "data.json", "tokenizer/vocab.json", "tokenizer/merges.txt")


def _with_manifest(path: Path) -> checkpoint_manifest.Files:
    for number, name in enumerate(FILES):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(bytes([number] * 9))
    checkpoint_manifest.write(path, checkpoint_manifest.describe(path, checkpoint_manifest.all_files(path)))
    files = checkpoint_manifest.read(path)
    assert files is not None
    assert sorted(files) == sorted(FILES)
    assert list(files.values()) == [{"bytes": 9, "crc32": checkpoint_manifest.checksum(path / name)} for name in files]
    return files


@pytest.mark.parametrize("name", FILES)
def test_damage_of_every_file_is_said_of_it_alone(name: str, tmp_path: Path) -> None:
    """And flags are taken from a checkpoint unless one of the files that they follow from is damaged."""
    files = _with_manifest(tmp_path)
    path, content = tmp_path / name, (tmp_path / name).read_bytes()
    assert checkpoint_manifest.problems(tmp_path, files) == []
    assert resume._flags_are_intact(tmp_path)
    for now, said in (
        (content[:-1], "has 8 bytes instead of 9"),
        (content + b"x", "has 10 bytes instead of 9"),
        (content[:-1] + b"x", f"has another checksum than {files[name]['crc32']}"),
        (b"x" + content[1:], f"has another checksum than {files[name]['crc32']}"),
        (b"", "has 0 bytes instead of 9"),
    ):
        path.write_bytes(now)
        assert checkpoint_manifest.problems(tmp_path, files) == [f"{name} {said}"]
        assert resume._flags_are_intact(tmp_path) == (name not in OF_THE_FLAGS)
    path.unlink()
    assert checkpoint_manifest.problems(tmp_path, files) == [f"{name} is missing"]
    assert resume._flags_are_intact(tmp_path) == (name not in OF_THE_FLAGS)


def test_every_byte_of_a_manifest_counts(tmp_path: Path) -> None:
    _with_manifest(tmp_path)
    path, before = tmp_path / checkpoint_manifest.MANIFEST, checkpoint_manifest.name_of(tmp_path)
    content = path.read_bytes()
    assert before == hashlib.sha256(content).hexdigest()[:16], "as snapshots have noted it since"
    for place in range(0, len(content), 11):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert checkpoint_manifest.name_of(tmp_path) != before
        assert not resume._flags_are_intact(tmp_path)
        with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
            checkpoint_manifest.read(tmp_path)
    path.unlink()
    assert checkpoint_manifest.name_of(tmp_path) is None
    assert not resume._flags_are_intact(tmp_path)
    with pytest.raises(ValueError, match=r"manifest\.json is missing"):
        checkpoint_manifest.read(tmp_path)
    (tmp_path / "versions.json").unlink()
    assert checkpoint_manifest.read(tmp_path) is None
    assert resume._flags_are_intact(tmp_path), "Megatron-LM writes none"


WHOLE: list[str] = []
