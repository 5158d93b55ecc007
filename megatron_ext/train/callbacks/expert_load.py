"""Reads how many tokens each expert gets, once a log interval, and warns of experts that get none for many steps."""

from collections.abc import Iterator
from typing import Any

import torch

from megatron_ext.model.names import unwrapped
from megatron_ext.parts.experts.load_report import LayerLoad, load_report
from megatron_ext.parts.experts.router import Router
from megatron_ext.parts.protocol import Report
from megatron_ext.parts.stack import layers
from megatron_ext.terminal import warn
from megatron_ext.train.run import Run
from megatron_ext.train.trainer import Callback, Trainer

STEPS_WITHOUT_TOKENS = 100
"""Steps without a token after which an expert is named: ten times as many as it takes Adam to forget a gradient with
--adam-beta1 0.9, so that an expert which is empty now and then is not named."""

_NAMED = 5  # experts that are named in one warning


class ExpertLoad(Callback):
    """Adds up the token counts of all ranks' routers. `Reporting` asks for it."""

    def __init__(self) -> None:
        self._steps = 0  # since the last reading
        self._idle: dict[tuple[int, int], int] = {}  # (layer, expert) -> steps without a token

    def ends_before_next(self, trainer: Trainer) -> bool:
        return False

    def on_step_begin(self, trainer: Trainer) -> None:
        self._steps += 1
        for _, router in _routers(trainer.run):
            router.load.begin_step()

    def read(self, trainer: Trainer) -> Report:
        """Return the report of each layer's load in the step that has ended, over the global batch; equal on all ranks.
        Collective, and waits for the device.

        Experts that had no token in `STEPS_WITHOUT_TOKENS` steps are named in a warning, once until they get one.
        """
        run, model = trainer.run, trainer.run.config.model
        experts, described = model.num_experts or 0, layers(run.config)
        # Tokens of each expert, all tokens and the sum of squares, in this step and since the last reading; biases.
        numbers = torch.zeros(len(described), 3, experts + 2, dtype=torch.float64, device=run.device.torch_device)
        alone = torch.distributed.get_rank(run.groups.tp_dp_cp) == 0
        for layer, router in _routers(run):
            numbers[layer, 0], numbers[layer, 1] = router.load.take(experts, numbers.device)
            if router.expert_bias is not None and alone:  # equal on the ranks of a stage
                numbers[layer, 2, :experts] = router.expert_bias
        if run.world_size > 1:
            torch.distributed.all_reduce(numbers)
        steps, self._steps = self._steps, 0
        found: list[LayerLoad] = []
        for layer, (step, interval, bias) in zip(described, numbers.tolist(), strict=True):
            if layer.experts is None or layer.repeats:  # the tokens of all passes are the first one's
                continue
            *tokens, routed, squares = step
            choices = routed * layer.experts.top_k
            found.append(
                LayerLoad(
                    layer=layer.number,
                    tokens=tuple(map(int, tokens)),
                    dropped=1.0 - sum(tokens) / choices if choices else 0.0,
                    router_z=squares / max(routed, 1.0),
                    bias=(min(bias[:-2]), max(bias[:-2])) if layer.experts.has_bias else None,
                )
            )
            for expert, count in enumerate(interval[:-2]):
                self._idle[layer.number, expert] = 0 if count else self._idle.get((layer.number, expert), 0) + steps
        if run.rank == 0:
            self._warn(run.state.iteration, steps)
        return load_report(found, has_capacity=model.moe_expert_capacity_factor is not None)

    def _warn(self, iteration: int, steps: int) -> None:
        """Name the experts that have come to be without tokens for so long."""
        new = [one for one, idle in self._idle.items() if STEPS_WITHOUT_TOKENS <= idle < STEPS_WITHOUT_TOKENS + steps]
        if not new:
            return
        named = ", ".join(f"expert {expert} of layer {layer}" for layer, expert in new[:_NAMED])
        more = f" and {len(new) - _NAMED} more" if len(new) > _NAMED else ""
        warn(
            f"step {iteration}: {named}{more} had no token in the last {STEPS_WITHOUT_TOKENS} steps or more, and learn "
            "nothing; --moe-aux-loss-coeff 0.01, or --moe-router-enable-expert-bias with "
            "--moe-router-score-function sigmoid, spreads tokens over experts"
        )


def _routers(run: Run) -> Iterator[tuple[int, Any]]:
    """Yield the routers of this rank, with the index of their layer; depths of multi-token prediction come last."""
    ahead_of_all = [layer for layer in layers(run.config) if layer.next_token is not None and not layer.repeats]
    mixtures = [layer for layer in ahead_of_all if layer.experts is not None]
    for chunk in unwrapped(run.chunks):
        ahead = iter(mixtures)  # all of them lie in the last chunk, in their order
        for module in chunk.modules():
            if isinstance(module, Router):
                assert module.layer_number is not None
                yield next(ahead).number if module.is_mtp_layer else module.layer_number - 1, module
