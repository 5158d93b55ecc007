"""Lists the recipes of examples/recipes, makes tiny copies of them for CPU processes, and writes docs/recipes.md.

    python tools/recipes.py list
    python tools/recipes.py reduce llama3.1-8b tiny.yaml    # writes a configuration of seconds, prints its ranks
    python tools/recipes.py measure                         # trains all tiny copies, keeps their losses
    python tools/recipes.py measure --missing               # goes on where that was stopped
    python tools/recipes.py table                           # writes docs/recipes.md

Memory and times in the table are what tools/plan.py answers for each recipe's own layout; the losses are those of the
last `measure` (benchmarks/results/recipes.json). Exit codes: 0 done, 64 the recipe is unknown or cannot work.
"""

import contextlib
import io
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml

from megatron_ext.commandline import ToolParser, run_tool
from megatron_ext.config.derived.batch_size import training_steps
from megatron_ext.config.derived.sharding import FLAGS
from megatron_ext.config.parse.recipe_files import Devices, Heading, find_recipe, heading
from megatron_ext.config.schema import Config
from megatron_ext.cost.state_bytes import state_bytes
from megatron_ext.errors import ConfigurationError
from megatron_ext.parts.catalogue import count, count_per_rank
from megatron_ext.plugins.planner.commands import plan
from megatron_ext.train.configure import configure

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples/recipes"
PAGE = ROOT / "docs/recipes.md"
LOSSES = ROOT / "benchmarks/results/recipes.json"
SYNTHETIC = ["--mock-data", "--tokenizer-type", "NullTokenizer"]
"""Flags that stand for the data, which a recipe does not name."""

_BEGIN, _END = "<!-- tools/recipes.py: begin -->", "<!-- tools/recipes.py: end -->"
_UNITS = {"": 1, "M": 10**6, "B": 10**9}


