"""Lists what benchmarks/gpu_session.py runs: cases as data, in the order of their value.

A case is a command of its own process, which may print a line `RESULT {...}`, whose figures are then kept. To add one,
append a `Case` to the list of its phase, or make a new phase in `PHASES`; the runner needs no change. A phase whose
cases may together take longer than a session is divided into parts by `parts`.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_ext.plugins.prove.cases import CASES

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 90.0
SESSION = 570.0
"""Seconds for which a machine is lent at a time: no part takes longer, whatever its cases do."""

MOCK = "--mock-data --tokenizer-type NullTokenizer --eval-interval 0 --lr 1e-3 --lr-warmup-iters 10 "
LLAMA = "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0 "
SMALL = MOCK + (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --vocab-size 1000 --micro-batch-size 2 "
    "--global-batch-size 8 --train-iters 20 --log-interval 1 " + NO_DROPOUT
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 "
PACKED = "--reset-position-ids --reset-attention-mask --eod-mask-loss "
FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy "
RECOMPUTE = "--recompute-granularity selective --recompute-modules core_attn mlp layernorm "
OFFLOAD = "--use-distributed-optimizer --optimizer-cpu-offload "
GRAPHS = "--cuda-graph-impl full_iteration "

MATCHES = {
    "Llama": LLAMA,
    "Llama, bf16": LLAMA + "--bf16 ",
    "GPT-2, distributed optimizer": "--openai-gelu --use-distributed-optimizer ",
    "packed documents, bf16": LLAMA + PACKED + "--bf16 ",
    "grouped queries, packed documents": LLAMA + "--group-query-attention --num-query-groups 2 " + PACKED,
    "grouped queries, packed documents, bf16": LLAMA + "--group-query-attention --num-query-groups 2 --bf16 " + PACKED,
    "without fused functions, bf16": LLAMA + "--disable-jit-fuser --bf16 ",
    "without Triton kernels, bf16": LLAMA + "--no-triton-kernels --bf16 ",
    "norms of heads, pairs of neighbours": LLAMA + "--qk-layernorm --rotary-interleaved ",
    "norms after, bf16": LLAMA + "--norm-position after --qk-layernorm --qk-layernorm-over projection --bf16 ",
    "dropout of 0 in LayerNorm's sums, bf16": "--openai-gelu --bf16 ",
    "experts": LLAMA + EXPERTS,
    "grouped experts, bf16": LLAMA + EXPERTS + "--moe-grouped-gemm --bf16 ",
    "fp16, distributed optimizer": LLAMA + "--fp16 --initial-loss-scale 1048576 --use-distributed-optimizer ",
    "layers recomputed": LLAMA + "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 ",
    "parts recomputed, bf16": LLAMA + RECOMPUTE + "--bf16 ",
    "FSDP2": LLAMA + "--use-torch-fsdp2 ",
    "FSDP2, bf16": LLAMA + "--use-torch-fsdp2 --bf16 ",
    "ZeRO-2, bf16": LLAMA + FSDP + "optim_grads --bf16 ",
    "ZeRO-3, bf16": LLAMA + FSDP + "optim_grads_params --bf16 ",
    "ZeRO-3, experts": LLAMA + EXPERTS + FSDP + "optim_grads_params ",
    "compiled": LLAMA + "--torch-compile ",
    "loss with its output layer, bf16": LLAMA + "--linear-cross-entropy --bf16 ",
    "weight gradients added by the product, bf16": LLAMA + "--gradient-accumulation-fusion --bf16 ",
    "weight gradients added after their products, bf16": LLAMA + "--no-gradient-accumulation-fusion --bf16 ",
    "both, fp32": LLAMA + "--linear-cross-entropy --gradient-accumulation-fusion ",
    "optimizer in host memory, bf16": LLAMA + OFFLOAD + "--bf16 ",
    "half of the optimizer in host memory": LLAMA + OFFLOAD + "--optimizer-offload-fraction 0.5 ",
    "FSDP2 in host memory": LLAMA + "--use-torch-fsdp2 --torch-fsdp2-cpu-offload ",
    "FSDP2 in host memory, bf16": LLAMA + "--use-torch-fsdp2 --torch-fsdp2-cpu-offload --bf16 ",
    "CUDA graphs": LLAMA + GRAPHS,
    "CUDA graphs, both, bf16": LLAMA + GRAPHS + "--linear-cross-entropy --gradient-accumulation-fusion --bf16 ",
}
"""Flags added to SMALL. They take the kernels that differ between CUDA and CPU (attention, packed documents, experts)
and what moves tensors between host and device or between dtypes."""

GPT_2 = MOCK + (
    "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --vocab-size 50257 --openai-gelu "
    "--micro-batch-size 32 --global-batch-size 64 " + NO_DROPOUT
)
LLAMA_1B = MOCK + (
    "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 5504 --seq-length 2048 "
    "--vocab-size 32000 --untie-embeddings-and-output-weights --micro-batch-size 4 --global-batch-size 16 "
    + LLAMA
    + NO_DROPOUT
)
FP8 = {
    recipe: f"--bf16 --fp8-format hybrid --fp8-recipe {recipe} " for recipe in ("tensorwise", "rowwise", "blockwise")
}
SPEEDS = {
    "GPT-2 124M, sequences of 1,024": GPT_2,
    "Llama-shaped 1.3B, sequences of 2,048": LLAMA_1B,
    "GPT-2 124M, compiled": GPT_2 + "--torch-compile ",
    "Llama-shaped 1.3B, compiled": LLAMA_1B + "--torch-compile ",
    **{f"Llama-shaped 1.3B, FP8 {recipe}": LLAMA_1B + flags for recipe, flags in FP8.items()},
}
WIDE = "--ffn-hidden-size 384 "
"""Flags added to SMALL for FP8, whose blocks need sides that are multiples of 128."""
SWITCHES = {
    "loss with its output layer": "--linear-cross-entropy",
    "weight gradients added after their products": "--no-gradient-accumulation-fusion",
    "both": "--linear-cross-entropy --no-gradient-accumulation-fusion",
    "compiled, loss with its output layer": "--torch-compile --linear-cross-entropy",
    "without fused functions": "--disable-jit-fuser",
    "without Triton kernels": "--no-triton-kernels",
    "compiled": "--torch-compile",
    "neither Triton kernels nor fused functions": "--no-triton-kernels --disable-jit-fuser",
    "attention by flash": "--attention-backend flash",
    "attention by cuDNN": "--attention-backend fused",
    "numbers read before the update": "--check-before-update",
}
"""Flags that change no loss but by rounding: each is switched on and off."""
RECURRENCES = {
    "gated delta rules": LLAMA + "--experimental-attention-variant gated_delta_net --linear-attention-freq 4 ",
    "Kimi delta rules": LLAMA + "--experimental-attention-variant kda --linear-attention-freq 4 ",
    "gated delta rules, packed": (
        LLAMA + "--experimental-attention-variant gated_delta_net --linear-attention-freq 4 " + PACKED
    ),
    "Mamba-2": LLAMA.replace("rope", "none") + "--hybrid-layer-pattern M-M* --mamba-num-groups 1 ",
}
"""Flags added to SMALL, and to a model of 1,024 channels for time: without fla-core's kernels and with them."""
SWITCHED = {"GPT-2 124M": GPT_2, "Llama-shaped 1.3B": LLAMA_1B}
GRAPHED = {
    f"{name}, microbatches of {samples}": f"{flags}--micro-batch-size {samples} --global-batch-size 32 "
    for samples in (4, 8)
    for name, flags in {
        "GPT-2 124M": GPT_2,
        "Llama's layers, 124M": GPT_2.replace("--openai-gelu ", LLAMA),
        "GPT-2 124M, distributed optimizer": GPT_2 + "--use-distributed-optimizer ",
    }.items()
}
"""Sizes at which the GPU may wait for the host. Each is trained without and with CUDA graphs: equal losses, and how
much faster."""


