"""The house keeps its shape: imports go down, the core knows no plugin, torch-free rooms stay torch-free, the engine
comes after the device."""

import ast
import functools
import importlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from megatron_ext import device
from megatron_ext.registry import EXTENSION_POINTS, brought, command_modules, plugins
from tests.support.syntax import nodes_of, source

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_ext"

# Top floor first. A room may import from rooms below it, never from one above.
FLOORS = [
    "cli",
    "forkserver",
    "train",
    "checkpoint",
    "sharding",
    "telemetry",
    "resilience",
    "optim",
    "model",
    "parts",
    "data",
    "tokenizer",
    "parallel",
    "device",
    "seams",
    "cost",
    "rules",
    "parts, described",
    "config",
    "untrusted",
]
PLUGINS = "plugins"
FREE_OF_TORCH = ("untrusted", "config", "rules", "tokenizer", "cost", "seams", "plugins/families", "plugins/planner")
# Of a part the description lies on a floor of its own, below all that reads it, and is free of torch.
DESCRIPTIONS = {
    "describe",
    "ways",
    "protocol",
    "kinds",
    "stack",
    "catalogue",
    "parameter",
    "own_parameters",
    "update_factors",
    "slices",
    "__init__",
}


def room_of(path: Path) -> str | None:
    """The room that a file lies in, a plugin as plugins/NAME; None for files beside the rooms (errors.py and so on)."""
    parts = path.relative_to(PACKAGE).parts
    if parts[0] == PLUGINS:
        return "/".join(parts[:2]) if len(parts) > 2 else None
    return floor_of(parts[0], path.stem) if len(parts) > 1 else None


def floor_of(room: str, *names: str) -> str:
    """The floor of a file in a room, by its dotted name there."""
    return "parts, described" if room == "parts" and DESCRIPTIONS.intersection(names) else room


@functools.cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, whether importing the file imports it) for every import but those for type checkers alone."""
    return list(_imports(nodes_of(source(path))))


def _imports(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, bool]]:
    for_types = {
        id(inner)
        for node in nodes
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    [tree] = [node for node in nodes if isinstance(node, ast.Module)]
    top_level = {id(node) for node in tree.body}
    for node in nodes:
        if id(node) in for_types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield f"{node.module}.{alias.name}", id(node) in top_level
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in top_level


@functools.cache
def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def files_imported_by(path: Path) -> Iterator[Path]:
    """The package's files that a file imports, also late and for type checkers."""
    for node in nodes_of(source(path)):
        match node:
            case ast.ImportFrom(module=str(module)):
                names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
            case ast.Import():
                names = [alias.name for alias in node.names]
            case _:
                continue
        for name in names:
            file = (ROOT / name.replace(".", "/")).with_suffix(".py")
            if name.startswith("megatron_ext.") and file.exists():
                yield file


def test_no_files_import_each_other() -> None:
    """A circle is named by graphlib, file by file."""
    TopologicalSorter({path: {*files_imported_by(path)} - {path} for path in sources()}).prepare()


def test_every_room_has_a_floor() -> None:
    rooms = {room for path in sources() if (room := room_of(path)) is not None and not room.startswith(PLUGINS)}
    assert rooms <= set(FLOORS), (
        "give a new room its floor in this test, and a place and a line of the tree in docs/tour.md"
    )


def test_the_tree_of_the_tour_has_every_room_in_order() -> None:
    tree = (ROOT / "docs/tour.md").read_text().partition("\nmegatron_ext/ ")[2].partition("\ntools/ ")[0]
    assert re.findall(r"^  (\w+(?:, described)?)/? ", tree, re.MULTILINE) == [*FLOORS, PLUGINS]


def test_the_tour_names_every_room() -> None:
    tour = (ROOT / "docs/tour.md").read_text()
    assert [room for room in FLOORS if f"`{room.partition(',')[0]}/" not in tour] == []


def climbs(path: Path) -> Iterator[str]:
    """What a file of the core imports from a floor above its own, or from a plugin; a file beside the rooms lies below
    them all."""
    own = room_of(path)
    for module, _ in imports(path):
        parts = module.split(".")
        if parts[0] != "megatron_ext" or len(parts) < 2 or parts[1] not in (*FLOORS, PLUGINS):
            continue
        if parts[1] == PLUGINS or own is None or FLOORS.index(floor_of(*parts[1:])) < FLOORS.index(own):
            yield f"{path.relative_to(PACKAGE)} imports {module}, which is a floor above"


def core() -> list[Path]:
    return [path for path in sources() if path.relative_to(PACKAGE).parts[0] != PLUGINS]


