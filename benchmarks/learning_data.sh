#!/usr/bin/env bash
# Makes the data of mixer_comparison.py and optimizer_comparison.py in FOLDER: the quickstart's corpus and tokenizer, and
# of TEXT_FILE, where it is given, tinyshakespeare's bytes, the last tenth of them for validation.
#   bash benchmarks/learning_data.sh FOLDER [TEXT_FILE]
set -euo pipefail
folder=$(realpath -m "${1:?usage: $0 FOLDER [TEXT_FILE]}")
text=${2:+$(realpath "$2")}
cd "$(dirname "$0")/.."
source tools/environment.sh requirements.txt

mkdir -p "$folder"
python tools/python_corpus.py --output-prefix "$folder/code" \
    --package transformers --files "models/*/modeling_*.py" --without-header
python tools/train_tokenizer.py --input "$folder/code_train.jsonl" --output-dir "$folder/tokenizer" --vocab-size 1024
for part in train valid; do
    python tools/preprocess_data.py --input "$folder/code_$part.jsonl" --output-prefix "$folder/code_$part" \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$folder/tokenizer" --append-eod
done
if [ -n "$text" ]; then
    bytes=$(wc -c <"$text")
    head -c $((bytes * 9 / 10)) "$text" >"$folder/tinyshakespeare_train.txt"
    tail -c +$((bytes * 9 / 10 + 1)) "$text" >"$folder/tinyshakespeare_valid.txt"
    for part in train valid; do
        python tools/preprocess_data.py --input "$folder/tinyshakespeare_$part.txt" \
            --output-prefix "$folder/tinyshakespeare_$part" --tokenizer-type ByteTokenizer
    done
fi
