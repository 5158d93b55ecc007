"""What the rules say next to the wrong command lines: with one flag dropped, and with each number on both sides of its
bound. For tests/golden/near_flags.json and its test."""

import contextlib
import dataclasses
import functools
import json
import re
import shlex
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.parse.options import options_by_flag, options_by_name, read_texts
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.rules.validate import RULES
from tests.support.wrong_flags import BASE, EXAMPLES

_PP2 = "--world-size 2 --pipeline-model-parallel-size 2"
_EXPERTS = "--disable-bias-linear --num-experts 8"
_FP8 = "--bf16 --fp8-format e4m3 --hidden-size 256 --num-attention-heads 2 --seq-length 128"

# Each has several numbers or switches that rules weigh against each other, no two of them equal where that is possible.
MORE = (
    "--swiglu --mlp-multipliers 1 2 3",
    "--num-layers 4 --position-embedding-type none --hybrid-layer-pattern +-*-",
    "--num-layers 4 --position-embedding-type none --disable-bias-linear --hybrid-layer-pattern G-*- "
    "--linear-attention-freq 2",
    "--global-batch-size 24 --rampup-batch-size 4 5 100",
    "--world-size 2 --global-batch-size 24 --rampup-batch-size 4 4 100",
    "--world-size 2 --global-batch-size 24 --rampup-batch-size 4 5 100",
    f"{_PP2} --global-batch-size 24 --rampup-batch-size 4 4 100 --num-virtual-stages-per-pipeline-rank 2",
    "--world-size 3 --global-batch-size 9 --step-batch-size-schedule '0:3 1K:6 2K:9'",
    "--world-size 2 --global-batch-size 9 --step-batch-size-schedule '0:2 1K:6 2K:9'",
    "--eval-global-batch-size 12 --eval-micro-batch-size 3 --world-size 2",
    f"{_PP2} --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 4 --eval-global-batch-size 6",
    "--skip-train --eval-iters 0 --full-validation",
    "--skip-train --eval-interval 0 --full-validation",
    "--bf16 --optimizer adam --exp-avg-dtype bf16 --exp-avg-sq-dtype fp16",
    "--bf16 --optimizer sgd --exp-avg-sq-dtype bf16",
    "--loss-scale 8 --min-loss-scale 4 --initial-loss-scale 4",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 4",
    f"{_PP2} --num-layers 11 --decoder-first-pipeline-num-layers 3 --recompute-granularity full "
    "--recompute-method block --recompute-num-layers 8",
    "--recompute-granularity selective --recompute-modules layernorm mlp --norm-position before",
    "--lr 0.01 --min-lr 0.001 --lr-warmup-init 0.002 --lr-warmup-iters 20 --lr-decay-iters 50",
    "--decoupled-lr 0.02 --decoupled-min-lr 0.003 --lr 0.001",
    "--lr-decay-style WSD --lr-wsd-decay-iters 20 --lr-decay-iters 50",
    "--weight-decay-incr-style cosine --start-weight-decay 0.01 --end-weight-decay 0.1",
    "--train-iters 100 --lr-warmup-fraction 0.1 --lr-decay-iters 50",
    f"{_EXPERTS} --world-size 8 --expert-model-parallel-size 4 --moe-router-topk 3 --moe-z-loss-coeff 0.001 "
    "--moe-aux-loss-coeff 0.01 --moe-ffn-hidden-size 192 --moe-shared-expert-intermediate-size 160",
    f"{_EXPERTS} --world-size 8 --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 4 "
    "--expert-tensor-parallel-size 2 --moe-ffn-hidden-size 192 --moe-shared-expert-intermediate-size 160",
    f"{_EXPERTS} --world-size 24 --expert-model-parallel-size 8 --num-distributed-optimizer-instances 2 "
    "--use-distributed-optimizer",
    f"{_EXPERTS} --world-size 8 --expert-model-parallel-size 4 --num-distributed-optimizer-instances 4 "
    "--use-distributed-optimizer",
    f"{_EXPERTS} --moe-router-topk 1 --moe-router-load-balancing-type sinkhorn",
    f"{_EXPERTS} --moe-router-topk 1 --moe-router-pre-softmax",
    f"{_EXPERTS} --moe-router-topk 1 --moe-router-score-function sigmoid",
    "--world-size 12 --num-distributed-optimizer-instances 4 --use-distributed-optimizer",
    "--world-size 4 --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
    "--num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim",
    f"{_EXPERTS} --world-size 4 --use-megatron-fsdp --data-parallel-sharding-strategy optim",
    "--world-size 4 --use-megatron-fsdp --use-torch-fsdp2 --bf16",
    "--world-size 2 --use-torch-fsdp2 --torch-fsdp2-cpu-offload --optimizer-cpu-offload --ddp-bucket-size 1000",
    "--world-size 2 --use-torch-fsdp2 --use-distributed-optimizer --fp16",
    "--optimizer-cpu-offload --optimizer-offload-fraction 0.5 --no-pin-cpu-grads --no-pin-cpu-params",
    "--world-size 12 --tensor-model-parallel-size 2 --context-parallel-size 3 --sequence-parallel --seq-length 96 "
    "--attention-dropout 0 --num-attention-heads 12 --hidden-size 96",
    "--world-size 6 --tensor-model-parallel-size 2 --context-parallel-size 3 --sequence-parallel --seq-length 60 "
    "--cp-comm-type a2a --num-attention-heads 12 --hidden-size 96 --ffn-hidden-size 384",
    "--world-size 6 --tensor-model-parallel-size 2 --context-parallel-size 3 --seq-length 66 --cp-comm-type a2a "
    "--num-attention-heads 12 --hidden-size 96 --group-query-attention --num-query-groups 6",
    "--world-size 2 --context-parallel-size 2 --reset-attention-mask --attention-dropout 0 --cp-comm-type all_gather",
    "--world-size 2 --context-parallel-size 2 --attention-dropout 0.1 --cp-comm-type all_gather",
    f"{_FP8} --num-layers 4 --num-layers-at-start-in-bf16 1 --num-layers-at-end-in-bf16 2 --first-last-layers-bf16",
    f"{_FP8} --fp8-recipe blockwise --world-size 2 --tensor-model-parallel-size 2",
    f"{_FP8} --fp8-recipe rowwise --world-size 2 --context-parallel-size 2 --seq-length 96 --attention-dropout 0",
    f"{_FP8} --fp8-recipe blockwise --world-size 2 --context-parallel-size 2 --micro-batch-size 2 "
    "--attention-dropout 0",
    f"{_FP8} --fp8-recipe rowwise --seq-length 24 --micro-batch-size 2",
    "--mock-data=false --vocab-size 257 --tokenizer-type NullTokenizer --data-path 0.3 a 0.7 b --split 90,7,3",
    "--mock-data=false --train-data-path a b --valid-data-path c d --multiple-validation-sets "
    "--validation-set-names x y --tokenizer-type ByteTokenizer",
    "--mock-data=false --data-path a b c --multiple-validation-sets --validation-set-names x y y "
    "--tokenizer-type ByteTokenizer",
    "--save a --load b --save-interval 10 --save-retain-interval 30 --keep-last-checkpoints 3 --ckpt-step 20 "
    "--exit-on-missing-checkpoint",
    "--save a --non-persistent-save-interval 10 --non-persistent-ckpt-type local "
    "--non-persistent-local-ckpt-dir /dev/shm/snapshots --replication --replication-jump 2",
    "--elastic --save a --load a --global-batch-size 8",
    "--stages curriculum.yaml --save a --no-save-optim --no-save-rng --step-batch-size-schedule '0:2 64:4'",
    "--tokenizer-type SentencePieceTokenizer --tokenizer-model m --vocab-size 1000",
    "--profile --use-pytorch-profiler --profile-step-start 3 --profile-step-end 5 --profile-ranks 0 1 --world-size 2",
    "--position-embedding-type rope --rotary-percent 0.5 --use-rope-scaling --rope-scaling-low-freq-factor 2 "
    "--rope-scaling-high-freq-factor 3 --rope-scaling-factor 5",
    "--position-embedding-type rope --kv-channels 4 --rope-type longrope --longrope-short-factor 1 2 "
    "--longrope-long-factor 3 4 --rotary-scaling-factor 3",
    "--position-embedding-type rope --rotary-base-local 7 --window-size 7,0 --attention-dropout 0 --no-rope-freq 2 "
    "--attention-temperature-scale 0.1 --attention-temperature-step 9",
    "--window-size 7,0 --attention-dropout 0 --num-query-groups-local 2 --softmax-type-local learnable "
    "--value-channels 12 --value-multiplier 2",
    "--quick-geglu --activation-func-clamp-value 7 --glu-linear-offset 1",
    "--group-query-attention --num-query-groups 2 --world-size 4 --tensor-model-parallel-size 4 --kv-channels 12",
    "--padded-vocab-size 1024 --make-vocab-size-divisible-by 32 --max-position-embeddings 65",
    f"{_PP2} --num-layers 10 --decoder-first-pipeline-num-layers 4 --num-virtual-stages-per-pipeline-rank 2 "
    "--global-batch-size 4 --microbatch-group-size-per-virtual-pipeline-stage 3",
    "--world-size 3 --pipeline-model-parallel-size 3 --num-layers 11 --decoder-first-pipeline-num-layers 2 "
    "--decoder-last-pipeline-num-layers 4",
    "--world-size 3 --pipeline-model-parallel-size 3 --num-layers 10 --account-for-embedding-in-pipeline-split "
    "--account-for-loss-in-pipeline-split",
    f"{_PP2} --num-layers 7 --pipeline-model-parallel-layout Et*2|t|tt|ttL --global-batch-size 2",
    "--world-size 8 --tensor-model-parallel-size 2 --context-parallel-size 2 --cp-comm-type a2a "
    "--num-attention-heads 6 --hidden-size 96 --seq-length 60",
    "--mock-data=false --vocab-size 257 --tokenizer-type NullTokenizer --data-path 0.3 a c b --split 90,0,3,1",
    "--mock-data=false --vocab-size 257 --tokenizer-type NullTokenizer --data-path 0 a 2 b --split inf,1",
    "--mock-data=false --vocab-size 257 --tokenizer-type NullTokenizer --data-path a --split 0,1,1",
    "--swiglu --squared-relu --openai-gelu",
    "--swiglu --openai-gelu",
    "--max-position-embeddings 63 --padded-vocab-size 1001 --world-size 2 --tensor-model-parallel-size 2",
    "--max-position-embeddings 64 --padded-vocab-size 1000 --distributed-timeout-minutes 1",
    "--train-samples 100",
    "--lr-decay-samples 100 --lr-warmup-samples 20",
    "--lr-decay-style WSD --lr-wsd-decay-samples 20",
    "--attention-dropout 0.5 --hidden-dropout 0.25 --clip-grad 0.5 --norm-epsilon 0.001",
)

