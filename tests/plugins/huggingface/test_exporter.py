"""Folders of Hugging Face, read and written: files, dtypes, rows and columns, and what lies next to the weights."""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from megatron_ext.checkpoint.native import checkpoint_manifest, torch_dist
from megatron_ext.checkpoint.native.torch_dist import Chunk, Tensor
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.parts.parameter import Parameter
from megatron_ext.plugins.checkpoint_tools import single_process
from megatron_ext.plugins.checkpoint_tools.copying import FileRange, Files
from megatron_ext.plugins.families.registry import family_of
from megatron_ext.plugins.families.state_dict_mapping import ParameterMapping, RowRange
from megatron_ext.plugins.huggingface import exporter, load_hf, saved_model
from megatron_ext.plugins.huggingface.exporter import export_huggingface
from megatron_ext.plugins.huggingface.huggingface_folder import HFFolder
from megatron_ext.plugins.huggingface.importer import import_huggingface
from megatron_ext.plugins.huggingface.safetensors import create
from megatron_ext.plugins.huggingface.saved_model import Piece, SavedModel
from megatron_ext.tokenizer.simple import ByteTokenizer
from tests.support.small_models import LLAMA as LLAMA_FLAGS
from tests.support.small_models import small_config

LLAMA = {
    "model_type": "llama", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 11, "max_position_embeddings": 16, "tie_word_embeddings": False,
}  # fmt: skip


def _write(folder: Path, code: str = "F16") -> Path:
    """Write a model whose weights count from 0."""
    from megatron_ext.config.resolve import Facts, resolve
    from megatron_ext.plugins.families.hf_config import read_hf_config
    from megatron_ext.plugins.families.state_dict_mapping import state_dict_mapping

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    family, values = read_hf_config(folder)
    mappings = state_dict_mapping(resolve(values, Facts()), family)
    shapes = {name: shape for part in mappings for name, shape in part.tensor_shapes().items()}
    for number, entry in enumerate(create(folder / "model.safetensors", shapes, code).values()):
        entry.whole(writable=True)[...] = number + 1
    return folder


@pytest.fixture(scope="module")
def _imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("imported")
    import_huggingface(_write(path / "source"), path / "saved")
    return path / "saved"


@pytest.fixture
def saved(_imported: Path, tmp_path: Path) -> Path:
    """A --save folder with a checkpoint that was imported, and is the test's own."""
    shutil.copytree(_imported, tmp_path / "saved")
    return tmp_path / "saved"


def test_an_import_is_a_checkpoint_of_weights_alone(tmp_path: Path) -> None:
    """In an empty folder that is there; every file is in the manifest, and the objects are lists of one, as others'."""
    (tmp_path / "saved").mkdir()
    path = import_huggingface(_write(tmp_path / "source"), tmp_path / "saved")
    assert path == tmp_path / "saved" / "iter_0000000"
    files = checkpoint_manifest.read(path)
    assert files is not None
    assert sorted(files) == [".metadata", "__0_0.distcp", "config.yaml", "metadata.json", "versions.json"]
    assert checkpoint_manifest.problems(path, files) == []
    assert "fp16: true" in (path / "config.yaml").read_text()
    objects = torch_dist.read_objects((path / ".metadata").open("rb"))
    states = {f"decoder.layers.{module}._extra_state/shard_0_1" for module in (
        "self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")}  # fmt: skip
    assert objects.keys() == {"common_state/shard_0_1", *states}
    place = objects["common_state/shard_0_1"]
    content = (path / "__0_0.distcp").read_bytes()[place.offset : place.offset + place.length]
    (tmp_path / "object").write_bytes(content)
    assert torch.load(tmp_path / "object", weights_only=True) == [
        {
            "weights_only": True,
            "iteration": 0,
            "content_metadata": {"distrib_optim_sharding_type": "fully_reshardable", "singleton_local_shards": False},
        }
    ]
    with pytest.raises(ConfigurationError, match="holds checkpoints already"):
        import_huggingface(tmp_path / "source", tmp_path / "saved")


def test_layers_of_experts_have_fewer_objects() -> None:
    names = [name for name, _ in single_process._objects(small_config({"num_experts": 4, "num_layers": 2}), {})]
    assert names == [
        *(f"decoder.layers.self_attention.{module}._extra_state/shard_{layer}_2"
          for layer in range(2) for module in ("linear_proj", "linear_qkv")),
        "common_state/shard_0_1",
    ]  # fmt: skip


