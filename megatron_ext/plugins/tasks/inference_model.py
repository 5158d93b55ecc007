"""A trained model on the ranks of a layout, for forward passes alone: loaded for that, or in the middle of training.

Every rank makes the same passes over batches of the same shape, for ranks may share weights and experts. Ranks with the
same weights (data- and context-parallel ones) each take batches of their own; the ranks of one replica divide a pass
among themselves. What comes of it is then made known to all ranks.

Shape legend: B rows, S positions, N positions that are read, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ext.config.derived.pipeline_split import is_v_shaped, last_stage
from megatron_ext.config.schema import Config
from megatron_ext.device.device_protocol import Device
from megatron_ext.model.names import unwrapped
from megatron_ext.parts.attention.cached import WholeSequences
from megatron_ext.parts.stack import stack
from megatron_ext.tokenizer.tokenizer_protocol import Tokenizer

_OF_SEQUENCE_PARALLELISM = ("sequence_parallel", "scatter_to_sequence_parallel", "reduce_scatter_embeddings")


@dataclass(frozen=True)
class Model:
    """A model as inference sees it; `train.run.Run` has the same parts."""

    config: Config
    device: Device
    groups: ProcessGroupCollection
    p2p: P2PCommunicator
    chunks: Sequence[torch.nn.Module]
    """The model chunks of this rank, one per virtual stage, wrapped or not."""
    tokenizer: Tokenizer | None
    """The tokenizer of the model; None where only token ids are known."""
    gathered: Callable[[], AbstractContextManager[None]] = nullcontext
    """Returns a context in which all weights are up to date."""
    iteration: int | None = None
    """Iteration of the checkpoint that was loaded; None for a Hugging Face model, and in training."""

    @property
    def rank(self) -> int:
        """This rank's number."""
        return torch.distributed.get_rank()

    @property
    def replica(self) -> int:
        """Number of this rank's replica of the model."""
        return self.groups.dp_cp.rank()

    @property
    def replicas(self) -> int:
        """Number of replicas of the model."""
        return self.groups.dp_cp.size()

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the output layer."""
        return self.groups.pp.rank() == last_stage(self.config.layout)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, without padding."""
        return self.config.data.vocab_size or self.config.model.padded_vocab_size

    @property
    def longest(self) -> int | None:
        """Most positions of a sequence; None where nothing limits them (rotary positions whose frequencies are the same
        for every length)."""
        if self.config.model.position_embedding_type == "learned_absolute":
            return self.config.model.max_position_embeddings
        limits = (getattr(getattr(kind.mixer, "rotary", None), "longest", None) for kind, _ in stack(self.config).kinds)
        return next(filter(None, limits), None)

    @property
    def eod(self) -> int | None:
        """Id that ends a document; None without a tokenizer."""
        return None if self.tokenizer is None else self.tokenizer.eod

    def forward(
        self, tokens_BS: torch.Tensor, positions: torch.Tensor, inference: WholeSequences
    ) -> torch.Tensor | None:
        """Pass a batch through all stages. Call it within `at_work`, on every rank of the replica.

        Args:
            tokens_BS: int64, on the device; only its shape matters but on the first stage.
            positions: int64 [B, S] or [1, S].
            inference: how tokens attend, and which positions' logits are read on the last stage.
        Returns:
            On the last stage, the logits that `inference` reads; None on other stages.
        """
        stage, stages = self.groups.pp.rank(), self.groups.pp.size()
        rows, length = tokens_BS.shape
        shape = (length, rows, self.config.model.hidden_size)
        output, v_shaped = None, is_v_shaped(self.config.layout)
        for number, chunk in enumerate(self.chunks):
            back = v_shaped and number > 0  # the second half of a V passes the ranks the other way
            if back:
                turns = stage == stages - 1
                received = [output] if turns else self.p2p.recv_backward([shape], is_last_stage=False)
                unwrapped([chunk])[0].set_input_tensor(received)
            elif stage > 0 or number > 0:
                received = self.p2p.recv_forward([shape], is_first_stage=False)
                unwrapped([chunk])[0].set_input_tensor(received)
            output = chunk(tokens_BS, positions, inference=inference)
            ends = v_shaped or number == len(self.chunks) - 1
            if stage == (0 if back else stages - 1) and ends:
                continue
            if back:
                self.p2p.send_backward([output], is_first_stage=False)
            else:
                self.p2p.send_forward([output], is_last_stage=False)
            output = None
        return output

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Return a context for forward passes; afterwards everything is as it was, random states included.

        No dropout, no gradients, no compiled layers (which would be compiled again for every shape), and no division of
        the sequence among tensor-parallel ranks, which a single token cannot have.
        """
        chunks = unwrapped(self.chunks)
        trains = [chunk.training for chunk in self.chunks]
        divided = [
            (module, name)
            for chunk in chunks
            for module in chunk.modules()
            for name in _OF_SEQUENCE_PARALLELISM
            if getattr(module, name, None) is True
        ]
        configs = list({id(chunk.config): chunk.config for chunk in chunks}.values())
        was = [config.sequence_parallel for config in configs]
        try:
            for chunk in self.chunks:
                chunk.eval()
            for module, name in divided:
                setattr(module, name, False)
            for config in configs:
                config.sequence_parallel = False
            with self._no_gradients(), self._uncompiled(), self.gathered():
                yield
        finally:
            for config, value in zip(configs, was, strict=True):
                config.sequence_parallel = value
            for module, name in divided:
                setattr(module, name, True)
            for chunk, training in zip(self.chunks, trains, strict=True):
                chunk.train(training)

    def _no_gradients(self) -> AbstractContextManager[Any]:
        """Return inference mode, or in training no_grad: tensors made in inference mode, and kept, can never get a
        gradient."""
        in_training = any(weight.requires_grad for chunk in self.chunks for weight in chunk.parameters())
        return torch.no_grad() if in_training else torch.inference_mode()

    def _uncompiled(self) -> AbstractContextManager[Any]:
        # The compiler takes seconds to import.
        compiled = self.config.training.torch_compile
        return torch.compiler.set_stance("force_eager") if compiled else nullcontext()

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Add up, in place, what each rank contributes; every rank gets the sum. Collective over all ranks."""
        if torch.distributed.get_world_size() > 1:
            torch.distributed.all_reduce(values)
        return values

    def whole_vocabulary(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """Return the logits of the whole vocabulary without padding, from the part of each tensor-parallel rank."""
        if self.groups.tp.size() > 1:
            parts: Any = [torch.empty_like(logits_NV) for _ in range(self.groups.tp.size())]
            torch.distributed.all_gather(parts, logits_NV.contiguous(), group=self.groups.tp)
            logits_NV = torch.cat(parts, dim=-1)
        return logits_NV[:, : self.vocab_size]
