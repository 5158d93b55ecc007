"""Reads the training settings of a `config.json`: dropout and the load-balancing loss. These change no logits; without
flags a run from the folder has them, as transformers' class would.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from megatron_ext.config.schema import ModelConfig
from megatron_ext.plugins.families.reading import Reading

DROPOUTS = {
    "attention_dropout": ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"),
    "hidden_dropout": (
        *("resid_pdrop", "hidden_dropout", "residual_dropout", "resid_dropout", "dropout", "hidden_dropout_prob"),
    ),
}
"""Flag -> names of its key in the families. A class that has none of them drops nothing."""

_OF_EMBEDDINGS = ("embd_pdrop", "emb_pdrop", "embed_dropout", "embedding_dropout")
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_alpha")

TRAINING_FLAGS = (*DROPOUTS, "moe_aux_loss_coeff", "moe_router_load_balancing_type")
"""Flags of a run that a folder has values of, and that flags may contradict."""


def training_values(reading: Reading) -> dict[str, Any]:
    """Return the values of `TRAINING_FLAGS`; the load-balancing loss has values only where the file names a coefficient
    above 0."""
    values: dict[str, Any] = {
        flag: next((reading.number_from_0(name, below=1.0) for name in names if reading.get(name) is not None), 0.0)
        for flag, names in DROPOUTS.items()
    }
    said = [reading.number_from_0(name) for name in _COEFFICIENTS if reading.get(name) is not None]
    if any(said):
        values["moe_aux_loss_coeff"] = (max(said),)
        if reading.get("seq_aux") is True:
            values["moe_router_load_balancing_type"] = ("seq_aux_loss",)
    return values


def dropout_json(keys: Iterable[str], model: ModelConfig) -> dict[str, float]:
    """Return the rates of the training by a family's keys, with which a run from the folder goes on."""
    of_attention = DROPOUTS["attention_dropout"]
    return {key: model.attention_dropout if key in of_attention else model.hidden_dropout for key in keys}


def one_number_for_two(reading: Reading) -> Iterator[str]:
    """Yield that embeddings have another dropout in the file than residual branches, where it says so."""
    for_branches = training_values(reading)["hidden_dropout"]
    for name in _OF_EMBEDDINGS:
        if (of_embeddings := reading.get(name)) is not None and of_embeddings != for_branches:
            yield (
                f"{name} is {of_embeddings}, and the dropout of residual branches {for_branches:g}, which "
                "--hidden-dropout takes for both"
            )
