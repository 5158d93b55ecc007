"""No pickle in a checkpoint runs, makes or changes anything.

Every payload tries to: it makes a folder, or sets an attribute of a real class. What it does where Python's unpickler
reads it, with the names of a checkpoint's classes alone allowed, is tested too: a payload that does nothing shows
nothing.
"""

import contextlib
import copyreg
import importlib
import io
import os
import pickle
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.native import torch_dist
from megatron_ext.checkpoint.native.safe_reading import SafeReader, no_code_from_files, read_metadata
from megatron_ext.checkpoint.native.torch_archive import archive, place_of_elements, plain
from megatron_ext.checkpoint.native.torch_dist import ALLOWED, Chunk, Tensor
from megatron_ext.errors import DataError
from megatron_ext.plugins.huggingface import saved_model
from megatron_ext.plugins.migrate.megatron_lm_checkpoint.saved_flags import read_args
from megatron_ext.untrusted.inert_pickle import Global, Made, Stored, read

_PLANTED = "planted_by_a_pickle"
_FORCED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_READERS = (read_metadata, torch_dist.read, torch_dist.read_objects)
_MADE = b"cpathlib\nPosixPath\n)\x81"


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text.encode())) + text.encode()


def _calls(module: str, name: str, *arguments: str) -> bytes:
    return f"\x80\2c{module}\n{name}\n(".encode("latin-1") + b"".join(map(_text, arguments)) + b"tR."


def _changes(module: str, name: str, *, slots: bool) -> bytes:
    """BUILD on the class itself: (no dictionary, slots) becomes setattr, a dictionary goes into its __dict__."""
    state = b"}" + _text(_PLANTED) + _text("x") + b"s"
    return f"\x80\2c{module}\n{name}\n".encode("latin-1") + (b"N" + state + b"\x86" if slots else state) + b"b."


class _Trusting(pickle.Unpickler):
    """What an allow-list of real classes does."""

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError("not allowed")
        return super().find_class(module, name)


@pytest.fixture
def _nothing_planted() -> Iterator[None]:
    yield
    with contextlib.suppress(AttributeError, TypeError):
        delattr(PosixPath, _PLANTED)


@pytest.mark.usefixtures("_nothing_planted")
def test_an_allow_list_of_real_classes_lets_them_be_changed() -> None:
    _Trusting(io.BytesIO(_changes("pathlib", "PosixPath", slots=True))).load()
    assert hasattr(PosixPath, _PLANTED)


@pytest.mark.parametrize("slots", [True, False])
@pytest.mark.parametrize(("module", "name"), sorted(ALLOWED - {("pathlib._local", "PosixPath")}))
def test_no_class_is_changed(module: str, name: str, slots: bool) -> None:
    payload = _changes(module, name, slots=slots)
    real = getattr(importlib.import_module(module), name)
    for reader in _READERS:
        try:
            with pytest.raises(
                pickle.UnpicklingError, match=rf"^\.metadata would change {module}\.{name}, which is no"
            ):
                reader(io.BytesIO(payload))
            assert not hasattr(real, _PLANTED)
        finally:
            with contextlib.suppress(AttributeError, TypeError):
                delattr(real, _PLANTED)


def _folder_makers(folder: str) -> list[tuple[bytes, str]]:
    path = _text(folder)
    return [
        (_calls("os", "mkdir", folder), "asks for os.mkdir, which no checkpoint needs"),
        (_calls("posix", "mkdir", folder), "asks for posix.mkdir, which no checkpoint needs"),
        (pickle.dumps(_Canary(folder), protocol=4), "asks for posix.mkdir, which no checkpoint needs"),
        (pickle.dumps(_Canary(folder), protocol=5), "asks for posix.mkdir, which no checkpoint needs"),
        (pickle.dumps(_Canary(folder), protocol=1), "asks for posix.mkdir, which no checkpoint needs"),
        (_calls("builtins", "eval", f"__import__('os').mkdir({folder!r})"), "asks for builtins.eval"),
        (_calls("pathlib", "PosixPath.mkdir", folder), "asks for pathlib.PosixPath.mkdir"),
        (b"\x80\2(" + path + b"ios\nmkdir\n.", "holds the opcode 0x69"),  # INST
        (b"\x80\2(cos\nmkdir\n" + path + b"o.", "asks for os.mkdir"),  # OBJ
        (b"\x80\4cos\nmkdir\n" + path + b"\x85}\x92.", "asks for os.mkdir"),  # NEWOBJ_EX
        (b"\x80\2\x82\xf0" + path + b"\x85R.", "holds the opcode 0x82"),  # EXT1, of the registry of this process
        (b"\x80\2\x83\xf0\0" + path + b"\x85R.", "holds the opcode 0x83"),  # EXT2
        (b"\x80\2ccopyreg\n_reconstructor\n.", "asks for copyreg._reconstructor"),
        (b"\x80\2" + path + b"Q.", "refers to something outside of it"),  # BINPERSID
        (b"\x80\2P" + folder.encode() + b"\n.", "holds the opcode 0x50"),  # PERSID
    ]


