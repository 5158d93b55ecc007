"""Wrong command lines by what is wrong with them, each with flags that put it right: for docs/errors.md and tests."""

import re
from typing import NamedTuple


class Example(NamedTuple):
    flags: str
    right: str
    """Added after the flags, this makes them work, as the message says."""


BASE = (
    "--num-layers 8 --hidden-size 128 --num-attention-heads 8 --seq-length 64 --micro-batch-size 1 "
    "--lr 1e-3 --train-iters 100 --mock-data --vocab-size 1000 --device cpu --dry-run"
)
"""A launch that works; each example adds to it."""

_EXPERTS = "--disable-bias-linear"

EXAMPLES = {
    "Kernels of a package that is not installed": Example("--external-kernels apex", "--external-kernels none"),
    "Heads not divisible by the tensor-parallel size": Example(
        "--world-size 8 --num-attention-heads 6 --hidden-size 96 --tensor-model-parallel-size 4",
        "--tensor-model-parallel-size 2",
    ),
    "Query groups neither a multiple nor a divisor of the tensor-parallel size": Example(
        "--world-size 2 --num-attention-heads 12 --hidden-size 96 --group-query-attention --num-query-groups 3 "
        "--tensor-model-parallel-size 2",
        "--num-query-groups 4",
    ),
    "A type of Hugging Face that is not known": Example("--hf-model-type lama", "--hf-model-type llama"),
    "A share of documents that is none": Example("--fim-rate 1.5", "--fim-rate 0.5"),
    "Windows that look ahead": Example("--window-size 7,1 --attention-dropout 0", "--window-size 7,0"),
    "A base of layers with a window where there are none": Example(
        "--rotary-base-local 5 --attention-dropout 0", "--window-size 4095,0 --position-embedding-type rope"
    ),
    "Key/value heads of layers with a window where there are none": Example(
        "--num-query-groups-local 2 --attention-dropout 0", "--window-size 4095,0"
    ),
    "Factors of longrope that are missing": Example(
        "--position-embedding-type rope --kv-channels 4 --rope-type longrope --longrope-short-factor 1 2",
        "--longrope-long-factor 3 4",
    ),
    "Latents next to slopes": Example(
        "--multi-latent-attention --position-embedding-type alibi --attention-dropout 0",
        "--position-embedding-type rope",
    ),
    "A bound of gates without gates": Example("--activation-func-clamp-value 7", "--quick-geglu"),
    "A schedule for two model chunks of a rank that has one": Example(
        "--world-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule zbv",
        "--num-virtual-stages-per-pipeline-rank 2",
    ),
    "Layers without rotation in a model that rotates nothing": Example(
        "--no-rope-freq 4", "--position-embedding-type rope"
    ),
    "Gated delta rules in no layer": Example(
        "--experimental-attention-variant gated_delta_net --position-embedding-type rope --normalization RMSNorm "
        "--disable-bias-linear",
        "--linear-attention-freq 4",
    ),
    "A layer with attention after the last one": Example(
        "--position-embedding-type rope --full-attn-idxs 5 99", "--full-attn-idxs 5"
    ),
    "A pattern with more letters than layers": Example(
        "--hybrid-layer-pattern M-M-M-M-M* --mamba-num-groups 2", "--num-layers 10"
    ),
    "A depth with letters that no layer has": Example(
        "--position-embedding-type rope --hybrid-layer-pattern M-M-M-M* --mamba-num-groups 2 --mtp-num-layers 1 "
        "--mtp-hybrid-override-pattern E",
        "--mtp-hybrid-override-pattern '*'",
    ),
    "A layer of several depths computed anew where gradients are divided": Example(
        "--world-size 2 --position-embedding-type rope --mtp-num-layers 2 --mtp-use-repeated-layer --use-torch-fsdp2 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--recompute-method block",
    ),
    "A factor that a norm takes out again": Example(
        "--residual-multiplier 0.5 --norm-position after", "--residual-multiplier 1"
    ),
    "Parallel attention and MLP with norms after them": Example(
        "--parallel-residual one-norm --norm-position after", "--norm-position before"
    ),
    "Experts in no layer": Example(f"{_EXPERTS} --num-experts 8 --moe-layer-freq [0]*8", "--moe-layer-freq 1"),
    "Norms over the projection without norms of queries and keys": Example(
        "--normalization RMSNorm --qk-layernorm-over projection", "--qk-layernorm"
    ),
    "LayerNorm over the projection": Example(
        "--qk-layernorm --qk-layernorm-over projection", "--normalization RMSNorm"
    ),
    "Norms after attention and MLP, recomputed": Example(
        "--norm-position after --recompute-granularity selective --recompute-modules layernorm",
        "--recompute-modules core_attn",
    ),
    "A sequence that tensor-parallel ranks cannot share": Example(
        "--world-size 4 --tensor-model-parallel-size 4 --sequence-parallel --seq-length 66", "--seq-length 64"
    ),
    "Gathered inputs kept where nothing is gathered": Example(
        "--world-size 2 --tensor-model-parallel-size 2 --sequence-parallel-keep-gathered", "--sequence-parallel"
    ),
    "Products that overlap with nothing": Example(
        "--world-size 2 --tensor-model-parallel-size 2 --tp-comm-overlap", "--sequence-parallel"
    ),
    "Products that overlap and keep what they gather": Example(
        "--world-size 2 --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap "
        "--sequence-parallel-keep-gathered",
        "--sequence-parallel-keep-gathered=false",
    ),
    "Gathered inputs kept by a layer that is recomputed": Example(
        "--world-size 2 --tensor-model-parallel-size 2 --sequence-parallel --sequence-parallel-keep-gathered "
        "--recompute-granularity selective",
        "--sequence-parallel-keep-gathered=false",
    ),
    "Gathered inputs kept by Transformer Engine's layers": Example(
        "--world-size 2 --tensor-model-parallel-size 2 --sequence-parallel --sequence-parallel-keep-gathered "
        "--transformer-impl transformer_engine",
        "--transformer-impl local",
    ),
    "Parameter gathering without the distributed optimizer": Example(
        "--world-size 4 --overlap-param-gather", "--use-distributed-optimizer --overlap-grad-reduce"
    ),
    "A distributed optimizer with SGD": Example(
        "--world-size 4 --use-distributed-optimizer --optimizer sgd", "--optimizer adam"
    ),
    "NCCL between CPU processes": Example("--world-size 2 --distributed-backend nccl", "--distributed-backend gloo"),
    "Virtual stages that do not divide the layers of a stage": Example(
        "--world-size 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3 "
        "--global-batch-size 4",
        "--num-virtual-stages-per-pipeline-rank 2",
    ),
    "A batch that grows in too many phases": Example(
        "--rampup-batch-size 1 1 100000 --global-batch-size 100001", "--rampup-batch-size 1 10 100000"
    ),
    "A file to load checkpoints from": Example("--load /dev/null", "--load /dev"),
    "An old spelling that Megatron takes with rotary positions alone": Example(
        "--no-position-embedding", "--position-embedding-type rope"
    ),
    "Names for validation sets that are evaluated together": Example(
        "--validation-set-names wiki",
        "--multiple-validation-sets --mock-data=false --tokenizer-type ByteTokenizer --train-data-path EXISTING "
        "--valid-data-path EXISTING",
    ),
    "Layers that do not divide over the pipeline stages": Example(
        "--world-size 4 --num-layers 30 --pipeline-model-parallel-size 4", "--num-layers 28"
    ),
    "End stages that leave no even rest": Example(
        "--world-size 4 --num-layers 30 --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 5",
        "--decoder-first-pipeline-num-layers 6",
    ),
    "Two ways to shape the pipeline stages": Example(
        "--world-size 2 --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3 "
        "--account-for-embedding-in-pipeline-split",
        "--account-for-embedding-in-pipeline-split=false",
    ),
    "A layout string with another number of layers": Example(
        "--world-size 2 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*3|t*4L'",
        "--pipeline-model-parallel-layout 'Et*4|t*4L'",
    ),
    "A layout string whose chunks the pipeline size does not divide": Example(
        "--world-size 2 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*3|t*3|t*2L'",
        "--pipeline-model-parallel-size 3 --world-size 3",
    ),
    "Microbatches that make no whole groups": Example(
        "--world-size 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--microbatch-group-size-per-virtual-pipeline-stage 3 --global-batch-size 4",
        "--global-batch-size 6",
    ),
    "Virtual stages without pipeline stages": Example(
        "--world-size 4 --num-virtual-stages-per-pipeline-rank 2",
        "--pipeline-model-parallel-size 2 --global-batch-size 4",
    ),
    "A world size that is not a multiple of the model-parallel size": Example(
        "--world-size 6 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", "--world-size 8"
    ),
    "A global batch that the micro batch and the data-parallel size do not divide": Example(
        "--world-size 4 --micro-batch-size 2 --global-batch-size 12", "--global-batch-size 16"
    ),
    "Experts that do not divide over the expert-parallel ranks": Example(
        f"--world-size 4 {_EXPERTS} --num-experts 6 --expert-model-parallel-size 4", "--expert-model-parallel-size 2"
    ),
    "Expert-parallel ranks that do not divide the ranks of a pipeline stage": Example(
        f"--world-size 4 {_EXPERTS} --num-experts 8 --pipeline-model-parallel-size 2 --expert-model-parallel-size 4",
        "--expert-model-parallel-size 2",
    ),
    "Expert parallelism without experts": Example(
        "--world-size 2 --expert-model-parallel-size 2", "--num-experts 8 --disable-bias-linear"
    ),
    "Experts with tensor parallelism, without sequence parallelism": Example(
        f"--world-size 2 {_EXPERTS} --num-experts 8 --tensor-model-parallel-size 2", "--sequence-parallel"
    ),
    "Shared experts with biases": Example(
        "--num-experts 8 --moe-shared-expert-intermediate-size 64", "--disable-bias-linear"
    ),
    "Sequences of several chunks": Example(
        "--attention-chunk-size 32 --position-embedding-type rope", "--seq-length 32"
    ),
    "The first tokens of ranks that have others": Example(
        f"--world-size 2 --context-parallel-size 2 {_EXPERTS} --num-experts 8 --moe-expert-capacity-factor 1 "
        "--moe-token-drop-policy position",
        "--moe-token-drop-policy probs",
    ),
    "Weights of several experts at their input": Example(
        f"{_EXPERTS} --num-experts 8 --moe-apply-probs-on-input --moe-router-score-function sigmoid",
        "--moe-router-topk 1",
    ),
    "Another choice of experts next to SparseMixer's": Example(
        f"{_EXPERTS} --num-experts 8 --moe-router-sparsemixer-eps 0.01 --moe-router-topk 4", "--moe-router-topk 2"
    ),
    "More experts for each token than there are": Example(
        f"{_EXPERTS} --num-experts 2 --moe-router-topk 4", "--moe-router-topk 2"
    ),
    "One expert for each token, whose weight is always 1": Example(
        f"{_EXPERTS} --num-experts 8 --moe-router-topk 1", "--moe-router-pre-softmax"
    ),
    "An expert width that the expert-tensor-parallel ranks do not divide": Example(
        f"--world-size 2 {_EXPERTS} --num-experts 8 --moe-ffn-hidden-size 63 --expert-tensor-parallel-size 2",
        "--expert-tensor-parallel-size 1",
    ),
    "A shared-expert width that the tensor-parallel ranks do not divide": Example(
        f"--world-size 2 {_EXPERTS} --num-experts 8 --moe-shared-expert-intermediate-size 63 "
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--moe-shared-expert-intermediate-size 64",
    ),
    "Experts of an MLP of another width": Example(
        f"{_EXPERTS} --num-experts 8 --moe-use-upcycling --load none --ffn-hidden-size 256 --moe-ffn-hidden-size 64",
        "--moe-ffn-hidden-size 256",
    ),
    "Experts of an MLP and shared ones": Example(
        f"{_EXPERTS} --num-experts 8 --moe-use-upcycling --load none --moe-shared-expert-intermediate-size 64 "
        "--ffn-hidden-size 256",
        "--moe-use-upcycling=false",
    ),
    "Experts of a third of an MLP": Example(
        f"{_EXPERTS} --num-experts 8 --moe-use-upcycling --load none --ffn-hidden-size 256 "
        "--moe-upcycling-granularity 3 --moe-ffn-hidden-size 64",
        "--moe-upcycling-granularity 1 --moe-ffn-hidden-size 256",
    ),
    "Experts compiled": Example(f"{_EXPERTS} --num-experts 8 --torch-compile", "--torch-compile=false"),
    "An auxiliary loss with a negative weight": Example(
        f"{_EXPERTS} --num-experts 8 --moe-aux-loss-coeff -0.01 --moe-z-loss-coeff 0",
        "--moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 1e-3",
    ),
    "Positions that do not divide over context-parallel ranks": Example(
        "--world-size 3 --context-parallel-size 3 --cp-comm-type all_gather --attention-dropout 0", "--seq-length 66"
    ),
    "Heads exchanged by context-parallel ranks that do not divide": Example(
        "--world-size 4 --context-parallel-size 4 --cp-comm-type a2a --group-query-attention --num-query-groups 2",
        "--context-parallel-size 2",
    ),
    "Attention dropout in blocks": Example(
        "--world-size 2 --context-parallel-size 2 --cp-comm-type p2p", "--cp-comm-type a2a"
    ),
    "An exchange of keys that does not exist": Example(
        "--world-size 2 --context-parallel-size 2 --attention-dropout 0 --cp-comm-type ring", "--cp-comm-type p2p"
    ),
    "An exchange of keys for some of the layers": Example(
        "--world-size 2 --context-parallel-size 2 --attention-dropout 0 --cp-comm-type p2p all_gather",
        "--cp-comm-type p2p",
    ),
    "Packed documents in the ring": Example(
        "--world-size 2 --context-parallel-size 2 --attention-dropout 0 --reset-attention-mask",
        "--cp-comm-type all_gather",
    ),
    "Packed documents with attention dropout": Example("--reset-attention-mask", "--attention-dropout 0"),
    "FSDP2 in host memory with pipeline stages": Example(
        "--world-size 4 --use-torch-fsdp2 --torch-fsdp2-cpu-offload --pipeline-model-parallel-size 2",
        "--torch-fsdp2-cpu-offload=false",
    ),
    "FSDP2 with the distributed optimizer": Example(
        "--world-size 2 --use-torch-fsdp2 --use-distributed-optimizer", "--use-distributed-optimizer=false"
    ),
    "Replicas compared under FSDP2": Example(
        "--world-size 2 --use-torch-fsdp2 --check-weight-hash-across-dp-replicas-interval 10", "--use-torch-fsdp2=false"
    ),
    "FSDP2 with experts": Example(
        f"--world-size 2 {_EXPERTS} --num-experts 8 --use-torch-fsdp2",
        "--use-torch-fsdp2=false --use-distributed-optimizer",
    ),
    "Optimizer instances that do not divide the ranks of an expert": Example(
        f"--world-size 4 {_EXPERTS} --num-experts 8 --expert-model-parallel-size 4 --use-distributed-optimizer "
        "--num-distributed-optimizer-instances 2",
        "--num-distributed-optimizer-instances 1",
    ),
    "A loss with its output layer under Megatron-FSDP": Example(
        "--world-size 2 --use-megatron-fsdp --linear-cross-entropy", "--linear-cross-entropy=false"
    ),
    "A loss of the normalizer with the output layer": Example(
        "--z-loss-strength 1e-4 --linear-cross-entropy", "--linear-cross-entropy=false"
    ),
    "A loss with its output layer in float16": Example("--fp16 --linear-cross-entropy", "--fp16=false --bf16"),
    "Products that add to gradients under FSDP2": Example(
        "--world-size 2 --use-torch-fsdp2 --gradient-accumulation-fusion", "--gradient-accumulation-fusion=false"
    ),
    "Products that add to gradients, compiled": Example(
        "--torch-compile --gradient-accumulation-fusion", "--gradient-accumulation-fusion=false"
    ),
    "Products that add to gradients in Transformer Engine": Example(
        "--transformer-impl transformer_engine --gradient-accumulation-fusion", "--transformer-impl local"
    ),
    "FP8 in float16": Example("--fp16 --fp8-format hybrid", "--fp16=false --bf16"),
    "FP8 with all layers left in bf16": Example(
        "--fp8-format hybrid --first-last-layers-bf16 --num-layers-at-start-in-bf16 8", "--first-last-layers-bf16=false"
    ),
    "Blocks of FP8 that a rank cuts": Example(
        "--world-size 2 --tensor-model-parallel-size 2 --micro-batch-size 2 --fp8-format hybrid --fp8-recipe blockwise",
        "--fp8-recipe rowwise",
    ),
    "Experts in FP8 that see a part of a microbatch": Example(
        "--num-experts 4 --disable-bias-linear --world-size 2 --tensor-model-parallel-size 2 --sequence-parallel "
        "--expert-tensor-parallel-size 1 --bf16 --fp8-format hybrid",
        "--expert-tensor-parallel-size 2",
    ),
    "Too few tokens for a block of FP8": Example("--fp8-format e4m3 --fp8-recipe blockwise", "--micro-batch-size 2"),
    "FSDP2 with buckets": Example("--world-size 2 --use-torch-fsdp2 --ddp-bucket-size 1000", "--use-torch-fsdp2=false"),
    "A share of the optimizer's state that stays where it is": Example(
        "--optimizer-offload-fraction 0.5", "--optimizer-cpu-offload"
    ),
    "Pageable memory for weights that stay on the device": Example("--no-pin-cpu-params", "--optimizer-cpu-offload"),
    "Offloading nothing of the optimizer's state": Example(
        "--optimizer-cpu-offload --optimizer-offload-fraction 0", "--optimizer-offload-fraction 0.5"
    ),
    "FSDP2 with a loss scale": Example("--world-size 2 --use-torch-fsdp2 --fp16", "--fp16=false --bf16"),
    "A setting of FSDP2 without FSDP2": Example(
        "--world-size 2 --torch-fsdp2-no-reshard-after-forward", "--use-torch-fsdp2"
    ),
    "Host memory for FSDP2 without FSDP2": Example("--world-size 2 --torch-fsdp2-cpu-offload", "--use-torch-fsdp2"),
    "FSDP2 and the optimizer offloaded": Example(
        "--world-size 2 --use-torch-fsdp2 --torch-fsdp2-cpu-offload --optimizer-cpu-offload",
        "--optimizer-cpu-offload=false",
    ),
    "A sharding strategy without Megatron-FSDP": Example(
        "--world-size 2 --data-parallel-sharding-strategy optim", "--use-megatron-fsdp"
    ),
    "Megatron-FSDP with FSDP2": Example(
        "--world-size 2 --use-megatron-fsdp --use-torch-fsdp2", "--use-torch-fsdp2=false"
    ),
    "Megatron-FSDP with pipeline stages": Example(
        "--world-size 4 --use-megatron-fsdp --pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 1"
    ),
    "Megatron-FSDP with SGD": Example("--world-size 2 --use-megatron-fsdp --optimizer sgd", "--optimizer adam"),
    "Megatron-FSDP with the optimizer on the host": Example(
        "--world-size 2 --use-megatron-fsdp --optimizer-cpu-offload", "--use-megatron-fsdp=false --use-torch-fsdp2"
    ),
    "Megatron-FSDP that shards nothing, with experts": Example(
        f"--world-size 2 {_EXPERTS} --num-experts 8 --use-megatron-fsdp --data-parallel-sharding-strategy no_shard",
        "--data-parallel-sharding-strategy optim",
    ),
    "Copies divided without Megatron-FSDP": Example(
        "--world-size 4 --use-torch-fsdp2 --num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim",
        "--use-torch-fsdp2=false --use-megatron-fsdp",
    ),
    "Copies divided of what is not wholly divided": Example(
        "--world-size 4 --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads "
        "--num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim",
        "--data-parallel-sharding-strategy optim_grads_params",
    ),
    "Copies divided where there is one": Example(
        "--world-size 4 --use-megatron-fsdp --outer-dp-sharding-strategy optim",
        "--num-distributed-optimizer-instances 2",
    ),
    "Replicas compared under Megatron-FSDP": Example(
        "--world-size 2 --use-megatron-fsdp --check-weight-hash-across-dp-replicas-interval 5",
        "--use-megatron-fsdp=false",
    ),
    "Optimizer instances that do not divide the data-parallel size": Example(
        "--world-size 6 --use-distributed-optimizer --num-distributed-optimizer-instances 4",
        "--num-distributed-optimizer-instances 3",
    ),
    "Optimizer instances of an optimizer that is not sharded": Example(
        "--world-size 4 --num-distributed-optimizer-instances 2", "--use-distributed-optimizer"
    ),
    "Communication timed where streams wait for each other": Example(
        "--world-size 2 --use-torch-fsdp2 --log-communication-share", "--log-communication-share=false"
    ),
    "A range of steps that ends before it begins": Example(
        "--profile --use-pytorch-profiler --profile-step-start 5 --profile-step-end 5", "--profile-step-end 7"
    ),
    "A profiled rank that does not exist": Example(
        "--world-size 2 --profile --use-pytorch-profiler --profile-ranks 2", "--profile-ranks 1"
    ),
    "Nsight's profiler on CPU processes": Example("--profile", "--use-pytorch-profiler"),
    "A history of GPU memory on CPU processes": Example("--record-memory-history", "--record-memory-history=false"),
    "A learning rate to scale, from no batch": Example("--lr-scale-rule linear", "--lr-scale-base-batch-size 256"),
    "A batch to scale from, and no rule": Example("--lr-scale-base-batch-size 256", "--lr-scale-rule sqrt"),
    "A schedule of batches that is none": Example(
        "--step-batch-size-schedule '8 64K:16'", "--step-batch-size-schedule '0:8 64K:16'"
    ),
    "A schedule of batches whose thresholds are nearer than a sample": Example(
        "--step-batch-size-schedule '0:8 10:16'", "--step-batch-size-schedule '0:8 64:16'"
    ),
    "A schedule of batches that ends with another global batch": Example(
        "--step-batch-size-schedule '0:8 64K:16' --global-batch-size 8", "--global-batch-size 16"
    ),
    "A schedule of batches, one of which the ranks cannot share": Example(
        "--world-size 2 --step-batch-size-schedule '0:7 64K:16'", "--step-batch-size-schedule '0:8 64K:16'"
    ),
    "A batch of an evaluation that its microbatches do not divide": Example(
        "--eval-global-batch-size 8 --eval-micro-batch-size 3", "--eval-global-batch-size 9"
    ),
    "Nothing to train and nothing to evaluate": Example("--skip-train --eval-iters 0", "--eval-iters 100"),
    "Gradients in two precisions": Example(
        "--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32",
        "--accumulate-allreduce-grads-in-fp32=false",
    ),
    "Moments in 16 bits of an optimizer that has others": Example(
        "--optimizer lion --exp-avg-dtype fp16", "--optimizer adam"
    ),
    "A flag of another optimizer": Example("--optimizer lion --adam-beta2 0.95 --muon-nesterov", "--optimizer muon"),
    "A group of weights that are not there": Example("--lr-group decoder.layers.9.*=0.5", "--num-layers 16"),
    "Two values for one multiplier": Example(
        "--use-mup --mup-output-mult 0.5 --logits-multiplier 0.25", "--logits-multiplier 0.5"
    ),
    "A decay next to an average": Example(
        "--optimizer schedule_free --lr-decay-style cosine", "--lr-decay-style constant"
    ),
    "Muon in host memory": Example("--optimizer muon --optimizer-cpu-offload", "--optimizer-cpu-offload=false"),
    "Adafactor with steps that follow the width": Example(
        "--optimizer adafactor --use-mup --mup-base-hidden-size 32", "--use-mup=false"
    ),
    "QK-clip in host memory": Example(
        "--disable-bias-linear --qk-clip --optimizer-cpu-offload", "--optimizer-cpu-offload=false"
    ),
    "QK-clip of queries with biases": Example("--disable-bias-linear --qk-clip --add-qkv-bias", "--add-qkv-bias=false"),
    "QK-clip of weights that are made of others": Example(
        "--disable-bias-linear --qk-clip --optimizer schedule_free", "--optimizer muon"
    ),
    "QK-clip of normed heads": Example("--disable-bias-linear --qk-clip --qk-layernorm", "--qk-clip=false"),
    "QK-clip of heads that ranks share": Example(
        "--disable-bias-linear --qk-clip --world-size 4 --tensor-model-parallel-size 4 --group-query-attention "
        "--num-query-groups 2",
        "--tensor-model-parallel-size 2",
    ),
    "Moments in bf16 in host memory": Example(
        "--optimizer-cpu-offload --exp-avg-dtype bf16", "--optimizer-cpu-offload=false"
    ),
    "A lowest rate of embeddings that have no rate of their own": Example(
        "--decoupled-min-lr 1e-5", "--decoupled-lr 1e-3"
    ),
    "A lowest rate of embeddings above their highest": Example(
        "--decoupled-lr 1e-3 --decoupled-min-lr 1e-2", "--decoupled-min-lr 1e-4"
    ),
    "Interleaved channels without rotary positions": Example("--rotary-interleaved", "--position-embedding-type rope"),
    "Sinkhorn's assignment with a loss": Example(
        f"{_EXPERTS} --num-experts 8 --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0.1",
        "--moe-aux-loss-coeff 0",
    ),
    "Sinkhorn's assignment with a bias": Example(
        f"{_EXPERTS} --num-experts 8 --moe-router-load-balancing-type sinkhorn --moe-router-enable-expert-bias",
        "--moe-router-load-balancing-type none",
    ),
    "A loss with another one's coefficient": Example(
        f"{_EXPERTS} --num-experts 8 --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1",
        "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01",
    ),
    "Groups that the experts do not fill": Example(
        f"{_EXPERTS} --num-experts 8 --moe-router-num-groups 3 --moe-router-group-topk 1", "--moe-router-num-groups 2"
    ),
    "Groups with too few experts for a token": Example(
        f"{_EXPERTS} --num-experts 8 --moe-router-num-groups 8 --moe-router-group-topk 1", "--moe-router-group-topk 2"
    ),
    "Groups of which none is chosen": Example(
        f"{_EXPERTS} --num-experts 8 --moe-router-num-groups 4", "--moe-router-group-topk 1"
    ),
    "A gate of no shared experts": Example(
        f"{_EXPERTS} --num-experts 8 --moe-shared-expert-gate", "--moe-shared-expert-intermediate-size 64"
    ),
    "Stages between data-parallel ranks that share experts": Example(
        f"{_EXPERTS} --num-experts 8 --world-size 8 --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 "
        "--use-tp-pp-dp-mapping",
        "--use-tp-pp-dp-mapping=false",
    ),
    "Snapshots without a kind": Example(
        "--non-persistent-save-interval 10",
        "--non-persistent-ckpt-type local --non-persistent-local-ckpt-dir /dev/shm/snapshots --save checkpoints",
    ),
    "Snapshots without an interval, a folder and a run": Example(
        "--non-persistent-ckpt-type local",
        "--non-persistent-save-interval 10 --non-persistent-local-ckpt-dir /dev/shm/snapshots --save checkpoints",
    ),
    "Copies of no snapshots": Example("--replication", "--replication=false"),
    "A distance of no copies": Example(
        "--replication-jump 8",
        "--replication --non-persistent-save-interval 10 --non-persistent-ckpt-type local "
        "--non-persistent-local-ckpt-dir /dev/shm/snapshots --save checkpoints",
    ),
    "Machines that come and go, with nothing to go on from": Example(
        "--elastic --global-batch-size 8", "--save checkpoints --load checkpoints"
    ),
    "Machines that come and go, and the batch with them": Example(
        "--elastic --save checkpoints --load checkpoints", "--global-batch-size 8"
    ),
    "Samples to leave out that are no numbers": Example("--skip-samples 7 nine", "--skip-samples 7 9-12"),
    "An interval of samples without prompts": Example(
        "--sample-interval 5 --tokenizer-type ByteTokenizer", "--sample-prompts README.md"
    ),
    "Prompts without an interval": Example(
        "--sample-prompts README.md", "--sample-interval 5 --tokenizer-type ByteTokenizer"
    ),
    "Samples longer than the positions": Example(
        "--sample-interval 5 --sample-prompts README.md --tokenizer-type ByteTokenizer --sample-tokens 64",
        "--sample-tokens 32",
    ),
    "Samples without a tokenizer of text": Example(
        "--sample-interval 5 --sample-prompts README.md", "--tokenizer-type ByteTokenizer"
    ),
    "Two precisions": Example("--fp16 --bf16", "--fp16=false"),
}
"""The wrong command lines that the issue of the foundation lists, but for the misspelt flag."""

