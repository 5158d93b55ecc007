"""A checkpoint folder leads to nothing outside of it, and only what saves have written there is removed."""

import errno
import io
import json
import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.checkpoint.native import checkpoint_manifest, torch_dist
from megatron_ext.checkpoint.native import extra_files as beside
from megatron_ext.checkpoint.native.checkpoint_folder import (
    TRACKER,
    find_all,
    make_partial,
    publish,
    remove,
    remove_leftovers,
    write_tracker,
)
from megatron_ext.checkpoint.native.safe_reading import SafeReader, no_code_from_files
from megatron_ext.checkpoint.native.torch_archive import archive, plain, tensor_pickle
from megatron_ext.checkpoint.native.torch_dist import Chunk, Tensor
from megatron_ext.config.schema import DataConfig
from megatron_ext.errors import DataError
from megatron_ext.plugins.checkpoint_tools.tensors import Tensors
from megatron_ext.plugins.migrate.megatron_lm_checkpoint.saved_flags import read_args
from megatron_ext.train.configure import configure
from megatron_ext.untrusted.untrusted_folder import check_folder, file_inside, is_plain, read_inside


def _checkpoint(folder: Path) -> Path:
    """The smallest checkpoint with a tensor: [0, 0, 0, 0]."""
    path = folder / "iter_0000001"
    path.mkdir(parents=True)
    head, tail = archive(tensor_pickle((4,), "F32"), 16)
    content = head + bytes(16) + tail
    (path / "__0_0.distcp").write_bytes(content)
    tensors = {"weight": Tensor("F32", (4,), (Chunk((0,), (4,), "__0_0.distcp", 0, len(content)),))}
    (path / ".metadata").write_bytes(torch_dist.write(tensors, {}))
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    return path


def _move_out(path: Path, to: Path) -> None:
    """A link in the folder, and the file elsewhere."""
    to.mkdir(exist_ok=True)
    path.rename(to / path.name)
    path.symlink_to(to / path.name)


def test_a_checkpoint_is_read(tmp_path: Path) -> None:
    path = _checkpoint(tmp_path)
    (path / "other.distcp").symlink_to("__0_0.distcp")  # a link inside leads nowhere else
    (tmp_path / "linked").symlink_to(path)
    for folder in (path, tmp_path / "linked"):
        check_folder(folder)
        assert Tensors(folder).read("weight").tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("depth", ["tokenizer", "a/b/tokenizer"])
def test_a_folder_of_a_checkpoint_that_is_a_link_out_of_it_is_not_followed(depth: str, tmp_path: Path) -> None:
    """All that lies in it are files; where it leads into the checkpoint, or nowhere inside, it may stay."""
    path = _checkpoint(tmp_path)
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    (outside / "tokenizer.json").write_text("{}")
    link = path / depth
    link.parent.mkdir(parents=True, exist_ok=True)
    for refused in (outside, tmp_path, tmp_path / "missing", "/"):
        link.symlink_to(refused, target_is_directory=True)
        with pytest.raises(DataError, match=rf"{link} is a link to \S*, out of its folder; nothing was read"):
            check_folder(path)
        with pytest.raises(DataError, match="out of its folder"):
            Tensors(path).read("weight")
        link.unlink()
    (path / "inside").mkdir()
    for allowed in (path / "inside", path / "gone"):
        link.symlink_to(allowed, target_is_directory=True)
        check_folder(path)
        link.unlink()


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "metadata.json"])
def test_a_link_out_of_the_folder_is_not_followed(name: str, tmp_path: Path) -> None:
    path = _checkpoint(tmp_path)
    _move_out(path / name, tmp_path / "elsewhere")
    with pytest.raises(DataError, match=rf"{path / name} is a link to \S*/elsewhere/{name}, out of its folder"):
        check_folder(path)
    with pytest.raises(DataError, match="out of its folder"), no_code_from_files(path):
        raise AssertionError("the engine would open the file")
    with pytest.raises(DataError, match="out of its folder"):
        Tensors(path).read("weight")
    if name != "metadata.json":
        with pytest.raises(DataError, match="out of its folder"):
            SafeReader(path).read_metadata()


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    path = _checkpoint(tmp_path)
    (path / name).unlink()
    os.mkfifo(path / name)
    for refuse in (check_folder, lambda path: SafeReader(path).read_metadata(), lambda path: file_inside(path, name)):
        with pytest.raises(DataError, match=rf"{path / name} is no file but a pipe"):
            refuse(path)


def test_pipes_and_links_in_the_place_of_small_files(tmp_path: Path) -> None:
    path = _checkpoint(tmp_path)
    for name in ("manifest.json", "config.yaml", "common.pt"):
        os.mkfifo(path / name)
    with pytest.raises(ValueError, match=r"manifest\.json is no file but a pipe"):
        checkpoint_manifest.read(path)
    with pytest.raises(DataError, match=r"config\.yaml is no file but a pipe"):
        configure(["--load", str(tmp_path)])
    assert read_args(path) is None
    (tmp_path / TRACKER).symlink_to("/dev/zero")
    [found] = find_all(tmp_path)
    assert (found.path, found.warning is None) == (path, False)


