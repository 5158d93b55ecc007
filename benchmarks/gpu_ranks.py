"""Runs one case of several ranks of benchmarks/gpu_session.py: `gpu_ranks.py DEVICE BACKEND CASE`.

CASE is a name of `plugins/prove/cases.CASES`. torchrun trains its model in its layout, a device for each rank, and
losses, gradient norms and the validation loss are held against one rank by the tolerances of `plugins/prove/parity.py`.
`gpu_ranks.py DEVICE one-rank MODEL` trains that rank; a session does so once for each model. BACKEND is a value of
--nccl-backend, or gloo. Prints RESULT and the figures as JSON; exit code 1 where the runs differ.
"""

import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import gpu_trial
from megatron_ext.plugins.prove.cases import CASES
from megatron_ext.plugins.prove.compared_models import MODELS, RECIPE

ONE_RANK = "one-rank"


def main(device: str, backend: str, name: str) -> None:
    figures = one_rank(device, name) if backend == ONE_RANK else several_ranks(device, backend, name)
    print("RESULT", json.dumps(figures), flush=True)
    if "wrong" in figures:
        sys.exit(1)


def one_rank(device: str, model: str) -> dict[str, Any]:
    """Return the first and the last loss of one rank."""
    losses = [row["lm_loss"] for row in _reference(device, model) if "lm_loss" in row]
    return {"first loss": losses[0], "last loss": losses[-1]}


def several_ranks(device: str, backend: str, name: str) -> dict[str, Any]:
    """Return how far a layout is from one rank, and, where it is too far, the command that names the first tensor that
    differs."""
    from megatron_ext.plugins.prove.parity import compare

    case = CASES[name]
    found = compare(_record(_reference(device, case.model)), _record(_train(device, name, backend)))
    figures: dict[str, Any] = {
        "first loss": found.first_loss,
        "loss": found.loss,
        "gradient norm": found.grad_norm,
        "validation loss": found.validation_loss,
    }
    problems = found.problems()
    if problems:
        made_up = "--mock-data --tokenizer-type NullTokenizer --vocab-size 256 --seq-length 32"
        flags = [*RECIPE.split(), *MODELS[case.model].split(), *made_up.split(), *case.flags, *_chosen(backend)]
        tool = ["python", "tools/parity.py", "--device", device, "--world-size", str(case.world_size), "--"]
        figures |= {"wrong": "; ".join(problems), "the first tensor that differs": shlex.join([*tool, *flags])}
    return figures


def _reference(device: str, model: str) -> list[dict[str, Any]]:
    return gpu_trial.kept(f"{ONE_RANK} {device} {model}", lambda: _run(device, MODELS[model], 1))


def _train(device: str, name: str, backend: str) -> list[dict[str, Any]]:
    case = CASES[name]
    return _run(device, shlex.join([*MODELS[case.model].split(), *case.flags, *_chosen(backend)]), case.world_size)


def _run(device: str, flags: str, ranks: int) -> list[dict[str, Any]]:
    from megatron_ext.plugins.prove.parity import write_corpus

    with tempfile.TemporaryDirectory() as folder:
        data = shlex.join(write_corpus(Path(folder)))
        return gpu_trial.metrics(device, f"{RECIPE} {data} --log-interval 1 {flags}", ranks)[0]


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
