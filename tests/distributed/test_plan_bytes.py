"""What ranks really hold and send in a step, against the planner's formulas: layouts, schedules and recomputation.

Held is what autograd holds, at its most, with all microbatches of the schedule in flight. The formulas leave out a few
numbers per token (masks and sums of the loss, token ids), and have a rotary table for every microbatch.
"""

import pytest

from megatron_ext.forkserver.ranks import run_ranks
from tests.support.selection import chosen, marked
from tests.support.several_models import end_layout

BASE = (
    "--device cpu --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 "
    "--global-batch-size 4 --train-iters 10 --lr 1e-3 --mock-data --vocab-size 500 --eval-interval 0 --swiglu "
    "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
    "--position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 "
)
_TP, _CP = "--tensor-model-parallel-size 2", "--context-parallel-size 2"
_MORE = "--global-batch-size 8"  # stages hold several microbatches, and the more tokens the more even experts' loads
_PP = f"{_MORE} --pipeline-model-parallel-size 2"
_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_EXPERTS = f"{_MORE} --num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 --moe-token-dispatcher-type"
_DIVIDED_EXPERTS = (
    f"{_MORE} --num-experts 4 --moe-router-topk 2 {_TP} --sequence-parallel --expert-tensor-parallel-size 2 "
    "--moe-token-dispatcher-type allgather"
)
_LATENTS = (
    "--multi-latent-attention --qk-layernorm --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16"
)
_INDEXED = (
    f"{_LATENTS} --q-lora-rank 24 --experimental-attention-variant dsa --dsa-indexer-n-heads 4 "
    "--dsa-indexer-head-dim 16 --dsa-indexer-topk 16"
)
_DELTA = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 4 "
    "--linear-num-value-heads 8 --linear-key-head-dim 16 --linear-value-head-dim 12"
)
_MAMBA = "--hybrid-layer-pattern MM*- --mamba-state-dim 16 --mamba-head-dim 12 --mamba-num-groups 4 --mamba-num-heads 8"
_SCAN = "--hybrid-layer-pattern SS*- --scan-state-dim 16 --scan-channels 96 --scan-norm"
_BOTH = f"{_MAMBA.replace('MM*-', 'B-B-')} --mlp-multipliers 0.5 2"
_BY_LAYER = (
    "--window-size 15,0 --window-attn-skip-freq 2 --group-query-attention --num-query-groups 4 "
    "--num-query-groups-local 2 --softmax-type-local learnable --value-channels 12 --value-multiplier 0.7"
)
_KDA = _DELTA.replace("gated_delta_net", "kda")
RUNS = {
    _TP: 0.005,
    f"{_TP} --sequence-parallel": 0.005,
    f"{_TP} --sequence-parallel {_FULL}": 0.005,
    f"{_TP} --sequence-parallel --sequence-parallel-keep-gathered": 0.005,
    f"{_CP} --cp-comm-type p2p": 0.005,
    f"{_CP} --cp-comm-type p2p {_FULL}": 0.005,
    f"{_CP} --cp-comm-type all_gather": 0.005,
    f"{_CP} --cp-comm-type a2a": 0.005,
    f"{_TP} --parallel-residual one-norm": 0.005,
    f"{_TP} --sequence-parallel --parallel-residual two-norms": 0.005,
    f"{_TP} --sequence-parallel {_FULL} --parallel-residual one-norm": 0.005,
    f"{_TP} --recompute-granularity selective --recompute-modules mlp --parallel-residual two-norms": 0.005,
    f"{_BY_LAYER} {_TP} --sequence-parallel": 0.005,
    f"{_BY_LAYER} {_CP} --cp-comm-type all_gather": 0.005,
    f"{_LATENTS} {_TP}": 0.005,
    f"{_LATENTS} {_TP} --sequence-parallel": 0.005,
    f"{_LATENTS} {_TP} --sequence-parallel --sequence-parallel-keep-gathered --q-lora-rank 24": 0.005,
    f"{_LATENTS} {_CP} --cp-comm-type all_gather": 0.005,
    f"{_INDEXED} {_TP}": 0.005,
    f"{_INDEXED} {_TP} --sequence-parallel": 0.005,
    f"{_INDEXED} {_CP} --cp-comm-type all_gather": 0.005,
    f"{_DELTA} {_TP} --sequence-parallel": 0.005,
    f"{_DELTA} {_TP} --sequence-parallel {_FULL}": 0.005,
    f"{_DELTA} {_CP} --cp-comm-type p2p": 0.005,
    f"{_DELTA} {_CP} --cp-comm-type p2p --recompute-granularity selective": 0.005,
    f"{_KDA} {_TP}": 0.005,
    f"{_KDA} {_TP} --sequence-parallel": 0.005,
    f"{_KDA} {_TP} --sequence-parallel --sequence-parallel-keep-gathered": 0.005,
    f"{_KDA} {_CP} --cp-comm-type p2p": 0.005,
    f"{_MAMBA} {_TP} --sequence-parallel": 0.005,
    f"{_MAMBA} {_TP} --sequence-parallel {_FULL}": 0.005,
    # A span's backward pass holds what it computes again, which Mamba-2's formula says within a tenth.
    f"{_MAMBA} {_CP} --cp-comm-type p2p": 0.025,
    f"{_BOTH} {_TP}": 0.005,
    f"{_BOTH} {_TP} --sequence-parallel {_FULL}": 0.005,
    f"{_BOTH} {_CP} --cp-comm-type p2p": 0.025,
    f"{_SCAN} none {_TP}": 0.005,
    f"{_SCAN} with-weights {_TP} --sequence-parallel": 0.005,
    f"{_SCAN} with-weights {_TP} --sequence-parallel {_FULL}": 0.005,
    f"{_SCAN} without-weights {_CP} --cp-comm-type p2p": 0.025,  # as Mamba-2
    f"{_LATENTS} --position-embedding-type none {_TP} --sequence-parallel": 0.005,
    _PP: 0.005,
    f"{_PP} --num-virtual-stages-per-pipeline-rank 2": 0.005,
    f"{_PP} --recompute-granularity selective --recompute-modules mlp": 0.005,
    f"--mtp-num-layers 1 {_TP}": 0.005,
    f"--mtp-num-layers 2 {_TP} --sequence-parallel": 0.005,
    f"--mtp-num-layers 2 {_TP} --sequence-parallel --sequence-parallel-keep-gathered": 0.005,
    f"--mtp-num-layers 1 {_TP} --sequence-parallel {_FULL}": 0.005,
    f"--mtp-num-layers 2 {_PP}": 0.005,
    f"--mtp-num-layers 2 --mtp-use-repeated-layer {_TP} --sequence-parallel": 0.005,
    f"--mtp-num-layers 2 --mtp-use-repeated-layer {_PP}": 0.005,
    f"{_EXPERTS} alltoall": 0.05,  # no microbatch loads its experts evenly
    f"{_EXPERTS} allgather": 0.05,
    _DIVIDED_EXPERTS: 0.05,
    f"{_EXPERTS} alltoall --moe-latent-size 24": 0.05,
    f"{_EXPERTS} alltoall --recompute-granularity selective --recompute-modules moe": 0.05,
}
"""By flags: how far what is held may be from its formula."""

