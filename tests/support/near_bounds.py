"""tests/golden/problems.txt: the whole answer to launches on both sides of every bound that a rule draws.

docs/errors.md has an example of each rule; here stand its bounds, with the last value that works and the first that
does not, and the flags that a rule must not mistake for each other. A launch that works has no line below it.
"""

import shlex
from collections.abc import Sequence

from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.rules.validate import problems
from tests.support.wrong_flags import BASE, WRONG

_PP2, _PP4 = "--world-size 2 --pipeline-model-parallel-size 2", "--world-size 4 --pipeline-model-parallel-size 4"
_VPP2 = "--num-virtual-stages-per-pipeline-rank 2"
_TP2, _TP4 = "--world-size 2 --tensor-model-parallel-size 2", "--world-size 4 --tensor-model-parallel-size 4"
_CP2 = "--world-size 2 --context-parallel-size 2 --attention-dropout 0"
_EXPERTS = "--disable-bias-linear --num-experts 8"
_MIDDLE = "--decoder-first-pipeline-num-layers"
_LATENTS = "--position-embedding-type rope --multi-latent-attention"
_INDEXED = (
    f"{_LATENTS} --attention-dropout 0 --q-lora-rank 16 --experimental-attention-variant dsa --dsa-indexer-n-heads 4 "
    "--dsa-indexer-head-dim 64 --dsa-indexer-topk 8"
)
_TEXT = "--sample-interval 5 --sample-prompts README.md --tokenizer-type ByteTokenizer"
_DELTA = (
    "--position-embedding-type rope --normalization RMSNorm --disable-bias-linear --experimental-attention-variant "
    "gated_delta_net --linear-attention-freq"
)
_CONVOLUTIONS = "--position-embedding-type rope --full-attn-idxs"
_LETTERS = "--num-layers 8 --position-embedding-type none --mamba-num-groups 2 --hybrid-layer-pattern"
_SCANS = "--position-embedding-type none --hybrid-layer-pattern S-S-S-S*"
_FSDP = "--world-size 4 --use-megatron-fsdp --data-parallel-sharding-strategy"
_FULL = "--recompute-granularity full --recompute-method"
_LIST = "--recompute-granularity selective --recompute-modules"
_FP8 = "--bf16 --fp8-format hybrid --fp8-recipe"
_LAYOUT = "--pipeline-model-parallel-layout"
_WSD = "--lr-decay-style WSD --lr-wsd-decay-iters"
_VALID = "--mock-data=false --tokenizer-type ByteTokenizer --train-data-path a --valid-data-path b c"

_ONE_MISTAKE, _IN_SAMPLES = "one mistake", "a run given in samples"

