"""--fp8-param-gather: weights that are rounded before they are sent are those that are rounded after, to the bit, in
every layout that gathers them; and what is sent are the bytes that the planner says."""

from pathlib import Path

import pytest

from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.plugins.prove.compared_models import MODELS, RECIPE
from megatron_ext.plugins.prove.parity import write_corpus
from megatron_ext.plugins.prove.recorded_training import record

FP8 = "--bf16 --fp8-format hybrid --fp8-recipe"
ZERO_1 = "--use-distributed-optimizer"
# Several buckets, which begin and end within weights and blocks.
OVERLAPPED = f"{ZERO_1} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 30000"
FSDP2, TP2 = "--use-torch-fsdp2", "--tensor-model-parallel-size 2"
DENSE = f"{MODELS['learned positions, biases']} --num-layers 2 --hidden-size 128 --ffn-hidden-size 256"
EXPERTS = (
    f"{MODELS['experts']} --num-layers 2 --hidden-size 128 --ffn-hidden-size 256 --moe-ffn-hidden-size 128 "
    "--moe-shared-expert-intermediate-size 128"
)
RUNS = {
    "ZeRO-1, tensorwise": (2, DENSE, "tensorwise", ZERO_1),
    "ZeRO-1 overlapped, tensorwise": (2, DENSE, "tensorwise", OVERLAPPED),
    "ZeRO-1 overlapped, blockwise": (2, DENSE, "blockwise", f"{OVERLAPPED} --seq-length 128"),
    "FSDP2, tensorwise": (2, DENSE, "tensorwise", FSDP2),
    "FSDP2, blockwise": (2, DENSE, "blockwise", f"{FSDP2} --seq-length 128"),
    "FSDP2 on three ranks, tensorwise": (3, DENSE, "tensorwise", f"{FSDP2} --global-batch-size 6"),
    "ZeRO-1 in host memory, tensorwise": (2, DENSE, "tensorwise", f"{ZERO_1} --optimizer-cpu-offload"),
    "HSDP FSDP2, tensorwise": (4, DENSE, "tensorwise", f"{FSDP2} --num-distributed-optimizer-instances 2"),
    "PP2 ZeRO-1 overlapped, tensorwise": (4, DENSE, "tensorwise", f"{OVERLAPPED} --pipeline-model-parallel-size 2"),
    "TP2 FSDP2, tensorwise": (4, DENSE, "tensorwise", f"{TP2} {FSDP2}"),
    "TP2 ZeRO-1 overlapped, tensorwise": (4, DENSE, "tensorwise", f"{TP2} {OVERLAPPED}"),
    "experts, ZeRO-1 overlapped, tensorwise": (2, EXPERTS, "tensorwise", OVERLAPPED),
    "experts, ZeRO-1 overlapped, blockwise": (2, EXPERTS, "blockwise", f"{OVERLAPPED} --seq-length 128"),
    "EP2, ZeRO-1, tensorwise": (4, EXPERTS, "tensorwise", f"{ZERO_1} --expert-model-parallel-size 2"),
}
PLAIN_RUN = ("ZeRO-1 overlapped, tensorwise", "FSDP2, blockwise", "experts, ZeRO-1 overlapped, blockwise")
STEPS = 3


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return list(write_corpus(tmp_path_factory.mktemp("corpus")))


@pytest.mark.full
@pytest.mark.first(*PLAIN_RUN)
@pytest.mark.parametrize("name", RUNS)
def test_rounding_before_sending_changes_no_bit(name: str, data: list[str]) -> None:
    """Evaluations between the steps see the weights as they are, which are gathered in between."""
    ranks, model, recipe, layout = RUNS[name]
    flags = f"{model} {FP8} {recipe} --eval-interval 2 --eval-iters 1 {layout}"
    words = [*RECIPE.split(), *data, *flags.split()]
    plain, gathered = record(words, ranks, STEPS), record([*words, "--fp8-param-gather"], ranks, STEPS)
    assert gathered.losses == plain.losses
    assert gathered.grad_norms == plain.grad_norms
    assert gathered.validation_loss == plain.validation_loss is not None
    for name, weight in plain.final_weights.items():
        assert (gathered.final_weights[name] == weight).all(), name
    assert gathered.final_weights.keys() == plain.final_weights.keys()
    assert not gathered.flaws


