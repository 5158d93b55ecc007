"""What is fuzzed: for each kind of input one whole example, how it is changed, and how one tells that it is read right.

A target is called once with an empty folder and returns a function that makes, writes and reads one input. What is
taken is compared with another reader (json, yaml, the bytes that were written): a wrong success is an AssertionError.
"""

import bz2
import gzip
import io
import json
import lzma
import pickle
import random
import shlex
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megatron_ext.checkpoint.huggingface import safetensors
from megatron_ext.checkpoint.huggingface.folder import HFFolder
from megatron_ext.checkpoint.megatron_lm.arguments import read_args
from megatron_ext.checkpoint.native import manifest, torch_dist
from megatron_ext.checkpoint.native.folder import find_all
from megatron_ext.config.files import to_yaml
from megatron_ext.config.hf_config import differences, read_hf_config
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.config.saved import read_saved
from megatron_ext.data.checksums import checksums, first_damage, known_blocks
from megatron_ext.data.indexed import IndexedWriter
from megatron_ext.data.integrity import check_indexed_files, check_token_ids, open_index
from megatron_ext.data.prepare.documents import read_documents
from megatron_ext.data.prepare.inputs import find_files
from megatron_ext.data.record import read_record
from megatron_ext.errors import DataError, TrainingError
from megatron_ext.foreign.translate import read as read_foreign
from megatron_ext.plan.dry_run import describe
from megatron_ext.telemetry.jsonl import read_rows
from megatron_ext.tokenizer.build import build_tokenizer
from megatron_ext.train.configure import configure
from megatron_ext.untrusted.text import TextError, load_json, load_yaml
from tests.fuzz.mutations import changed, flipped

Read = Callable[[random.Random], None]

_FLAGS = shlex.split("""
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --mock-data
    --vocab-size 61 --micro-batch-size 2 --global-batch-size 4 --train-iters 10 --lr 1e-3 --weight-decay 0.1
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --world-size 4 --device cpu --dry-run
""")
_NUMBERS = "0 1 -1 2 3 7 1000000000 1e9 1e400 nan inf -inf 0x10 1_000 9999999999999999999999 true none [] {}"
_WORDS = "../.. /dev/null /dev/zero selective full uniform E|t*2|L Et*9999999L (t|)*4 p2p a2a adam lion"
_ODD = (
    "--",
    "-",
    "=",
    "",
    "\x1b[2J",
    "é",
    "\udcff",
    "\0",
    "9" * 5000,
    "a" * 5000,
    "1 2 3",
    "__import__('os')",
    "'",
    "\\",
)
_VALUES = (*shlex.split(_NUMBERS), *shlex.split(_WORDS), *_ODD)


def flags(folder: Path) -> Read:
    """Random values after random flags, next to those of a whole command line."""
    from megatron_ext.config.options import options

    # Naming a tokenizer, a folder or a file has targets of its own.
    known = [option for option in options() if option.name not in ("load", "load_hf", "tokenizer_model", "save")]

    def read(chance: random.Random) -> None:
        words = list(_FLAGS)
        for _ in range(chance.choice((1, 1, 2, 3))):
            option = chance.choice(known)
            words.append(option.flag)
            if not option.is_switch or chance.random() < 0.1:
                likely = [*map(str, option.choices or ()), *map(str, range(1, 9)), "0.5"]
                choices = likely if chance.random() < 0.6 else _VALUES
                words += [chance.choice(choices) for _ in range(chance.choice((1, 1, 1, 2, 3)))]
        if chance.random() < 0.2:
            del words[chance.randrange(len(words))]
        configured = configure(words)
        assert describe(configured.config)
        if configured.config.model.padded_vocab_size:
            written = folder / "again.yaml"
            written.write_text(to_yaml(configured.config))
            size = str(configured.config.layout.world_size)
            try:
                again = configure(["--config", str(written), "--dry-run", "--world-size", size])
            except TrainingError as error:
                raise AssertionError(f"the written configuration is refused: {error}") from error
            assert again.config == configured.config, "the written configuration is another"

    return read


def _yaml_text() -> bytes:
    values = configure(_FLAGS)
    return to_yaml(values.config).encode() + b"list: &a [1, 2]\nmap: {x: *a, y: 1.5}\n"


def yaml_text(folder: Path) -> Read:
    """YAML by itself: what is taken is what PyYAML reads."""
    whole = _yaml_text()

    def read(chance: random.Random) -> None:
        content = changed(whole, chance)
        try:
            text = content.decode()
            value = load_yaml(text)
        except (TextError, UnicodeDecodeError) as error:
            raise DataError(str(error)) from None
        assert repr(value) == repr(yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))

    return read


