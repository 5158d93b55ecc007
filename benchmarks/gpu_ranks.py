"""Runs one case of several ranks of benchmarks/gpu_session.py: `gpu_ranks.py DEVICE BACKEND CASE [FLAGS]`.

CASE is a name of `plugins/prove/cases.CASES`. torchrun trains its model in its layout, a device for each rank, and
losses, gradient norms and the validation loss are held against one rank by the tolerances of `plugins/prove/parity.py`.
`gpu_ranks.py DEVICE one-rank MODEL` trains that rank; a session does so once for each model. BACKEND is a value of
--nccl-backend, or gloo. FLAGS are added to the layout's. `gpu_ranks.py DEVICE switch TRAINED|SWITCH` times a run of two
ranks without and with the flags after the `|`, whose losses agree. Prints RESULT and the figures as JSON; exit code 1
where the runs differ.
"""

import json
import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import gpu_trial
from megatron_ext.plugins.prove.cases import CASES
from megatron_ext.plugins.prove.compared_models import MODELS, RECIPE

ONE_RANK, SWITCH = "one-rank", "switch"


def main(device: str, backend: str, name: str, flags: str = "") -> None:
    kinds = {ONE_RANK: one_rank, SWITCH: switched}
    figures = kinds[backend](device, name) if backend in kinds else several_ranks(device, backend, name, flags)
    print("RESULT", json.dumps(figures), flush=True)
    if "wrong" in figures:
        sys.exit(1)


def one_rank(device: str, model: str) -> dict[str, Any]:
    """Return the first and the last loss of one rank."""
    losses = [row["lm_loss"] for row in _reference(device, model) if "lm_loss" in row]
    return {"first loss": losses[0], "last loss": losses[-1]}


def switched(device: str, flags: str) -> dict[str, Any]:
    """Return the medians of two ranks without and with what stands after the `|`, and how far the losses are apart."""
    plain, switch = flags.split("|")
    runs = [gpu_trial.metrics(device, f"{each} {gpu_trial.TIMED}", 2) for each in (plain, f"{plain} {switch}")]
    off, on = ([row for row in rows if "lm_loss" in row] for rows, _ in runs)
    differences = [abs(a["lm_loss"] - b["lm_loss"]) for a, b in zip(off, on, strict=True)]
    figures = {"off": gpu_trial.medians(off), "on": gpu_trial.medians(on), "all steps": max(differences)}
    figures |= {"first step": differences[0], **_without_effect(runs[1][1])}
    agree = differences[0] <= gpu_trial.LARGEST_FIRST_LOSS_DIFFERENCE[16]
    return figures if agree else {**figures, "wrong": "the losses are others"}


def _without_effect(said: str) -> dict[str, str]:
    """Return what a run has said of a flag that changes nothing on these devices."""
    found = re.search(r"--\S+ changes nothing on rank .*", said)
    return {} if found is None else {"without effect": found[0]}


def several_ranks(device: str, backend: str, name: str, more: str = "") -> dict[str, Any]:
    """Return how far a layout is from one rank, and, where it is too far, the command that names the first tensor that
    differs.

    Args:
        more: flags that are added to the layout's.
    """
    from megatron_ext.plugins.prove.parity import compare

    case = CASES[name]
    rows, said = _train(device, name, backend, more)
    found = compare(_record(_reference(device, case.model)), _record(rows))
    figures: dict[str, Any] = {
        "first loss": found.first_loss,
        "loss": found.loss,
        "gradient norm": found.grad_norm,
        "validation loss": found.validation_loss,
        **_without_effect(said),
    }
    problems = found.problems()
    if problems:
        made_up = "--mock-data --tokenizer-type NullTokenizer --vocab-size 256 --seq-length 32"
        flags = [
            *RECIPE.split(),
            *MODELS[case.model].split(),
            *made_up.split(),
            *case.flags,
            *_chosen(backend),
            *more.split(),
        ]
        tool = ["python", "tools/parity.py", "--device", device, "--world-size", str(case.world_size), "--"]
        figures |= {"wrong": "; ".join(problems), "the first tensor that differs": shlex.join([*tool, *flags])}
    return figures


def _reference(device: str, model: str) -> list[dict[str, Any]]:
    return gpu_trial.kept(f"{ONE_RANK} {device} {model}", lambda: _run(device, MODELS[model], 1)[0])


def _train(device: str, name: str, backend: str, more: str) -> tuple[list[dict[str, Any]], str]:
    case = CASES[name]
    flags = [*MODELS[case.model].split(), *case.flags, *_chosen(backend), *more.split()]
    return _run(device, shlex.join(flags), case.world_size)


def _run(device: str, flags: str, ranks: int) -> tuple[list[dict[str, Any]], str]:
    from megatron_ext.plugins.prove.parity import write_corpus

    with tempfile.TemporaryDirectory() as folder:
        data = shlex.join(write_corpus(Path(folder)))
        return gpu_trial.metrics(device, f"{RECIPE} {data} --log-interval 1 {flags}", ranks)


def _chosen(backend: str) -> tuple[str, ...]:
    return () if backend == "gloo" else ("--nccl-backend", backend)


def _record(rows: list[dict[str, Any]]) -> Any:
    """Return a run's curves as those that the proofs of layouts compare."""
    from megatron_ext.plugins.prove.recorded_training import RunRecord

    steps = [row for row in rows if "lm_loss" in row]
    validated = [row["validation_loss"] for row in rows if "validation_loss" in row]
    losses, norms = ([row[name] for row in steps] for name in ("lm_loss", "grad_norm"))
    return RunRecord(losses, norms, validated[-1] if validated else None, weights={}, gradients={}, flaws=())


if __name__ == "__main__":
    main(*sys.argv[1:])
