#!/usr/bin/env bash
# From nothing to a small GPT that writes PyTorch code, in Hugging Face's format, in five minutes on two cores.
#   bash examples/quickstart.sh [FOLDER [ITERATIONS [RANKS]]]      default: runs/quickstart, 1200 where they fit
# Begins by emptying FOLDER, if an earlier quickstart made it; refuses any other folder that holds something. Measures a
# few steps, and trains fewer than 1200 where these would take more than five minutes; ITERATIONS are taken as given.
# Trains on one process, stops, and goes on from its checkpoint on RANKS (1, 2, 4 or 8) of the machine's GPUs, by default
# as many as it has, or else on CPU processes, by default 8: the same program, the same flags, the same curve.
set -euo pipefail
cd "$(dirname "$0")/.."

run=${1:-runs/quickstart}
iterations=${2:-}
ranks=${3:-}
while [[ $run == ?*/ ]]; do run=${run%/}; done # "link/" is what the link points to
marker=.made_by_quickstart
refuse() {
    echo "error: $run $1; name a folder that does not exist, that is empty, or that an earlier quickstart made (it holds $marker)" >&2
    exit 64
}
if [[ -L $run ]]; then refuse "is a symbolic link"; fi
if [[ -e $run && ! -d $run ]]; then refuse "is not a folder"; fi
if [[ -d $run && ! -f $run/$marker && -n $(ls -A -- "$run") ]]; then
    refuse "holds files that the quickstart did not make, and it begins by emptying its folder"
fi

source tools/environment.sh requirements.txt
mkdir -p -- "$run"
touch -- "$run/$marker" # first in, and never removed: a quickstart that was killed can begin again
find "$run" -mindepth 1 -maxdepth 1 ! -name "$marker" -exec rm -rf -- {} +
started=$SECONDS
estimate= # seconds of all of it, where they were estimated
step() {
    local passed=$((SECONDS - started)) left=
    if [[ $estimate ]]; then left=", about $((estimate > passed ? estimate - passed : 0)) s left"; fi
    printf '\n== [%3d s%s] %s\n' "$passed" "$left" "$*"
}

# A Llama-shaped model of 0.9M parameters.
model=(
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --group-query-attention --num-query-groups 2
    --swiglu --ffn-hidden-size 352 --normalization RMSNorm --disable-bias-linear
    --position-embedding-type rope --seq-length 256 --hidden-dropout 0 --attention-dropout 0
)
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
if ((gpus)); then machine=(--bf16); else machine=(--device cpu); fi
export OMP_NUM_THREADS=1
# A thread for each core, up to four. (Not by nproc, which counts OMP_NUM_THREADS.) One that waits sleeps soon: awake, it
# would take the core of whatever else runs; at once, the step would take a fifth longer.
threads=$(python -c 'import os; print(min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()))')
if [ -z "$iterations" ]; then
    echo "== measuring a few steps"
    read -r iterations estimate < <(OMP_NUM_THREADS=$threads GOMP_SPINCOUNT=5000 python examples/quickstart_steps.py 1200 \
        "${model[@]}" "${machine[@]}" --micro-batch-size 8 --global-batch-size 8 --lr 6e-3)
fi

step "1/8 corpus: the models in the transformers package that is installed, PyTorch code in one style"
python tools/python_corpus.py --output-prefix "$run/python" \
    --package transformers --files "models/*/modeling_*.py" --without-header

step "2/8 tokenizer: byte-level BPE with 1,024 entries"
python tools/train_tokenizer.py --input "$run/python_train.jsonl" --output-dir "$run/tokenizer" --vocab-size 1024

step "3/8 preprocessing: text to .bin/.idx with a manifest of what they are made from; every token checked"
tokenizer=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$run/tokenizer")
for part in train valid; do
    python tools/preprocess_data.py --input "$run/python_$part.jsonl" --output-prefix "$run/$part" \
        "${tokenizer[@]}" --append-eod --workers 2
    python tools/inspect_dataset.py verify "$run/${part}_text_document" --vocab-size 1024
done
cat "$run/train_manifest.json"