class _Canary:
    def __init__(self, folder: str):
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)


@pytest.fixture
def _registered() -> Iterator[None]:
    """Some library has registered a function: its number then stands for it, and no name is asked for."""
    copyreg.add_extension("os", "mkdir", 240)
    copyreg._extension_cache[240] = os.mkdir  # pyright: ignore[reportAttributeAccessIssue]
    yield
    copyreg.remove_extension("os", "mkdir", 240)


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("number", range(15))
def test_nothing_is_called(number: int, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    payload, refusal = _folder_makers(str(canary))[number]
    for reader in _READERS:
        with pytest.raises(pickle.UnpicklingError) as caught:
            reader(io.BytesIO(payload))
        assert str(caught.value).startswith(f".metadata {refusal}")
        assert not canary.exists()


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("number", [0, 1, 2, 3, 4, 5, 7, 8, 10, 11])
def test_the_canary_sings_where_pickle_is_trusted(number: int, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    payload, _ = _folder_makers(str(canary))[number]
    with contextlib.suppress(Exception):
        pickle.loads(payload)
    assert canary.is_dir()


@pytest.mark.parametrize(
    ("payload", "refusal"),
    [
        (b"", "is damaged: IndexError"),
        (b"\x80\2]q\0.", "holds a list where a Metadata belongs"),
        (b"\x80\x04\x95garbage", "is damaged: ValueError: it ends too early"),
        (b"\x80\x06N.", "is of a newer protocol"),
        (b"\x80\2h\5.", "is damaged: KeyError"),
        (b"\x80\2r\xff\xff\xff\xff.", "is damaged: IndexError"),  # a memo of four billion places
        (b"\x80\2X\xff\xff\xff\xffab.", "is damaged: ValueError: it ends too early"),
        (b"\x80\2cpathlib\nPosixPath\n" + _text("a") + _text("b") + b"s.", "sets items of a Global"),
        (b"\x80\2cpathlib\nPosixPath\n(" + _text("a") + b"e.", "appends to a Global"),
        (b"\x80\2" + _text("a") + b")R.", "calls 'a'"),
        (b"\x80\2" + _MADE + b")R.", "calls a Made"),
        (b"\x80\2" + _MADE + b"}b}b.", "changes an object of PosixPath twice"),
        (b"\x80\2})" + b"\x85" * 200_000 + b"Ns.", "has a tuple for a key"),  # whose hash would end the process
        (b"\x80\2}]Ns.", "has a list for a key"),
        (b"\x80\2" + b"]" * 200_000 + b"a" * 199_999 + b".", "holds a list where a Metadata belongs"),
    ],
)
def test_damage_is_refused_by_name(payload: bytes, refusal: str) -> None:
    for reader in _READERS:
        with pytest.raises(pickle.UnpicklingError) as caught:
            reader(io.BytesIO(payload))
        assert str(caught.value).startswith(f".metadata {refusal}")


_CHUNK = Chunk((0, 0), (2, 3), "__0_0.distcp", 0, 400)
_OTHER = Chunk((2, 0), (2, 3), "__0_0.distcp", 400, 400)
_GENUINE = {"weight": Tensor("F32", (4, 3), (_CHUNK, _OTHER))}


def test_genuine_metadata_is_taken() -> None:
    content = torch_dist.write(_GENUINE, {"state/shard_0_1": Chunk((), (), "__0_0.distcp", 7, 9)})
    assert torch_dist.read(io.BytesIO(content)) == _GENUINE
    made = read_metadata(io.BytesIO(content))
    theirs = pickle.loads(content)
    assert (made.state_dict_metadata, made.storage_data) == (theirs.state_dict_metadata, theirs.storage_data)


@pytest.mark.parametrize(
    ("of", "by", "refusal"),
    [
        (_text("__0_0.distcp"), _text("../a.distcp"), "names the file '../a.distcp', which is not one beside it"),
        (_text("__0_0.distcp"), _text("/etc/passwd"), "names the file '/etc/passwd', which is not one beside it"),
        (_text("__0_0.distcp"), _text(".."), "names the file '..', which is not one beside it"),
        (_text("__0_0.distcp"), _text("."), "names the file '.', which is not one beside it"),
        (_text("__0_0.distcp"), _text(""), "names the file '', which is not one beside it"),
        (_text("__0_0.distcp"), _text("a\0b"), "names the file 'a\\\\x00b', which is not one beside it"),
        (_text("__0_0.distcp"), _MADE, "names the file a Made, which is not one beside it"),
        (b"M\x90\x01", b"J\xff\xff\xff\xff", "has -1 for a size or a place"),
        (b"M\x90\x01", b"\x8a\x09" + b"\xff" * 8 + b"\1", "has 36893488147419103231 for a size or a place"),
        (b"M\x90\x01", b"\x88", "has True for a size or a place"),
        (b"M\x90\x01", b"G" + bytes(8), "has 0.0 for a size or a place"),
        (b"K\4K\3", b"K\3K\3", "has a part of 'weight' at [2, 0] that is not in [3, 3]"),
        (b"K\4K\3", b"K\4K\3K\1", "has a part of 'weight' at [0, 0] that is not in [4, 3, 1]"),
        (b"ctorch\nfloat32\n", b"ctorch\nSize\n", "has a Global for a dtype"),
        (_text("torch.strided"), _text("torch.sparse_coo"), "has a tensor that is not strided"),
        (plain("fqn") + plain("weight"), plain("fqn") + plain("other"), "has no place for 'weight' at [0, 0]"),
        (plain("fqn") + plain("weight"), plain("fqn") + b"N", "has None for a tensor's name"),
        (_text("storage_data"), _text("storage_date"), "has no tables of tensors and places"),
    ],
)
def test_every_value_is_checked(of: bytes, by: bytes, refusal: str) -> None:
    content = torch_dist.write(_GENUINE, {})
    assert of in content
    for reader in (read_metadata, torch_dist.read):
        with pytest.raises(pickle.UnpicklingError) as caught:
            reader(io.BytesIO(content.replace(of, by)))
        assert str(caught.value) == f".metadata {refusal}".replace("\\\\", "\\")


def test_one_list_of_chunks_for_many_tensors_is_not_followed() -> None:
    chunks = _CHUNK, _OTHER
    content = torch_dist.write({f"w{number}": Tensor("F32", (4, 3), chunks) for number in range(3)}, {})
    places = content.index(_text("storage_data"))
    without = content[:places] + content[places:].replace(_text("w2"), _text("w1"))
    with pytest.raises(pickle.UnpicklingError, match=r"gives a tensor two places|more often than it has places"):
        torch_dist.read(io.BytesIO(without))


def test_a_pickle_is_data() -> None:
    content = {"a": [1, -2, 3.5, None, True, "é", (1, 2), (1, 2, 3, 4), b"xy"], "path": PosixPath("a/b")}
    for protocol in range(2, 6):
        found = read(pickle.dumps(content, protocol=protocol), None)
        assert found["a"][:8] == content["a"][:8]
        assert type(found["path"]) is Made
        assert found["path"].args == ("a", "b")
        assert found["path"].kind.name == "PosixPath"
    assert read(b"\x80\2" + _text("x") + b"Q.", None, stored=True).place == "x"
    assert (Global("a", "b"), type(Stored(1))) == (Global("a", "b"), Stored)


def test_a_shard_of_another_content_is_not_looked_into(tmp_path: Path) -> None:
    """That of a tensor may ask for torch's storages; here it asks for a folder, in the place of its shape."""
    canary = tmp_path / "canary"
    head, _ = archive(_calls("posix", "mkdir", str(canary)), None)
    shard = tmp_path / "shard"
    shard.write_bytes(head)
    with shard.open("rb") as file:
        assert place_of_elements(file, 0, len(head), (1,), "F32") is None
    assert not canary.exists()


def test_flags_of_megatron_lm_are_read_without_making_anything(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    planted = _calls("posix", "mkdir", str(canary))[2:-1]
    changed = _changes("pathlib", "PosixPath", slots=True)[2:-1]
    for hostile, found in ((planted, {"num_layers": 2}), (changed, None)):
        flags = b"}" + _text("num_layers") + b"K\2s" + _text("other") + hostile + b"s"
        content = b"\x80\2}" + _text("args") + b"cargparse\nNamespace\n)\x81" + flags + b"bs."
        with zipfile.ZipFile(tmp_path / "common.pt", "w") as file:
            file.writestr("common/data.pkl", content)
        assert read_args(tmp_path) == found
    assert not canary.exists()
    assert not hasattr(PosixPath, _PLANTED)


def test_objects_in_shards_are_of_torch_alone(tmp_path: Path) -> None:
    """megatron-core lets torch make numpy's arrays, whose state is taken as it stands."""
    import numpy as np

    saved = io.BytesIO()
    torch.save({"array": np.zeros(3)}, saved)
    before = torch.serialization.get_safe_globals()
    with no_code_from_files(tmp_path), pytest.raises(pickle.UnpicklingError, match=r"_reconstruct"):
        torch.load(io.BytesIO(saved.getvalue()), weights_only=True)
    assert set(torch.serialization.get_safe_globals()) == set(before)


def test_objects_in_shards_change_no_enum(tmp_path: Path) -> None:
    """Its members are the same objects in the whole process; those that Megatron-LM's flags hold are still read."""
    from megatron.core.transformer.enums import AttnBackend

    saved = io.BytesIO()
    torch.save({"backend": AttnBackend.flash}, saved)
    saved.seek(0)
    made = b"\x80\2cmegatron.core.transformer.enums\nAttnBackend\nK\1\x85R}" + _text(_PLANTED) + _text("x") + b"sb."
    hostile = io.BytesIO(archive(made, None)[0])
    assert AttnBackend(1) is AttnBackend.flash
    with no_code_from_files(tmp_path):
        assert torch.load(saved, weights_only=True) == {"backend": AttnBackend.flash}
        with pytest.raises(pickle.UnpicklingError):
            torch.load(hostile, weights_only=True)
    assert not hasattr(AttnBackend.flash, _PLANTED)


def test_megatron_cores_loading_reads_by_our_reader_and_no_free_pickle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the environment said before, which has its word afterwards, also when loading fails."""
    from megatron.core.dist_checkpointing.strategies import torch as engine_torch

    before = engine_torch.FileSystemReader
    for said in (None, "0"):
        if said is None:
            monkeypatch.delenv(_FORCED, raising=False)
        else:
            monkeypatch.setenv(_FORCED, said)
        with contextlib.suppress(KeyError), no_code_from_files(tmp_path):
            assert engine_torch.FileSystemReader is SafeReader
            assert os.environ[_FORCED] == "1"
            with pytest.raises(pickle.UnpicklingError, match="Weights only"):
                torch.load(io.BytesIO(archive(_calls("os", "getpid"), None)[0]), weights_only=False)
            raise KeyError
        assert engine_torch.FileSystemReader is before
        assert os.environ.get(_FORCED) == said


def test_a_shard_that_torch_reads_for_an_export_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements in another order are put right by torch, which would run what the file says."""
    monkeypatch.delenv(_FORCED, raising=False)
    data = archive(_calls("os", "mkdir", str(tmp_path / "canary")), None)[0]
    chunk = Chunk(offsets=(0,), sizes=(1,), file="__0_0.distcp", offset=0, length=len(data))
    (tmp_path / chunk.file).write_bytes(data)
    with pytest.raises(DataError, match=r"posix\.mkdir|os\.mkdir"):
        saved_model._elements(tmp_path / chunk.file, "w", chunk, "F32")
    assert not (tmp_path / "canary").exists()
    torch.load(io.BytesIO(data), weights_only=False)
    assert (tmp_path / "canary").exists(), "it would have"