_WRONG = """
--moe-router-num-groups 3
--moe-router-group-scores 2
--moe-router-group-topk 2
--validation-set-names a b
--mock-data=false --tokenizer-type ByteTokenizer --train-data-path a --valid-data-path b c --multiple-validation-sets
  --validation-set-names x
--num-layers 0
--hidden-size=-8
--attention-dropout 1
--norm-epsilon 0
--clip-grad=-1
--tensor-model-parallel-size 0
--hidden-size 100 --num-attention-heads 8
--num-query-groups 2
--group-query-attention --num-query-groups 3
--position-embedding-type rope --kv-channels 15
--position-embedding-type rope --rotary-percent 0
--rotary-base-local 5
--softmax-type-local learnable --attention-dropout 0
--num-query-groups-local 3 --window-size 7,0 --attention-dropout 0
--world-size 3 --num-attention-heads 12 --hidden-size 96 --window-size 7,0 --tensor-model-parallel-size 3
  --num-query-groups-local 4 --attention-dropout 0
--world-size 2 --window-size 7,0 --context-parallel-size 2 --cp-comm-type a2a --num-query-groups-local 1
  --attention-dropout 0
--world-size 2 --window-size 7,0 --tensor-model-parallel-size 2 --qk-clip --num-query-groups-local 1
  --attention-dropout 0 --disable-bias-linear
--attention-temperature-scale 0.1
--position-embedding-type rope --rope-type longrope --longrope-short-factor 1 2 --longrope-long-factor 1 2 3 4 5 6 7 8
--position-embedding-type rope --rope-type yarn --use-rope-scaling
--position-embedding-type yarn --beta-fast 1 --beta-slow 2
--activation-func-clamp-value 7
--swiglu --xielu
--qk-l2-norm
--disable-bias-linear --num-experts 8 --xielu
--window-size 7,1 --attention-dropout 0
--window-attn-skip-freq 2
--window-size 7,0 --attention-dropout 0 --window-attn-skip-freq [1,0]
--position-embedding-type rope --no-rope-freq [1,0]
--normalization RMSNorm --disable-bias-linear --experimental-attention-variant gated_delta_net --linear-attention-freq
  [1,0]
--hybrid-layer-pattern M-M-M-MX --mamba-num-groups 2
--hybrid-layer-pattern M-M-M-M* --mamba-num-groups 3
--position-embedding-type rope --mtp-num-layers 1 --mtp-hybrid-override-pattern M --mamba-num-groups 1
--mlp-multipliers 1 2
--num-layers 2 --swiglu --position-embedding-type none --mlp-multipliers 1 2 --hybrid-layer-pattern **
  --transformer-impl local
--disable-bias-linear --num-experts 8 --moe-layer-freq [1,0]
--disable-bias-linear --num-experts 8 --moe-layer-freq [0]*8
--moe-layer-freq [0]+[1]*7
--disable-bias-linear --num-experts 8 --moe-shared-expert-intermediate-size 64 --add-mlp-bias
--residual-multiplier 0.5 --norm-position after
--parallel-residual one-norm --norm-position both
--parallel-residual two-norms --residual-multiplier 0.5
--lm-head-bias --linear-cross-entropy
--lm-head-bias --logits-multiplier 2
--softmax-scale 0
--qkv-clip 0
--softmax-type learnable
--swiglu --geglu
--no-rope-freq 4
--window-size 7,0
--window-size 7,0 --attention-dropout 0 --world-size 2 --context-parallel-size 2 --cp-comm-type p2p
--use-rope-scaling
--use-rope-scaling --position-embedding-type rope --rope-scaling-low-freq-factor 4.5
--no-position-embedding
--no-position-embedding --position-embedding-type none
--world-size 2 --tensor-model-parallel-size 2 --ffn-hidden-size 511
--cp-comm-type ring
--cp-comm-type p2p a2a
--world-size 6 --context-parallel-size 4 --attention-dropout 0
--world-size 8 --tensor-model-parallel-size 4 --sequence-parallel --context-parallel-size 2 --seq-length 36
  --cp-comm-type a2a
--use-distributed-optimizer --optimizer sgd
--torch-compile --world-size 2 --tensor-model-parallel-size 2 --hidden-dropout 0.1 --attention-dropout 0
--swiglu --squared-relu
--max-position-embeddings 32
--padded-vocab-size 999
--transformer-impl transformer_engine
--recurrence-kernels fla
--num-layers 8 --world-size 2 --pipeline-model-parallel-size 2 --global-batch-size 2
  --num-virtual-stages-per-pipeline-rank 3
--world-size 2 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3
--world-size 2 --pipeline-model-parallel-size 2 --global-batch-size 2 --num-layers-per-virtual-pipeline-stage 2
  --num-virtual-stages-per-pipeline-rank 4
--world-size 2 --pipeline-model-parallel-size 2 --global-batch-size 3 --num-virtual-stages-per-pipeline-rank 2
--world-size 2 --pipeline-model-parallel-size 2 --global-batch-size 2 --num-virtual-stages-per-pipeline-rank 2
  --no-overlap-p2p-communication
--world-size 2 --pipeline-model-parallel-size 2 --num-layers 9
--world-size 2 --pipeline-model-parallel-size 2 --account-for-embedding-in-pipeline-split
  --account-for-loss-in-pipeline-split --global-batch-size 2 --num-virtual-stages-per-pipeline-rank 2
--world-size 2 --tensor-model-parallel-size 2 --sequence-parallel --disable-bias-linear --num-experts 8
  --expert-tensor-parallel-size 1 --moe-shared-expert-intermediate-size 63
--world-size 2 --pipeline-model-parallel-size 2 --account-for-loss-in-pipeline-split
--world-size 2 --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3
  --decoder-last-pipeline-num-layers 4
--decoder-first-pipeline-num-layers 8
--world-size 2 --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 8
--world-size 2 --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 0
--world-size 2 --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 2
  --num-layers-per-virtual-pipeline-stage 2
--world-size 2 --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3
  --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 2
--world-size 2 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*8|L
  --num-layers-per-virtual-pipeline-stage 2
--world-size 2 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*4|x*4L
--world-size 2 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*4|t*4mL
--mtp-num-layers 2 --position-embedding-type rope --world-size 2 --pipeline-model-parallel-size 2
  --pipeline-model-parallel-layout Et*8mm|L
--mtp-num-layers 2
--mtp-num-layers 2 --position-embedding-type rope --embed-layernorm
--mtp-num-layers 2 --position-embedding-type rope --logits-multiplier 0.5
--mtp-num-layers 2 --position-embedding-type rope --recompute-granularity full --recompute-method uniform
  --recompute-num-layers 2
--mtp-num-layers 2 --mtp-use-repeated-layer --position-embedding-type rope --world-size 2 --use-torch-fsdp2
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
--mtp-num-layers 2 --mtp-use-repeated-layer --position-embedding-type rope --world-size 2 --use-megatron-fsdp
  --data-parallel-sharding-strategy optim_grads --recompute-granularity full --recompute-method uniform
  --recompute-num-layers 1
--mtp-num-layers 2 --mtp-use-repeated-layer --position-embedding-type rope --world-size 2 --use-megatron-fsdp
  --data-parallel-sharding-strategy optim_grads_params --recompute-granularity selective --recompute-modules mlp
--mtp-num-layers 2 --mtp-use-repeated-layer --position-embedding-type rope --num-experts 8
  --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01
--world-size 2 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout t*4E|t*4L
--world-size 2 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*4||t*4|L --global-batch-size 2
--world-size 2 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*(99999999)|L
--world-size 2 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E(t*999)*999|L
--world-size 2 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*4|t|t*3|L
  --num-virtual-stages-per-pipeline-rank 3 --global-batch-size 2
--world-size 2 --pipeline-model-parallel-size 2 --microbatch-group-size-per-virtual-pipeline-stage 2
--world-size 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 2
  --microbatch-group-size-per-virtual-pipeline-stage 1
--world-size 2 --tensor-model-parallel-size 2 --sequence-parallel --seq-length 63
--overlap-param-gather --use-distributed-optimizer
--overlap-param-gather
--distributed-backend nccl
--device cuda
--distributed-timeout-minutes 0
--world-size 4 --eval-global-batch-size 6
--train-samples 5
--global-batch-size 16 --rampup-batch-size 4 5 100
--global-batch-size 16 --rampup-batch-size 16 4 100
--global-batch-size 16 --rampup-batch-size 4 4
--world-size 2 --global-batch-size 16 --rampup-batch-size 3 13 100
--world-size 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 8
  --rampup-batch-size 1 1 100
--loss-scale 0
--min-loss-scale 8 --initial-loss-scale 4
--recompute-granularity full
--recompute-granularity full --recompute-method block --recompute-num-layers 9
--recompute-granularity full --recompute-method block --recompute-num-layers 1 --recompute-activations
--world-size 2 --use-torch-fsdp2 --log-straggler --log-communication-share
--world-size 2 --use-torch-fsdp2 --check-weight-hash-across-dp-replicas-interval 5
--world-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule zbv
--world-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule interleaved-1f1b
--world-size 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --pipeline-schedule gpipe
--world-size 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --pipeline-schedule 1f1b
  --global-batch-size 4
--world-size 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --pipeline-schedule
  dualpipe-v --global-batch-size 3
--world-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule interleaved-zero-bubble --global-batch-size 5
--world-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule looped-bfs
  --microbatch-group-size-per-virtual-pipeline-stage 2
--world-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule interleaved-zero-bubble --torch-compile
  --hidden-dropout 0 --attention-dropout 0
--recompute-modules mlp
--recompute-granularity selective --recompute-modules mlp rotary
--recompute-granularity selective --recompute-modules layernorm --torch-compile --hidden-dropout 0 --attention-dropout
  0
--recompute-granularity selective --recompute-num-layers 1
--min-lr 1
--lr-warmup-init 1
--lr-decay-samples 100
--lr-warmup-iters 100
--lr-warmup-iters 50 --lr-decay-iters 20
--lr-warmup-iters 5 --lr-warmup-fraction 0.1
--lr-warmup-fraction 1.5
--lr-decay-style WSD
--lr-wsd-decay-iters 10
--lr-decay-style WSD --lr-wsd-decay-iters 200
--start-weight-decay 0
--weight-decay-incr-style linear
--weight-decay-incr-style linear --start-weight-decay 1 --end-weight-decay 0
--mock-data=false
--data-path a
--dry-run --data-args-path a
--mock-data=false --data-path a --valid-data-path b
--mock-data=false --valid-data-path b
--split 90,ten
--split 0,1
--tokenizer-type HuggingFaceTokenizer
--keep-last-checkpoints 5
--exit-on-missing-checkpoint
--ckpt-step 5
--use-checkpoint-args
--override-opt-param-scheduler --use-checkpoint-opt-param-scheduler
--keep-last-checkpoints 2
--save a --save-interval 10 --save-retain-interval 25
--stages curriculum.yaml --save a
--profile --use-pytorch-profiler --profile-step-start 5 --profile-step-end 5
--profile
--profile --pytorch-profiler-collect-shapes
--profile --use-pytorch-profiler --record-shapes
--profile --use-pytorch-profiler --nvtx-ranges
--profile-ranks 0 2 --world-size 2
--record-memory-history
"""
WRONG = tuple(re.sub("\n +", " ", _WRONG).strip().split("\n"))
"""Flags with one mistake each; a line that begins with blanks goes on with the one above. tests/golden/problems.txt has
the whole answer to each."""

UNREADABLE: dict[str, str] = {
    "A misspelt flag": "--tensor-parallel-model-size 2",
    "A flag of Megatron that is not supported": "--mla-down-proj-fusion",
    "A value of the wrong type": "--hidden-size wide",
    "A data path that does not exist": (
        "--mock-data=false --vocab-size 257 --tokenizer-type ByteTokenizer --data-path nowhere/corpus"
    ),
    "An unreadable value next to a wrong one": "--hiden-size 4 --mla-down-proj-fusion --min-lr 1",
}

SEVERAL = "--world-size 3 --tensor-model-parallel-size 2 --min-lr 1 --keep-last-checkpoints 2 --swiglu --openai-gelu"
