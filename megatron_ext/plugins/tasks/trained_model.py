"""Loads a trained model for inference, in the layout of this launch: no optimizer, no gradients, no data.

    model = load_trained(["--load", "ckpt", "--tensor-model-parallel-size", "2"])

What the model is comes from the checkpoint's configuration, or from a Hugging Face folder; the flags name it and the
layout. They are checked by the rules of the training, so that what cannot be divided is refused before it starts.
"""

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from megatron_ext import device
from megatron_ext.checkpoint.native.checkpoint_folder import without_checkpoint
from megatron_ext.config.derived.pipeline_split import layer_counts
from megatron_ext.config.parse.arguments import read
from megatron_ext.config.parse.options import options_by_flag
from megatron_ext.config.schema import Config
from megatron_ext.errors import ConfigurationError
from megatron_ext.tokenizer.from_flags import tokenizer_from_flags
from megatron_ext.tokenizer.tokenizer_protocol import Tokenizer
from megatron_ext.train.configure import Configured, configure, configure_for

if TYPE_CHECKING:
    from megatron_ext.plugins.tasks.inference_model import Model

# Flags that a run needs besides the model, and that inference does not use.
_OF_A_RUN = (
    *("--mock-data", "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1", "--eval-interval", "0"),
    *("--attention-dropout", "0", "--hidden-dropout", "0"),
)
_WEIGHTS_ALONE = ("--use-checkpoint-args", "--finetune", "--no-load-optim", "--no-load-rng")
_LONGEST = 2048
"""Positions that a Hugging Face model is given at once, where it can take more and --seq-length does not say."""
_AS_SAVED = ("seq_length", "max_position_embeddings", "bf16", "fp16")
"""Fields that a run may change when it resumes; inference takes those that are not given from the checkpoint."""


def configure_trained(argv: Sequence[str]) -> Configured:
    """Return the configuration of the model that --load or --load-hf names, in the layout of the other flags.

    Raises:
        ConfigurationError: neither or both are given, there is no checkpoint, or the flags cannot work.
        DataError: as `train.configure.configure`.
    """
    typed = read(argv)
    source = [name for name in ("load", "load_hf") if typed.values.get(name) is not None]
    if len(source) != 1:
        asked = "give a model with --load CHECKPOINT or --load-hf FOLDER, one of them"
        raise ConfigurationError([*typed.problems, asked])
    flags = [*_OF_A_RUN, *argv, *_for_experts(typed.values)]
    if source == ["load_hf"]:
        return configure([*flags, *_huggingface_flags(typed.values)])
    return configure([*flags, *_WEIGHTS_ALONE, *_saved_flags(typed.values)])


def load_trained(argv: Sequence[str] | Configured, *, depths: bool = False) -> "Model":
    """Load a model on this rank. Collective over all ranks of the launch.

    Args:
        argv: --load or --load-hf, layout, --device, --ckpt-step and a tokenizer, as flags of `megatron-ext
            pretrain`, or what `configure_trained` made of them.
        depths: whether its depths of multi-token prediction are loaded, too, which have no part in the next token.
    Raises:
        ConfigurationError, DataError, StorageError: as `configure_trained` and `load_checkpoint.load_saved`.
    """
    configured = argv if isinstance(argv, Configured) else configure_trained(argv)
    config = configured.config
    here = device.install(config.layout.device, fuses=False, nccl_backend=config.layout.nccl_backend)
    # Only now may megatron-core be imported.
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from megatron_ext.checkpoint.native.agreed_checkpoint import agree
    from megatron_ext.checkpoint.native.load_checkpoint import load_saved
    from megatron_ext.model.config import transformer_config
    from megatron_ext.model.gpt import build_model
    from megatron_ext.parallel import groups
    from megatron_ext.plugins.huggingface.load_hf import load_huggingface
    from megatron_ext.plugins.tasks.inference_model import Model
    from megatron_ext.train.build import set_kernels

    groups.start(config.layout, here)
    if configured.search is not None:
        configured = configure_for(configured, agree(configured.search, config.checkpoint))
    config = _for_inference(configured.config, depths)
    collection = groups.initialize(config.layout, here)
    set_kernels(config, here)
    core = transformer_config(config, here.kind)
    chunks = build_model(config, core, collection)
    weights: Any = _Weights(config, here, collection, chunks)
    iteration = None
    if configured.resume is not None:
        iteration = load_saved(weights, configured.resume)
    else:
        assert config.checkpoint.load_hf is not None
        load_huggingface(weights, config.checkpoint.load_hf)
    for chunk in chunks:
        chunk.eval().requires_grad_(False)
    p2p = P2PCommunicator(pp_group=collection.pp, config=core)
    return Model(config, here, collection, p2p, chunks, tokenizer_of(config), iteration=iteration)


