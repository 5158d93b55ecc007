#!/usr/bin/env bash
# The quickstart's data on one CPU process. Run examples/quickstart.sh first: it prepares the data.
#   bash examples/pretrain_cpu.sh [FOLDER [further flags]]      default: runs/quickstart
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/environment.sh requirements.txt
data=${1:-runs/quickstart}

OMP_NUM_THREADS=$(nproc) python pretrain_gpt.py --device cpu \
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --group-query-attention --num-query-groups 2 \
    --swiglu --ffn-hidden-size 352 --normalization RMSNorm --disable-bias-linear \
    --position-embedding-type rope --seq-length 256 --hidden-dropout 0 --attention-dropout 0 \
    --micro-batch-size 8 --global-batch-size 8 --train-iters 100 --eval-interval 50 --eval-iters 4 \
    --lr 6e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 10 \
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --log-interval 5 \
    --train-data-path "$data/train_text_document" --valid-data-path "$data/valid_text_document" \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$data/tokenizer" "${@:2}"