def test_imports_only_go_down() -> None:
    door = PACKAGE / "__main__.py"  # above all rooms
    assert [climb for path in core() if path != door for climb in climbs(path)] == []
    assert list(climbs(door)), "what lies above all rooms imports from them"


def test_the_core_names_no_plugin() -> None:
    """Not as a text either: what a plugin brings is asked of megatron_ext/registry.py."""
    named = {str(path.relative_to(ROOT)): "megatron_ext.plugins" in source(path) for path in core()}
    assert [name for name, is_so in named.items() if is_so] == ["megatron_ext/registry.py"]
    assert plugins().keys() == {path.parent.name for path in (PACKAGE / PLUGINS).glob("*/plugin.py")}


def test_plugins_import_the_core_and_the_plugins_that_they_need() -> None:
    undeclared: set[str] = set()
    for path in (PACKAGE / PLUGINS).rglob("*/*.py"):
        own = path.relative_to(PACKAGE).parts[1]
        others = {module.split(".")[2] for module, _ in imports(path) if module.startswith("megatron_ext.plugins.")}
        undeclared |= {f"{own} imports {other}" for other in others - {own} - {*plugins()[own].needs}}
    assert undeclared == set()
    TopologicalSorter({name: plugin.needs for name, plugin in plugins().items()}).prepare()


def test_a_plugin_brings_what_is_there() -> None:
    for point in EXTENSION_POINTS:
        assert isinstance(brought(point), tuple)
    for module, _ in command_modules().values():
        assert callable(importlib.import_module(module).main), module


def test_no_megatron_training() -> None:
    users = [path for path in sources() if any(name.startswith("megatron.training") for name, _ in imports(path))]
    assert users == []


def test_package_inits_import_nothing_heavy() -> None:
    for path in PACKAGE.rglob("__init__.py"):
        heavy = {module.split(".")[0] for module, now in imports(path) if now} & {"torch", "megatron", "numpy"}
        assert not heavy, f"{path.relative_to(ROOT)} imports {heavy}"


@pytest.mark.parametrize(
    "command",
    [
        "import megatron_ext.train.configure, megatron_ext.cost.dry_run, megatron_ext.resilience.process_end",
        *(f"import megatron_ext.{room.replace('/', '.')}" for room in FREE_OF_TORCH),
    ],
)
def test_what_help_and_dry_run_import_is_free_of_torch(command: str) -> None:
    check = f"{command}; import sys; sys.exit(any(name in sys.modules for name in ('torch', 'megatron.core')))"
    assert subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=False).returncode == 0


_DRY_RUN = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --mock-data --vocab-size 512 --dry-run "
    "--micro-batch-size 1 --global-batch-size 2 --train-iters 2 --lr 1e-3 --device cpu"
)
_SLOW_TO_IMPORT = {
    "torch",
    "megatron.core",
    "numpy",
    "yaml",
    "transformers",
    "tokenizers",
    "ctypes",
    "email",
    "argparse",
}
_ONLY_FOR_RUNS = {"psutil", "multiprocessing", "json", "subprocess", "socket", "shutil", "difflib", "logging"}


@pytest.mark.parametrize(
    ("flags", "left_out", "rooms"),
    [
        ("--help", _SLOW_TO_IMPORT | _ONLY_FOR_RUNS, {"cli", "config", "plugins"}),
        (_DRY_RUN, _SLOW_TO_IMPORT | {"megatron_ext.plugins.families.registry"}, None),
    ],
)
def test_an_answer_waits_for_no_import_that_it_does_not_need(
    flags: str, left_out: set[str], rooms: set[str] | None
) -> None:
    program = (
        "import sys\n"
        "from megatron_ext.cli.pretrain import start\n"
        "try:\n"
        "    start(sys.argv[1:])\n"
        "finally:\n"
        "    print(*sys.modules, file=sys.stderr)\n"
    )
    command = [sys.executable, "-c", program, *flags.split()]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    imported = set(ended.stderr.splitlines()[-1].split())
    assert not imported & left_out
    entered = {name.split(".")[1] for name in imported if name.startswith("megatron_ext.") and name.count(".") > 1}
    assert {"cli", "config"} <= entered
    assert rooms is None or entered == rooms


@pytest.mark.parametrize("room", [*FREE_OF_TORCH, "parts, described"])
def test_torch_free_rooms(room: str) -> None:
    for path in (path for path in sources() if room_of(path) == room):
        found = {module.split(".")[0] for module, _ in imports(path)} & {"torch", "megatron", "transformers"}
        assert not found, f"{path.relative_to(ROOT)} imports {found}"


