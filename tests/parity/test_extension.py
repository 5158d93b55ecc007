"""The example of docs/extending.md, a user's own parts of everything, in TP, PP, CP and DP against one process."""

import dataclasses
import functools
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.extension.extension import EXTENSIONS, Progressions, layer_parameters, layer_spec
from megatron_ext.config.derived.optimizers import OPTIMIZERS
from megatron_ext.errors import ConfigurationError
from megatron_ext.forkserver.ranks import RankError, run_ranks
from megatron_ext.parts.catalogue import Parameter, count, count_per_rank, parameters
from megatron_ext.parts.own_parameters import with_own_parameters
from megatron_ext.plugins.huggingface.saved_model import SavedModel
from megatron_ext.plugins.prove.compared_models import MODELS, RECIPE
from megatron_ext.plugins.prove.gather import assemble
from megatron_ext.plugins.prove.parity import STEPS, compare
from megatron_ext.plugins.prove.recorded_training import RunRecord, record
from megatron_ext.train.configure import configure
from megatron_ext.train.extensions import NONE, Extensions, extensions_of_script
from tests.support.launched import finish, start_python, start_torchrun
from tests.support.selection import marked

ROOT = Path(__file__).resolve().parents[2]
DATA = "--seq-length 16 --mock-data --vocab-size 250 --eval-interval 100 --eval-iters 1"
FLAGS = [*RECIPE.replace("--lr 1e-3", "--lr 1e-2").split(), *MODELS["tied"].split(), *DATA.split()]
LAYOUTS = {
    "TP2 SP": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2 VPP2": (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    "CP2": (2, "--context-parallel-size 2"),
    "DP2 distributed optimizer": (2, "--use-distributed-optimizer"),
    "DP2 gathers overlapped": (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "DP2 FSDP2": (2, "--use-torch-fsdp2"),
    "TP2 PP2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
}


@functools.cache
def one_process(*left_out: str, steps: int = STEPS) -> RunRecord:
    gone = [*left_out, *(["layer_parameters"] if "layer_spec" in left_out else [])]
    kept = dataclasses.replace(EXTENSIONS, **dict.fromkeys(gone))
    return record(FLAGS, 1, steps, extensions=kept)


# TP2 PP2 is slow: the others divide by each.
@pytest.mark.first("TP2 SP", "PP2 VPP2")
@pytest.mark.parametrize("name", marked(LAYOUTS, slow={"TP2 PP2"}))
def test_the_example_has_one_loss_curve(name: str, steps: int) -> None:
    world_size, flags = LAYOUTS[name]
    other = record([*FLAGS, *flags.split()], world_size, steps, extensions=EXTENSIONS)
    assert compare(one_process(steps=steps), other).problems() == []


@pytest.mark.full
def test_the_example_learns() -> None:
    losses = one_process().losses
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("part", ["datasets", "loss", "layer_spec"])
def test_every_part_of_the_model_and_its_data_is_the_users(part: str) -> None:
    assert one_process(part, steps=1).losses[0] != one_process().losses[0]


# The first step has a rate of 0; the rate is halved after 64 samples, eight steps.
@pytest.mark.parametrize(("part", "steps"), [("optimizer", 3), ("learning_rate", 10)])
def test_every_part_of_the_update_is_the_users(part: str, steps: int) -> None:
    found = one_process(part, steps=steps).losses
    assert found[0] == one_process().losses[0]
    assert found[-1] != one_process().losses[len(found) - 1]


def _own_cross_entropy() -> tuple[list[float], list[float]]:
    """The rank's logits are a quarter of the vocabulary; what their loss and its gradient are."""
    from megatron.core import parallel_state

    from megatron_ext.model.loss import TokenLogits

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    rank = torch.distributed.get_rank()
    random = torch.Generator().manual_seed(7)
    whole = torch.randn(3, 2, 8, generator=random) * 20
    labels = torch.randint(8, (2, 3), generator=random)
    expected = whole.clone().requires_grad_()
    losses = torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.t().flatten(), reduction="none")
    losses.square().sum().backward()
    own = whole[..., 4 * rank : 4 * rank + 4].clone().requires_grad_()
    group = parallel_state.get_tensor_model_parallel_group()
    assert isinstance(group, torch.distributed.ProcessGroup)
    result = TokenLogits(own, labels, group).cross_entropy()
    result.square().sum().backward()
    assert own.grad is not None
    assert expected.grad is not None
    torch.testing.assert_close(result, losses.view(3, 2).t(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(own.grad, expected.grad[..., 4 * rank : 4 * rank + 4], rtol=1e-5, atol=1e-6)
    parallel_state.destroy_model_parallel()
    return result.flatten().tolist(), own.grad.flatten().tolist()


def test_the_cross_entropy_over_shards_is_torchs() -> None:
    (first, _), (second, _) = run_ranks(2, _own_cross_entropy)
    assert first == second


@pytest.mark.full
def test_the_example_runs_as_a_program(tmp_path: Path) -> None:
    """It resumes as any run does: the own optimizer's state is saved by its name."""
    program = [str(ROOT / "examples" / "extension" / "extension.py"), *FLAGS, "--device", "cpu"]
    program += ["--save", str(tmp_path / "run"), "--load", str(tmp_path / "run"), "--log-interval", "1"]
    program += ["--num-workers", "0", "--exit-interval"]
    for steps in ("2", "4"):
        log = tmp_path / f"{steps}.log"
        finish(start_python([*program, steps], log), log)
        assert "lowest loss: " in log.read_text()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["lm_loss"] for row in rows if "lm_loss" in row]
    np.testing.assert_array_equal(losses, one_process().losses[:4])


def _own_run(flags: list[str], folder: str, loads: bool, more: Extensions = EXTENSIONS) -> list[Any]:
    """On a rank: save the example's run after three steps, or load what was saved; its weights either way."""
    from megatron_ext import device
    from megatron_ext.checkpoint.native.load_checkpoint import load_checkpoint
    from megatron_ext.checkpoint.native.save import save_checkpoint
    from megatron_ext.plugins.prove import gather

    with more.registered():
        config = more.applied(configure(flags).config)
        installed = device.install("cpu")
        from megatron_ext.train.build import build_run
        from megatron_ext.train.trainer import Trainer

        run = build_run(config, installed, None, more)
        if loads:
            load_checkpoint(run, folder)
        else:
            trainer = Trainer(run, [])
            for _ in range(3):  # the first has a rate of 0
                trainer.step()
            save_checkpoint(run, folder)
        return gather.weights(run)


OWN = ("down.weight", "up.weight", "scale", "mix")


@pytest.mark.full
def test_own_parameters_are_saved_whole_and_read_in_another_layout(tmp_path: Path) -> None:
    """Two ranks save halves of three of them; one process reads them whole, and so does an export, which refuses."""
    flags, ours = [*FLAGS, "--device", "cpu"], EXTENSIONS  # whose optimizer no export knows, nor needs
    ranks = run_ranks(2, _own_run, [*flags, *LAYOUTS["TP2 SP"][1].split()], str(tmp_path), False, ours)
    [found] = run_ranks(1, _own_run, flags, str(tmp_path), True, ours)
    config = with_own_parameters(configure([*FLAGS, "--dry-run"]).config, EXTENSIONS.layer_parameters)
    with EXTENSIONS.registered():
        saved, flaws = assemble(config, (shard for rank in ranks for shard in rank))
        whole, _ = assemble(config, found)
        divided = [*FLAGS, *LAYOUTS["TP2 SP"][1].split(), "--world-size", "2", "--dry-run"]
        halves = with_own_parameters(configure(divided).config, EXTENSIONS.layer_parameters)
        assert count_per_rank(halves)[0] < count(config)
    assert flaws == []
    own = [name for name in saved if name.endswith(OWN)]
    assert sum(whole[name].size for name in own) == 4 * (2 * 8 * 64 + 8 + 64)
    for name in saved:
        np.testing.assert_array_equal(whole[name], saved[name])
    for name in own:
        assert saved[name].std() > 0, f"{name} is trained, or drawn"
    with pytest.raises(
        ConfigurationError, match=r"has decoder\.layers\.down\.weight, decoder\.layers\.mix, .* exported"
    ):
        SavedModel(tmp_path).check()
    with pytest.raises(Exception, match=r"down\.weight, mix, scale, up\.weight this model does not have"):
        run_ranks(1, _own_run, flags, str(tmp_path), True, dataclasses.replace(ours, **_OURS))


_OURS = {"layer_spec": None, "layer_parameters": None}


def _lacks_one(config: Any, layer: Any) -> list[Parameter]:
    return layer_parameters(config, layer)[1:]


def _has_another(config: Any, layer: Any) -> list[Parameter]:
    *others, mix = layer_parameters(config, layer)
    return [*others, dataclasses.replace(mix, shape=(7,)), Parameter("bias", (7,), layer.number, "zeros")]


def _mistakes() -> list[str]:
    found = []
    for own in (_lacks_one, _has_another):
        from tests.support.several_models import end_layout

        with pytest.raises(ConfigurationError) as caught:
            _own_run([*FLAGS, "--device", "cpu"], "", True, dataclasses.replace(EXTENSIONS, layer_parameters=own))
        found.append(str(caught.value))
        end_layout()
    return found


def test_a_layer_that_is_not_as_it_says_is_refused() -> None:
    [(lacking, other)] = run_ranks(1, _mistakes)
    assert "has a parameter decoder.layers.0.down.weight of shape [8, 64], which nobody would initialize" in lacking
    assert "Parameter('down.weight', shape, layer.number, 'zeros')" in lacking
    assert "decoder.layers.3.mix has shape [64] on this rank, and layer_parameters=, or " in other
    assert "names decoder.layers.0.bias, which the own layer does not have" in other


@pytest.mark.parametrize(
    ("parameter", "problem"),
    [
        (Parameter("a", (8,), 0, "normal", 0.1), "cannot begin with random numbers"),
        (Parameter("a", (8, 6), 0, "zeros", tp_dim=2), "cannot be divided in its dimension 2"),
        (Parameter("a", (7, 6), 0, "zeros", tp_dim=0), "over 2 tensor-parallel ranks"),
        (Parameter("a", (8, 6), 0, "zeros", tp_dim=0, tp_stride=2), "tp_stride"),
    ],
)
def test_a_parameter_that_cannot_be_is_refused(parameter: Parameter, problem: str) -> None:
    config = configure([*FLAGS, "--world-size", "2", "--tensor-model-parallel-size", "2", "--dry-run"]).config
    with pytest.raises(ConfigurationError, match=problem):
        parameters(with_own_parameters(config, lambda *_: [parameter]))
    assert not any(name.endswith(".a") for name in (one.name for one in parameters(config)))


def test_own_parameters_belong_to_own_layers() -> None:
    config = configure([*FLAGS, "--dry-run"]).config
    with pytest.raises(ConfigurationError, match="without layer_spec="):
        Extensions(layer_parameters=layer_parameters).applied(config)
    begun = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, load_hf="folder"))
    with pytest.raises(ConfigurationError, match="leave --load-hf out"):
        dataclasses.replace(EXTENSIONS, optimizer=None).applied(begun)


