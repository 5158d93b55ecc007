"""Writes the first lines of a run: one line each for device, layout, model, data and the iterations to go."""

from dataclasses import dataclass
from importlib import metadata

from megatron_ext import __version__
from megatron_ext.config.derived.batch_size import training_samples
from megatron_ext.config.derived.cuda_graphs import makes_graphs
from megatron_ext.config.derived.rank_order import axis_sizes
from megatron_ext.config.parse.blend import read_blend
from megatron_ext.config.schema import Config
from megatron_ext.parts.catalogue import count, vocabulary_padding
from megatron_ext.parts.stack import stack


@dataclass(frozen=True)
class Begun:
    """Facts about a starting run that its configuration does not have."""

    device: str
    """Name of the hardware."""

    backend: str
    iteration: int
    consumed_samples: int
    own: tuple[str, ...] = ()
    """Names of the parts that a user brought."""

    kernels: str | None = None
    """Whether kernels of other packages (apex, Transformer Engine) are used, if any is installed."""

    attention: str | None = None
    """Which kernel computes attention, where it was chosen."""


def banner(config: Config, begun: Begun) -> str:
    """Return the lines, without the last newline."""
    lines = {
        "": f"megatron-ext {__version__}, torch {_version('torch')}, megatron-core {_version('megatron-core')}",
        "device": f"{_ranks(config.layout.world_size)} on {begun.device}, {begun.backend}",
        "layout": _layout(config),
        "model": _model(config),
        "dropout": _dropout(config),
        "data": _data(config),
        "to go": _to_go(config, begun),
        "own": ", ".join(begun.own),
        "kernels": begun.kernels or "",
        "attend": begun.attention or "",
        "graphs": _graphs(config),
    }
    return "\n".join(f"{name:<8}{text}" if name else text for name, text in lines.items() if text)


def described(config: Config) -> dict[str, str]:
    """Return texts that describe a configuration's model, optimizer, data and layout."""
    ranks = f"{_ranks(config.layout.world_size)}, {_layout(config)}"
    return {"model": _model(config), "optimizer": _optimizer(config), "data": _data(config), "layout": ranks}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of unknown version"


def _ranks(number: int) -> str:
    return f"{number} rank{'s' * (number != 1)}"


def _layout(config: Config) -> str:
    sizes = axis_sizes(config.layout)
    chunks = config.layout.virtual_pipeline_model_parallel_size
    pipeline = f"PP {sizes.pp}" + (f" in {chunks} chunks" if chunks > 1 else "")
    pipeline += f" by {config.layout.table}" if config.layout.table and sizes.pp > 1 else ""
    expert = config.layout.expert_model_parallel_size
    return " x ".join(
        [f"TP {sizes.tp}", pipeline, f"CP {sizes.cp}", f"DP {sizes.dp}", *([f"EP {expert}"] if expert > 1 else [])]
    )


def _model(config: Config) -> str:
    layers = stack(config).count(lambda layer: layer.next_token is None)
    precision = "bf16" if config.training.bf16 else "fp16" if config.training.fp16 else "fp32"
    padding = vocabulary_padding(config)
    number = f"{count(config) - padding:,} parameters" + (f" and {padding:,} of vocabulary padding" if padding else "")
    return f"{number}, {layers} layers of width {config.model.hidden_size:,}, {precision}"


def _optimizer(config: Config) -> str:
    flags = config.optimizer
    samples = config.training.train_samples is not None
    warmup, unit = (flags.lr_warmup_samples, "samples") if samples else (flags.lr_warmup_iters, "steps")
    decays = flags.lr_decay_style != "constant"
    parts = [
        flags.optimizer,
        f"learning rate {flags.lr:g}" if flags.lr is not None else "",
        f"{warmup:,} {unit} of warmup" if warmup else "",
        f"{flags.lr_decay_style}{f' to {flags.min_lr:g}' if decays else ''}",
        f"weight decay {flags.weight_decay:g}" if flags.weight_decay else "",
    ]
    return ", ".join(filter(None, parts))


def _dropout(config: Config) -> str:
    model = config.model
    rates = {"attention": model.attention_dropout, "embeddings and residual branches": model.hidden_dropout}
    return ", ".join(f"{rate:g} of {name}" for name, rate in rates.items() if rate)


def _graphs(config: Config) -> str:
    if not makes_graphs(config):
        return ""
    eager = config.training.cuda_graph_warmup_steps
    return f"after {eager} step{'s' * (eager != 1)}, each step replays the passes that one CUDA graph holds"


def _data(config: Config) -> str:
    data, training = config.data, config.training
    paths = data.data_path or data.train_data_path
    names = read_blend(paths).prefixes if paths else ()
    source = "synthetic" if not names else names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
    return f"{source}; {training.global_batch_size:,} sequences of {config.model.seq_length:,} tokens a step"


def _to_go(config: Config, begun: Begun) -> str:
    left = max(0, training_samples(config) - begun.consumed_samples)
    after = f" after iteration {begun.iteration:,}" if begun.iteration else ""
    return f"{left * config.model.seq_length:,} tokens in {left:,} sequences{after}"
