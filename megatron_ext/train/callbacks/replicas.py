"""Checks now and then that ranks which must hold the same weights do."""

from megatron_ext.train.replicas import check_data_parallel_replicas, check_model_parallel_copies
from megatron_ext.train.trainer import Callback, Trainer


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
