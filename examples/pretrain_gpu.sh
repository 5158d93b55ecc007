#!/usr/bin/env bash
# A 1.3B Llama-shaped model in bf16 over the GPUs of one machine or of several.
#   TRAIN=/data/train_text_document VALID=/data/valid_text_document TOKENIZER=/data/tokenizer SAVE=/ckpt/run1 \
#       bash examples/pretrain_gpu.sh [further flags]
# On several machines start it on each, with NODES, NODE_RANK and MASTER_ADDR (the first machine's address) set.
# A rank that dies is started again with all others, from the last checkpoint, up to RESTARTS times (default 3).
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/environment.sh --no-install
: "${TRAIN:?prefix of the training .bin/.idx}" "${VALID:?prefix of the validation .bin/.idx}"
: "${TOKENIZER:?folder with tokenizer.json}" "${SAVE:?folder for checkpoints}"

torchrun --nproc-per-node "${GPUS:-8}" --nnodes "${NODES:-1}" --node-rank "${NODE_RANK:-0}" \
    --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}" --max-restarts "${RESTARTS:-3}" \
    pretrain_gpt.py --bf16 \
    --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --swiglu --ffn-hidden-size 5504 \
    --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights \
    --position-embedding-type rope --seq-length 2048 --hidden-dropout 0 --attention-dropout 0 \
    --tensor-model-parallel-size "${TP:-1}" --sequence-parallel \
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
    --micro-batch-size 4 --global-batch-size 256 --train-iters 20000 --eval-interval 1000 --eval-iters 20 \
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 500 \
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 \
    --train-data-path "$TRAIN" --valid-data-path "$VALID" \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER" \
    --save "$SAVE" --load "$SAVE" --save-interval 500 --tensorboard-dir "$SAVE/tensorboard" \
    --log-interval 10 --log-throughput "$@"
