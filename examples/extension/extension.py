"""A dataset, a loss, a layer, an optimizer, a learning-rate schedule and a callback of one's own.

    torchrun --nproc-per-node 4 examples/extension/extension.py --device cpu --mock-data --vocab-size 64 \
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \
        --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --position-embedding-type rope \
        --hidden-dropout 0 --attention-dropout 0 \
        --micro-batch-size 2 --global-batch-size 8 --train-iters 200 --lr 0.1 --log-interval 50

The loss falls from log(64) = 4.16, that of a guess, to about 1.9. Nothing of megatron_ext is changed for it, and each
part computes the same in every layout: docs/extending.md says what that asks of it. tests/parity/test_extension.py
compares TP, PP, DP and CP with one process.
"""

import dataclasses
import functools
import sys
from typing import Any

import numpy as np
import torch

from megatron_ext.cli.pretrain import start
from megatron_ext.config.derived.optimizer_traits import OptimizerTraits, State
from megatron_ext.data.corpus import Splits
from megatron_ext.parts.catalogue import Parameter
from megatron_ext.train.extensions import Extensions


class Progressions:
    """Samples that count upwards in steps of their own, modulo the vocabulary: 5 8 11 14 ... A model can learn them.

    A sample is a function of (seed, index) alone, so that every rank, and a resumed run, reads the same.
    """

    def __init__(self, count: int, seq_length: int, vocab_size: int, seed: int):
        self.count, self.seq_length, self.vocab_size, self.seed = count, seq_length, vocab_size, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        random = np.random.default_rng((self.seed, index))
        first, step = random.integers(self.vocab_size), random.integers(1, 8)
        text = (first + step * np.arange(self.seq_length + 1)) % self.vocab_size
        mask = np.ones(self.seq_length, np.float32)
        mask[0] = 0.0  # the second number cannot be guessed from the first
        positions = np.arange(self.seq_length)
        return {"tokens": text[:-1], "labels": text[1:], "loss_mask": mask, "position_ids": positions}


def datasets(config: Any, tokenizer: Any, samples: Splits[int]) -> Splits[Any]:
    """Return one dataset for each split that the run reads, with as many samples as it reads."""

    def made(count: int, seed: int) -> Progressions | None:
        return Progressions(count, config.model.seq_length, tokenizer.vocab_size, seed) if count else None

    return Splits(made(samples.train, 0), made(samples.valid, 1), made(samples.test, 2))


def loss(token: Any) -> torch.Tensor:
    """Add 1e-4 log(Z)^2 to the cross-entropy, which keeps the logits small (the z-loss of PaLM, arXiv:2204.02311)."""
    return token.cross_entropy() + 1e-4 * token.log_normalizer() ** 2