RANKS = (
    *("TP2 SP, untied", "PP2, untied", "DP2 distributed optimizer, overlap, untied", "FSDP2, untied", "ZeRO-3, untied"),
    *("EP2, alltoall, experts", "CP2 p2p, untied", "CP2 all_gather, untied", "CP2 a2a, untied", "PP2 zbv, untied"),
    *("PP4 VPP2, untied", "TP2 SP PP2 VPP2 DP2 distributed optimizer, overlap, untied"),
)
"""Names of layouts of several ranks that are held against one rank (`plugins/prove/cases.py`), the most telling of
those with as many ranks first. Each communicates in another way."""
RANKS_LIMIT = 60.0
OVERLAPPED = "TP2 SP, untied"
"""The layout that is held against one rank with --tp-comm-overlap, too."""
BACKENDS = {"cuda": ("nccl-legacy", "nccl2"), "cpu": ("gloo",)}
"""Implementations of collectives under which they train, the default first."""


@dataclass(frozen=True)
class Case:
    """One process.

    Attributes:
        limit: seconds after which it is killed, with whatever it has started.
        alone: whether nothing else may run meanwhile, for its times to count.
        needs: modules without which it cannot run.
        devices: GPUs that it trains on, or processes of a CPU.
    """

    name: str
    phase: str
    command: tuple[str, ...]
    limit: float = LIMIT
    alone: bool = False
    needs: tuple[str, ...] = ()
    devices: int = 1