NEAR: dict[str, tuple[str, ...]] = {
    "gated delta rules": (
        f"{_DELTA} 4",
        _DELTA.removesuffix(" --linear-attention-freq"),
        f"{_DELTA} 1",
        f"{_DELTA} [0]*8",
        f"{_DELTA} [1]*7",
        f"{_DELTA} 2 --normalization LayerNorm",
        f"{_DELTA} 2 --disable-bias-linear=false",
        f"{_DELTA} 2 --linear-num-value-heads 24",
        f"{_DELTA} 2 --linear-num-key-heads 2 --linear-num-value-heads 3",
        f"{_TP2} {_DELTA} 2 --linear-num-key-heads 3 --linear-num-value-heads 3",
        f"{_CP2} {_DELTA} 2 --seq-length 16 --linear-conv-kernel-dim 5",
        f"{_CP2} {_DELTA} 2 --seq-length 16 --linear-conv-kernel-dim 6",
        f"{_DELTA} 2 --bf16 --fp8-format hybrid --attention-dropout 0",
        "--linear-attention-freq 4 --linear-num-key-heads 8",
    ),
    "gated short convolutions": (
        f"{_CONVOLUTIONS} 2 5",
        f"{_CONVOLUTIONS} 2 8",
        f"{_CONVOLUTIONS} -1 2",
        f"{_CONVOLUTIONS} 0 1 2 3 4 5 6 7",
        f"{_CONVOLUTIONS} 2 --hybrid-layer-pattern C-*-C-C-",
        f"{_CONVOLUTIONS} 2 --experimental-attention-variant kda --linear-attention-freq 2 --disable-bias-linear",
        f"{_CP2} {_CONVOLUTIONS} 2 --seq-length 16 --conv-l-cache 5",
        f"{_CP2} {_CONVOLUTIONS} 2 --seq-length 16 --conv-l-cache 6",
        f"{_CONVOLUTIONS} 2 --bf16 --fp8-format hybrid --attention-dropout 0",
        "--conv-l-cache 4 --conv-bias",
    ),
    "layers of letters": (
        *(
            f"{_LETTERS} {letters}"
            for letters in ("M-M-M-M*", "M-M-M-M", "M-M-M-MD", "M-M-M-M*/M-", "M-M-M-M*/M-/M*", "M-M-M-ME", "M-M-|M-M*")
        ),
        f"{_PP2} {_LETTERS} M-M-|M-M*",
        f"{_LETTERS} M-M-M-M*/M-/M- --mtp-num-layers 1",
        f"{_LETTERS} M-M-M-M*/M- --mtp-hybrid-override-pattern M*",
        f"{_LETTERS} M-M-M-M* --mtp-hybrid-override-pattern M*",
        f"{_LETTERS} M-M-M-M* --mtp-num-layers 2 --mtp-hybrid-override-pattern M*G",
        f"{_LETTERS} M-M-M-M* --mtp-num-layers 2",
        "--mtp-num-layers 2 --mtp-hybrid-override-pattern M",
        f"{_LETTERS} '|'",
        f"{_LETTERS} M-M-M-ME {_EXPERTS}",
        f"{_LETTERS} M-M-M-M* {_EXPERTS}",
        f"{_LETTERS} M-M-M-M* --multi-latent-attention --position-embedding-type rope",
        f"{_LETTERS} M-M-M-M+ --position-embedding-type rope",
        f"{_LETTERS} M-M-M-M* --linear-attention-freq 2 --parallel-residual one-norm --mtp-num-layers 1",
        f"{_LETTERS} M-M-M-B* --multi-latent-attention --position-embedding-type rope",
        f"{_LETTERS} M-M-M-B* --mixer-multipliers 2 1 --mamba-multipliers 1 2 1 2 1 --swiglu --mlp-multipliers 2 1",
        f"{_LETTERS} M-M-M-M* --mixer-multipliers 2 1",
        f"{_LETTERS} B-B-B-B* --mixer-multipliers 2",
        f"{_LETTERS} B-B-B-B* --mixer-multipliers 2 0",
        f"{_LETTERS} *-*-*-*- --mamba-multipliers 1 1 1 1 2",
        f"{_LETTERS} B-B-B-B* --bf16 --fp8-format hybrid --attention-dropout 0",
        f"{_LETTERS} M-M-M-M* --mamba-head-dim 96",
        f"{_LETTERS} M-M-M-M* --mamba-num-heads 3",
        f"{_LETTERS} M-M-M-M* --mamba-head-dim 256",
        f"{_TP4} {_LETTERS} M-M-M-M*",
        f"{_TP2} {_LETTERS} M-M-M-M*",
        f"{_CP2} {_LETTERS} M-M-M-M* --seq-length 16 --linear-conv-kernel-dim 5",
        f"{_CP2} {_LETTERS} M-M-M-M* --seq-length 16 --linear-conv-kernel-dim 6",
        f"{_LETTERS} M-M-M-M* --bf16 --fp8-format hybrid --attention-dropout 0",
        f"{_LETTERS} M-M-M-M* --transformer-impl transformer_engine",
        f"{_LETTERS} M-M-M-M* --recurrence-kernels fla --mamba-state-dim 63",
        f"{_LETTERS} M-M-M-M* --recurrence-kernels fla --mamba-state-dim 512 --bf16",
        "--mamba-state-dim 64 --mamba-num-heads 8",
    ),
    "selective scans": (
        _SCANS,
        f"{_TP4} {_SCANS} --scan-channels 90",
        f"{_TP2} {_SCANS} --scan-channels 90",
        f"{_CP2} {_SCANS} --seq-length 16 --scan-conv-kernel-dim 5",
        f"{_CP2} {_SCANS} --seq-length 16 --scan-conv-kernel-dim 6",
        f"{_SCANS} --bf16 --fp8-format hybrid --attention-dropout 0",
        "--scan-state-dim 4 --scan-bias",
    ),
    "context": (
        "--cp-comm-type p2p a2a all_gather p2p a2a all_gather p2p p2p",
        f"{_CP2} --cp-comm-type a2a a2a a2a p2p a2a a2a a2a a2a",
        f"{_CP2} --seq-length 62",
        f"{_CP2} --seq-length 60",
        "--world-size 8 --tensor-model-parallel-size 4 --context-parallel-size 2 --seq-length 12 --attention-dropout 0",
        *(
            "--world-size 8 --tensor-model-parallel-size 4 --sequence-parallel --context-parallel-size 2 "
            f"--seq-length {length} --attention-dropout 0"
            for length in (8, 12, 16)
        ),
        *(
            f"--world-size 4 --context-parallel-size 2 --tensor-model-parallel-size 2 --cp-comm-type a2a {heads}"
            for heads in (
                "--group-query-attention --num-query-groups 4",
                "--group-query-attention --num-query-groups 2",
                "--num-attention-heads 6 --hidden-size 96",
            )
        ),
        "--world-size 4 --context-parallel-size 4 --cp-comm-type a2a --num-attention-heads 6 --hidden-size 96",
        "--world-size 1 --cp-comm-type a2a --group-query-attention --num-query-groups 1",
        f"{_CP2} --attention-dropout 0.1",
        f"{_CP2} --attention-dropout 0.1 --cp-comm-type a2a",
        f"{_CP2} --attention-dropout 0.1 --cp-comm-type a2a a2a a2a a2a a2a a2a a2a all_gather",
        "--reset-attention-mask --attention-dropout 0 --cp-comm-type p2p",
        f"{_CP2} --reset-attention-mask --cp-comm-type all_gather",
        f"{_CP2} --reset-attention-mask --cp-comm-type a2a",
        f"{_CP2} --reset-attention-mask --cp-comm-type a2a a2a a2a a2a all_gather all_gather all_gather all_gather",
        f"{_CP2} --reset-attention-mask --cp-comm-type a2a a2a a2a a2a a2a a2a a2a p2p",
    ),
    "FP8": (
        f"{_FP8} blockwise --seq-length 128",
        f"{_FP8} blockwise --seq-length 64 --micro-batch-size 2",
        f"{_FP8} blockwise --seq-length 96",
        f"{_FP8} blockwise --seq-length 96 --micro-batch-size 4",
        f"{_FP8} blockwise --seq-length 256 {_CP2}",
        f"{_FP8} blockwise --seq-length 512 {_CP2}",
        f"{_FP8} rowwise --seq-length 40 {_CP2}",
        f"{_FP8} rowwise --seq-length 32 {_CP2}",
        f"{_FP8} rowwise --seq-length 24",
        f"{_FP8} rowwise --hidden-size 72 --num-attention-heads 9 --kv-channels 8",
        f"{_FP8} rowwise {_TP4} --ffn-hidden-size 352",
        f"{_FP8} blockwise --seq-length 128 {_TP2} --hidden-size 256",
        f"{_FP8} blockwise --seq-length 128 {_TP2} --ffn-hidden-size 768",
        f"{_FP8} rowwise --num-experts 8 --disable-bias-linear",
        f"{_FP8} mxfp8 --num-experts 8 --disable-bias-linear --seq-length 128 {_CP2} --expert-model-parallel-size 2",
        f"{_FP8} rowwise --num-experts 8 --disable-bias-linear --seq-length 128 {_CP2} --expert-model-parallel-size 2",
        f"{_FP8} mxfp8 --seq-length 48",
        f"{_FP8} mxfp8 --seq-length 32",
        f"{_FP8} rowwise --seq-length 32 --fp4-format e2m1",
        "--bf16 --fp4-format e2m1 --seq-length 48",
        "--bf16 --fp4-format e2m1 --fp4-recipe mxfp4 --seq-length 32",
        "--bf16 --fp4-format e2m1 --seq-length 32 --hidden-size 272 --num-attention-heads 17 --kv-channels 16",
        f"{_FP8} rowwise --first-last-layers-bf16 --num-layers-at-start-in-bf16 4 --num-layers-at-end-in-bf16 3",
        f"{_FP8} rowwise --first-last-layers-bf16 --num-layers-at-start-in-bf16 4 --num-layers-at-end-in-bf16 4",
    ),
    "tasks and samples": (
        *(f"{_TEXT} --sample-tokens {tokens}" for tokens in (63, 64)),
        f"{_TEXT} --sample-tokens 100 --position-embedding-type rope",
        f"{_TEXT} --max-position-embeddings 1 --seq-length 1",
        "--sample-interval 5 --sample-prompts README.md --tokenizer-type NullTokenizer",
        "--sample-interval 5 --sample-prompts README.md --transformer-impl transformer_engine --eval-tasks README.md",
    ),
    "the model": (
        "--num-attention-heads 9 --hidden-size 100",
        "--num-attention-heads 60 --hidden-size 100",
        "--num-attention-heads 9 --hidden-size 100 --kv-channels 12",
        f"{_TP2} --num-attention-heads 5 --hidden-size 80",
        "--world-size 4 --tensor-model-parallel-size 4 --num-attention-heads 6 --hidden-size 96 "
        "--context-parallel-size 1",
        "--world-size 12 --tensor-model-parallel-size 4 --num-attention-heads 6 --hidden-size 96 "
        "--context-parallel-size 3 "
        "--seq-length 96 --attention-dropout 0",
        f"{_TP4} --group-query-attention --num-query-groups 2",
        f"{_TP4} --group-query-attention --num-query-groups 8",
        "--world-size 6 --tensor-model-parallel-size 6 --num-attention-heads 12 --hidden-size 96 "
        "--group-query-attention "
        "--num-query-groups 4 --ffn-hidden-size 384",
        "--num-attention-heads 9 --hidden-size 72 --group-query-attention --num-query-groups 2",
        "--num-query-groups 8",
        *(
            f"--position-embedding-type rope --rotary-percent {share} --kv-channels {channels}"
            for share, channels in ((1, 16), (1.1, 16), (0.5, 16), (0.5, 14), (0.05, 16))
        ),
        f"{_TP4} --ffn-hidden-size 514",
        f"{_TP4} --ffn-hidden-size 2",
        "--squared-relu --openai-gelu",
        "--max-position-embeddings 63",
        *(f"--position-embedding-offset {rows}" for rows in (-1, 0, 2)),
        "--max-position-embeddings 64",
        "--max-position-embeddings 63 --position-embedding-type rope",
        "--attention-chunk-size 63 --position-embedding-type rope",
        "--attention-chunk-size 64 --position-embedding-type rope",
        "--use-rope-scaling --position-embedding-type rope --rope-scaling-low-freq-factor 4",
        *(f"{_TP2} --padded-vocab-size {rows}" for rows in (999, 1000, 1001)),
    ),
    "experts": (
        f"{_EXPERTS} --moe-aux-loss-coeff 0 --moe-z-loss-coeff 0",
        f"{_EXPERTS} --moe-aux-loss-coeff 0 --moe-z-loss-coeff 1e-5",
        *(f"{_EXPERTS} --moe-expert-capacity-factor {factor}" for factor in (0, 0.01)),
        f"{_EXPERTS} --moe-router-load-balancing-type sinkhorn --moe-expert-capacity-factor 1",
        f"{_EXPERTS} --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.01 0.02",
        f"{_EXPERTS} --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0",
        "--world-size 2 --expert-model-parallel-size 1",
        "--moe-ffn-hidden-size 64 --moe-shared-expert-intermediate-size 64 --moe-aux-loss-coeff 0.1 "
        "--moe-z-loss-coeff 0.1",
        "--moe-aux-loss-coeff 0",
        *(
            f"{_EXPERTS} --moe-router-topk 4 {how}"
            for how in (
                "--moe-router-num-groups 4 --moe-router-group-topk 2",
                "--moe-router-num-groups 4 --moe-router-group-topk 1",
                "--moe-router-num-groups 4 --moe-router-group-topk 5",
                "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-group-scores 3",
                "--moe-router-num-groups 3 --moe-router-group-topk 2",
                "--moe-router-group-topk 2",
                "--moe-router-group-scores 2",
            )
        ),
        f"{_EXPERTS} --moe-router-topk 8",
        f"{_EXPERTS} --moe-router-topk 9",
        *(
            f"{_EXPERTS} --moe-router-topk 1 {how}"
            for how in (
                "",
                "--moe-router-score-function sigmoid",
                "--moe-router-load-balancing-type sinkhorn",
                "--moe-router-pre-softmax",
            )
        ),
        *(
            f"--world-size 8 --pipeline-model-parallel-size 2 {_EXPERTS} --sequence-parallel {ranks}"
            for ranks in (
                "--expert-model-parallel-size 4",
                "--expert-model-parallel-size 8",
                "--tensor-model-parallel-size 2 --expert-model-parallel-size 4",
                "--tensor-model-parallel-size 2 --expert-model-parallel-size 2",
                "--tensor-model-parallel-size 2 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1",
            )
        ),
        f"--world-size 4 --tensor-model-parallel-size 1 {_EXPERTS} --expert-tensor-parallel-size 3",
        f"{_TP2} {_EXPERTS} --sequence-parallel --moe-ffn-hidden-size 63 --expert-tensor-parallel-size 1",
        f"{_TP2} {_EXPERTS} --sequence-parallel --moe-ffn-hidden-size 63",
        *(
            f"--world-size 8 --pipeline-model-parallel-size 2 {_EXPERTS} {how}"
            for how in (
                "--expert-model-parallel-size 2",
                "--use-tp-pp-dp-mapping",
                "--use-tp-pp-dp-mapping --tensor-model-parallel-size 2 --sequence-parallel",
            )
        ),
        f"--world-size 8 {_EXPERTS} --expert-model-parallel-size 2 --use-tp-pp-dp-mapping",
    ),
    "latents": (
        f"{_LATENTS} --qk-pos-emb-head-dim 8",
        f"{_LATENTS} --qk-pos-emb-head-dim 7",
        f"{_LATENTS} --beta-fast 2 --beta-slow 2",
        f"{_LATENTS} --beta-fast 1 --beta-slow 2",
        f"{_LATENTS} --rotary-base 1.01",
        f"{_LATENTS} --rotary-base 1",
        f"{_LATENTS} --rope-type rope --rotary-base 1 --beta-fast 1 --beta-slow 2",
        f"{_LATENTS} --softmax-scale 0.1 --no-rope-freq 2",
        f"{_LATENTS} --bf16 --fp8-format hybrid",
        f"{_LATENTS} --transformer-impl transformer_engine",
        f"{_LATENTS} --group-query-attention --num-query-groups 2",
        "--rope-type yarn",
        "--q-lora-rank 8 --rope-type rope",
    ),
    "chosen keys": (
        _INDEXED,
        *(_INDEXED.replace(f"--{flag}", "--seed") for flag in ("q-lora-rank", "dsa-indexer-n-heads")),
        *(_INDEXED.replace(f"--{flag}", "--seed") for flag in ("dsa-indexer-head-dim", "dsa-indexer-topk")),
        f"{_INDEXED} --dsa-indexer-head-dim 63",
        f"{_INDEXED} --multi-latent-attention=false",
        f"{_INDEXED} --position-embedding-type none",
        f"{_INDEXED} --window-size 7,0",
        f"{_INDEXED} --attention-dropout 0.1",
        f"{_INDEXED} --qk-clip",
        f"{_INDEXED} --log-max-attention-logit",
        *(f"{_INDEXED} {_CP2} --cp-comm-type {exchange}" for exchange in ("all_gather", "p2p", "a2a")),
        f"{_INDEXED} --bf16 --fp8-format hybrid",
        f"{_INDEXED} --transformer-impl transformer_engine",
        f"{_DELTA} 2 --dsa-indexer-topk 8 --dsa-indexer-warmup",
        f"{_DELTA} 2 --recurrence-kernels fla --deterministic-mode --linear-key-head-dim 256",
        f"{_DELTA} 2 --recurrence-kernels fla --linear-key-head-dim 257 --tf32",
        f"{_DELTA} 2 --recurrence-kernels fla --linear-key-head-dim 258 --bf16",
        "--dsa-indexer-n-heads 4",
    ),
    "stages": (
        f"{_PP2} --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --num-layers 10",
        f"{_PP2} {_LAYOUT} Et*4|t*4L",
        f"{_PP2} {_LAYOUT} Et*4|t*4L {_MIDDLE} 4 --account-for-loss-in-pipeline-split",
        f"{_PP2} {_LAYOUT} Et*4L|t*4",
        f"{_PP2} {_LAYOUT} t*4|Et*4L",
        f"{_PP2} {_LAYOUT} EEt*4|t*4L",
        f"{_PP2} {_LAYOUT} Et*5|t*4L",
        f"{_PP2} {_LAYOUT} Et*2|t*2|t*2|t*2L --global-batch-size 2",
        f"{_PP2} {_LAYOUT} Et*2|t*2|t*2|t*2L --global-batch-size 2 {_VPP2}",
        f"{_PP2} {_LAYOUT} |Et*4|t*4|L --global-batch-size 2",
        f"{_PP2} {_LAYOUT} x --num-layers 2",
        f"{_PP2} {_LAYOUT} x --num-layers 1",
        f"{_PP4} {_LAYOUT} Et|t|tL --num-layers 3",
        f"{_PP4} {_LAYOUT} Et*4|t*3L --num-layers 7",
        f"{_PP4} {_LAYOUT} Et*4|t*3|tL",
        "--world-size 3 --pipeline-model-parallel-size 3 --num-layers 8",
        "--world-size 3 --pipeline-model-parallel-size 3 --num-layers 8 --account-for-loss-in-pipeline-split",
        "--world-size 3 --pipeline-model-parallel-size 3 --num-layers 7 --account-for-embedding-in-pipeline-split",
        "--world-size 3 --pipeline-model-parallel-size 3 --num-layers 2",
        f"--world-size 6 --pipeline-model-parallel-size 3 --num-layers 20 {_VPP2} --global-batch-size 6",
        "--world-size 12 --pipeline-model-parallel-size 4 --context-parallel-size 3 --num-layers 9 --seq-length 96 "
        "--attention-dropout 0",
        *(f"{_PP4} {_MIDDLE} {first}" for first in (1, 2, 5, 8)),
        *(f"{_PP4} --decoder-last-pipeline-num-layers {last}" for last in (2, 3)),
        *(f"{_PP4} {_MIDDLE} 3 --decoder-last-pipeline-num-layers {last}" for last in (1, 2, 3, 5)),
        f"{_PP4} --num-layers 15 {_MIDDLE} 3 --decoder-last-pipeline-num-layers 3 --num-layers 13",
        f"{_PP4} --num-layers 22 {_MIDDLE} 3 --decoder-last-pipeline-num-layers 4 {_VPP2} --global-batch-size 4",
        f"{_PP2} {_MIDDLE} 9 --decoder-last-pipeline-num-layers 1",
        f"{_PP2} {_MIDDLE} 6 --decoder-last-pipeline-num-layers 2 {_VPP2} --global-batch-size 2",
        f"{_PP2} {_MIDDLE} 6 {_VPP2} --global-batch-size 2",
        f"{_PP2} --num-layers-per-virtual-pipeline-stage 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--global-batch-size 2",
        f"--world-size 4 --pipeline-model-parallel-size 2 {_VPP2} --no-overlap-p2p-communication --global-batch-size 4",
        f"{_PP4} {_VPP2} --no-overlap-p2p-communication --global-batch-size 4",
        f"{_PP2} {_VPP2} --overlap-grad-reduce --global-batch-size 2",
        f"--world-size 4 {_VPP2} --global-batch-size 3 --micro-batch-size 2",
        "--world-size 2 --num-layers-per-virtual-pipeline-stage 2 --global-batch-size 6",
        *(
            f"{_PP4} {_VPP2} --global-batch-size {batch} --microbatch-group-size-per-virtual-pipeline-stage {group}"
            for batch, group in ((8, 3), (8, 4), (10, 6), (9, 6), (5, 6), (12, 6), (6, 6))
        ),
        *(f"{_PP4} {_VPP2} --global-batch-size {batch}" for batch in (4, 6, 8)),
    ),
    "profiling": (
        "--profile-step-start 5 --profile-step-end 5",
        "--profile --use-pytorch-profiler --profile-step-start=-1 --profile-step-end 3",
        "--profile-ranks 0 1 --world-size 2",
        "--profile-ranks 0 -1 --world-size 2",
        "--profile --use-pytorch-profiler --pytorch-profiler-collect-callstack --pytorch-profiler-collect-chakra",
        "--profile --pytorch-profiler-collect-callstack --pytorch-profiler-collect-chakra",
        "--world-size 4 --use-distributed-optimizer --num-distributed-optimizer-instances 2 --log-straggler",
        "--world-size 4 --use-distributed-optimizer --log-straggler --log-communication-share",
    ),
    "ranks": (
        "--world-size 6 --tensor-model-parallel-size 4",
        "--world-size 6 --pipeline-model-parallel-size 4 --context-parallel-size 1",
        "--world-size 12 --tensor-model-parallel-size 8 --context-parallel-size 2 --attention-dropout 0",
        f"{_TP2} --seq-length 63",
        f"{_TP2} --sequence-parallel-keep-gathered --torch-compile --gradient-accumulation-fusion --bf16 "
        "--fp8-format hybrid --hidden-dropout 0 --attention-dropout 0 --sequence-parallel",
        f"{_TP2} --tp-comm-overlap",
        f"{_TP2} --tp-comm-overlap --sequence-parallel",
        f"{_TP2} --tp-comm-overlap --sequence-parallel --sequence-parallel-keep-gathered --torch-compile",
        "--world-size 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule zbv "
        "--num-virtual-stages-per-pipeline-rank 2 --sequence-parallel --tp-comm-overlap --num-layers 4",
        "--world-size 2 --overlap-param-gather --overlap-grad-reduce",
        "--world-size 2 --overlap-param-gather --overlap-grad-reduce --use-distributed-optimizer",
        "--use-distributed-optimizer --optimizer lion",
        "--distributed-timeout-minutes 0.1",
    ),
    "data and checkpoints": (
        "--mock-data=false",
        "--mock-data=false --vocab-size 5 --test-data-path a",
        "--mock-data=false --tokenizer-type ByteTokenizer --data-path a --test-data-path b",
        "--train-data-path a",
        "--data-args-path a",
        "--per-split-data-args-path a",
        *(f"{_VALID} --multiple-validation-sets --validation-set-names {names}" for names in ("x y", "x x", "x y z")),
        "--mock-data=false --tokenizer-type ByteTokenizer --data-path a b --multiple-validation-sets "
        "--validation-set-names x y",
        *(f"--split {shares}" for shares in ("1", "1,0,0", "1,1,1,1", "1,-1", "1,inf", "0,1,1", "1,nan", ",")),
        "--mock-data=false --tokenizer-type ByteTokenizer --data-path a",
        *(f"--tokenizer-type {kind}" for kind in ("NullTokenizer", "GPT2BPETokenizer", "SentencePieceTokenizer")),
        *(f"--save a --save-interval 10 --save-retain-interval {retain}" for retain in (5, 10, 20, 11)),
        "--save a --save-retain-interval 5",
        "--ckpt-step 0",
        "--ckpt-step 0 --load a",
        "--keep-last-checkpoints 1 --save a",
        "--load a --exit-on-missing-checkpoint",
        *(f"--elastic --global-batch-size 8 {folders}" for folders in ("--save a", "--load a", "--save a --load b")),
        "--non-persistent-save-interval 10 --non-persistent-ckpt-type local "
        "--non-persistent-local-ckpt-dir a --save b "
        "--replication --replication-jump 1",
        "--non-persistent-save-interval 10 --non-persistent-ckpt-type local "
        "--non-persistent-local-ckpt-dir a --save b "
        "--replication-jump 1",
        "--wandb-project p --mlflow-experiment e --comet-project c --trackio-project t",
        *(
            f"--torch-compile {_TP2} --hidden-dropout {one} --attention-dropout {two}"
            for one, two in ((0, 0.1), (0, 0))
        ),
        "--torch-compile --hidden-dropout 0.1",
    ),
    "what data-parallel ranks divide": (
        "--world-size 2 --use-torch-fsdp2 --use-distributed-optimizer --overlap-grad-reduce",
        "--world-size 2 --use-torch-fsdp2 --ddp-bucket-size 0",
        "--ddp-bucket-size 1",
        "--torch-fsdp2-no-reshard-after-forward --torch-fsdp2-cpu-offload",
        *(f"{_FSDP} {kind} --num-distributed-optimizer-instances 2" for kind in ("optim", "optim_grads_params")),
        *(f"{_FSDP} {kind} {_EXPERTS}" for kind in ("no_shard", "optim", "optim_grads")),
        f"{_FSDP} optim --pipeline-model-parallel-size 1 --optimizer lion",
        "--world-size 2 --optimizer muon --use-torch-fsdp2",
        "--world-size 2 --optimizer muon --use-torch-fsdp2 --torch-fsdp2-cpu-offload",
        "--optimizer muon --use-distributed-optimizer --optimizer-cpu-offload",
        "--optimizer adafactor --optimizer-cpu-offload",
        *(f"{_FSDP} {kind} --outer-dp-sharding-strategy optim" for kind in ("optim", "optim_grads_params")),
        f"{_FSDP} optim_grads_params --outer-dp-sharding-strategy optim --num-distributed-optimizer-instances 2",
        "--world-size 4 --use-distributed-optimizer --num-distributed-optimizer-instances 4",
        "--world-size 4 --use-distributed-optimizer --num-distributed-optimizer-instances 3",
        "--world-size 12 --use-distributed-optimizer --num-distributed-optimizer-instances 4 --disable-bias-linear "
        "--num-experts 12 --expert-model-parallel-size 6",
        "--world-size 12 --use-distributed-optimizer --num-distributed-optimizer-instances 4 --disable-bias-linear "
        "--num-experts 12 --expert-model-parallel-size 3",
        "--world-size 12 --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer "
        "--num-distributed-optimizer-instances 3 --disable-bias-linear --num-experts 12 --expert-model-parallel-size 3 "
        "--expert-tensor-parallel-size 1",
        "--world-size 2 --use-torch-fsdp2 --check-weight-hash-across-dp-replicas-interval 0",
    ),
    "batches": (
        "--train-samples 5 --train-iters 5",
        *(f"--world-size 4 --micro-batch-size 2 --global-batch-size {batch}" for batch in (4, 8, 20)),
        "--world-size 4 --tensor-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 6",
        *(
            f"--rampup-batch-size {ramp} --global-batch-size {batch}"
            for ramp, batch in (
                ("1 1 100", 10001),
                ("1 1 100", 10002),
                ("1 1 100", 40001),
                ("15 1 100", 16),
                ("16 1 100", 16),
                ("4 0 100", 16),
                ("4 6 100", 16),
            )
        ),
        *(
            f"--world-size 4 --global-batch-size 16 --rampup-batch-size {ramp} 100"
            for ramp in ("4 4", "8 2", "2 14", "4 5")
        ),
        *(
            f"{_PP2} {_VPP2} --microbatch-group-size-per-virtual-pipeline-stage 4 --global-batch-size 8 "
            f"--rampup-batch-size {ramp} 100"
            for ramp in ("4 4", "2 2")
        ),
        "--step-batch-size-schedule '0:8 64K:16' --global-batch-size 16",
        "--step-batch-size-schedule '0:8 64K:16' --rampup-batch-size 8 8 100",
        f"{_PP2} {_VPP2} --step-batch-size-schedule '0:2 64K:5 128K:7 256K:16'",
        *(
            f"--world-size 4 --tensor-model-parallel-size 2 --eval-micro-batch-size 2 --eval-global-batch-size {batch}"
            for batch in (4, 6)
        ),
        f"{_PP2} {_VPP2} --global-batch-size 2 --eval-global-batch-size 3",
        *(
            f"--skip-train {evaluates}"
            for evaluates in (
                "",
                "--eval-interval 0",
                "--eval-iters 0 --full-validation",
                "--eval-interval 0 --eval-iters 0",
                "--eval-interval 0 --full-validation",
            )
        ),
        "--grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32",
        "--optimizer sgd --exp-avg-dtype fp16 --exp-avg-sq-dtype bf16",
        "--optimizer sgd --exp-avg-dtype fp32",
        "--muon-momentum 0.8 --muon-nesterov --lion-beta1 0.9",
        "--optimizer muon --muon-momentum 0.8 --muon-nesterov --adam-beta2 0.95",
        "--optimizer muon --muon-num-ns-steps 0",
        "--optimizer adaptive_muon --muon-momentum 0.8 --adaptive-muon-beta2 1 --adaptive-muon-eps 0",
        "--optimizer adaptive_muon --adaptive-muon-beta2 0 --adaptive-muon-moment2-method namo",
        "--optimizer muon --adaptive-muon-beta2 0.9 --adafactor-clip 2",
        "--optimizer adafactor --adafactor-beta2-decay 0 --adafactor-eps2 0 --adafactor-clip 1",
        "--optimizer adafactor --adafactor-beta2-decay 0.1 --adafactor-eps2=-1 --adafactor-clip 0.9",
        "--optimizer adafactor --use-mup",
        *(f"--lr-group {group}" for group in ("decoder.layers.7.*=0.5", "decoder.layers.8.*=0.5", "*=0", "*=-1", "*")),
        "--disable-bias-linear --num-experts 4 --weight-decay-group *.experts.1.*=2",
        "--disable-bias-linear --num-experts 4 --weight-decay-group *.experts.*.linear_fc1.*=2 *norm*=x",
        "--use-mup --mup-base-hidden-size 32 --mup-base-num-layers 4 --mup-base-head-dim 16",
        "--use-mup --mup-base-hidden-size 0 --mup-base-num-layers 0",
        "--use-mup --init-method-xavier-uniform",
        "--use-mup --mup-output-mult 0.5 --logits-multiplier 0.25 --mup-embedding-mult 2",
        "--use-mup --mup-base-num-layers 4 --norm-position after",
        "--ema-decay 1",
        "--ema-decay 0.99 --eval-ema --optimizer-cpu-offload",
        "--optimizer schedule_free --lr-decay-style constant",
        "--optimizer schedule_free --ema-decay 0.9 --optimizer-cpu-offload --lr-decay-style linear",
        "--ademamix-beta3 1 --ademamix-alpha 1 --optimizer ademamix",
        "--optimizer sgd --adam-beta1 0.8 --ademamix-warmup 5",
        "--min-loss-scale 4 --initial-loss-scale 4",
        "--min-loss-scale 0 --initial-loss-scale 4",
        "--loss-scale=-1",
        "--loss-scale 0.5",
        *(
            f"{_FULL} {method} --recompute-num-layers {n}"
            for method, n in (("block", 8), ("uniform", 9), ("uniform", 1))
        ),
        *(f"{_PP4} {_MIDDLE} 2 {_FULL} block --recompute-num-layers {n}" for n in (2, 3)),
        *(f"{_PP4} {_MIDDLE} 5 {_FULL} block --recompute-num-layers {n}" for n in (5, 6)),
        f"{_PP2} {_FULL} uniform --recompute-num-layers 5",
        f"{_PP2} --num-layers 2 {_FULL} uniform --recompute-num-layers 2",
        f"{_FULL} uniform",
        "--recompute-method uniform",
        "--recompute-granularity selective --recompute-activations",
        *(
            f"{_LIST} {words}"
            for words in (
                "core_attn mlp layernorm",
                "layernorm --transformer-impl transformer_engine",
                "mlp --norm-position after",
                "layernorm core_attn --norm-position after",
                "mlp --torch-compile --hidden-dropout 0 --attention-dropout 0",
                "a b",
            )
        ),
    ),
    "curves": (
        *(f"--min-lr {lowest}" for lowest in ("1e-3", "1.1e-3", "-1")),
        *(f"--lr-warmup-init {first}" for first in ("1e-3", "1.1e-3", "-1")),
        *(
            f"--decoupled-lr {peak} {lowest}"
            for peak, lowest in (
                ("1e-4", "--min-lr 1e-4"),
                ("1e-4", "--min-lr 2e-4"),
                ("1e-4", "--min-lr 2e-4 --decoupled-min-lr 0"),
                ("1e-4", "--decoupled-min-lr 1e-4"),
                ("1e-4", "--lr-warmup-init 1e-4"),
                ("1e-4", "--lr-warmup-init 2e-4"),
            )
        ),
        "--lr-scale-rule sqrt --lr-scale-base-batch-size 256",
        "--lr-scale-rule sqrt --global-batch-size 48",
        *(f"--{curve}-samples 5" for curve in ("lr-decay", "lr-warmup", "lr-wsd-decay")),
        *(f"--lr-warmup-iters {warmup}" for warmup in (0, 99, 100, 101, -1)),
        *(f"--lr-decay-iters 50 --lr-warmup-iters {warmup}" for warmup in (49, 50)),
        *(f"--lr-warmup-fraction {share}" for share in (0, 0.99, 1, -0.1)),
        *(f"{_WSD} {steps}" for steps in (0, 1, 100, 101)),
        f"{_WSD} 50 --lr-decay-iters 49",
        *(f"--lr-decay-style power --lr-power-scale {scale}" for scale in (0.001, 0)),
        *(f"--lr-decay-style power --lr-power-exponent {exponent}" for exponent in (-0.51, 0, 0.1)),
        "--optimizer schedule_free --lr-decay-style power",
        "--lr-decay-style WSD --lr-decay-iters 4",
        *(
            f"--weight-decay-incr-style cosine --start-weight-decay {start} --end-weight-decay {end}"
            for start, end in ((0, 0), (0.1, 0.1), (-0.1, 0.1), (0.1, -0.1), (0.2, 0.1))
        ),
        "--weight-decay-incr-style linear --start-weight-decay 0",
        "--end-weight-decay 0",
        *(f"--optimizer-cpu-offload --optimizer-offload-fraction {share}" for share in (1, 0.01, 0, 1.01)),
        "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads --no-pin-cpu-params",
        "--overlap-cpu-optimizer-d2h-h2d",
        "--no-pin-cpu-grads",
        "--use-torch-optimizer-for-cpu-offload --optimizer-offload-fraction 0.99",
        "--world-size 2 --use-torch-fsdp2 --torch-fsdp2-cpu-offload --no-pin-cpu-params --exp-avg-dtype bf16",
    ),
    "operations": (
        "--linear-cross-entropy --bf16",
        f"{_FSDP} optim --gradient-accumulation-fusion --linear-cross-entropy",
        "--world-size 2 --use-torch-fsdp2 --gradient-accumulation-fusion --torch-compile --hidden-dropout 0 "
        "--attention-dropout 0",
    ),
    _IN_SAMPLES: (
        "--lr-warmup-samples 5 --lr-decay-samples 50",
        "--lr-warmup-samples 50 --lr-decay-samples 50",
        "--lr-warmup-samples 1000",
        "--lr-warmup-samples 999",
        "--lr-warmup-iters 5 --lr-decay-iters 5 --lr-wsd-decay-iters 5",
        "--lr-decay-style WSD",
        "--lr-decay-style WSD --lr-wsd-decay-samples 1000",
        "--lr-decay-style WSD --lr-wsd-decay-samples 1001",
        "--lr-wsd-decay-samples 5",
    ),
}
"""Flags that are added to the launch of docs/errors.md, by subject."""

SUBJECTS = (_ONE_MISTAKE, *NEAR)


def found(flags: str, facts: Facts | None = None, base: str = BASE) -> list[str]:
    """The problems of the base launch with these flags added."""
    facts = facts or Facts()
    return problems(resolve(parse(shlex.split(f"{base} {flags}")).values, facts), facts)


def answers(subject: str) -> str:
    """The launches of a subject, each with all of its problems."""
    base = BASE.replace("--train-iters 100", "--train-samples 1000") if subject == _IN_SAMPLES else BASE
    return "\n\n".join("\n".join(["> " + flags, *found(flags, base=base)]) for flags in _lines(subject))


def _lines(subject: str) -> Sequence[str]:
    return WRONG if subject == _ONE_MISTAKE else NEAR[subject]


def golden_text() -> str:
    return "\n".join(f"## {subject}\n\n{answers(subject)}\n" for subject in SUBJECTS)
