"""What 2-byte gradients would make possible: `--grad-reduce-in-bf16` halves their memory and their traffic, and sums
them less exactly, so that the search never chooses it by itself.

NVIDIA's own benchmarks are run so (NeMo-Framework-Launcher, examples/training/llama/h100/llama3_8b_bf16.sh:
`optim.grad_sync_dtype=bf16`), and some of their layouts do not fit with gradients of 4 bytes.
"""

from dataclasses import replace

from megatron_ext.plan.search import Answer, Candidate, Question, tried_again

_LEAST_GAIN = 0.01


def with_short_gradients(question: Question, answer: Answer, number: int = 3) -> list[Candidate]:
    """Return up to `number` layouts that are faster by 1% or more with 2-byte gradients than the best without, fastest
    first; none where nothing fits, or what was given says how gradients are kept."""
    values = question.values
    said = any(values.get(name) for name in ("grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32"))
    if not answer.best or said or not values.get("bf16") or values.get("main_grads_dtype"):
        return []
    limit = answer.best[0].seconds / (1 + _LEAST_GAIN)
    short = {"grad_reduce_in_bf16": True}
    resolved = {**short, "accumulate_allreduce_grads_in_fp32": False}
    # What host memory had to take before is part of the flags of the best.
    moved = {name: True for name in ("optimizer_cpu_offload",) if answer.best[0].choice.get(name)}
    found = tried_again(question, answer.tight, resolved, limit, number)
    return [replace(each, choice={**each.choice, **moved, **short}) for each in found]