OF_A_RUN = ("torch", "megatron.core", "numpy", "packaging", "psutil", "yaml")
"""Modules without which no run of the program gets as far as its first step."""
PACKAGES = (*OF_A_RUN, "triton", "einops", "tokenizers", "orjson", "gigatoken")
"""Modules whose absence is worth a line at the start; none of the cases needs the last three."""


def cases(device: str) -> list[Case]:
    """Return all cases for "cuda" or "cpu"; with "cpu" those that need no GPU, which compare the CPU with itself."""
    return [case for phase in PHASES.values() for case in phase(device)]


def parts(device: str) -> dict[str, list[Case]]:
    """Return the cases by part, in their order: neighbours of a phase whose limits add up to at most `SESSION`. A phase
    that has several is named with a number: `matches-1`."""
    found: dict[str, list[Case]] = {}
    for name, phase in PHASES.items():
        pieces: list[list[Case]] = [[]]
        for case in phase(device):
            if sum(each.limit for each in pieces[-1]) + case.limit > SESSION:
                pieces.append([])
            pieces[-1].append(case)
        found |= {name if len(pieces) == 1 else f"{name}-{n}": piece for n, piece in enumerate(pieces, 1) if piece}
    return found


def _facts(device: str) -> list[Case]:
    asked = {"versions": ("versions",), "attention": ("attention",)}
    asked |= {f"group of one, {backend}": ("group of one", backend) for backend in BACKENDS[device]}
    return [_helper("gpu_facts.py", name, "facts", device, *words, needs=("torch",)) for name, words in asked.items()]


def _smoke(device: str) -> list[Case]:
    runs = {"fp32": "", "bf16": "--bf16 "}
    if device == "cuda":  # a CPU multiplies nothing in FP8
        runs |= {f"FP8 {recipe}": WIDE + flags for recipe, flags in FP8.items()}
    return [_trial(name, "smoke", device, "loss", SMALL + LLAMA + flags) for name, flags in runs.items()]


def _operators(device: str) -> list[Case]:
    names = ["weight gradient", "loss", "padded vocabulary"]
    if device == "cuda":  # no Triton kernel runs on a CPU
        names += ["norms", "heads", "SwiGLU", "cross-entropy", "updates", "ceilings"]
    in_triton = ("norms", "heads", "SwiGLU", "cross-entropy", "updates")
    return [
        _helper(
            "gpu_operations.py", name, "operators", device, name, alone=True,
            needs=("torch", "megatron.core", *(("triton",) if name in in_triton else ())),
        )
        for name in names
    ]  # fmt: skip


def _matches(device: str) -> list[Case]:
    slow = ("--torch-compile", RECOMPUTE)  # the second compiles some C++ of megatron-core
    limits = {name: 2 * LIMIT if any(flag in flags for flag in slow) else LIMIT for name, flags in MATCHES.items()}
    return [
        _trial(name, "matches", device, "match", SMALL + flags, limit=limits[name]) for name, flags in MATCHES.items()
    ]


def _ranks(device: str) -> list[Case]:
    """Return one rank of every model, then the layouts of 2, 4 and 8 ranks, under the default backend first."""
    chosen = [CASES[name] for name in RANKS]
    models = dict.fromkeys(one.model for one in chosen)
    found = [_of_ranks(f"one rank, {model}", device, "one-rank", model, 1) for model in models]
    for backend in BACKENDS[device]:
        for one in sorted(chosen, key=lambda one: one.world_size):
            found.append(_of_ranks(f"{one.name}, {backend}", device, backend, one.name, one.world_size))
    return [*found, *_overlapped(device)]


def _overlapped(device: str) -> list[Case]:
    """Return the cases of --tp-comm-overlap: right, and how fast; on a CPU, which has no symmetric memory, none."""
    if device == "cpu":
        return []
    flag, name = "--tp-comm-overlap", f"{OVERLAPPED}, products overlap"
    trained = f"{LLAMA_1B}--tensor-model-parallel-size 2 --sequence-parallel |{flag}"
    return [
        _of_ranks(name, device, BACKENDS[device][0], OVERLAPPED, 2, flag),
        _of_ranks("Llama-shaped 1.3B, TP2 SP: products overlap", device, "switch", trained, 2, limit=2 * LIMIT),
    ]