@functools.cache
def parallel_layer() -> type:
    """Return the class of a layer, x + attention(norm(x)) + mix MLP(norm(x)) + narrow(norm(x)): parallel as in PaLM,
    with parameters of its own. The engine is there when it is called, and not yet when this file is imported."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

    from megatron_ext.parts.layer import ResidualLayer
    from megatron_ext.parts.linear.compute import ColumnLinear, RowLinear

    class ParallelLayer(ResidualLayer):
        """A layer whose MLP does not see what its attention adds, next to a narrow one of WIDTH channels.

        Tensor-parallel ranks divide the channels of the narrow one; `layer_parameters` says so.
        """

        reads = "share"  # the positions of its rank: what attention needs of the others is attention's concern

        def __init__(self, config: Any, *settings: Any, pg_collection: Any, **others: Any) -> None:
            super().__init__(config, *settings, pg_collection=pg_collection, **others)
            common: dict[str, Any] = {
                "config": config,
                "init_method": None,
                "bias": False,
                "tp_group": pg_collection.tp,
            }
            self.down = ColumnLinear(config.hidden_size, WIDTH, gather_output=False, skip_bias_add=False, **common)
            self.up = RowLinear(WIDTH, config.hidden_size, input_is_parallel=True, skip_bias_add=False, **common)
            self.scale = torch.nn.Parameter(torch.empty(WIDTH // pg_collection.tp.size()))
            self.mix = torch.nn.Parameter(torch.empty(config.hidden_size))

        def forward(
            self,
            hidden_states: torch.Tensor,
            attention_mask: torch.Tensor | None = None,
            rotary_pos_emb: torch.Tensor | None = None,
            packed_seq_params: Any = None,
            **unused: object,
        ) -> tuple[torch.Tensor, None]:
            add: Any = get_bias_dropout_add(self.training, self.config.bias_dropout_fusion)
            normed: Any = self.input_layernorm(hidden_states)
            attended = self.self_attention(normed, attention_mask, rotary_pos_emb, packed_seq_params)
            normed = self.pre_mlp_layernorm(hidden_states)
            expanded, bias = self.mlp(normed)
            narrow = torch.nn.functional.silu(self.down(normed)[0]) * self.scale
            expanded = self.mix * expanded + self.up(narrow)[0]
            hidden_states = add(attended, hidden_states, self.hidden_dropout)
            return add((expanded, bias), hidden_states, self.hidden_dropout), None

    return ParallelLayer


WIDTH = 8


def layer_spec(spec: Any, layer: Any) -> Any:
    """Return the spec of a layer with the same parts and another class."""
    return dataclasses.replace(spec, module=parallel_layer())


def layer_parameters(config: Any, layer: Any) -> list[Parameter]:
    """Return the parameters that the layer has besides ours, in the shapes of the whole model."""
    hidden, std = config.model.hidden_size, config.model.init_method_std
    return [
        Parameter("down.weight", (WIDTH, hidden), layer.number, "normal", std, tp_dim=0, by_element=False),
        Parameter("up.weight", (hidden, WIDTH), layer.number, "normal", std / 10, tp_dim=1, by_element=False),
        Parameter("scale", (WIDTH,), layer.number, "ones", tp_dim=0),
        # Whole on every rank; under sequence parallelism each sees the gradient of its own tokens.
        Parameter("mix", (hidden,), layer.number, "ones", sequence_parallel=True),
    ]


class HeavyBall(torch.optim.Optimizer):
    """Momentum with decoupled weight decay: m <- 0.9 m + g; x <- x - lr (m + weight_decay x) (Polyak 1964)."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is None:
                    continue
                state = self.state[weights]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(weights)
                momentum = state["momentum"].mul_(0.9).add_(weights.grad)
                weights.sub_(group["lr"] * (momentum + group["weight_decay"] * weights))


HEAVY_BALL = OptimizerTraits(
    name="heavy-ball",
    title="heavy ball",
    torch_class=f"{__name__}:HeavyBall",
    arguments={},
    states=(State("momentum"),),  # saved, resharded and counted by this name
    schemes=frozenset({"use_distributed_optimizer", "use_torch_fsdp2", "use_megatron_fsdp"}),
    built_as="adam",
)


def learning_rate(samples: int, rate: float) -> float:
    """Halve the rate of the flags in every second span of 64 samples."""
    return rate if samples // 64 % 2 == 0 else rate / 2


def best_loss() -> Any:
    """Return a callback that prints, at the end, the lowest loss of the run and its iteration."""
    from megatron_ext.train.trainer import Callback

    class BestLoss(Callback):
        """Remembers the step with the lowest loss. A StepResult is the same on every rank; one of them prints."""

        best: tuple[float, int] | None = None

        def on_step_end(self, trainer: Any, result: Any) -> None:
            here = (result.loss, trainer.run.state.iteration)
            self.best = here if self.best is None else min(self.best, here)

        def on_end(self, trainer: Any) -> None:
            if trainer.run.is_last_rank and self.best is not None:
                print(f"lowest loss: {self.best[0]:.4f} at iteration {self.best[1]}", flush=True)

    return BestLoss()


EXTENSIONS = Extensions(
    datasets=datasets,
    loss=loss,
    layer_spec=layer_spec,
    layer_parameters=layer_parameters,
    optimizer=HEAVY_BALL,
    learning_rate=learning_rate,
)

if __name__ == "__main__":
    start(
        sys.argv[1:],
        callbacks=[best_loss],
        datasets=datasets,
        loss=loss,
        layer_spec=layer_spec,
        layer_parameters=layer_parameters,
        optimizer=HEAVY_BALL,
        learning_rate=learning_rate,
    )