def config_file(folder: Path) -> Read:
    """--config, the config.yaml of a checkpoint, and a configuration of another program."""
    whole = to_yaml(configure(_FLAGS).config).encode()
    path = folder / "config.yaml"

    def read(chance: random.Random) -> None:
        path.write_bytes(changed(whole, chance))
        saved = read_saved(path)
        if saved is not None:
            assert resolve(saved, Facts(world_size=4))
        configured = configure(["--config", str(path), "--dry-run", "--world-size", "4"])
        assert describe(configured.config)

    return read


def foreign(folder: Path) -> Read:
    """A configuration of DeepSpeed."""
    whole = (Path(__file__).parents[1] / "golden/import_config/deepspeed/zero3_offload.json").read_bytes()
    path = folder / "ds.json"

    def read(chance: random.Random) -> None:
        path.write_bytes(changed(whole, chance))
        assert read_foreign(str(path)) is not None

    return read


def json_text(folder: Path) -> Read:
    """JSON by itself: what is taken is what json reads."""
    whole = json.dumps({"a": [1, 2.5, None, {"b": "é\n"}], "c": {"d": [[[]]]}, "e": "x" * 50}).encode()

    def read(chance: random.Random) -> None:
        content = changed(whole, chance)
        try:
            value = load_json(content)
        except TextError as error:
            raise DataError(str(error)) from None
        assert repr(value) == repr(json.loads(content.decode("utf-8-sig")))

    return read


_HF = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "float32",
}
_JSON_VALUES = (None, True, -1, 0, 10**30, 10**400, 1e308, "x", "1", [], [1], {}, {"factor": "x"}, "gelu", float("nan"))


def hf_config(folder: Path) -> Read:
    """config.json of a Hugging Face folder, by bytes and by values."""

    def read(chance: random.Random) -> None:
        content = dict(_HF)
        for _ in range(chance.choice((1, 2, 3))):
            content[chance.choice([*content, "quantization_config", "sliding_window"])] = chance.choice(_JSON_VALUES)
        text = json.dumps(content).encode()
        (folder / "config.json").write_bytes(changed(text, chance) if chance.random() < 0.5 else text)
        _, values = read_hf_config(folder)
        config = resolve({**values, "seq_length": 8, "micro_batch_size": 1}, Facts(world_size=1))
        assert not differences(config, values)
        run = "--seq-length 8 --micro-batch-size 1 --train-iters 1 --lr 1 --mock-data --dry-run --world-size 1"
        configured = configure(["--load-hf", str(folder), *shlex.split(run)])
        assert describe(configured.config)

    return read


def hf_folder(folder: Path) -> Read:
    """Index and safetensors files of a Hugging Face folder."""
    (folder / "config.json").write_text(json.dumps(_HF))
    names = {f"model.layers.{n}.input_layernorm.weight": "one.safetensors" for n in range(2)}
    index = json.dumps({"metadata": {}, "weight_map": names}).encode()
    tensors = dict.fromkeys(names, (16,))
    safetensors.create(folder / "one.safetensors", tensors, "F32")
    whole = (folder / "one.safetensors").read_bytes()

    def read(chance: random.Random) -> None:
        which = chance.random() < 0.5
        (folder / "model.safetensors.index.json").write_bytes(changed(index, chance) if which else index)
        (folder / "one.safetensors").write_bytes(whole if which else changed(whole, chance))
        entries = HFFolder(folder).entries
        for entry in entries.values():
            assert entry.path.parent == folder
            assert entry.shape is not None
            assert entry.offset + entry.row_bytes * (entry.shape[0] if entry.shape else 1) <= entry.path.stat().st_size

    return read


def safetensors_file(folder: Path) -> Read:
    """The header of a safetensors file: what is taken covers the file exactly."""
    path = folder / "x.safetensors"
    safetensors.create(path, {"a": (2, 3), "b": (4,), "é": (1, 1, 1)}, "F32")
    whole = path.read_bytes()

    def read(chance: random.Random) -> None:
        path.write_bytes(changed(whole, chance))
        entries = safetensors.read_header(path)
        size = sum(
            int(np.prod(entry.shape)) * safetensors.SAFETENSORS_WIDTHS[entry.dtype] for entry in entries.values()
        )
        length = int.from_bytes(path.read_bytes()[:8], "little")
        assert 8 + length + size == path.stat().st_size

    return read


