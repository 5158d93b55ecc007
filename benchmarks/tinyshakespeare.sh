#!/usr/bin/env bash
# How well a small model learns: 2,000 iterations on tinyshakespeare, byte by byte, on one CPU process.
#   bash benchmarks/tinyshakespeare.sh tinyshakespeare.txt [FOLDER]
# The setting is nanoGPT's CPU recipe (4 layers, 4 heads, width 128, block 64, batch 12; last 10% for validation),
# which reaches 1.88 nats per character.
set -euo pipefail
text=$(realpath "${1:?usage: $0 TEXT_FILE [FOLDER]}")
folder=$(realpath -m "${2:-runs/tinyshakespeare}")
cd "$(dirname "$0")/.."
source tools/environment.sh requirements.txt

mkdir -p "$folder"
bytes=$(wc -c <"$text")
head -c $((bytes * 9 / 10)) "$text" >"$folder/train.txt"
tail -c +$((bytes * 9 / 10 + 1)) "$text" >"$folder/valid.txt"
for part in train valid; do
    python tools/preprocess_data.py --input "$folder/$part.txt" --output-prefix "$folder/$part" \
        --tokenizer-type ByteTokenizer
done
rm -f "$folder/metrics.jsonl"
OMP_NUM_THREADS=2 python pretrain_gpt.py --device cpu \
    --num-layers 4 --num-attention-heads 4 --hidden-size 128 --seq-length 64 \
    --position-embedding-type rope --normalization RMSNorm --swiglu --ffn-hidden-size 352 --disable-bias-linear \
    --hidden-dropout 0 --attention-dropout 0 \
    --micro-batch-size 12 --global-batch-size 12 --train-iters 2000 \
    --lr 4e-3 --min-lr 4e-4 --lr-decay-style cosine --lr-warmup-iters 100 \
    --adam-beta2 0.99 --weight-decay 0.1 --clip-grad 1.0 \
    --tokenizer-type ByteTokenizer \
    --train-data-path "$folder/train_text_document" --valid-data-path "$folder/valid_text_document" \
    --full-validation --eval-interval 500 --log-interval 100 --metrics-file "$folder/metrics.jsonl"