def test_an_import_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise OSError("full")

    monkeypatch.setattr(single_process, "write_versions", fails)
    with pytest.raises(OSError, match="full"):
        import_huggingface(_write(tmp_path / "source"), tmp_path / "saved")
    assert os.listdir(tmp_path / "saved") == []


def test_the_tokenizer_of_a_saved_model_is_the_copy_that_lies_with_it(saved: Path) -> None:
    """The one of the training may be gone, or another by now."""
    path = saved / "iter_0000000"
    with (path / "config.yaml").open("a") as file:
        file.write("\ntokenizer_type: HuggingFaceTokenizer\ntokenizer_model: /elsewhere\n")
    assert SavedModel(saved).config.data.tokenizer_model == "/elsewhere"
    (path / "tokenizer").mkdir()
    (path / "tokenizer" / "tokenizer.json").write_text("{}")
    assert SavedModel(saved).config.data.tokenizer_model == str(path / "tokenizer")


@pytest.mark.parametrize("with_tokenizer", [False, True])
@pytest.mark.parametrize("files", [(), ("tokenizer.json",)])
def test_what_an_export_has_next_to_the_weights(
    with_tokenizer: bool, files: tuple[str, ...], saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into an empty folder that is there. What ends a text is always kept; without files nothing is compared."""
    kept = saved / "iter_0000000" / "tokenizer"
    kept.mkdir()
    for name in (*files, "generation_config.json"):
        (kept / name).write_text('{"eos_token_id": 3}')
    (tmp_path / "model").mkdir()
    monkeypatch.setattr(exporter, "_tokenizer_of_training", lambda config: ByteTokenizer())
    monkeypatch.setattr(exporter, "_is_converted", lambda config: False)
    checked: list[Any] = []
    exported = export_huggingface(
        SavedModel(saved),
        tmp_path / "model",
        with_tokenizer=with_tokenizer,
        check_tokenizer=lambda folder, config, tokenizer: checked.append(sorted(os.listdir(folder))),
    )
    names = [*files] if with_tokenizer else []
    always = ["README.md", "config.json", "generation_config.json", "model.safetensors"]
    assert sorted(os.listdir(tmp_path / "model")) == sorted([*always, *names])
    assert json.loads((tmp_path / "model" / "config.json").read_text())["eos_token_id"] == 256
    assert json.loads((tmp_path / "model" / "generation_config.json").read_text())["eos_token_id"] == [256, 3]
    assert (exported.tokenizer, exported.files) == (names, 1)
    assert checked == ([sorted([*always, *names])] if names else [])
    with pytest.raises(ConfigurationError, match="exists and is not an empty folder; give a new one"):
        export_huggingface(SavedModel(saved), tmp_path / "model")


def test_a_rate_of_dropout_that_the_family_cannot_say_is_said(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved / "iter_0000000" / "config.yaml"
    values = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**values, "attention_dropout": 0.2, "hidden_dropout": 0.1}))
    source = SavedModel(saved)
    exporter._write_companions(tmp_path, source, family_of(source.config), "F32", None)
    assert json.loads((tmp_path / "config.json").read_text())["attention_dropout"] == 0.2
    said = capsys.readouterr().err
    assert "trained with --hidden-dropout 0.1, for which config.json of llama has no key: give the flag" in said
    assert "--attention-dropout" not in said


def test_files_are_filled_to_the_last_byte(tmp_path: Path) -> None:
    """Two of 40 bytes fill 80 exactly; each file begins anew, and the index counts all."""
    shapes = dict.fromkeys("abcde", (10,))
    entries = exporter._files(tmp_path, shapes, "F32", 80)
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 1, 2, 2, 3)]
    assert [entries[name].path.name for name in shapes] == names
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text()) == {
        "metadata": {"total_size": 200}, "weight_map": dict(zip("abcde", names, strict=True))
    }  # fmt: skip
    larger = exporter._files(tmp_path, {"a": (10,), "b": (30,)}, "F32", 100)
    assert len({entry.path for entry in larger.values()}) == 2, "one that is larger has a file of its own"
    (tmp_path / "one").mkdir()
    assert exporter._files(tmp_path / "one", shapes, "F32", 200)["a"].path.name == "model.safetensors"
    assert os.listdir(tmp_path / "one") == ["model.safetensors"]


def _mapping(spans: list[tuple[str, int, int, int]], *, transposed: bool = False) -> Any:
    ranges = tuple(RowRange(tensor, place, start, count) for tensor, start, count, place in spans)
    parameter = Parameter("weight", (1, 1), 0, "zeros")  # its sizes are those of the ranges
    return ParameterMapping(parameter, ranges, transposed)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("code", ["F32", "F64"])
def test_rows_and_columns_of_a_piece_go_to_their_places(
    transposed: bool, in_memory: bool, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of a matrix of 7 by 6: rows 2 to 6, columns 0 to 6 or 2 to 5, of which two tensors are made."""
    monkeypatch.setattr(exporter, "BLOCK", 30)
    whole = np.arange(42, dtype=np.float32).reshape(7, 6)
    mapping = _mapping([("a", 0, 3, 1), ("b", 3, 2, 0)], transposed=transposed)
    for low, high in ((0, 6), (2, 5)):
        shapes = {"a": (4, 6), "b": (2, 6)}
        shapes = {name: shape[::-1] if transposed else shape for name, shape in shapes.items()}
        (tmp_path / "out.safetensors").unlink(missing_ok=True)
        entries = create(tmp_path / "out.safetensors", shapes, code)
        part = np.ascontiguousarray(whole[2:6, low:high])
        (tmp_path / "shard").write_bytes(b"x" * 9 + part.tobytes())
        piece = Piece(2, low, part.shape, "shard", 9, part if in_memory else None)
        with Files(os.O_RDWR) as files:
            for offset, found in exporter._parts(piece, mapping, entries, "F32", files):
                content = memoryview((tmp_path / "shard").read_bytes())[offset : offset + found.length]
                if isinstance(found, FileRange):
                    os.pwrite(files[found.path], content, found.offset)
                else:
                    found.scatter(0, content)
        expected = {"a": np.zeros((4, 6)), "b": np.zeros((2, 6))}
        expected["a"][3, low:high] = whole[2, low:high]
        expected["b"][:, low:high] = whole[3:5, low:high]
        for name, values in expected.items():
            written = np.array(entries[name].whole())
            assert np.array_equal(written.T if transposed else written, values), (name, low)


def test_shards_are_as_long_as_their_manifest_says(tmp_path: Path) -> None:
    """One that ends with its last tensor has nothing behind it; one that is longer is damaged."""
    parts: list[Any] = [(0, exporter.SkippedBytes(3)), (3, exporter.SkippedBytes(4))]
    (tmp_path / "shard").write_bytes(bytes(7))
    assert [part.length for part in exporter._all(parts[::-1], tmp_path / "shard")] == [3, 4]
    (tmp_path / "shard").write_bytes(bytes(9))
    assert [part.length for part in exporter._all(parts[1:], tmp_path / "shard")] == [3, 4, 2]
    (tmp_path / "shard").write_bytes(bytes(6))
    with pytest.raises(EOFError, match="ends 1 bytes too early"):
        list(exporter._all(parts, tmp_path / "shard"))
    (tmp_path / "shard").write_bytes(bytes(9))
    for size, checksum, said in ((8, "x", "has 9 bytes instead of 8"), (9, "0123abcd", "has another checksum than")):
        entry = {"bytes": size, "crc32": checksum}
        source: Any = SimpleNamespace(path=tmp_path, damage=lambda entry=entry: ({"shard": entry}, []))
        with Files(os.O_RDONLY) as files, pytest.raises(DataError, match=said):
            exporter._write_weights(source, [], {}, files)


def test_pieces_of_a_parameter_are_found_in_stacked_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layer 3 and expert 1 in chunks of two layers and three experts, cut along rows and columns."""
    chunk = Chunk((2, 0, 4, 6), (2, 3, 5, 7), "shard", 0, 0)
    other = Chunk((0, 0, 4, 6), (2, 3, 5, 7), "shard", 0, 0)
    made: Any = object.__new__(SavedModel)
    made.path, made.config = tmp_path, small_config({**LLAMA_FLAGS, "num_experts": 3})
    (tmp_path / "shard").touch()
    made.tensors = {"decoder.layers.mlp.experts.experts.w": Tensor("BF16", (4, 3, 9, 13), (other, chunk))}
    made._elements = lambda path, key, chunk, dtype: (1000, None)
    name = "decoder.layers.3.mlp.experts.1.w"
    at = 1000 + (1 * 3 * 5 * 7 + 1 * 5 * 7) * 2
    assert list(made.pieces(name)) == [Piece(4, 6, (5, 7), "shard", at)]
    elements = np.arange(2 * 3 * 5 * 7).reshape(2, 3, 5, 7)
    made._elements = lambda path, key, chunk, dtype: (0, elements)
    [piece] = made.pieces(name)
    assert (piece.row, piece.column, piece.shape, piece.offset) == (4, 6, (5, 7), 0)
    assert np.array_equal(piece.array, elements[1, 1])


def test_a_shard_is_read_through_torch_from_its_place(tmp_path: Path) -> None:
    saved = torch.arange(6.0).view(2, 3).bfloat16()
    torch.save(saved, tmp_path / "one")
    content = (tmp_path / "one").read_bytes()
    (tmp_path / "shard").write_bytes(content[:50] + content)
    chunk = Chunk((0, 0), (2, 3), "shard", 50, len(content))
    with (tmp_path / "shard").open("rb") as file:
        found = saved_model._read(file, chunk, "BF16")
        assert np.array_equal(found, saved.view(torch.uint16).numpy())
        with pytest.raises(RuntimeError, match=r"torch.bfloat16 \[2, 3\] instead of float32 \[2, 3\]"):
            saved_model._read(file, chunk, "F32")


def test_what_a_checkpoint_has_that_its_configuration_does_not(saved: Path) -> None:
    """The other way round, too: each tensor with both shapes; states of modules are none of one's own."""
    model = SavedModel(saved)
    model.tensors["decoder.layers.self_attention.core._extra_state"] = Tensor("F32", (1,), ())
    model.check()
    key = "decoder.layers.mlp.linear_fc2.weight"
    model.tensors[key] = Tensor("F16", (1, 8, 13), ())
    with pytest.raises(DataError, match=r"linear_fc2.weight has shape \[1, 8, 13\]; by config.yaml .* \[1, 8, 12\]$"):
        model.check()
    model.tensors["decoder.layers.own"] = Tensor("F32", (1,), ())
    with pytest.raises(ConfigurationError, match=r"has decoder\.layers\.own, of layers of one's own"):
        model.check()
    path = saved / "iter_0000000"
    (path / "versions.json").write_text("{}")
    shards, problems = model.damage()
    assert list(shards) == ["__0_0.distcp"]
    assert problems == [
        f"versions.json has 2 bytes instead of {(checkpoint_manifest.read(path) or {})['versions.json']['bytes']}"
    ]
    (path / "manifest.json").write_text("{}")
    assert model.damage() == ({}, ["manifest.json is damaged"])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("columns", [slice(None), slice(2, 5)])
def test_rows_of_a_shard_are_read_from_two_tensors_and_padding(
    transposed: bool, dtype: torch.dtype, columns: slice, tmp_path: Path
) -> None:
    """Rows 2 to 8 of a matrix of 9 by 6, whose last three rows are padding."""
    whole = torch.zeros(9, 6)
    whole[:6] = torch.arange(36.0).view(6, 6) + 1
    shapes = {"a": (5, 6), "b": (2, 6)}
    shapes = {name: shape[::-1] if transposed else shape for name, shape in shapes.items()}
    entries = create(tmp_path / "x", shapes, "F32")
    for name, rows, at in (("a", whole[:4], 1), ("b", whole[4:6], 0)):
        view = entries[name].whole(writable=True)
        (view.T if transposed else view)[at : at + len(rows)] = rows.numpy()
    mapping = _mapping([("a", 0, 4, 1), ("b", 4, 2, 0)], transposed=transposed)
    source = object.__new__(HFFolder)
    source.entries = entries
    for turned in (False, True):
        wide = whole[2:8, columns].shape
        target = torch.full(wide[::-1], -1.0, dtype=dtype).t() if turned else torch.full(wide, -1.0, dtype=dtype)
        load_hf.read_rows(source, mapping, range(2, 8), columns, target)
        assert torch.equal(target, whole[2:8, columns].to(dtype))


def _configured(saved: Path, **data: Any) -> SavedModel:
    """Return the saved model, as if it had been trained with these flags of the data."""
    model = SavedModel(saved)
    model.config = dataclasses.replace(model.config, data=dataclasses.replace(model.config.data, **data))
    return model


@pytest.mark.parametrize(
    ("flags", "made"),
    [
        ({"tokenizer_type": "HuggingFaceTokenizer"}, False),
        ({"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_special_tokens": ("<x>",)}, True),
        ({"tokenizer_type": "ByteTokenizer"}, True),
    ],
)
def test_a_tokenizer_that_is_no_file_of_hugging_face_is_converted(
    flags: dict[str, Any], made: bool, saved: Path
) -> None:
    assert exporter._is_converted(_configured(saved, **flags).config) == made


def test_a_checkpoints_own_tokenizer_comes_before_the_runs(saved: Path, tmp_path: Path) -> None:
    for name in ("kept", "run"):
        (tmp_path / name / "tokenizer").mkdir(parents=True)
        (tmp_path / name / "tokenizer" / "tokenizer.json").write_text(name)
    flags = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tmp_path / "run" / "tokenizer")}
    source = _configured(saved, **flags)
    source.path = tmp_path / "kept"
    for kept in ("kept", "run"):
        assert exporter._copy(source, tmp_path, ["tokenizer.json"]) == ["tokenizer.json"]
        assert (tmp_path / "tokenizer.json").read_text() == kept
        (tmp_path / "kept" / "tokenizer" / "tokenizer.json").unlink(missing_ok=True)
    (tmp_path / "v").write_text("{}")
    single = {"vocab_file": str(tmp_path / "v"), "merge_file": str(tmp_path / "none")}
    source = _configured(saved, tokenizer_type="GPT2BPETokenizer", **single)
    assert exporter._copy(source, tmp_path, ["vocab.json", "merges.txt"]) == ["vocab.json"]


