"""Computes the toy linear recurrence step by step."""

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule

from megatron_ext.parts.linear.compute import ColumnLinear, RowLinear


class LinearRecurrence(MegatronModule):
    """Computes W_out h, where h_t = a h_(t-1) + (1 - a) (W_in x)_t and a = sigmoid(decay)."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, *, width: int, pg_collection: Any, **_: object
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        hidden, tp = config.hidden_size, pg_collection.tp
        settings: dict[str, Any] = {"config": config, "init_method": config.init_method, "bias": False, "tp_group": tp}
        self.linear_in = ColumnLinear(hidden, width, gather_output=False, skip_bias_add=False, **settings)
        self.linear_out = RowLinear(width, hidden, input_is_parallel=True, skip_bias_add=True, **settings)
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.decay = torch.nn.Parameter(torch.zeros(width // tp.size(), dtype=config.params_dtype, device=device))
        set_tensor_model_parallel_attributes(self.decay, True, 0, 1)
        divided: Any = self.decay
        divided.own_layers_divided_dim = 0

    def forward(self, hidden_SBH: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, None]:
        """Return the sum to add to the residual stream, and no bias."""
        inputs_SBW, _bias = self.linear_in(hidden_SBH)
        keep = self.decay.sigmoid()
        state, states = torch.zeros_like(inputs_SBW[0]), []
        for step in inputs_SBW * (1 - keep):
            state = keep * state + step
            states.append(state)
        return self.linear_out(torch.stack(states))[0], None
