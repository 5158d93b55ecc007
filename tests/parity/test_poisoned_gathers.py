"""No row of the parity table reads a weight that an overlapped gather has not brought yet: until then it is NaN.

Three steps, an evaluation and generated texts between them, next to the same without NaN. Each weight has a bucket of
its own, or one that is waited for would bring its neighbours.
"""

from collections.abc import Callable
from contextlib import nullcontext

import pytest

from megatron_ext.forkserver.ranks import RankError, run_ranks
from megatron_ext.plugins.prove.cases import CASES
from megatron_ext.plugins.prove.compared_layouts import RECOMPUTE
from megatron_ext.plugins.prove.compared_models import MODELS, RECIPE
from megatron_ext.plugins.prove.recorded_training import build, poisoned_gathers
from megatron_ext.plugins.tasks.generation import generate
from megatron_ext.plugins.tasks.sampling import Sampling
from megatron_ext.plugins.tasks.tasks_and_samples import model_of
from megatron_ext.train.callbacks.evaluation import evaluate
from megatron_ext.train.datasets import tokenizer_of_run
from megatron_ext.train.extensions import NONE
from megatron_ext.train.trainer import Trainer
from tests.support import planted_faults

LATE = "--overlap-param-gather"
GATHERING = [name for name, case in CASES.items() if {LATE, "--use-torch-fsdp2", "--use-megatron-fsdp"} & {*case.flags}]
AHEAD = "PP2 DP2 distributed optimizer, overlap, one token ahead"
DELTA = "DP2 distributed optimizer, overlap, delta rules"
QUICK = {(AHEAD, "eager"), (DELTA, "eager"), ("TP2 SP FSDP2, tied", "recomputed"), ("ZeRO-2, xIELU", "eager")}
PROMPTS = [[72, 101, 108], [87], [111, 114, 108, 100]]
RECOMPUTED = RECOMPUTE["full uniform"].split()


def _numbers(flags: list[str], poisons: bool, plant: Callable[[], None] | None = None) -> list[str]:
    """One rank: losses and gradient norms of three steps, the loss of an evaluation and texts after two of them."""
    if plant is not None:
        plant()
    with poisoned_gathers() if poisons else nullcontext():
        run = build(flags, NONE)
    with run.gathered_parameters():  # as whoever looks at the weights before the first step
        pass
    trainer, numbers = Trainer(run, []), []
    for step in range(3):
        result = trainer.step()
        assert result.grad_norm is not None
        numbers += [result.loss.hex(), result.grad_norm.hex()]
        if step == 1:
            assert run.loaders.valid is not None
            numbers.append(evaluate(run, run.loaders.valid).hex())
            model = model_of(run, tokenizer_of_run(run.config))
            texts = generate(model, PROMPTS, Sampling(max_new_tokens=4, ignore_eod=True), rows=2)
            numbers.append(str([text.tokens for text in texts]))
    run.loaders.close()
    return numbers


def _flags(name: str, computed: str, data: list[str]) -> list[str]:
    case = CASES[name]
    flags = [*RECIPE.split(), *MODELS[case.model].split(), *data, "--lr-warmup-init", "1e-4", *case.flags]
    if "--use-distributed-optimizer" in flags:
        flags += ["--ddp-bucket-size", "1"]
    elif "--use-megatron-fsdp" in flags:
        flags += [LATE]
    return flags if computed == "eager" or "--recompute-granularity" in flags else [*flags, *RECOMPUTED]


@pytest.mark.first("PP2 DP2 distributed optimizer, overlap, one token ahead-eager")
@pytest.mark.parametrize(
    ("name", "computed"),
    [
        pytest.param(name, computed, marks=[pytest.mark.slow] * ((name, computed) not in QUICK))
        for name in GATHERING
        for computed in ("eager", "recomputed")
    ],
)
def test_nothing_reads_a_weight_before_its_gather(name: str, computed: str, data: list[str]) -> None:
    flags = _flags(name, computed, data)
    plain, poisoned = (run_ranks(CASES[name].world_size, _numbers, flags, poisons) for poisons in (False, True))
    assert poisoned == plain


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        (AHEAD, planted_faults.read_tied_weights_before_their_gather),
        (DELTA, planted_faults.read_convolutions_before_their_gather),
    ],
)
def test_a_weight_that_is_read_before_its_gather_is_nan(name: str, fault: Callable[[], None], data: list[str]) -> None:
    with pytest.raises(RankError, match="NaN or infinity in the loss, iteration 2"):
        run_ranks(CASES[name].world_size, _numbers, _flags(name, "eager", data), True, fault)