def metadata(folder: Path) -> Read:
    """.metadata of a checkpoint: a pickle that is read as data."""
    chunks = tuple(torch_dist.Chunk((row, 0), (2, 3), "__0_0.distcp", 400 * row, 400) for row in (0, 2))
    whole = torch_dist.write(
        {"weight": torch_dist.Tensor("F32", (4, 3), chunks)}, {"s/shard_0_1": torch_dist.Chunk((), (), "a", 7, 9)}
    )

    def read(chance: random.Random) -> None:
        try:
            saved = torch_dist.read_all(io.BytesIO(changed(whole, chance)))
        except pickle.UnpicklingError as error:
            raise DataError(str(error)) from None
        for tensor in saved.tensors.values():
            for chunk in tensor.chunks:
                assert all(o + s <= t for o, s, t in zip(chunk.offsets, chunk.sizes, tensor.size, strict=True))
                assert "/" not in chunk.file

    return read


def checkpoint(folder: Path) -> Read:
    """A checkpoint's files: one that was changed is never whole; its tracker may hold anything."""
    place = folder / "iter_0000003"
    place.mkdir()
    files = {name: bytes(range(200)) for name in (".metadata", "metadata.json", "__0_0.distcp", "config.yaml")}

    def read(chance: random.Random) -> None:
        for name, content in files.items():
            (place / name).write_bytes(content)
        manifest.write(place, manifest.describe(place, [place / name for name in files]))
        (folder / "latest_checkpointed_iteration.txt").write_bytes(b"3")
        target = chance.choice([*(place / name for name in (*files, "manifest.json")), *folder.glob("*.txt")])
        before = target.read_bytes()
        target.write_bytes(changed(before, chance))
        same = target.read_bytes() == before
        found = find_all(folder)[0]
        try:
            listed = manifest.read(found.path)
        except ValueError as error:
            raise DataError(str(error)) from None
        assert listed is not None
        wrong = manifest.problems(found.path, listed)
        assert bool(wrong) != (same or target.suffix == ".txt"), target
        read_args(found.path)
        read_record(place / "config.yaml")

    return read


def pair(folder: Path) -> Read:
    """A .bin/.idx pair with its manifest: what is taken is what was written."""
    prefix = str(folder / "x_text_document")
    tokens = (np.arange(3000) % 61).astype(np.uint16)
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_tokens(tokens.tobytes(), [30] * 100)
    whole = {suffix: Path(prefix + suffix).read_bytes() for suffix in (".bin", ".idx")}
    outputs = {prefix: {"token_bytes": 6000}}
    content = {"tokenizer": {}, "outputs": outputs, "checksums": checksums([prefix], 1024)}
    said = json.dumps(content).encode()

    def read(chance: random.Random) -> None:
        which = chance.choice((".bin", ".idx", "manifest"))
        for suffix, bytes_ in whole.items():
            Path(prefix + suffix).write_bytes(changed(bytes_, chance) if which == suffix else bytes_)
        text = changed(said, chance) if which == "manifest" else said
        (folder / "x_text_document_manifest.json").write_bytes(text)
        check_indexed_files(prefix)
        check_token_ids(prefix, 61)
        arrays = open_index(prefix)
        ends = arrays.pointers + arrays.lengths.astype(np.int64) * arrays.dtype.itemsize
        assert (arrays.pointers[1:] == ends[:-1]).all()
        assert int(ends[-1]) == Path(prefix + ".bin").stat().st_size
        found = first_damage(known_blocks(prefix))
        if found is not None:
            raise DataError(found)
        if which != "manifest":
            assert all(Path(prefix + suffix).read_bytes() == bytes_ for suffix, bytes_ in whole.items())

    return read


def bin_bits(folder: Path) -> Read:
    """A single bit of the tokens: always found."""
    prefix = str(folder / "x")
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_tokens(bytes(6000), [30] * 100)
    whole = Path(prefix + ".bin").read_bytes()
    content = {"tokenizer": {}, "outputs": {prefix: {"token_bytes": 6000}}, "checksums": checksums([prefix], 1024)}
    (folder / "x_manifest.json").write_text(json.dumps(content))

    def read(chance: random.Random) -> None:
        Path(prefix + ".bin").write_bytes(flipped(whole, chance))
        found = first_damage(known_blocks(prefix))
        assert found is not None, "a changed bit was not found"
        raise DataError(found)

    return read


_LINES = b"".join(
    json.dumps({"text": f"document {n} é \u6f22 \U0001f600", "id": n, "more": {"a": [n]}}).encode() + b"\n"
    for n in range(20)
)