@dataclass(frozen=True)
class Recipe:
    """One file of examples/recipes: what its first lines say, and its values by field name."""

    path: Path
    title: str
    notes: Mapping[str, str]
    values: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Return the name that run.sh takes."""
        return self.path.stem

    @property
    def devices(self) -> list[Devices]:
        """Return the devices that it is meant for, the fewest first; none where the model is not in the file."""
        return Heading(self.title, self.notes).devices

    def published(self) -> tuple[int, int]:
        """Return the published number of parameters, and how far from it a count may be: nothing where it is exact,
        half a unit of the last digit that is not zero where it is rounded (`1,320M`)."""
        number, unit = re.findall(r"([\d,]+)([MB]?)", self.notes["published parameters"])[0]
        digits = number.replace(",", "")
        zeros = len(digits) - len(digits.rstrip("0"))
        return int(digits) * _UNITS[unit], _UNITS[unit] * 10**zeros // 2 if unit else 0

    def flags(self) -> list[str]:
        """Return the command line that trains it on synthetic tokens."""
        return ["--config", str(self.path), *SYNTHETIC]


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    parser = ToolParser("List recipes, make tiny copies of them, write their table.")
    parser.add_argument("action", choices=("list", "reduce", "measure", "table"), help="what to do")
    parser.add_argument("name", nargs="?", help="reduce: of a recipe; measure: of the only one")
    parser.add_argument("file", nargs="?", type=Path, help="reduce: the YAML file to write")
    parser.add_argument("--missing", action="store_true", help="measure: only those without kept losses")
    parser.add_argument("--most-ranks", type=int, default=8, metavar="N", help="reduce: of the copy (default: 8)")
    options = parser.parse_args(argv)
    if options.action == "reduce" and options.file is None:
        parser.error("reduce needs the name of a recipe and the file to write")
    if options.action == "list":
        print("\n".join(f"{recipe.name:<29} {recipe.title}" for recipe in recipes()))
    elif options.action == "reduce":
        values, ranks = reduce(find(options.name).values, options.most_ranks)
        options.file.write_text(yaml.safe_dump(values, sort_keys=False))
        print(ranks)
    elif options.action == "measure":
        names = [recipe.name for recipe in recipes() if recipe.devices] if options.name is None else [options.name]
        measure(names, again=not options.missing)
    else:
        PAGE.write_text(page(PAGE.read_text()))
    return 0


def recipes() -> list[Recipe]:
    """Return all recipes, in the order of their names."""
    return [read(path) for path in sorted(FOLDER.glob("*.yaml"))]


def find(name: str) -> Recipe:
    """Return the recipe of that name.

    Raises:
        ConfigurationError: there is none.
    """
    return read(find_recipe(name))


def read(path: Path) -> Recipe:
    """Return the recipe in a file, whose comments at the top are a title and `name: text`."""
    top = heading(path)
    return Recipe(path, top.title, top.notes, yaml.safe_load(path.read_text()))


# ---- tiny copies

_TINY = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 250, "seq_length": 64, "micro_batch_size": 1}
_TINY_IF_GIVEN = {
    "ffn_hidden_size": 96,
    "num_query_groups": 2,
    "kv_channels": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_state_dim": 16,
    "mamba_head_dim": 16,
    "mamba_num_groups": 2,
    "mamba_num_heads": 4,
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "dsa_indexer_n_heads": 2,
    "dsa_indexer_head_dim": 16,
    "dsa_indexer_topk": 16,
    "full_attn_idxs": [1],
    "lr_warmup_iters": 1,
    "lr_wsd_decay_iters": 2,
    "initial_loss_scale": 65536,
}
_OF_LONG_RUNS = ("train_samples", "lr_decay_samples", "lr_warmup_samples", "init_method_std")
_LAYOUT = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "num_distributed_optimizer_instances": 1,
    "expert_model_parallel_size": 1,
}
_GIVEN_UP = ("num_distributed_optimizer_instances", "data", "context_parallel_size", "pipeline_model_parallel_size")
"""Where a tiny copy would have too many ranks: what it does without, first to last."""


def reduce(values: Mapping[str, Any], most_ranks: int) -> tuple[dict[str, Any], int]:
    """Return a tiny copy of a recipe, which trains 5 steps on CPU processes in seconds, and its number of ranks.

    The kind of model, the precision and each technique stay; whatever has more than one rank has two.
    """
    sizes, ranks = _sizes(values, most_ranks)
    kept = {name: value for name, value in values.items() if name not in _OF_LONG_RUNS}
    given = {name: value for name, value in _TINY_IF_GIVEN.items() if name in values}
    layers = _layers(values, sizes)
    tiny = {**kept, **_TINY, **given, **sizes, "num_layers": layers, "global_batch_size": 8}
    if "moe_layer_freq" in values:
        tiny["moe_layer_freq"] = f"[0]+[1]*{layers - 1}"
    if str(values.get("linear_attention_freq")).startswith("["):
        tiny["linear_attention_freq"] = "2"
    if "hybrid_layer_pattern" in values:
        tiny["hybrid_layer_pattern"] = "".join(dict.fromkeys(values["hybrid_layer_pattern"]))
        tiny["num_layers"] = len(tiny["hybrid_layer_pattern"])
    if sizes["tensor_model_parallel_size"] == 1:
        tiny.pop("sequence_parallel", None)
    if sizes["pipeline_model_parallel_size"] == 1:
        for name in _PIPELINE:
            tiny.pop(name, None)
    run = {"train_iters": 5, "lr": 0.01, "min_lr": 0.0, "eval_iters": 0, "log_interval": 1, "num_workers": 0}
    return {**tiny, **run, "device": "cpu", "mock_data": True, "tokenizer_type": "NullTokenizer"}, ranks


_PIPELINE = (
    "num_virtual_stages_per_pipeline_rank",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "decoder_last_pipeline_num_layers",
)


def _sizes(values: Mapping[str, Any], most_ranks: int) -> tuple[dict[str, int], int]:
    """Return the layout's sizes, each 1 or 2, and the number of ranks."""
    sizes = {name: min(values.get(name, 1), 2) for name in _LAYOUT} | {"data": 2}
    for name in (*_GIVEN_UP, "tensor_model_parallel_size"):
        if _ranks(sizes) <= most_ranks:
            break
        sizes[name] = 1
    ranks = _ranks(sizes)
    replicas = sizes.pop("data") * sizes["num_distributed_optimizer_instances"]
    sizes["expert_model_parallel_size"] = min(sizes["expert_model_parallel_size"], replicas)
    return sizes, ranks


def _ranks(sizes: Mapping[str, int]) -> int:
    """Return the product of the sizes; expert-parallel ranks are data-parallel ones."""
    product = 1
    for name, size in sizes.items():
        product *= size if name != "expert_model_parallel_size" else 1
    return product


def _layers(values: Mapping[str, Any], sizes: Mapping[str, int]) -> int:
    """Return the number of layers: two for each chunk, without those that stand for embedding and loss."""
    if sizes["pipeline_model_parallel_size"] == 1:
        return 2
    chunks = values.get("num_virtual_stages_per_pipeline_rank", 1)
    counted = [values.get(name, False) for name in _PIPELINE[1:]]
    return 2 * sizes["pipeline_model_parallel_size"] * chunks - sum(counted)