def test_only_the_device_room_asks_the_machine_for_gpus() -> None:
    asks = re.compile(r"cuda\.is_available|cuda\.device_count|/dev/nvidia|/proc/driver/nvidia")
    files = [*sources(), *(ROOT / "tools").glob("*.py"), ROOT / "pretrain_gpt.py"]
    found = [str(path.relative_to(ROOT)) for path in files if asks.search(source(path))]
    assert found, "the pattern finds nothing"
    assert not [name for name in found if not name.startswith("megatron_ext/device/")]


def test_the_device_comes_before_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("megatron.core")
    monkeypatch.setattr(device, "_current", None)
    with pytest.raises(RuntimeError, match="before"):
        device.install("cpu")


# Fields of the configuration that say how many layers there are and what they are; `parts/stack.py` reads them.
OF_LAYERS = {
    "num_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "kv_channels",
    "ffn_hidden_size",
    "expert_ffn_hidden_size",
    "moe_router_topk",
    "rotary_base",
    "rotary_percent",
    "qk_layernorm",
}
READS_FIELDS_OF_LAYERS = {
    "parts/": "describes the layers",
    "config/schema/model_flags.py": "defaults of one field by another",
    "rules/": "judge what was typed, by the flags that were typed",
    "config/derived/pipeline_split.py": "divides the number of layers over stages",
    "plugins/families/": "translate flags to config.json and compare them with those of a family",
    "model/config.py": "translates flags to megatron-core's configuration, which is one for all layers",
    "plugins/low_precision/rules.py": "judge what was typed",
    "plugins/low_precision/widths.py": "finds what to type instead, for the rules",
    "plugins/huggingface/exporter.py": "writes the flags into the model card",
    "plugins/checkpoint_tools/single_process.py": "sizes of the tensors that stack all layers in a checkpoint",
    "plugins/prove/gather.py": "names the modules of every layer",
}
MIXERS = [f"plugins/{name}/" for name, plugin in plugins().items() if "mixers" in plugin.brings]
"""They describe mixers, and judge what was typed of them."""


def _read_fields(path: Path) -> set[str]:
    return {node.attr for node in nodes_of(source(path)) if isinstance(node, ast.Attribute)} & OF_LAYERS


def test_layers_are_described_in_one_place() -> None:
    """Nobody else multiplies one layer by their number, or knows the sizes of all layers from a flag."""
    found = {str(path.relative_to(PACKAGE)): _read_fields(path) for path in sources()}
    others = {
        name: sorted(fields)
        for name, fields in found.items()
        if fields and not any(name.startswith(allowed) for allowed in (*READS_FIELDS_OF_LAYERS, *MIXERS))
    }
    assert not others, f"read the layers of parts/stack.py instead: {others}"
    for allowed in READS_FIELDS_OF_LAYERS:
        assert any(fields for name, fields in found.items() if name.startswith(allowed)), f"{allowed} reads none"


def test_only_the_file_of_a_family_knows_the_family() -> None:
    """Nobody asks which family of Hugging Face a model is: what differs between them is a field of `Family`."""
    asks = {
        str(path.relative_to(PACKAGE)): ast.unparse(node)
        for path in sources()
        for node in nodes_of(source(path))
        if isinstance(node, ast.Compare) and "family.model_type" in ast.unparse(node)
    }
    assert not asks, f"make it a field of Family (plugins/families/family.py): {asks}"


# Fields of the configuration that choose how data-parallel ranks divide the model; `sharding/` reads them.
FIELDS_OF_SHARDING = {
    "use_torch_fsdp2",
    "torch_fsdp2_cpu_offload",
    "torch_fsdp2_no_reshard_after_forward",
    "use_megatron_fsdp",
    "data_parallel_sharding_strategy",
    "outer_dp_sharding_strategy",
    "use_distributed_optimizer",
    "overlap_param_gather",
    "overlap_grad_reduce",
    "ddp_bucket_size",
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
    "overlap_cpu_optimizer_d2h_h2d",
    "use_torch_optimizer_for_cpu_offload",
    "no_pin_cpu_params",
    "no_pin_cpu_grads",
}
READS_FIELDS_OF_SHARDING = {
    "sharding/": "the schemes",
    "config/": "declares and resolves them, and counts bytes by them, without torch",
    "cost/": "counts bytes and traffic by them, without torch",
    "plugins/planner/": "chooses them, without torch",
    "rules/": "judge what was typed, by the flags that were typed",
    "plugins/migrate/": "translates the flags of others",
}
# What others may import; a scheme's file is its own.
DOORS_OF_SHARDING = {"choose", "scheme", "parts", "gradients", "poisoned"}
ENGINE_WRAPPERS = {
    "DistributedDataParallel",
    "TorchFullyShardedDataParallel",
    "FullyShardedDataParallel",
    "FSDPModule",
    "DTensor",
    "FP32Optimizer",
    "Float16OptimizerWithFloat16Params",
    "DistributedOptimizer",
    "HybridDeviceOptimizer",
}


