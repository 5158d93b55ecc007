"""Refused options of other programs than pretraining, which share Megatron's parser. The notation is that of the
package."""

REFUSED: tuple[tuple[str, str], ...] = (
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
        "conversations are tokenized once, before training: tools/preprocess_data.py --data-format messages, then "
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
