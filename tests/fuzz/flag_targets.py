"""Flags and the texts that hold them or others' settings, as targets of the fuzzer (`targets.py`)."""

import json
import random
import shlex
from pathlib import Path

import yaml

from megatron_ext.config.parse.config_file import to_yaml
from megatron_ext.config.parse.saved import read_saved
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.cost.dry_run import describe
from megatron_ext.errors import DataError, TrainingError
from megatron_ext.plugins.migrate.translate import read as read_foreign
from megatron_ext.train.configure import configure
from megatron_ext.untrusted.text import TextError, load_json
from megatron_ext.untrusted.yaml_text import load_yaml
from tests.fuzz.mutations import Read, changed

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
    from megatron_ext.config.parse.options import options

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