def test_a_dry_run_counts_own_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    from megatron_ext.cli.pretrain import main
    from megatron_ext.resilience.process_end import RunStatus

    counts = []
    for own in {}, {"layer_spec": layer_spec, "layer_parameters": layer_parameters}:
        assert main([*FLAGS, "--dry-run"], RunStatus(0), **own) == 0
        counts.append(int(capsys.readouterr().out.split("parameters  ")[1].split()[0].replace(",", "")))
    assert counts[1] - counts[0] == 4 * (2 * 8 * 64 + 8 + 64)


def test_too_short_a_dataset_is_named() -> None:
    config = configure([*FLAGS, "--dry-run"]).config
    from megatron_ext.data.corpus import Splits

    short = Extensions(datasets=lambda *_: Splits(Progressions(3, 16, 250, 0), None, None))
    with pytest.raises(ConfigurationError, match="has 3 samples, and the run reads 160"):
        short.own_datasets(config, None, Splits(160, 0, 0))  # pyright: ignore[reportArgumentType]


def test_an_optimizer_that_a_scheme_cannot_run_is_refused() -> None:
    config = configure([*FLAGS, "--use-distributed-optimizer", "--dry-run"]).config
    assert EXTENSIONS.optimizer_traits is not None
    traits = dataclasses.replace(EXTENSIONS.optimizer_traits, name="not-everywhere", schemes=frozenset())
    with pytest.raises(ConfigurationError, match="--use-distributed-optimizer cannot run heavy ball"):
        Extensions(optimizer=traits).applied(config)
    assert "not-everywhere" not in OPTIMIZERS
    with pytest.raises(ConfigurationError, match="there is an optimizer 'adam' already"):
        Extensions(optimizer=dataclasses.replace(traits, name="adam")).applied(config)
    assert NONE.applied(config) is config