def _of_ranks(
    name: str, device: str, backend: str, what: str, devices: int, *flags: str, limit: float = RANKS_LIMIT
) -> Case:
    needs = OF_A_RUN + (("einops",) if "ZeRO-3" in what else ())
    case = _helper("gpu_ranks.py", name, "ranks", device, backend, what, *flags, alone=True, limit=limit, needs=needs)
    return replace(case, devices=devices)


def _speeds(device: str) -> list[Case]:
    if device == "cpu":
        return []
    runs = [(name, "speed", flags) for name, flags in SPEEDS.items()]
    runs += [(f"where the time goes, {size}", "roofline", size) for size in ("124m", "1.3b")]
    return [_trial(name, "speed", device, kind, flags, alone=True, limit=2 * LIMIT) for name, kind, flags in runs]


def _switches(device: str) -> list[Case]:
    """Return every switch at every size; on a CPU, where a step of these takes minutes, at the small one."""
    sizes = {"small": SMALL + LLAMA} if device == "cpu" else SWITCHED
    for_gpus = ("compile", "triton", "attention")
    switches = {
        name: flags
        for name, flags in SWITCHES.items()
        if device == "cuda" or not any(word in flags for word in for_gpus)
    }
    return [
        _trial(f"{size}: {name}", "switches", device, "switch", f"{flags}|{switch}", alone=True, limit=2 * LIMIT)
        for size, flags in sizes.items()
        for name, switch in switches.items()
    ]


def _recurrences(device: str) -> list[Case]:
    """Return small models for their losses, then wider ones for time; on a CPU, which has no such kernels, none."""
    if device == "cpu":
        return []
    wide = SMALL.replace("--hidden-size 128", "--hidden-size 1024").replace("--seq-length 128", "--seq-length 4096")
    return [
        _trial(
            f"{name}, {size}", "recurrences", device, "switch", f"{base}{flags}|--recurrence-kernels fla",
            alone=True, limit=4 * LIMIT,
        )
        for size, base in (("small", SMALL), ("wide", wide))
        for name, flags in RECURRENCES.items()
    ]  # fmt: skip


def _graphs(device: str) -> list[Case]:
    """Return every small size without and with CUDA graphs; on a CPU, where there are none, the small model, which must
    then be the same to the bit."""
    sizes = {"small": SMALL + LLAMA} if device == "cpu" else GRAPHED
    return [
        _trial(name, "graphs", device, "graphs", f"{flags}|{GRAPHS}", alone=True, limit=2 * LIMIT)
        for name, flags in sizes.items()
    ]


def _peers(device: str) -> list[Case]:
    names = {"nanoGPT": (), "Trainer": ("transformers",)}
    return [
        _helper(
            "gpu_peers.py", name, "peers", device, name, alone=True, limit=3 * LIMIT,
            needs=(*OF_A_RUN, *more),
        )
        for name, more in names.items()
    ]  # fmt: skip


def _stall(device: str) -> list[Case]:
    """Return a background save of some 18 GB; on a CPU, of a small model."""
    flags = SMALL + LLAMA if device == "cpu" else LLAMA_1B
    return [_trial("background save", "stall", device, "stall", flags, alone=True, limit=3 * LIMIT)]


PHASES = {
    "facts": _facts,
    "smoke": _smoke,
    "operators": _operators,
    "matches": _matches,
    "speed": _speeds,
    "stall": _stall,
    "peers": _peers,
    "recurrences": _recurrences,
    "switches": _switches,
    "graphs": _graphs,
    "ranks": _ranks,  # the one phase of several devices: what one of them tells comes before it
}


def _trial(
    name: str, phase: str, device: str, kind: str, flags: str, *, alone: bool = False, limit: float = LIMIT
) -> Case:
    needs = [*OF_A_RUN]
    if "--use-megatron-fsdp" in flags:
        needs.append("einops")
    if device == "cuda" and "--torch-compile" in flags:
        needs.append("triton")
    if "--recurrence-kernels fla" in flags:
        needs += ["triton", "fla"]
    return _helper("gpu_trial.py", name, phase, device, kind, flags, alone=alone, limit=limit, needs=tuple(needs))


def _helper(
    program: str,
    name: str,
    phase: str,
    device: str,
    *arguments: str,
    alone: bool = False,
    limit: float = LIMIT,
    needs: tuple[str, ...] = (),
) -> Case:
    command = (sys.executable, str(ROOT / "benchmarks" / program), device, *arguments)
    return Case(name, phase, command, limit=limit, alone=alone, needs=needs)