# ---- their losses


SIZES = (2, 8)
"""Most ranks of the copies that are measured: the fewest that divide anything, and what `run.sh --reduced` takes."""


def measure(names: Sequence[str], *, again: bool) -> None:
    """Train tiny copies of both sizes and keep their losses, each at its end; those with kept losses only if `again`.

    Copies of the same configuration, which recipes of one family often have, are trained once.
    """
    kept = {} if again else kept_losses()
    done: dict[str, list[float]] = {}
    for name in names:
        for most_ranks in copies(find(name)).values():
            values, ranks = reduce(find(name).values, most_ranks)
            if str(ranks) in kept.get(name, {}):
                continue
            copy = json.dumps([values, ranks], sort_keys=True)
            done[copy] = done.get(copy) or measured([name], most_ranks)[name]
            keep(name, ranks, done[copy], LOSSES)


def kept_losses() -> dict[str, dict[str, list[float]]]:
    """Return the losses of the last measurements: recipe, number of ranks of its tiny copy, steps."""
    return json.loads(LOSSES.read_text()) if LOSSES.exists() else {}


def measured(names: Sequence[str], most_ranks: int) -> dict[str, list[float]]:
    """Return the losses of the steps of each tiny copy, trained on CPU ranks of its own (DTensor would remember the
    groups of an earlier copy)."""
    from megatron_ext.forkserver.ranks import run_ranks
    from tools import recipes as module  # ranks find a function by its module, which is not __main__

    losses: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            values, ranks = reduce(find(name).values, most_ranks)
            file = Path(folder) / f"{name}.yaml"
            file.write_text(yaml.safe_dump(values))
            losses[name] = run_ranks(ranks, module.trained, ["--config", str(file)])[-1]
    return losses


def trained(flags: Sequence[str]) -> list[float]:
    """On a rank of `run_ranks`: the losses of a run's steps."""
    from megatron_ext import device

    configured = configure(flags)
    installed = device.install("cpu")
    from megatron_ext.train.build import build_run
    from megatron_ext.train.trainer import Trainer

    trainer = Trainer(build_run(configured.config, installed, None), [])
    return [trainer.step().loss for _ in range(configured.config.training.train_iters or 0)]


def keep(name: str, ranks: int, losses: Sequence[float], path: Path) -> None:
    """Write the losses of a copy into a file, next to those of other copies that are there and still exist."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    kept.setdefault(name, {})[str(ranks)] = list(losses)
    left: dict[str, dict[str, Any]] = {}
    for recipe in recipes():
        if recipe.name in kept:
            left[recipe.name] = {size: kept[recipe.name][size] for size in copies(recipe) if size in kept[recipe.name]}
    path.write_text(json.dumps(left, indent=1, sort_keys=True) + "\n")


def copies(recipe: Recipe) -> dict[str, int]:
    """Return the numbers of ranks of a recipe's tiny copies, as kept, and for each the most that it was asked for."""
    return {str(reduce(recipe.values, most_ranks)[1]): most_ranks for most_ranks in reversed(SIZES)}


# ---- the table


def page(text: str) -> str:
    """Return the page with its table made anew."""
    head, _, rest = text.partition(_BEGIN)
    return "\n".join([head + _BEGIN, *table(), _END]) + rest.partition(_END)[2]


def table() -> Iterator[str]:
    """Yield the lines of the table, one for each recipe and number of devices."""
    losses = kept_losses()
    of_copy = " tiny copy's loss |" if losses else ""
    titles = "recipe | parameters | published | devices | layout | GB of a device | s/step | tokens/s each | run"
    yield f"| {titles} |{of_copy}"
    yield f"|---|---:|---:|---|---|---:|---:|---:|---|{'---|' if losses else ''}"
    for recipe in recipes():
        for devices in recipe.devices:
            cells = _row(recipe, devices)
            if losses:
                cells.append(_shown(losses.get(recipe.name)) if devices == recipe.devices[0] else "")
            yield "| " + " | ".join(cells) + " |"
    if losses:
        yield ""
        yield "Tiny copies have two layers (two a chunk in a pipeline), synthetic tokens and CPU processes"
        yield "(`python tools/recipes.py measure`). One has two ranks; where the layout divides by more techniques,"
        yield "another has all of them on 4 or 8 ranks, as `run.sh --reduced`. The loss of the first and of the fifth"
        yield "step shows that they train, and no more."


