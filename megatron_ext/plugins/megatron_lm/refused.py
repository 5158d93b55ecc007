"""Lists every option of Megatron's own command line that is refused, with what to use instead, by reason.

A refused option would change the training or the saved files, and is not built.

Flags are separated by commas: `--flag` is a switch, `--flag N` takes a value, `--flag N...` takes several. `=value` is
Megatron's default, or another value that asks for nothing: that one passes. The list was read from Megatron-LM as the
megatron-core 0.19.2 wheel holds it; tests/plugins/megatron_lm/test_megatron_options.py reads that wheel and fails when
an option is missing here, is listed twice, or takes another number of values.
"""

REFUSED: tuple[tuple[str, str], ...] = (
    # Old spellings, and what the command line says otherwise here.
    (
        "it belongs to a model of encoder and decoder; use --num-layers and --seq-length",
        """
        --decoder-num-layers N, --decoder-seq-length N
        """,
    ),
    (
        "use --config run.yaml, whose names are the flags' own",
        """
        --yaml-cfg N
        """,
    ),
    (
        "layer specs are not loaded from a module that the command line names; choose with --transformer-impl, and "
        "layers of Mamba-2 with --hybrid-layer-pattern",
        """
        --spec N..., --te-precision-config-file N
        """,
    ),
    # How the model is divided over ranks, and what the ranks send.
    (
        "context parallelism has one group of ranks and one split; use --context-parallel-size and --cp-comm-type",
        """
        --max-seqlen-per-dp-cp-rank N, --hybrid-context-parallel
        """,
    ),
    (
        "of a mixture of experts, this part is not in this version; leave it out, docs/experts.md has the others",
        """
        --expert-tensor-parallel-num-weight-shards N, --moe-shared-expert-glu-interleave-size N,
        --moe-enable-routing-replay, --moe-router-quantile-balancing-ema N =0.0, --moe-router-force-biased N,
        --moe-single-grouped-weight, --moe-single-grouped-bias, --moe-pad-experts-for-cuda-graph-inference,
        --moe-mlp-glu-interleave-size N, --moe-expert-rank-capacity-factor N,
        --moe-routing-trace-path N,
        --moe-routing-trace-max-training-iters N, --moe-routing-trace-capture-logits,
        --moe-routing-trace-capture-hidden-states, --moe-routing-trace-dump-weights,
        --save-tokens-per-expert-interval N
        """,
    ),
    (
        "only the plain form of FSDP is supported; use --use-megatron-fsdp or --use-torch-fsdp2 alone",
        """
        --megatron-fsdp-main-params-dtype N =fp32, --megatron-fsdp-main-grads-dtype N =auto;fp32,
        --megatron-fsdp-grad-comm-dtype N =auto;fp32, --enable-full-sharding-in-hsdp
        """,
    ),
    (
        "each weight has one shard per tensor-parallel rank; use --tensor-model-parallel-size",
        """
        --tensor-parallel-num-weight-shards N
        """,
    ),
    (
        "gradients are summed in one precision; use --accumulate-allreduce-grads-in-fp32 or --ddp-bucket-size",
        """
        --ddp-reduce-scatter-with-fp32-accumulation, --ddp-param-name-patterns-for-fp32-local-accumulation N...
        """,
    ),
    (
        "every rank really computes; use --dry-run to check a layout without them",
        """
        --fake-process-group
        """,
    ),
    # The model's structure, its first weights and its vocabulary.
    (
        "depths of multi-token prediction are trained with the model on the last stage, and megatron-ext "
        "generate --speculative takes their drafts; leave it out",
        """
        --mtp-standalone, --mtp-detach-heads,
        --num-speculative-tokens N =0
        """,
    ),
    (
        "generation keeps latents with --multi-latent-attention in any case; leave it out",
        """
        --cache-mla-latents
        """,
    ),
    (
        "the down projections of latent attention are two products; leave it out",
        """
        --mla-down-proj-fusion
        """,
    ),
    (
        "each layer has an indexer of its own, whose scores go through ReLU in plain torch; leave it out",
        """
        --dsa-indexer-topk-freq N =1, --dsa-indexer-skip-topk-offset N =0, --dsa-kernel-backend N =none,
        --no-dsa-indexer-scoring-relu, --disable-dsa-indexer-scoring-relu, --dsa-indexer-k-norm-fp32
        """,
    ),
    (
        "kitchen's attention is not in this version; leave it out",
        """
        --use-kitchen-attention, --kitchen-attention-backend N =sdpa,
        --kitchen-config-file N, --kitchen-recipe-number N
        """,
    ),
    (
        "states of Mamba-2 are in fp32, and latest inputs of its convolution in the dtype of the weights; leave it out",
        """
        --mamba-training-ssm-states-dtype N, --mamba-inference-conv-states-dtype N =bf16,
        --mamba-inference-ssm-states-dtype N =bf16
        """,
    ),
    (
        "rotation by the axes of images (mrope) is not in this version; leave it out, or use "
        "--position-embedding-type rope --use-rope-scaling",
        """
        --mrope-section N...
        """,
    ),
    (
        "relative position biases are not in this version; use --position-embedding-type",
        """
        --relative-attention-num-buckets N =32, --relative-attention-max-distance N =128
        """,
    ),
    (
        "the model's structure has no such variant in this version; leave it out",
        """
        --fp32-residual-connection, --apply-residual-connection-post-layernorm, --onnx-safe N, --bert-no-binary-head,
        --heterogeneous-layers-config-path N, --heterogeneous-layers-config-encoded-json N
        """,
    ),
    (
        "weights begin as a function of the seed and the parameter's name; use --init-method-std, "
        "--embedding-init-method-std or --init-method-xavier-uniform",
        """
        --data-parallel-random-init
        """,
    ),
    (
        "the vocabulary is always padded to --make-vocab-size-divisible-by times the tensor-parallel size; "
        "leave it out",
        """
        --no-pad-vocab-size, --disable-pad-vocab-size
        """,
    ),
    # Precision, optimizer, recomputation, and the batch.
    (
        "with --fp8-format all three products of a linear layer are in FP8, with scales as large as the format allows, "
        "and the output layer's in --bf16; leave it out",
        """
        --no-fp8-wgrad, --disable-fp8-wgrad, --fp8-output-proj, --fp8-margin N =0, --fp8-quantizer-factory N,
        --fp4-quantizer-factory N
        """,
    ),
    (
        "main parameters are in fp32; use --use-distributed-optimizer or --exp-avg-dtype bf16 to save memory",
        """
        --main-params-dtype N =fp32
        """,
    ),
    (
        "next to Muon, Adam updates embeddings, output layer, norms, biases and routers; leave it out",
        """
        --muon-scalar-optimizer N =adam
        """,
    ),
    (
        "use --apply-wd-to-qk-layernorm, which is its name today",
        """
        --no-weight-decay-cond-type N
        """,
    ),
    (
        "every weight is trained; leave it out",
        """
        --freeze-all-layers
        """,
    ),
    (
        "reinforcement learning is not part of pretraining; leave it out, or use --cuda-graph-impl full_iteration for "
        "CUDA graphs of training",
        """
        --rl-persist-cuda-graphs, --no-rl-persist-cuda-graphs, --rl-training-cuda-graphs,
        --no-rl-training-cuda-graphs
        """,
    ),
    (
        "a batch must be divisible by micro batch x data-parallel size; use --micro-batch-size",
        """
        --decrease-batch-size-if-needed
        """,
    ),
    (
        "use --skip-samples, with the samples of these iterations",
        """
        --iterations-to-skip N...
        """,
    ),
    (
        "no step is altered; leave it out",
        """
        --phase-transition-iterations N
        """,
    ),
    # Data and tokenizers.
    (
        "all samples of an epoch are read, and each data-parallel rank reads its share of a batch; leave it out",
        """
        --sample-rate N =1.0, --no-data-sharding
        """,
    ),
    (
        "use --reset-attention-mask, which needs no mask and no padding",
        """
        --dataloader-inter-document-masking
        """,
    ),
    (
        "masked language modelling is not in this version; leave it out",
        """
        --mask-prob N =0.15, --short-seq-prob N =0.1
        """,
    ),
    (
        "a tokenizer is what its files say; use --tokenizer-type with --tokenizer-model",
        """
        --vocab-extra-ids N =0, --tokenizer-metadata N,
        --tokenizer-sentencepiece-legacy, --no-tokenizer-sentencepiece-ignore-extra-whitespaces,
        --disable-tokenizer-sentencepiece-ignore-extra-whitespaces, --tokenizer-hf-no-use-fast,
        --tokenizer-hf-no-include-special-tokens, --null-tokenizer-eod-id N, --null-tokenizer-pad-id N =-1,
        --chat-template N
        """,
    ),
    # Options of work next to the steps: checks, measurements, evaluation, checkpoints.
    (
        "no process is killed or slowed down on purpose; use --error-injection-rate, or leave it out",
        """
        --fault-injector-ranks N, --fault-injector-num-ranks N,
        --fault-injector-fault-types N, --fault-injector-fault-probabilities N, --fault-injector-fault-delay N,
        --fault-injector-delay-start-iteration N, --fault-injector-mtti-seconds N, --fault-injector-offset-seconds N,
        --fault-injector-seed N
        """,
    ),
    (
        "SIGTERM and SIGINT save and stop, whatever sends them; leave it out",
        """
        --exit-signal N =SIGTERM
        """,
    ),
    (
        "it is not measured in this version; leave it out",
        """
        --save-params-interval N, --save-activations-interval N, --save-wgrads-interval N,
        --save-dgrads-interval N
        """,
    ),
    (
        "CUDA kernels that do not vary with the batch are not in this version; use --deterministic-mode",
        """
        --batch-invariant-mode
        """,
    ),
    (
        "--load reads any layout, and --ckpt-step, --finetune and --no-load-optim choose what of it; use those",
        """
        --pretrained-checkpoint N, --load-main-params-from-ckpt, --override-ckpt-iteration N,
        --use-mp-args-from-checkpoint-args
        """,
    ),
    (
        "checkpoints are complete and kept until deleted in this version; use --save and --save-interval",
        """
        --ckpt-convert-format N, --ckpt-convert-save N, --ckpt-convert-update-legacy-dist-opt-format
        """,
    ),
    (
        "snapshots are each rank's own, with one copy on another machine; use --non-persistent-ckpt-type local",
        """
        --non-persistent-global-ckpt-dir N, --non-persistent-local-ckpt-algo N =fully_parallel,
        --replication-factor N =2
        """,
    ),
    # Other programs than pretraining, which share Megatron's parser.
    (
        "reinforcement learning is not part of pretraining; leave it out",
        """
        --perform-rl-step, --rl-prompts-per-eval N =32, --grpo-prompts-per-step N =32, --grpo-group-size N =2,
        --rl-generation-lag N =0, --rl-submission-granularity N =B, --rl-consumption-granularity N =B,
        --grpo-iterations N =2, --grpo-clamp-eps-lower N =0.01, --grpo-clamp-eps-upper N =0.01,
        --grpo-kl-beta N =0.001, --grpo-entropy-term-weight N =0.0, --grpo-filter-groups-with-same-reward,
        --langrl-env-config N, --rl-default-temperature N =1.0, --rl-default-top-p N =0, --rl-default-top-k N =-1,
        --rl-offload-optimizer-during-inference, --rl-kv-cache-management-mode N =persist, --rl-partial-rollouts,
        --no-rl-partial-rollouts, --rl-inference-logprobs-is-correction, --no-rl-inference-logprobs-is-correction,
        --rl-importance-sampling-truncation-coef N, --rl-use-sequence-packing, --no-rl-use-sequence-packing,
        --rl-sequence-packing-max-sequences-per-bin N =50, --rl-sequence-packing-algo N =fifo,
        --rl-inference-tensor-model-parallel-size N, --rl-inference-pipeline-model-parallel-size N,
        --rl-inference-expert-model-parallel-size N, --rl-inference-expert-tensor-model-parallel-size N,
        --rl-inference-model-unified-memory-level N =0, --rl-offload-inference-model-weights-when-idle,
        --no-rl-offload-inference-model-weights-when-idle, --refit-method N =gloo, --rl-verify-model-weights-swap,
        --no-rl-verify-model-weights-swap, --rl-skip-bos-token, --no-rl-skip-bos-token, --rl-profile,
        --rl-profile-dir N, --rl-inference-parsers N...
        """,
    ),
    (
        "vision and retrieval models are not in this version; use a GPT",
        """
        --output-bert-embeddings, --bert-embedder-type N =megatron,
        --num-classes N =1000, --img-h N =224, --img-w N =224, --num-channels N =3, --patch-dim N =16,
        --classes-fraction N =1.0, --data-per-class-fraction N =1.0, --head-lr-mult N =1.0, --vision-pretraining,
        --vision-pretraining-type N =classify, --vision-backbone-type N =vit, --swin-backbone-type N =tiny,
        --mask-type N =random, --mask-factor N =1.0, --iter-per-epoch N =1250, --dino-local-img-size N =96,
        --dino-local-crops-number N =10, --dino-head-hidden-size N =2048, --dino-bottleneck-size N =256,
        --dino-freeze-last-layer N =1, --dino-norm-last-layer, --dino-warmup-teacher-temp N =0.04,
        --dino-teacher-temp N =0.07, --dino-warmup-teacher-temp-epochs N =30, --ict-head-size N,
        --biencoder-projection-dim N =0, --biencoder-shared-query-context-model, --ict-load N, --bert-load N,
        --titles-data-path N, --query-in-block-prob N =0.1, --use-one-sent-docs, --evidence-data-path N,
        --retriever-report-topk-accuracies N..., --retriever-score-scaling, --block-data-path N, --embedding-path N,
        --indexer-batch-size N =128, --indexer-log-interval N =1000
        """,
    ),
    (
        "conversations are tokenized once, before training: megatron-ext preprocess --data-format messages, then "
        "--assistant-only-loss",
        """
        --sft, --sft-tokenizer-prompt-format N =nemotron-h-aligned
        """,
    ),
    (
        "distillation is not in this version; leave it out",
        """
        --logits-save-top-k N, --logits-save-top-p N, --logits-save-top-p-min-k N =1, --logits-save-dir N,
        --logits-save-dtype N =fp16, --logits-load-dir N, --logits-load-decode-threads N =4,
        --logits-load-prefetch-factor N =3, --logits-load-msc-prefetch-depth N =2,
        --logits-load-kd-loss-alpha N =1.0, --logits-load-ignore-errors
        """,
    ),
)