@contextmanager
def trained_model(configured: Configured, *, depths: bool = False) -> "Iterator[Model]":
    """Return a context with the model that `load_trained` loads. On exit, end the groups of the ranks, so that the
    process can load another model or train."""
    try:
        yield load_trained(configured, depths=depths)
    finally:
        if "megatron.core" in sys.modules:  # else loading has failed before there were any
            from megatron_ext.parallel import groups

            groups.destroy()


def tokenizer_of(config: Config) -> Tokenizer | None:
    """Return the model's tokenizer; None where only token ids are known."""
    return None if config.data.tokenizer_type is None else tokenizer_from_flags(config.data)


@dataclass
class _Weights:
    """The weights alone, as loading sees a run (`checkpoint.native.saveable.Saveable`)."""

    config: Config
    device: Any
    groups: Any
    chunks: Sequence[Any]
    optimizer: None = None
    state: None = None
    data_record: None = None
    sharding: Any = dataclasses.field(
        # Each rank holds its weights as the modules do, and there are no master copies.
        default_factory=lambda: SimpleNamespace(
            weights_in_place=lambda chunks: nullcontext(), reload_masters=lambda optimizer: None, parts=lambda _: []
        )
    )

    @property
    def rank(self) -> int:
        import torch

        return torch.distributed.get_rank()


def _for_inference(config: Config, depths: bool) -> Config:
    """Return the configuration without what only training does."""
    layout = dataclasses.replace(
        config.layout,
        sequence_parallel=False,
        num_virtual_stages_per_pipeline_rank=None,
        num_layers_per_virtual_pipeline_stage=None,
        pipeline_schedule=None,
    )
    number = config.model.mtp_num_layers if depths else None
    if layout.pipeline_model_parallel_layout and config.layout.virtual_pipeline_model_parallel_size > 1:
        # It names chunks, of which a stage has one here.
        stages, layers = layout.pipeline_model_parallel_size, sum(map(sum, layer_counts(config)))
        of_stages = "|".join("t" * ((one + 1) * layers // stages - one * layers // stages) for one in range(stages))
        split = f"E{of_stages}{'m' * (number or 0)}L"
        layout = dataclasses.replace(layout, pipeline_model_parallel_layout=split)
    model = dataclasses.replace(config.model, transformer_impl="local", mtp_num_layers=number)
    return dataclasses.replace(config, layout=layout, model=model)


def _for_experts(values: Mapping[str, Any]) -> list[str]:
    """Return --sequence-parallel where tensor parallelism is asked for: training experts needs it, inference does
    without."""
    divides = (values.get("tensor_model_parallel_size") or 1) > 1
    return ["--sequence-parallel"] if divides and "sequence_parallel" not in values else []


def _saved_flags(values: Mapping[str, Any]) -> list[str]:
    """Return as flags what inference takes from the checkpoint."""
    from megatron_ext.checkpoint.native.resume import look

    search = look({**values, "use_checkpoint_args": True})
    if search is None or search.resume is None:
        raise ConfigurationError(f"--load {without_checkpoint(values['load'])}")
    saved = search.resume.saved
    if saved is None:
        return []
    precision = {"bf16", "fp16"} if {"bf16", "fp16"} & values.keys() else set()
    names = [name for name in _AS_SAVED if name not in values and name not in precision]
    if "seq_length" in values and saved.get("position_embedding_type") in ("rope", "alibi"):
        # A promise about lengths, with no parameter behind it.
        names = [name for name in names if name != "max_position_embeddings"]
    return [word for name in names if saved.get(name) for word in _as_flag(name, saved[name])]


def _as_flag(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    assert flag in options_by_flag()
    return [flag] if value is True else [flag, str(value)]


def _huggingface_flags(values: Mapping[str, Any]) -> list[str]:
    """Return the tokenizer of the folder where it has one and none is named, and the model's length."""
    folder = Path(values["load_hf"])
    flags = []
    if "tokenizer_type" not in values and (folder / "tokenizer.json").is_file():
        flags += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]
    if "seq_length" not in values:
        from megatron_ext.plugins.families.hf_config import read_hf_config

        longest = read_hf_config(str(folder))[1].get("max_position_embeddings", _LONGEST)
        flags += ["--seq-length", str(min(longest, _LONGEST))]
    return flags