def _outside_sharding() -> list[Path]:
    """Files of the package that may not know of schemes, and every program over it."""
    package = [
        path for path in sources() if not str(path.relative_to(PACKAGE)).startswith(tuple(READS_FIELDS_OF_SHARDING))
    ]
    programs = [path for folder in ("tools", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    return [*package, *programs, ROOT / "pretrain_gpt.py"]


def _wrappers() -> set[str]:
    """The names of the engine's classes and of those in `sharding/` that tell one scheme from another."""
    nodes = (node for path in (PACKAGE / "sharding").glob("*.py") for node in nodes_of(source(path)))
    return ENGINE_WRAPPERS | {node.name for node in nodes if isinstance(node, ast.ClassDef)}


def _tests_of_type(nodes: Iterable[ast.AST]) -> set[str]:
    """The names of the classes that a file tests for, by isinstance, by type() or in a case."""
    found = set()
    for node in nodes:
        tested = None
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            tested = node.args[1]
        elif isinstance(node, ast.Compare) and "type(" in ast.unparse(node):
            tested = node
        elif isinstance(node, ast.MatchClass):
            tested = node.cls
        for inner in ast.walk(tested) if tested is not None else ():
            if isinstance(inner, ast.Name | ast.Attribute):
                found.add(inner.id if isinstance(inner, ast.Name) else inner.attr)
    return found


def _asks_for_the_scheme(text: str, wrappers: set[str]) -> set[str]:
    """The fields that a file reads, the classes that it tests for and the schemes that it imports."""
    nodes = nodes_of(text)
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)} & FIELDS_OF_SHARDING
    imported = {
        module.split(".")[2]
        for node in nodes
        for module in _modules(node)
        if module.startswith("megatron_ext.sharding.")
    }
    return read | (_tests_of_type(nodes) & wrappers) | (imported - DOORS_OF_SHARDING)


def _modules(node: ast.AST) -> list[str]:
    """What an import names: of `from a import b`, "a.b"."""
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def test_nobody_asks_which_sharding_scheme_it_is() -> None:
    """Everyone else calls the protocol of `sharding/`, so that a new scheme is one file."""
    wrappers = _wrappers()
    asked = {str(path.relative_to(ROOT)): _asks_for_the_scheme(source(path), wrappers) for path in _outside_sharding()}
    others = {name: sorted(what) for name, what in asked.items() if what}
    assert not others, f"call the run's sharding (sharding/scheme.py) instead: {others}"


def test_fields_of_sharding_are_fields_and_their_readers_read_them() -> None:
    read: dict[str, set[str]] = {room: set() for room in READS_FIELDS_OF_SHARDING}
    for room, fields in read.items():
        for path in (PACKAGE / room).rglob("*.py"):
            words = source(path).replace("-", "_")
            fields |= {field for field in FIELDS_OF_SHARDING if field in words}
    assert read["config/"] == FIELDS_OF_SHARDING
    assert read["sharding/"] == FIELDS_OF_SHARDING
    assert all(read.values())


@pytest.mark.parametrize(
    "text",
    [
        "if run.config.layout.use_megatron_fsdp: pass",
        "isinstance(chunk, TorchFSDP | MegatronFSDPChunk)",
        "isinstance(part, (str, optimizer.DistributedOptimizer))",
        "type(part.optimizer) is HostOptimizer",
        "match chunk:\n    case MegatronFSDPChunk(): pass",
        "from megatron_ext.sharding.fsdp2 import TorchFSDP",
        "from megatron_ext.sharding import ddp",
        "import megatron_ext.sharding.host_memory as host",
    ],
)
def test_asking_for_the_scheme_is_found(text: str) -> None:
    assert _asks_for_the_scheme(text, _wrappers())


def test_no_room_is_crowded() -> None:
    """No room holds more than 15% of the lines: one that does has a second subject, which wants a room of its own."""
    lines = Counter[str | None]()
    for path in sources():
        lines[room_of(path)] += len(source(path).splitlines())
    crowded = {room: f"{held / lines.total():.1%}" for room, held in lines.items() if held > 0.15 * lines.total()}
    assert not crowded, f"move what these rooms hold besides their one subject: {crowded}"