def test_a_model_card_has_the_models_own_numbers(saved: Path) -> None:
    source = SavedModel(saved)
    source.config = small_config({
        "num_attention_heads": 4, "group_query_attention": True, "num_query_groups": 2, "num_experts": 8,
        "moe_ffn_hidden_size": 48, "moe_router_topk": 3, "seq_length": 77, **LLAMA_FLAGS,
    })  # fmt: skip
    source.path = Path("/x/iter_0000012")
    lines = exporter._model_card(source, family_of(source.config), "BF16").splitlines()
    for line in (
        "Exported from the training checkpoint `iter_0000012` by `megatron-ext convert to-hf`.",
        "| layers, hidden size, MLP width | 4, 64, 96 |",
        "| experts, of them for each token, width | 8, 3, 48 |",
        "| heads, key/value heads, head size | 4, 2, 16 |",
        "| vocabulary | 250 |",
        "| trained with sequences of | 77 tokens |",
        "| weights | BF16 |",
    ):
        assert line in lines
    assert lines[5] == f"# {family_of(source.config).architecture}, 0.4M parameters"


@pytest.mark.parametrize("with_tokenizer", [False, True])
@pytest.mark.parametrize(
    ("generation", "trained"),  # what both files then say of ends
    [
        ({}, (256, 256)),
        ({"eos_token_id": None}, (256, 256)),
        ({"bos_token_id": 3, "eos_token_id": None}, (256, 256)),
        ({"eos_token_id": 0}, ([256, 0], 256)),  # zero is an id
        ({"eos_token_id": [7, 8], "top_k": 5}, ([256, 7, 8], 256)),
        ({"eos_token_id": [7, 256]}, ([7, 256], [7, 256])),
    ],
)
def test_what_ends_a_text_is_in_both_files_of_an_export(
    with_tokenizer: bool,
    generation: dict[str, Any],
    trained: tuple[Any, Any],
    saved: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The token that ended documents in training; ids that the tokenizer's folder names stay behind it, as its rest."""
    path = tmp_path / "generation_config.json"
    if generation:
        path.write_text(json.dumps(generation))
    source, named = SavedModel(saved), generation.get("eos_token_id")
    exporter._write_companions(
        tmp_path, source, family_of(source.config), "BF16", ByteTokenizer() if with_tokenizer else None
    )
    ends = trained if with_tokenizer else (named, named)
    expected = generation if named is not None and ends[0] == named else {"bos_token_id": None, **generation}
    assert json.loads(path.read_text()) == {**expected, "eos_token_id": ends[0]}
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (generation.get("bos_token_id"), ends[1])
    differs = with_tokenizer and named in (0, [7, 8])
    assert ("documents ended with id 256 in training, and" in capsys.readouterr().err) == differs
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"
    assert "| weights | BF16 |" in (tmp_path / "README.md").read_text()