SCRIPT = """
import dataclasses, functools, sys
from megatron_ext.cli.pretrain import start

@functools.cache
def convolution():
    import torch

    class Convolution(torch.nn.Module):
        {reads}

        def __init__(self, config, **_):
            super().__init__()
            self.taps = torch.nn.Parameter(torch.empty(4, config.hidden_size))

        def forward(self, x, *_):
            padded = torch.nn.functional.pad(x, (0, 0, 0, 0, {before}, 3 - {before}))
            mixed = sum((0.5 + self.taps[tap]) * padded[tap : tap + len(x)] for tap in range(4))
            return mixed[:, :{rows}], None

    return Convolution

def layer_spec(spec, layer):
    from megatron.core.transformer.spec_utils import ModuleSpec
    own = ModuleSpec(module=convolution())
    return dataclasses.replace(spec, submodules=dataclasses.replace(spec.submodules, self_attention=own))

def layer_parameters(config, layer):
    from megatron_ext.parts.catalogue import Parameter
    return [Parameter("self_attention.taps", (4, config.model.hidden_size), layer.number, "normal", 0.1)]

if __name__ == "__main__":
    start([*sys.argv[1:], "--exit-interval", "1"], layer_spec=layer_spec, layer_parameters=layer_parameters)
"""


def _script(folder: Path, reads: str = "", before: int = 3, rows: int = 2) -> Path:
    path = folder / "mine.py"
    path.write_text(SCRIPT.format(reads=f"reads = {reads!r}" if reads else "", before=before, rows=rows))
    return path