_SAVED = {"num_layers": 8, "hidden_size": 128, "num_attention_heads": 8, "seq_length": 64, "vocab_size": 1000}
_MEET = "--load a --optimizer adam --bf16"
FACTS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("--world-size 4", {"world_size": 4}),
    ("--world-size 4", {"world_size": 3}),
    ("--vocab-size 1000", {"vocab_size": 1000}),
    ("--vocab-size 1000", {"vocab_size": 1001}),
    ("--load a --exit-on-missing-checkpoint", {"missing_checkpoint": "nothing is there"}),
    ("--data-path a", {"missing_paths": ("--data-path a.bin", "--data-path a.idx", "--eval-tasks e")}),
    ("--skip-samples x", {"skip_samples_error": "x is no number"}),
    ("--load a", {"load_problem": "it is a file"}),
    ("--load a --use-checkpoint-args", {"saved": None}),
    (_MEET, {"saved": _SAVED}),
    (_MEET, {"saved": _SAVED | {"num_layers": 9, "swiglu": True}}),
    (f"{_MEET} --swiglu", {"saved": _SAVED | {"ffn_hidden_size": 192}}),
    (f"{_MEET} --finetune", {"saved": _SAVED | {"vocab_size": 999, "moe_router_load_balancing_type": ("sinkhorn",)}}),
    (_MEET, {"saved": _SAVED | {"moe_router_load_balancing_type": ("sinkhorn",)}}),
    (f"{_MEET} --exp-avg-dtype fp16", {"saved": _SAVED}),
    (f"{_MEET} --exp-avg-sq-dtype bf16", {"saved": _SAVED | {"exp_avg_sq_dtype": "fp16"}}),
    (f"{_MEET} --exp-avg-sq-dtype fp16 --no-load-optim", {"saved": _SAVED}),
    (f"{_MEET} --exp-avg-dtype fp16 --finetune", {"saved": _SAVED}),
    (f"{_MEET} --optimizer sgd", {"saved": _SAVED | {"optimizer": "sgd", "sgd_momentum": 0.0}}),
    ("--elastic --save a --load a", {"global_batch_is_given": True}),
    ("--device cuda --bf16", {"cuda_available": True}),
    ("--device auto --distributed-backend gloo", {"cuda_available": True}),
    ("--device auto --torch-compile --hidden-dropout 0 --attention-dropout 0", {"missing_compiler": "g++"}),
    ("--transformer-impl transformer_engine --device cuda", {"cuda_available": True}),
    (
        "--transformer-impl transformer_engine --device cuda",
        {"cuda_available": True, "packages": frozenset({"transformer_engine"})},
    ),
    ("--wandb-project p", {"packages": frozenset({"wandb"})}),
    ("--recurrence-kernels fla", {"cuda_available": True}),
    ("--wandb-project p", {}),
)
"""Flags with what is found outside of them; near them, each fact is left out by itself too."""


