"""Averages the weights of several checkpoints of a run, one tensor at a time, in one process.

Source: Izmailov et al. 2018 (arXiv:1803.05407): the mean of weights along a run, here of checkpoints. Each tensor is
added up in fp32 (fp64 where it is saved in that), and rounded once to the dtype that it is saved in.
"""

import math
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from megatron_ext.checkpoint.dtypes import WIDTH, code_of
from megatron_ext.checkpoint.native.extra_files import TOKENIZER
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.checkpoint_tools.copying import ComputedBytes
from megatron_ext.plugins.checkpoint_tools.saved_config import saved_config
from megatron_ext.plugins.checkpoint_tools.single_process import Item, write_checkpoint
from megatron_ext.plugins.checkpoint_tools.tensors import Tensors


def average_checkpoints(checkpoints: Sequence[Path], destination: str | Path) -> Path:
    """Write a checkpoint of iteration 0, weights alone, whose weights are the means over the `checkpoints`.

    Args:
        checkpoints: folders `iter_*`, of one model; configuration and tokenizer are copied from the last.
        destination: a folder without checkpoints.
    Returns:
        The new checkpoint's own folder.
    Raises:
        ConfigurationError: they are not of one model, or the destination has checkpoints.
        DataError: one of them cannot be read.
        OSError: the destination cannot be written.
    """
    each, last = [Tensors(path) for path in checkpoints], checkpoints[-1]
    forms = [_forms(one) for one in each]
    for path, form in zip(checkpoints, forms, strict=True):
        different = sorted(name for name in form.keys() | forms[-1].keys() if form.get(name) != forms[-1].get(name))
        if different:
            raise ConfigurationError(
                f"{path} and {last} are not of one model: {different[0]} is {_words(form.get(different[0]))} in one "
                f"and {_words(forms[-1].get(different[0]))} in the other; average checkpoints of one run"
            )
    config = saved_config(last)
    common = {"weights_only": True, "iteration": 0}
    return write_checkpoint(destination, config, _items(each, forms[-1]), common, partial(_keep_tokenizer, last))


Form = tuple[tuple[int, ...], str]
"""Shape and dtype, as safetensors names it."""


def _forms(tensors: Tensors) -> dict[str, Form]:
    """Return the forms of the model's tensors: weights, and the biases of routers."""
    names = (name for name in tensors.names() if not name.startswith("optimizer."))
    forms = {name: (tensors.shape(name), code_of(str(tensors.dtype(name)).removeprefix("torch."))) for name in names}
    return {name: form for name, form in forms.items() if form[1] in WIDTH}


def _words(form: Form | None) -> str:
    return "missing" if form is None else f"{form[1]} {list(form[0])}"


def _items(each: Sequence[Tensors], forms: dict[str, Form]) -> Iterator[Item]:
    for name, (shape, dtype) in forms.items():
        computed = ComputedBytes(WIDTH[dtype] * math.prod(shape), partial(_mean, each, name))
        yield Item(name, (0,) * len(shape), shape, shape, dtype, lambda computed=computed: [computed])


def _mean(each: Sequence[Tensors], name: str, target: memoryview) -> None:
    """Fill `target` with the mean of a tensor of all checkpoints."""
    dtype = each[0].dtype(name)
    total = torch.zeros(each[0].shape(name), dtype=torch.promote_types(dtype, torch.float32))
    for one in each:
        total += one.read(name)
    elements = (total / len(each)).to(dtype).contiguous().view(-1).view(torch.uint8)
    torch.frombuffer(target, dtype=torch.uint8).copy_(elements)


def _keep_tokenizer(checkpoint: Path, unfinished: Path) -> None:
    if (checkpoint / TOKENIZER).is_dir():
        shutil.copytree(checkpoint / TOKENIZER, unfinished / TOKENIZER)