# Another's formula with a term less, or recomputed as another. Left to --all.
REPEATED = {
    _TP,
    f"{_TP} --sequence-parallel {_FULL} --parallel-residual one-norm",
    f"{_CP} --cp-comm-type p2p {_FULL}",
    f"{_CP} --cp-comm-type all_gather",
    _PP,
    f"{_EXPERTS} allgather",
}


def _measured(runs: list[str]) -> list[dict[str, float]]:
    from megatron_ext import device

    here = device.install("cpu")
    from benchmarks.traffic import Traffic
    from megatron_ext.cost.activations import Activations
    from megatron_ext.cost.schedule import most_held, schedule_of
    from megatron_ext.cost.stage_parameters import Shapes
    from megatron_ext.cost.traffic import sent
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure
    from megatron_ext.train.trainer import Trainer
    from tests.support.saved_bytes import HeldForBackward

    found = []
    for flags in runs:
        config = configure((BASE + flags).split()).config
        run = build_run(config, here)
        parameters = (parameter for chunk in run.chunks for parameter in chunk.parameters())
        trainer = Trainer(run, [])
        if config.model.num_experts is not None:
            trainer.step()  # the first batch loads the experts less evenly than RUNS allows for
        with HeldForBackward(parameters) as held, Traffic(run.groups) as traffic:
            trainer.step()
        stage, shapes, formulas = run.groups.pp.rank(), Shapes(config), Activations(config, fused=False)
        chunks = [
            formulas.chunk(layers, first=shapes.is_first(stage, chunk), last=shapes.is_last(stage, chunk))
            for chunk, layers in enumerate(shapes.stacks[stage])
        ]
        microbatches = config.training.global_batch_size // config.training.micro_batch_size
        works = schedule_of(config, microbatches // config.layout.data_parallel_size).order(stage)
        again = [max(chunk.recomputed - chunk.loss, 0.0) for chunk in chunks]
        most = most_held(works, [chunk.held for chunk in chunks], again).bytes
        found.append(
            {
                "held": held.most,
                "held by formula": most,
                "left": held.now,
                "sent": traffic.total,
                "sent by formula": sum(term.bytes for term in sent(config, stage)),
            }
        )
        run.loaders.close()
        end_layout()
    return found


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest) -> dict[str, list[dict[str, float]]]:
    asked = chosen(request, "flags")
    ranks = run_ranks(2, _measured, asked)
    return {flags: [rank[index] for rank in ranks] for index, flags in enumerate(asked)}


@pytest.mark.full
@pytest.mark.parametrize("flags", marked(RUNS, slow=REPEATED))
def test_ranks_hold_and_send_what_the_formulas_say(flags: str, measured: dict[str, list[dict[str, float]]]) -> None:
    for found in measured[flags]:
        if _CP in flags and any(one in flags for one in ("attention-variant", "mamba", "scan")):
            # The rank with the last piece of a sample holds the states before all others: no rank holds more.
            found["held"] = max(one["held"] for one in measured[flags])
        assert found["held"] == pytest.approx(found["held by formula"], rel=RUNS[flags])
        assert found["sent"] == pytest.approx(found["sent by formula"], rel=0.005)
        assert found["left"] == 0