@functools.cache
def lines() -> list[tuple[str, Facts, Mapping[str, Any]]]:
    """Every command line to look around, with the facts of its machine."""
    wrong = [example.flags for example in EXAMPLES.values()]
    right = [f"{example.flags} {example.right}" for example in EXAMPLES.values()]
    of_flags = [(line, Facts(), {}) for line in dict.fromkeys(["", *wrong, *right, *MORE])]
    return of_flags + [(line, Facts(**facts), facts) for line, facts in FACTS]


def typed_values(line: str) -> dict[str, Any]:
    return dict(parse(shlex.split(f"{BASE} {line}")).values)


def outcome(values: Mapping[str, Any], facts: Facts) -> tuple[list[str], list[str]]:
    """The rules that speak, in their order, and what they say."""
    config = resolve(values, facts)
    spoken = [(rule.__name__, text) for rule in RULES for text in rule(config, facts)]
    return [name for name, _ in spoken], [text for _, text in spoken]


def near(values: Mapping[str, Any], base: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every way to leave out one of the flags that are added to the base launch, and to move its value."""
    for name, value in values.items():
        if name in base and base[name] == value:
            continue
        dropped = {other: found for other, found in values.items() if other != name}
        yield f"-{name}", dropped | ({name: base[name]} if name in base else {})
        for moved in dict.fromkeys(_moved(name, value)):
            yield f"{name}={' '.join(map(str, moved)) if isinstance(moved, tuple) else moved}", {**values, name: moved}


def _moved(name: str, value: Any) -> Iterator[Any]:
    """Values next to one: those around a number, every other choice, and of several values one less or one more."""
    choices = options_by_name()[name].choices
    if isinstance(value, bool):
        return
    if isinstance(value, tuple):
        if len(value) > 1:
            yield value[:-1]
        yield (*value, *value[-1:])
        for place, item in enumerate(value):
            yield from ((*value[:place], moved, *value[place + 1 :]) for moved in _moved(name, item))
    elif choices is not None:
        yield from (choice for choice in choices if choice != value)
    elif isinstance(value, int):
        yield from (moved for moved in (value - 1, value + 1, 2 * value, 0) if moved != value)
    elif isinstance(value, float):
        yield from (moved for moved in (value / 2, value * 2, 0.0, 1.0, -value) if moved != value)


def advice(text: str) -> Iterator[tuple[str, dict[str, Any], frozenset[str]]]:
    """What the end of a message advises: in words, values to add, and names of flags to leave out."""
    known = options_by_flag()
    for words in re.findall(r"leave (--[\w-]+) out", text):
        yield f"leave {words} out", {}, frozenset({known[words].name})
    for words in re.findall(r"add (--[\w-]+)(?=$|,|;)", text):
        if words in known and known[words].is_switch:
            yield f"add {words}", {known[words].name: True}, frozenset()
    for flag, listed in re.findall(r"(?:use|or) (--[\w-]+) ((?:[\w.]+, )*[\w.]+(?: or [\w.]+)?)(?=$|,|;| \()", text):
        if flag in known:
            for word in re.split(", | or ", listed):
                with contextlib.suppress(ValueError):
                    yield f"use {flag} {word}", {known[flag].name: read_texts(known[flag], [word])}, frozenset()


class Spoken(NamedTuple):
    """What the rules say to values: which of them speak, in their order, and their texts."""

    what: str
    """What differs from the line."""

    values: Mapping[str, Any]
    names: list[str]
    texts: list[str]


@functools.cache
def spoken_near(number: int) -> list[Spoken]:
    """What the rules say at one of `lines`, and next to it."""
    line, facts, _ = lines()[number]
    values = typed_values(line)
    each = [("", values), *near(values, typed_values(""))]
    return [Spoken(what, moved, *outcome(moved, facts)) for what, moved in each]


def around(number: int) -> dict[str, Any]:
    """What the rules say at one of `lines`, next to it where that differs, and a checksum of all that they say."""
    _, facts, given = lines()[number]
    here, *others = spoken_near(number)
    said = [*here.texts, *(text for one in others for text in (one.what, *one.texts))]
    nearby = {one.what: one.names for one in others if one.names != here.names}
    for name in given:
        default = next(field for field in dataclasses.fields(Facts) if field.name == name)
        unknown = default.default if default.default is not dataclasses.MISSING else {}
        found, texts = outcome(here.values, dataclasses.replace(facts, **{name: unknown}))
        said += [name, *texts]
        if found != here.names:
            nearby[f"unknown {name}"] = found
    return {"rules": here.names, "near": nearby, "texts": zlib.crc32("\n".join(said).encode())}


def title(line: str, given: Mapping[str, Any]) -> str:
    shown = {name: sorted(value) if isinstance(value, frozenset) else value for name, value in given.items()}
    return f"{line} | {json.dumps(shown)}" if given else line


def golden_text() -> str:
    """tests/golden/near_flags.json: one command line a line."""
    rows = {title(line, given): around(number) for number, (line, _, given) in enumerate(lines())}
    body = ",\n".join(f"{json.dumps(key)}: {json.dumps(row)}" for key, row in rows.items())
    return f"{{\n{body}\n}}\n"
