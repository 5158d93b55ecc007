"""--torch-compile: compiled layers train as eager ones do, alone and divided over ranks."""

import functools
import os
import shutil
from collections.abc import Callable

import pytest
import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_ext.plugins.prove.cases import Case
from megatron_ext.plugins.prove.parity import Experiment, compare, write_corpus
from megatron_ext.train.build import compile_layers
from tests.support.small_models import LLAMA, build_small_model, small_config

# Of the second tier: an option of speed.

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="torch.compile needs a C++ compiler"),
]

TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
LAYOUTS = {
    "one process": (1, 4, ""),
    "TP2 SP": (2, 1, TP2),
    "PP2 VPP2, selective recompute": (
        2,
        4,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --recompute-granularity selective",
    ),
}
"""Ranks, layers (each is compiled anew, forward, backward and for the evaluation), flags."""


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Experiment]:
    """Of the model with a number of layers."""
    data = write_corpus(tmp_path_factory.mktemp("corpus"))
    return functools.cache(lambda layers: Experiment([*data, "--num-layers", str(layers)], steps=2 * layers))


def without_kernels() -> None:
    """Let torch's own operators run the compiler's graphs, forward and backward: its C++ takes a minute to compile."""
    torch.compile = functools.partial(torch.compile, backend="aot_eager")


def test_graphs_of_compiled_layers_train_as_eager_ones(experiment: Callable[[int], Experiment]) -> None:
    case = Case("TP2 SP", "tied", 2, ("--torch-compile", *TP2.split()))
    traced = experiment(1).train(case, sabotage=without_kernels)
    assert compare(experiment(1).reference("tied"), traced).problems() == []


@pytest.mark.slow  # the same with kernels, whose compilation takes most of a minute
@pytest.mark.parametrize("name", LAYOUTS)
def test_compiled_layers_train_as_eager_ones(name: str, experiment: Callable[[int], Experiment]) -> None:
    world_size, layers, flags = LAYOUTS[name]
    case = Case(name, "tied", world_size, ("--torch-compile", *flags.split()))
    assert compare(experiment(layers).reference("tied"), experiment(layers).train(case)).problems() == []


@pytest.mark.slow  # recomputation of eager layers repeats it, and compiled layers train as those
def test_recomputed_layers_repeat_their_dropout(experiment: Callable[[int], Experiment]) -> None:
    of_one_layer = experiment(1)
    flags = "--torch-compile --hidden-dropout 0.1 --attention-dropout 0.1"
    recompute = " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    kept = of_one_layer.train(Case("kept", "tied", 1, tuple(flags.split())))
    recomputed = of_one_layer.train(Case("recomputed", "tied", 1, tuple((flags + recompute).split())))
    assert compare(kept, recomputed).problems() == []
    assert abs(kept.losses[0] - of_one_layer.reference("tied").losses[0]) > 1e-4


def test_every_layer_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Into one graph, which the test above hands to the compiler of kernels; here it runs as it is."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    [gpt], _ = build_small_model(small_config({**LLAMA, "num_layers": 2}))
    names = [name for name, _ in gpt.named_parameters()]
    compile_layers([gpt])
    layers = [module for module in gpt.modules() if isinstance(module, TransformerLayer)]
    assert len(layers) == 2
    assert all(layer._compiled_call_impl is not None for layer in layers)
    assert [name for name, _ in gpt.named_parameters()] == names
    tokens = torch.randint(0, 250, (2, 17), generator=torch.Generator().manual_seed(0))
    torch._dynamo.utils.counters.clear()
    gpt(tokens[:, :-1], torch.arange(16).expand(2, 16), labels=tokens[:, 1:]).sum().backward()
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0
