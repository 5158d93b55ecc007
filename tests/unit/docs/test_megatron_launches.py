"""Launches as Megatron-LM's users write them: most are taken, and what is refused would train something else.

The launches of Megatron-LM's own repository are recorded (tests/golden/record_megatron_launches.py) and replayed:
docs/megatron_launches.md shows what becomes of them.
"""

import shlex
from pathlib import Path

import pytest

from megatron_ext.plugins.megatron_lm.megatron_options import earlier_options, megatron_options
from tests.support.megatron_launches import Outcome, Recorded, launches_page, other_launches, replay, words, world_size

ROOT = Path(__file__).resolve().parents[3]
_RUN = (
    "--micro-batch-size 1 --global-batch-size 128 --seq-length 4096 --max-position-embeddings 4096 --train-iters 1000 "
    "--lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 100 --weight-decay 0.1 --clip-grad 1.0 --bf16 "
    "--data-path $DATA --split 99,1,0 --save $OUT --load $OUT --save-interval 500 --log-interval 1 --eval-iters 10 "
    "--distributed-backend nccl --transformer-impl transformer_engine --use-mcore-models"
)
_LLAMA = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"
)

TAKEN = {
    "dense": (
        f"{_RUN} {_LLAMA} --tokenizer-type Llama2Tokenizer --tokenizer-model $MODEL --tensor-model-parallel-size 1 "
        "--sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
        "--use-persistent-ckpt-worker --dist-ckpt-strictness log_all --manual-gc --tp-comm-overlap --no-mmap-bin-files"
    ),
    "mixture": (
        f"{_RUN} {_LLAMA} --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model $MODEL --num-experts 8 "
        "--moe-router-topk 2 --moe-aux-loss-coeff 0.01 --moe-token-dispatcher-type flex --moe-enable-deepep "
        "--moe-permute-fusion --moe-layer-freq ([1]*32) --expert-model-parallel-size 8 --moe-grouped-gemm"
    ),
    "sharded": (
        f"{_RUN} {_LLAMA} --tokenizer-type HuggingFaceTokenizer --tokenizer-model $MODEL --use-megatron-fsdp "
        "--data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer --overlap-grad-reduce "
        "--overlap-param-gather --ckpt-format fsdp_dtensor --tiktoken-pattern v2"
    ),
    "gpt-2": (
        f"{_RUN} --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --vocab-file $VOCAB --merge-file $MERGES "
        "--use-rotary-position-embeddings --apply-query-key-layer-scaling --attention-softmax-in-fp32"
    ),
    "of 2020": (
        "--model-parallel-size 8 --num-layers 72 --hidden-size 3072 --num-attention-heads 32 --batch-size 4 "
        "--seq-length 1024 --max-position-embeddings 1024 --train-iters 500000 --lr-decay-iters 320000 --save ckpt "
        "--load ckpt --data-path d --vocab-file v.json --merge-file m.txt --data-impl mmap --split 949,50,1 "
        "--lr 1.5e-4 --distributed-backend nccl --lr-decay-style cosine --min-lr 1e-5 --weight-decay 1e-2 --warmup .01 "
        "--log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --fp16 "
        "--layernorm-epsilon 1e-5 --checkpoint-activations --checkpoint-num-layers 1 --DDP-impl torch --lazy-mpu-init "
        "--distribute-checkpointed-activations --scaled-upper-triang-masked-softmax-fusion --adlr-autoresume"
    ),
    "of a long run": (
        f"{_RUN.replace('--data-path $DATA --split 99,1,0', '--per-split-data-args-path blend.json')} {_LLAMA} "
        "--use-checkpoint-args --no-initialization --tokenizer-type TikTokenizer --tokenizer-model tk.json "
        "--tiktoken-pattern v2 --tiktoken-num-special-tokens 1000 --exit-duration-in-mins 230 --exit-signal-handler "
        "--log-progress --log-energy --manual-gc --enable-cuda-graph --inference-rng-tracker --use-nccl-ub "
        "--inference-max-seq-length 4096 --per-dataset-sequences-path counts.json --dataloader-fast-cache-load"
    ),
    "of AMD": (
        f"{_RUN} {_LLAMA} --tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3.1-8B "
        "--dataloader-type cyclic --no-async-tensor-model-parallel-allreduce --no-masked-softmax-fusion "
        "--disable-te-fused-rope --use-contiguous-parameters-in-local-ddp --no-gradient-accumulation-fusion"
    ),
    "in FP8": (
        f"{_RUN} {_LLAMA} --tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3.1-8B "
        "--fp8-margin=0 --fp8-format=hybrid --fp8-interval=1 --fp8-amax-history-len=1024 --fp8-amax-compute-algo=max"
    ),
    "of Ascend": (
        f"{_RUN.replace('--use-mcore-models', '')} {_LLAMA} --tokenizer-type PretrainedFromHF "
        "--tokenizer-name-or-path ./tok --use-flash-attn --use-fused-rmsnorm --use-fused-swiglu --swap-attention "
        "--use-fused-rotary-pos-emb --use-mc2 --use-cp-send-recv-overlap --no-load-optim --no-load-rng"
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_usual_launch_is_taken_and_says_what_it_leaves_out(name: str):
    outcome = replay(shlex.split(TAKEN[name]))
    assert outcome.problems == ()
    assert outcome.warnings
    assert all("s nothing here: " in warning for warning in outcome.warnings)


@pytest.mark.parametrize(
    ("added", "feature"),
    [
        ("--mtp-detach-heads", "--mtp-detach-heads"),
        ("--no-fp8-wgrad", "--no-fp8-wgrad"),
        ("--optimizer soap", "--optimizer: 'soap'"),
        ("--moe-layer-freq ([0]*1+[1]*31)", "--moe-layer-freq"),
    ],
)
def test_what_trains_something_else_is_refused_for_that_alone(added: str, feature: str):
    assert replay(shlex.split(f"{TAKEN['dense']} {added}")).features == (feature,)


def test_the_words_are_those_of_megatrons_runner():
    arguments = {"--bf16": True, "--modules": "[a b]", "--freq": "([1]*4)", "--path": "'x'", "--empty": "", "--n": 3}
    line = ["--bf16", "--modules", "a", "b", "--freq", "([1]*4)", "--path", "x", "--empty", "--n", "3"]
    assert words(arguments) == line


def test_a_launch_gets_the_ranks_that_it_needs():
    assert world_size({}) == 8
    assert world_size({"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 16}) == 128
    assert world_size({"pipeline_model_parallel_size": 4, "expert_model_parallel_size": 8}) == 32
    assert world_size({"global_batch_size": 2, "micro_batch_size": 2}) == 1


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return {name: replay(line) for name, line in Recorded.read().configurations.items()}


def test_most_configurations_of_megatron_lm_are_taken(outcomes: dict[str, Outcome]):
    assert len(outcomes) == 220
    assert sum(not outcome.problems for outcome in outcomes.values()) >= 217


def test_a_configuration_is_refused_for_what_is_not_built_alone(outcomes: dict[str, Outcome]):
    """Each refused one has a flag that would change what is trained or kept, and none has one without bearing."""
    accepted = {known.flag for known in megatron_options().values() if known.accepted}
    for name, outcome in outcomes.items():
        assert bool(outcome.problems) == bool(outcome.unbuilt), name
        assert not accepted & set(outcome.features), name


def test_the_page_shows_the_replay():
    assert launches_page() == (ROOT / "docs/megatron_launches.md").read_text(), "python tests/golden/regenerate.py"


def test_example_scripts_of_megatron_lm_start_as_they_stand():
    found = {Path(name).name: replay(line) for name, line in Recorded.read().examples.items()}
    assert {outcome.features for outcome in found.values()} == {()}
    llama = found["train_llama3_8b_h100_fp8.sh"]
    told = {warning.split()[0] for warning in llama.warnings if "fp8" in warning}
    assert told == {"--fp8-amax-history-len", "--fp8-amax-compute-algo"}
    assert "train_llama3_8b_h100_fp8.sh (DTYPE=bf16)" in found


def test_scripts_of_other_groups_are_taken_or_refused_by_name():
    """What a script is refused for is not what this program takes elsewhere with a warning."""
    found = {name: replay(line) for name, line in other_launches().items()}
    assert len(found) == 65
    assert sum(not outcome.problems for outcome in found.values()) >= 31
    no_bearing = {flag for flag, known in {**megatron_options(), **earlier_options()}.items() if known.accepted}
    for name, outcome in found.items():
        assert not no_bearing & set(outcome.features), name
        assert not [problem for problem in outcome.problems if "unexpected argument" in problem], name