def _shown(copies: Mapping[str, Sequence[float]] | None) -> str:
    shown = [f"{ranks} ranks: {losses[0]:.3f} to {losses[-1]:.3f}" for ranks, losses in (copies or {}).items()]
    return "; ".join(shown)


def _row(recipe: Recipe, devices: Devices) -> list[str]:
    config, answer = configuration(recipe, devices), planned(recipe, devices)
    best, seconds = answer["best"][0], answer["best"][0]["seconds"]["total"]
    batch_tokens = config.training.global_batch_size * config.model.seq_length
    steps = training_steps(config)
    first = devices == recipe.devices[0]
    return [
        f"[{recipe.name}](../examples/recipes/{recipe.path.name})" if first else "",
        f"{parameters(config):,}" if first else "",
        recipe.notes["published parameters"].partition(" ")[0] if first else "",
        str(devices),
        _layout(best["layout"], recipe, config),
        f"{best['bytes']['total'] / 1e9:.1f} of {answer['usable_bytes'] / 1e9:.1f}",
        f"{seconds:.3g}",
        f"{batch_tokens / seconds / devices.number:,.0f}",
        f"{steps:,} steps of {batch_tokens:,} tokens, {_duration(steps * seconds)}",
    ]


def configuration(recipe: Recipe, devices: Devices) -> Config:
    """Return the resolved configuration of a recipe on these devices, with synthetic tokens."""
    return configure([*recipe.flags(), "--dry-run", "--world-size", str(devices.number)]).config


def parameters(config: Config) -> int:
    """Return the number of parameters, without padding of the vocabulary."""
    assert config.data.vocab_size is not None
    return count(replace(config, model=replace(config.model, padded_vocab_size=config.data.vocab_size)))


def state_gb(config: Config) -> float:
    """Return the GB of weights, gradients and optimizer state of the stage that has most."""
    return max(count_per_rank(config)) * state_bytes(config).total / 1e9


def planned(recipe: Recipe, devices: Devices) -> dict[str, Any]:
    """Return what tools/plan.py answers for the recipe's own layout on these devices.

    Raises:
        ConfigurationError: the layout does not fit, or fits only with recomputation that the recipe does not name.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "plan.json"
        own = ["--world-size", str(devices.number), "--device", devices.name, "--json", str(out), "--number", "1"]
        if devices.memory_gb is not None:
            own += ["--device-memory-gb", str(devices.memory_gb)]
        with contextlib.redirect_stdout(io.StringIO()):
            plan.main([*own, "--", *recipe.flags(), *_pinned(recipe.values), *_alone(configuration(recipe, devices))])
        answer = json.loads(out.read_text())
    best = answer["best"] or [answer["nearest"]]
    named = best[0]["layout"]
    if not answer["best"] or ("recompute" in named and "recompute_granularity" not in recipe.values):
        needed = best[0]["bytes"]["total"] / 1e9
        raise ConfigurationError(f"{recipe.name} does not fit {devices} as it is: {named} needs {needed:.1f} GB")
    return answer


def _pinned(values: Mapping[str, Any]) -> list[str]:
    """Return flags that keep the planner from changing what the recipe leaves at its default."""
    sizes = ["tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size"]
    sizes += ["expert_model_parallel_size"] if "num_experts" in values else []
    switches = (*FLAGS, "optimizer_cpu_offload")
    flags = [f"--{name.replace('_', '-')}=1" for name in sizes if name not in values]
    return flags + [f"--{name.replace('_', '-')}=false" for name in switches if name not in values]


def _alone(config: Config) -> list[str]:
    """Return flags that take back ZeRO-1 where there is nobody to divide by, which the planner does not look at."""
    if config.layout.data_parallel_size * config.layout.context_parallel_size > 1:
        return []
    return ["--use-distributed-optimizer=false", "--overlap-param-gather=false"]


def _layout(name: str, recipe: Recipe, config: Config) -> str:
    """Return the planner's name of a layout without sizes of 1, with its copies."""
    if _alone(config):
        name = name.replace(", DDP", "")
    name = re.sub(r"\b(TP|CP|PP|EP|DP)1 ", "", name)
    name = name.replace(", recompute as given", f", recompute {config.training.recompute_granularity}")
    if (copies := recipe.values.get("num_distributed_optimizer_instances", 1)) > 1:
        name += f", {copies} copies"
    return name


def _duration(seconds: float) -> str:
    days = seconds / 86400
    return f"{days:,.0f} days" if days >= 3 else f"{seconds / 3600:.1f} hours"


if __name__ == "__main__":
    run_tool(main)