def _zst(content: bytes) -> bytes:
    from backports import zstd

    return zstd.compress(content)


_COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda content: content,
    ".gz": lambda content: gzip.compress(content, mtime=0),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": _zst,
}


def jsonl(folder: Path) -> Read:
    """JSON lines, plain and compressed: what is taken is what json reads of each line."""
    compressed = {suffix: make(_LINES) for suffix, make in _COMPRESS.items()}

    def read(chance: random.Random) -> None:
        suffix = chance.choice(list(compressed))
        inside = chance.random() < 0.5
        content = _COMPRESS[suffix](changed(_LINES, chance)) if inside else changed(compressed[suffix], chance)
        path = folder / f"x.jsonl{suffix}"
        path.write_bytes(content)
        for record in read_documents(find_files([str(path)])):
            [text] = record.texts(["text"])
            assert isinstance(record.payload, memoryview | bytes)
            assert json.loads(bytes(record.payload))["text"] == text

    return read


def text_file(folder: Path) -> Read:
    """A text file, compressed."""

    def read(chance: random.Random) -> None:
        path = folder / "x.txt.gz"
        path.write_bytes(changed(gzip.compress(_LINES, mtime=0), chance))
        [record] = read_documents(find_files([str(path)]))
        assert zlib.crc32(str(record.texts(["text"])[0]).encode()) == zlib.crc32(_LINES), "damage was not found"

    return read


def parquet(folder: Path) -> Read:
    """A parquet file."""
    import pyarrow
    import pyarrow.parquet

    path = folder / "x.parquet"
    rows = [f"document {n} é" for n in range(50)]
    pyarrow.parquet.write_table(pyarrow.table({"text": rows, "id": list(range(50))}), path, row_group_size=20)
    whole = path.read_bytes()

    def read(chance: random.Random) -> None:
        path.write_bytes(changed(whole, chance))
        for record in read_documents(find_files([str(path)])):
            assert isinstance(record.texts(["text"])[0], str | bytes)

    return read


def tokenizer(folder: Path) -> Read:
    """The files of a Hugging Face tokenizer."""
    vocabulary = {"<eod>": 0, **{chr(97 + n): n + 1 for n in range(26)}, "ab": 27}
    model = {"type": "BPE", "vocab": vocabulary, "merges": [["a", "b"]]}
    token = {"content": "<eod>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    added = [{"id": 0, "special": True, **token}]
    files: dict[str, Any] = {
        "tokenizer.json": {"version": "1.0", "added_tokens": added, "model": model},
        "tokenizer_config.json": {"eos_token": "<eod>", "added_tokens_decoder": {"0": token}},
    }
    texts = {name: json.dumps(content).encode() for name, content in files.items()}

    def read(chance: random.Random) -> None:
        target = chance.choice(list(texts))
        for name, text in texts.items():
            (folder / name).write_bytes(changed(text, chance) if name == target else text)
        made = build_tokenizer("HuggingFaceTokenizer", str(folder))
        assert made.vocab_size > 0

    return read


def tiktoken(folder: Path) -> Read:
    """A tiktoken vocabulary in JSON."""
    import base64

    entries = [{"rank": n, "token_bytes": base64.b64encode(bytes([n])).decode()} for n in range(256)]
    whole = json.dumps(entries).encode()
    path = folder / "tokens.json"

    def read(chance: random.Random) -> None:
        path.write_bytes(changed(whole, chance))
        assert build_tokenizer("TikTokenizer", str(path), 1256).vocab_size

    return read


def metrics(folder: Path) -> Read:
    """A metrics file."""
    whole = b"".join(json.dumps({"iteration": n, "lm_loss": 1 / (n + 1)}).encode() + b"\n" for n in range(10))

    def read(chance: random.Random) -> None:
        (folder / "m.jsonl").write_bytes(changed(whole, chance))
        assert all(isinstance(row["iteration"], int) for row in read_rows(folder / "m.jsonl"))

    return read


TARGETS: dict[str, Callable[[Path], Read]] = {
    "flags": flags,
    "yaml": yaml_text,
    "config": config_file,
    "json": json_text,
    "foreign": foreign,
    "hf config": hf_config,
    "hf folder": hf_folder,
    "safetensors": safetensors_file,
    "metadata": metadata,
    "checkpoint": checkpoint,
    "pair": pair,
    "bits": bin_bits,
    "jsonl": jsonl,
    "text": text_file,
    "parquet": parquet,
    "tokenizer": tokenizer,
    "tiktoken": tiktoken,
    "metrics": metrics,
}