@pytest.mark.parametrize(
    ("changed", "code", "said"),
    [
        ({}, 0, r"own layers are causal on the first batch: Convolution \(mine\.py:9\)\n"),
        (
            {"before": 2},
            0,
            r"own layers are NOT causal: Convolution \(mine\.py:9\), self_attention of layer \d: outputs",
        ),
        ({"reads": "token"}, 64, r"mine\.py:9\), self_attention of layer \d, declares reads = 'token', but its output"),
        ({"reads": "all"}, 64, r"Convolution \(mine\.py:9\) has reads = 'all'; use 'token', 'share' or 'sequence'"),
        (
            {"rows": 1},
            64,
            r"returned 2 values, the first of shape \[16, 1, 64\] for hidden states of shape \[16, 2, 64\]",
        ),
    ],
)
def test_the_first_batch_shows_what_an_own_part_reads(
    changed: dict[str, Any], code: int, said: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    program = [str(_script(tmp_path, **changed)), *FLAGS, "--device", "cpu", "--num-workers", "0"]
    finish(start_python(program, log), log, code=code)
    assert re.search(said, log.read_text()), log.read_text()


@pytest.mark.full
@pytest.mark.parametrize("layout", ["DP2 gathers overlapped", "DP2 FSDP2"])
def test_the_first_batch_is_looked_at_by_ranks_that_gather_weights(layout: str, tmp_path: Path) -> None:
    ranks, flags = LAYOUTS[layout]
    log, example = tmp_path / "log", str(ROOT / "examples/extension/extension.py")
    program = [example, *FLAGS, *flags.split(), "--device", "cpu", "--num-workers", "0", "--exit-interval", "2"]
    finish(start_torchrun(["--nproc-per-node", str(ranks), *program], log), log)
    assert re.search(
        r"own layers are causal on the first batch: ParallelLayer \(extension\.py:\d+\)\n", log.read_text()
    )
    assert "lowest loss: " in log.read_text()


@pytest.mark.parametrize("layout", ["TP2 SP", "CP2"])
def test_an_own_part_that_reads_whole_sequences_is_not_given_a_part_of_them(layout: str, tmp_path: Path) -> None:
    """It is whoever does not say what it reads; without sequence parallelism it computes the same on two ranks."""
    ranks, flags = LAYOUTS[layout]
    script = partial(extensions_of_script, _script(tmp_path), FLAGS)
    with pytest.raises(RankError, match=r"self_attention of layer 0, reads whole sequences, of which --(seq|context)"):
        record([*FLAGS, *flags.split()], ranks, 1, extensions=script)


@pytest.mark.full
def test_the_parity_tool_compares_the_parts_of_a_script(tmp_path: Path) -> None:
    """And shows what a wrong declaration hides: a convolution that only has a part of each sequence."""
    for reads, layout, verdict in (("", "--tensor-model-parallel-size 2", 0), ("share", LAYOUTS["CP2"][1], 1)):
        tool = [str(ROOT / "tools/parity.py"), "--steps", "1", "--script", str(_script(tmp_path, reads)), "--", *FLAGS]
        log = tmp_path / f"{verdict}.log"
        finish(start_python([*tool, *layout.split()], log), log, code=verdict)
        assert ("THEY PART. First, in forward order" in log.read_text()) == bool(verdict)
