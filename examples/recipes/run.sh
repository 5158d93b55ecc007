#!/usr/bin/env bash
# Trains a recipe of this folder on the GPUs of one machine or of several; `megatron-ext recipes` names them.
#   TRAIN=/data/train_text_document VALID=/data/valid_text_document TOKENIZER=/data/tokenizer SAVE=/ckpt/run1 \
#       bash examples/recipes/run.sh llama3.1-8b [further flags]
#   bash examples/recipes/run.sh llama3.1-8b                             without TRAIN: synthetic tokens, nothing saved
#   bash examples/recipes/run.sh llama3.1-8b --dry-run --world-size 64   the layout, without GPUs
#   bash examples/recipes/run.sh llama3.1-8b --reduced                   a tiny copy, 5 steps on CPU processes
# On several machines start it on each, with NODES, NODE_RANK and MASTER_ADDR (the first machine's address) set. Under
# Slurm: SCRIPT=examples/recipes/run.sh sbatch --nodes 8 examples/slurm/pretrain.sbatch llama3.1-8b
# HF=/models/Llama-3.1-8B begins with the weights of a Hugging Face folder.
set -euo pipefail
cd "$(dirname "$0")/../.."
source tools/environment.sh --no-install
name=${1:?name of a recipe, as in 'megatron-ext recipes'}
shift
[ -f "examples/recipes/$name.yaml" ] || {
    echo "there is no recipe $name; 'megatron-ext recipes' names them" >&2
    exit 64
}

if [ "${1:-}" = --reduced ]; then
    tiny=$(mktemp -d)
    trap 'rm -rf "$tiny"' EXIT
    ranks=$(python tools/recipes.py reduce "$name" "$tiny/recipe.yaml")
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node "$ranks" \
        pretrain_gpt.py --config "$tiny/recipe.yaml" "${@:2}"
    exit
fi

flags=(--config "examples/recipes/$name.yaml")
if [ -n "${TRAIN:-}" ]; then
    : "${VALID:?prefix of the validation .bin/.idx}" "${TOKENIZER:?folder with tokenizer.json}"
    : "${SAVE:?folder for checkpoints}"
    flags+=(--train-data-path "$TRAIN" --valid-data-path "$VALID" --eval-interval 1000 --eval-iters 20)
    flags+=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER")
    flags+=(--save "$SAVE" --load "$SAVE" --save-interval 500 --tensorboard-dir "$SAVE/tensorboard")
else
    flags+=(--mock-data --tokenizer-type NullTokenizer --eval-iters 0)
fi
if [ -n "${HF:-}" ]; then
    flags+=(--load-hf "$HF")
fi

if [ "${1:-}" = --dry-run ]; then
    exec python pretrain_gpt.py "${flags[@]}" "$@"
fi
exec torchrun --nproc-per-node "${GPUS:-8}" --nnodes "${NODES:-1}" --node-rank "${NODE_RANK:-0}" \
    --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}" --max-restarts "${RESTARTS:-3}" \
    pretrain_gpt.py "${flags[@]}" --log-interval 10 --log-throughput "$@"