TRAFFIC = {
    "ZeRO-1": ZERO_1,
    "ZeRO-1 overlapped": OVERLAPPED,
    "FSDP2": FSDP2,
    "experts": f"{OVERLAPPED} --num-experts 4 --moe-ffn-hidden-size 128 --moe-router-topk 2",
}
_MODEL = (
    "--device cpu --num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 "
    "--global-batch-size 8 --train-iters 10 --lr 1e-3 --mock-data --vocab-size 500 --eval-interval 0 --swiglu "
    "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --ffn-hidden-size 256 "
    f"--position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 {FP8} tensorwise"
)


def _gathers(layouts: list[str]) -> list[dict[str, tuple[float, float]]]:
    """Counted bytes and the formula's, of weights and of all that data-parallel ranks send, without and with."""
    from megatron_ext import device

    here = device.install("cpu")
    from benchmarks.traffic import Traffic
    from megatron_ext.cost.traffic import sent
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure
    from megatron_ext.train.trainer import Trainer
    from tests.support.several_models import end_layout

    found = []
    for layout in layouts:
        counts = {}
        for flag in ("", "--fp8-param-gather"):
            config = configure(f"{_MODEL} {layout} {flag}".split()).config
            run = build_run(config, here)
            trainer = Trainer(run, [])
            trainer.step()
            with Traffic(run.groups) as traffic:
                trainer.step()
            of_weights = traffic.bytes("all-gather") + traffic.bytes("broadcast")
            terms = sum(term.bytes for term in sent(config, 0) if term.collective == "all-gather")
            counts[flag] = of_weights, terms
            run.loaders.close()
            end_layout()
        found.append(counts)
    return found


@pytest.fixture(scope="module")
def counted() -> dict[str, list[dict[str, tuple[float, float]]]]:
    ranks = run_ranks(2, _gathers, list(TRAFFIC.values()))
    return {name: [rank[index] for rank in ranks] for index, name in enumerate(TRAFFIC)}


@pytest.mark.full
@pytest.mark.parametrize("layout", TRAFFIC)
def test_the_planner_says_what_is_sent(layout: str, counted: dict[str, list[dict[str, tuple[float, float]]]]) -> None:
    """Over the ranks, whose shards have more or less of the weights in FP8."""
    ranks = counted[layout]
    for flag in ("", "--fp8-param-gather"):
        measured, formula = (sum(rank[flag][index] for rank in ranks) for index in (0, 1))
        assert measured == pytest.approx(formula, rel=0.002), flag
    assert ranks[0]["--fp8-param-gather"][0] < 0.8 * ranks[0][""][0]


def test_what_the_flag_cannot_do_is_said(tmp_path: Path) -> None:
    """Each warning names a setting that works."""
    from megatron_ext.train.configure import configure

    def told(flags: str) -> list[str]:
        words = f"{_MODEL.replace('tensorwise', '')} {flags} --fp8-param-gather".split()
        return [text for text in configure(words, world_size=2).typed.warnings if "--fp8-param-gather" in text]

    for flags, mended in {
        f"rowwise {ZERO_1}": f"blockwise --seq-length 128 {ZERO_1}",
        "tensorwise": f"tensorwise {ZERO_1}",
        f"tensorwise {FSDP2} --torch-fsdp2-cpu-offload": f"tensorwise {FSDP2}",
        "tensorwise --use-megatron-fsdp": f"tensorwise {FSDP2}",
    }.items():
        [text] = told(flags)
        assert text.startswith("--fp8-param-gather changes nothing here: ")
        assert told(mended) == []