def test_no_memory_for_what_no_file_holds(tmp_path: Path) -> None:
    path = _checkpoint(tmp_path)
    for size, chunk, problem in (
        ((1 << 50,), (1 << 50,), "no room for 4,503,599,627,370,496 at 0"),
        ((1 << 50,), (4,), "its files hold 4 elements of 1,125,899,906,842,624"),
    ):
        tensors = {"weight": Tensor("F32", size, (Chunk((0,), chunk, "__0_0.distcp", 0, 400),))}
        (path / ".metadata").write_bytes(torch_dist.write(tensors, {}))
        with pytest.raises(DataError, match=problem):
            Tensors(path).read("weight")


def _manifest(path: Path, files: object) -> None:
    """As anybody can write one: with the checksum of its own."""
    body = json.dumps(files, indent=1)
    text = f'{{"checksum": "crc32", "files": {body}, "own_crc32": "{zlib.crc32(body.encode()):08x}"}}\n'
    (path / "manifest.json").write_text(text)


@pytest.mark.parametrize("name", ["/etc/passwd", "../secret", "a/../../secret", "..", "", ".", "a//b", "./a", "a\0"])
def test_a_manifest_names_files_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    path = _checkpoint(tmp_path)
    _manifest(path, {name: {"bytes": 6, "crc32": "00000000"}})
    with pytest.raises(ValueError, match=r"manifest\.json names .*, which is no file of the checkpoint"):
        checkpoint_manifest.read(path)


@pytest.mark.parametrize(
    "entry",
    [None, [], {"bytes": "6", "crc32": "0"}, {"bytes": -1, "crc32": "0"}, {"bytes": True, "crc32": "0"}, {"bytes": 6}],
)
def test_a_manifest_has_sizes_and_checksums(entry: object, tmp_path: Path) -> None:
    _manifest(tmp_path, {"a": entry})
    with pytest.raises(ValueError, match=r"manifest\.json has no size and checksum of 'a'"):
        checkpoint_manifest.read(tmp_path)


def test_a_manifest_reads_no_link_out_of_the_folder(tmp_path: Path) -> None:
    path = _checkpoint(tmp_path)
    (path / "tokenizer").mkdir()
    (path / "tokenizer" / "vocab.json").write_text("{}")
    checkpoint_manifest.write(path, checkpoint_manifest.describe(path, checkpoint_manifest.all_files(path)))
    files = checkpoint_manifest.read(path)
    assert files is not None
    assert checkpoint_manifest.problems(path, files) == []
    _move_out(path / "__0_0.distcp", tmp_path / "elsewhere")
    _move_out(path / "tokenizer", tmp_path / "elsewhere")
    found = checkpoint_manifest.problems(path, files)
    assert [problem.partition(":")[0] for problem in found] == ["__0_0.distcp", "tokenizer/vocab.json"]
    assert all("out of its folder" in problem for problem in found)


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"files": {}}', b'{"files": 3, "own_crc32": "00000000"}'])
def test_a_damaged_manifest_is_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        checkpoint_manifest.read(tmp_path)


def test_plain_names() -> None:
    assert is_plain("__0_0.distcp")
    assert is_plain(".metadata")
    assert is_plain("a/b", nested=True)
    for name in ("a/b", "/a", "..", ".", "", "a/", "a\0", None, 3):
        assert not is_plain(name)