stop=$((iterations * 97 / 100))
training=(
    --global-batch-size 8 --train-iters "$iterations" --eval-at-start --eval-interval $((iterations / 2)) --eval-iters 8
    --lr 6e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters $((iterations / 20)) --weight-decay 0.1
    --adam-beta2 0.95 --clip-grad 1.0
)
data=(--train-data-path "$run/train_text_document" --valid-data-path "$run/valid_text_document" "${tokenizer[@]}")
outputs=(
    --save "$run/checkpoints" --load "$run/checkpoints" --save-interval "$iterations"
    --tensorboard-dir "$run/tensorboard" --sample-interval $((iterations / 2)) --sample-prompts "$run/prompts.txt"
)
printf 'class SmallMLP(nn.Module):\ndef forward(self,\n' > "$run/prompts.txt"
three_d=(
    --tensor-model-parallel-size 2 --sequence-parallel
    --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
case "${ranks:-$gpus}" in
    1) ranks=1 shape="one process" layout=() ;;
    2 | 3)
        ranks=2 shape="2 processes, TP 2"
        layout=(--tensor-model-parallel-size 2 --sequence-parallel)
        ;;
    4 | 5 | 6 | 7)
        ranks=4 shape="4 processes, TP 2 x PP 2"
        layout=(--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2)
        ;;
    *) ranks=8 shape="8 processes, TP 2 x PP 2 x DP 2" layout=("${three_d[@]}") ;;
esac
train() {
    python -m torch.distributed.run --nproc-per-node "$1" pretrain_gpt.py \
        "${model[@]}" "${training[@]}" "${data[@]}" "${outputs[@]}" "${machine[@]}" "${@:2}"
}

step "4/8 training on one process, threads: $threads; stops after $stop of $iterations steps"
python tools/prepare_cache.py "${model[@]}" "${training[@]}" "${data[@]}" "${machine[@]}" --micro-batch-size 8
OMP_NUM_THREADS=$threads GOMP_SPINCOUNT=5000 \
    train 1 --micro-batch-size 8 --exit-interval "$stop" --log-interval 50

step "5/8 the same run on $shape: resumes at step $stop and goes on with the same curve"
train "$ranks" --micro-batch-size 2 --log-interval 5 "${layout[@]}"

step "6/8 the loss curve"
python tools/show_run.py "$run/checkpoints/metrics.jsonl"

echo "What step $stop read, the first lines of it:"
config=$run/checkpoints/$(printf 'iter_%07d' "$iterations")/config.yaml
python tools/inspect_dataset.py sample --step "$stop" --config "$config" --world-size "$ranks" > "$run/step_$stop.txt"
head -n 12 "$run/step_$stop.txt"

step "7/8 the model for Hugging Face; its loss by transformers, beside ours"
python tools/convert_checkpoint.py to-hf --load "$run/checkpoints" --save "$run/hf" \
    --no-verify --check-loss "$run/valid_text_document"

step "8/8 a sample of it, by transformers"
python tools/generate_sample.py --model "$run/hf" --max-new-tokens 225 --temperature 0.5 --prompt \
    $'class SmallMLP(nn.Module):\n    def __init__(self, config'

page=$run/report.html # what megatron-ext new makes, too
python tools/show_run.py "$run/checkpoints/metrics.jsonl" --html "$page" --files "$run"/* > /dev/null

# The set-up's .venv, or the environment that was active.
environment=$VIRTUAL_ENV
if [ "$environment" = "$PWD/.venv" ]; then environment=.venv; fi
cat <<TEXT

Done in $((SECONDS - started)) s. Everything is under $run; $page shows it in a browser.
The TensorBoard log is in $run/tensorboard. Next:
  cd $(printf %q "$PWD") && source $(printf %q "$environment")/bin/activate   # in a new shell
  megatron-ext pretrain --help all                                # all flags; megatron-ext --help lists the programs
  bash examples/pretrain_cpu.sh $(printf %q "$run")               # the same data and model, 100 steps on one process
  megatron-ext sample --model $(printf %q "$run")/hf --prompt "class " --max-new-tokens 200 --seed 1
  tensorboard --logdir $(printf %q "$run")/tensorboard            # the curves in a browser
TEXT
