"""Checks every so many steps whether the ranks that should hold the same weights do, bit for bit.

There are three kinds of copies: data-parallel replicas hold the same shard of the model; tensor-parallel ranks hold the
same norms, biases after a row-parallel layer, learned positions and routers; the first and the last pipeline stage hold
the same tied embeddings. Experts are replicated within groups of their own. Rounding is no excuse for a difference:
every copy began equal and was given the same updates.
"""

from collections.abc import Sequence

import torch

from megatron_ext.errors import NumericError
from megatron_ext.model.names import biases_of_experts, global_named_parameters
from megatron_ext.parallel.rows import local_part
from megatron_ext.parts.catalogue import WORD_EMBEDDINGS
from megatron_ext.plugins.silent_errors.weight_hash import weight_hash
from megatron_ext.train.run import Run
from megatron_ext.train.trainer import Callback, Trainer

NamedParameters = Sequence[tuple[str, torch.Tensor]]


def check_data_parallel_replicas(run: Run, iteration: int, last_good: int) -> None:
    """Compare all weights within the data-parallel groups (expert-data-parallel for experts). Collective.

    Args:
        iteration: the step before whose update it is.
        last_good: the iteration at which the last check passed.
    Raises:
        NumericError: replicas differ, on every rank; it names the ranks in the minority and the parameters.
    """
    parameters = _all(run)
    dense = [(name, parameter) for name, parameter in parameters if not _is_expert(parameter)]
    experts = [(name, parameter) for name, parameter in parameters if _is_expert(parameter)]
    what = "data-parallel replicas"
    differing = _differences(dense, run.groups.dp_cp, what) + _differences(experts, run.groups.expt_dp, what)
    _raise_together(run, differing, iteration, last_good)


def check_model_parallel_copies(run: Run, iteration: int, last_good: int) -> None:
    """Compare the weights that tensor-parallel ranks hold whole, and the tied embeddings of the first and last stage.

    Collective. `check_data_parallel_replicas` has the same arguments and errors.
    """
    parameters = _all(run)
    copies = [named for named in parameters if not getattr(named[1], "tensor_model_parallel", False)]
    dense = [(name, parameter) for name, parameter in copies if not _is_expert(parameter)]
    experts = [(name, parameter) for name, parameter in copies if _is_expert(parameter)]
    what = "tensor-parallel copies"
    differing = _differences(dense, run.groups.tp, what) + _differences(experts, run.groups.expt_tp, what)
    ends = run.groups.embd  # none on the stages between
    if ends is not None and run.config.model.shares_word_embeddings:
        tied = [named for named in parameters if named[0] == WORD_EMBEDDINGS]
        differing += _differences(tied, ends, "tied embeddings of the first and last stage")
    _raise_together(run, differing, iteration, last_good)


def _all(run: Run) -> list[tuple[str, torch.Tensor]]:
    """Return the weights, and the biases of experts, which are no weights and belong to all ranks of a stage."""
    return [*global_named_parameters(run.chunks), *biases_of_experts(run.chunks)]


def _is_expert(parameter: torch.Tensor) -> bool:
    """Return megatron-core's mark of a parameter whose gradient is not reduced over the whole data-parallel group."""
    return not getattr(parameter, "allreduce", True)


def _differences(named: NamedParameters, group: torch.distributed.ProcessGroup, what: str) -> list[str]:
    """Return one text for each parameter that differs between the ranks of `group`."""
    if group.size() == 1 or not named:
        return []
    own = torch.stack([weight_hash(local_part(parameter)) for _, parameter in named])
    gathered = own.new_empty(group.size() * len(own))
    torch.distributed.all_gather_into_tensor(gathered, own, group=group)
    of_ranks = gathered.view(group.size(), len(own))
    differs = (of_ranks != of_ranks[0]).any(dim=0)
    if not bool(differs.any()):  # the only wait for the device
        return []
    ranks = torch.distributed.get_process_group_ranks(group)
    return [
        f"{_who_is_wrong(ranks, of_ranks[:, index].tolist())} {named[index][0]} ({what})"
        for index in differs.nonzero().flatten().tolist()
    ]


def _who_is_wrong(ranks: Sequence[int], hashes: Sequence[int]) -> str:
    """Return "rank 2 differs from ranks 0, 1, 3 in": the minority, where more than half of the ranks agree."""
    agreeing: dict[int, list[int]] = {}
    for rank, value in zip(ranks, hashes, strict=True):
        agreeing.setdefault(value, []).append(rank)
    majority = max(agreeing.values(), key=len)
    if 2 * len(majority) <= len(ranks):
        return f"{_listed(ranks)} do not agree, and no majority says who is right, in"
    minority = [rank for rank in ranks if rank not in majority]
    return f"{_listed(minority)} differ{'s' if len(minority) == 1 else ''} from {_listed(majority)} in"


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _raise_together(run: Run, differing: list[str], iteration: int, last_good: int) -> None:
    """Tell every rank the differences that any rank found, and raise them on all."""
    anything = torch.tensor(len(differing), device=run.device.torch_device)
    torch.distributed.all_reduce(anything, op=torch.distributed.ReduceOp.MAX)
    if not int(anything):
        return
    of_ranks: list[list[str]] = [[] for _ in range(run.world_size)]
    torch.distributed.all_gather_object(of_ranks, differing)
    texts = list(dict.fromkeys(text for texts in of_ranks for text in texts))
    more = f", and {len(texts) - 3} more" if len(texts) > 3 else ""
    raise NumericError(
        f"weights that must be equal are not: {'; '.join(texts[:3])}{more}; found at iteration "
        f"{iteration}, before its update. At iteration {last_good} they were equal. Next: resume from a "
        f"checkpoint of iteration {last_good} or earlier (--ckpt-step); if the same rank is named again, take its "
        f"machine out."
    )


class ReplicaCheck(Callback):
    """Compares weights every so many steps, just before the update.

    It compares before rather than after the update: with the distributed optimizer the update fetches every weight anew
    from the rank that owns it, and so a copy that went wrong during the step would be gone, its effect on the gradients
    would not.

    Args:
        data_parallel_interval: steps between two comparisons of data-parallel replicas; None or 0 for none.
        model_parallel_interval: the same for what tensor-parallel ranks hold whole, and for tied embeddings.
    """

    phase = "the replica check"

    def __init__(self, data_parallel_interval: int | None, model_parallel_interval: int | None):
        self._checks = [
            (interval, check)
            for interval, check in (
                (data_parallel_interval, check_data_parallel_replicas),
                (model_parallel_interval, check_model_parallel_copies),
            )
            if interval
        ]
        self._last_good = [0] * len(self._checks)

    def on_start(self, trainer: Trainer) -> None:
        self._last_good = [trainer.run.state.iteration] * len(self._checks)

    def before_update(self, trainer: Trainer) -> None:
        iteration = trainer.position.iteration + 1
        for index, (interval, check) in enumerate(self._checks):
            if iteration % interval == 0:
                check(trainer.run, iteration, self._last_good[index])
                self._last_good[index] = iteration - 1