def test_small_files_are_small(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_inside(tmp_path, "a", 5) == b"12345"
    with pytest.raises(DataError, match="larger than 4 bytes"):
        read_inside(tmp_path, "a", 4)


def _hostile_metadata() -> bytes:
    """It gives every path of this process the name of a leftover."""
    return b"\x80\2cpathlib\nPosixPath\nN}" + plain("name") + plain(".iter_0000001.partial") + b"s\x86b."


def test_a_pickle_does_not_choose_what_is_removed(tmp_path: Path) -> None:
    from pathlib import PosixPath

    path = _checkpoint(tmp_path)
    kept = tmp_path / "precious"
    kept.mkdir()
    try:
        with pytest.raises(pickle.UnpicklingError, match=r"would change pathlib\.PosixPath"):
            torch_dist.read(io.BytesIO(_hostile_metadata()))
        (path / ".metadata").write_bytes(_hostile_metadata())
        with pytest.raises(pickle.UnpicklingError, match=r"would change pathlib\.PosixPath"):
            SafeReader(path).read_metadata()
        assert "name" not in vars(PosixPath)
        remove_leftovers(tmp_path)
        assert kept.is_dir()
        assert path.is_dir()
    finally:
        if "name" in vars(PosixPath):
            delattr(PosixPath, "name")


def test_only_leftovers_are_removed(tmp_path: Path) -> None:
    stay = ["iter_0000001", ".iter_0000001", ".iter_0000001.partial.old", "iter_0000001.partial", ".iter_1.partial"]
    stay += [".iter_000000\u0661.partial", "a.iter_0000001.partial", ".iter_0000001.partials", "precious"]
    go = [".iter_0000001.partial", ".iter_0000002.replaced", ".iter_12345678.removed"]
    for name in (*stay, *go):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    remove_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(stay)


def test_nothing_is_removed_through_a_link(tmp_path: Path) -> None:
    outside, save = tmp_path / "outside", tmp_path / "save"
    outside.mkdir()
    (outside / "file").write_text("x")
    save.mkdir()
    (save / ".iter_0000001.partial").symlink_to(outside)
    (save / ".iter_0000002.partial").mkdir()
    (save / ".iter_0000002.partial" / "inner").symlink_to(outside)
    (save / ".iter_0000003.replaced").write_text("a file")
    partial = make_partial(save, 4)
    assert os.listdir(save) == [partial.name]
    # A checkpoint that somebody has put elsewhere is replaced, and retention takes the link alone.
    (save / "iter_0000004").symlink_to(outside)
    publish(save, 4)
    assert not (save / "iter_0000004").is_symlink()
    (save / "iter_0000005").symlink_to(outside)
    remove(save, 5)
    assert sorted(os.listdir(save)) == ["iter_0000004", TRACKER]
    (save / f".{TRACKER}.tmp").symlink_to(outside / "file")
    write_tracker(save, 6)
    assert (outside / "file").read_text() == "x"
    assert (save / TRACKER).read_text() == "6"


@pytest.mark.parametrize("gone", [(), ("merges.txt",), ("vocab.json", "merges.txt")])
def test_a_tokenizer_is_kept_whole_or_as_it_was(gone: tuple[str, ...], tmp_path: Path) -> None:
    """Where one of its files is gone, all come from the first earlier checkpoint that has them."""
    names = ("vocab.json", "merges.txt")
    (tmp_path / "earlier" / "tokenizer").mkdir(parents=True)
    for name in names:
        (tmp_path / name).write_text("now")
        (tmp_path / "earlier" / "tokenizer" / name).write_text("then")
    for name in gone:
        (tmp_path / name).unlink()
    vocab, merges = (str(tmp_path / name) for name in names)
    data = DataConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)
    (tmp_path / "iter").mkdir()
    beside.keep_tokenizer(data, tmp_path / "iter", [tmp_path / "none", tmp_path / "earlier"])
    kept = [(tmp_path / "iter" / "tokenizer" / name).read_text() for name in names]
    assert kept == ["then" if gone else "now"] * 2


def test_a_kept_tokenizer_is_in_the_checkpoint(tmp_path: Path) -> None:
    values = {"tokenizer_type": "HuggingFaceTokenizer"}
    (tmp_path / "a" / "tokenizer").mkdir(parents=True)
    (tmp_path / "a" / "tokenizer" / "tokenizer.json").write_text("{}")
    assert beside.kept_tokenizer(values, tmp_path / "a") == {"tokenizer_model": str(tmp_path / "a" / "tokenizer")}
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "tokenizer").symlink_to(tmp_path / "a" / "tokenizer")
    assert beside.kept_tokenizer(values, tmp_path / "b") == {}
    _move_out(tmp_path / "a" / "tokenizer" / "tokenizer.json", tmp_path / "elsewhere")
    assert beside.kept_tokenizer(values, tmp_path / "a") == {}


def test_every_folder_below_is_looked_into(tmp_path: Path) -> None:
    """Two next to each other, each with another in it: a pipe is found in whichever it lies."""
    folders = [tmp_path / place for place in ("a", "a/inner", "b", "b/inner")]
    for folder in folders:
        folder.mkdir()
        (folder / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "a", target_is_directory=True)
    check_folder(tmp_path)
    for folder in folders:
        pipe = folder / "pipe"
        os.mkfifo(pipe)
        with pytest.raises(DataError, match=rf"{folder}/pipe is no file but a pipe"):
            check_folder(tmp_path)
        pipe.unlink()


def test_what_may_not_be_looked_at_is_not_called_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(number: int) -> Any:
        def stat(self: Path, **_: Any) -> None:
            raise OSError(number, os.strerror(number))

        return stat

    for number in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP):
        monkeypatch.setattr(Path, "stat", refuse(number))
        with pytest.raises(DataError, match="is missing"):
            file_inside(tmp_path, "file")
    for number in (errno.EACCES, errno.EIO, errno.ESTALE):
        monkeypatch.setattr(Path, "stat", refuse(number))
        with pytest.raises(OSError, match=os.strerror(number)):
            file_inside(tmp_path, "file")
