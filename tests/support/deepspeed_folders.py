"""Writes checkpoints in the documented layout of DeepSpeed, with weights of transformers' models; reads ours."""

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_ext.parts.catalogue import parameters
from megatron_ext.plugins.huggingface.saved_model import SavedModel

SIZES = {"vocab_size": 128, "hidden_size": 24, "num_attention_heads": 4}
State = dict[str, torch.Tensor]


def arrays_of(folder: Path, state: str = "") -> dict[str, np.ndarray]:
    """Every parameter of a checkpoint, or a state of it, put together of its pieces."""
    saved, found = SavedModel(folder), {}
    saved.tensors = {name.removeprefix(state): one for name, one in saved.tensors.items() if name.startswith(state)}
    for parameter in parameters(saved.config):
        whole = np.zeros(parameter.shape, np.float32)
        for piece in saved.pieces(parameter.name):
            values = np.fromfile(saved.path / piece.file, np.float32, int(np.prod(piece.shape)), offset=piece.offset)
            whole[piece.row : piece.row + piece.shape[0]] = values.reshape(piece.shape)
        found[parameter.name] = whole
    return found


def _bloom(state: State) -> dict[str, State]:
    """Modules of a pipeline by their number, as BigScience's program numbers them."""
    layers = {f"{3 + layer:02}": _of(state, f"transformer.h.{layer}.") for layer in range(2)}
    norm = _of(state, "transformer.word_embeddings_layernorm.", "word_embeddings.norm.")
    words = {"word_embeddings.weight": state["transformer.word_embeddings.weight"]}
    return {"01": {**words, **norm}, **layers, "06": _of(state, "transformer.ln_f."), "07": {**words, **norm}}


def _neox(state: State) -> dict[str, State]:
    layers = {f"{2 + layer:02}": _of(state, f"gpt_neox.layers.{layer}.") for layer in range(2)}
    for layer in layers.values():
        layer["attention.rotary_emb.inv_freq"] = torch.ones(1)
    return {
        "00": {"word_embeddings.weight": state["gpt_neox.embed_in.weight"]},
        **layers,
        "05": _of(state, "gpt_neox.final_layer_norm.", "norm."),
        "06": {"final_linear.weight": state["lm_head.weight"]},
    }


def _llama(state: State) -> dict[str, State]:
    """As Megatron-DeepSpeed's GPTModelPipe: queries of a group, its key and its value, one group after another."""
    found = {"01": {"word_embeddings.weight": state["model.embed_tokens.weight"]}}
    for layer in range(2):
        own = _of(state, f"model.layers.{layer}.")
        q, k, v = (own[f"self_attn.{kind}_proj.weight"].view(2, -1, 24) for kind in "qkv")
        found[f"{2 + layer:02}"] = {
            **{f"{name}.weight": own[f"{name}.weight"] for name in ("input_layernorm", "post_attention_layernorm")},
            "self_attention.query_key_value.weight": torch.cat((q, k, v), 1).flatten(0, 1),
            "self_attention.dense.weight": own["self_attn.o_proj.weight"],
            "mlp.dense_h_to_4h.weight": torch.cat([own[f"mlp.{kind}_proj.weight"] for kind in ("gate", "up")]),
            "mlp.dense_4h_to_h.weight": own["mlp.down_proj.weight"],
        }
    return {**found, "04": {"weight": state["model.norm.weight"]}, "05": {"lm_head.weight": state["lm_head.weight"]}}


def _glu(state: State) -> dict[str, State]:
    """As BigScience's program, where the gate is the second half."""
    found = _llama(state)
    for layer in (found["02"], found["03"]):
        gate, up = layer["mlp.dense_h_to_4h.weight"].chunk(2)
        layer["mlp.dense_h_to_4h.weight"] = torch.cat([up, gate])
    return found


def _neox_llama(state: State) -> dict[str, State]:
    """As GPT-NeoX: all queries, all keys, all values; the gate is the second half."""
    found = {"00": {"word_embeddings.weight": state["model.embed_tokens.weight"]}}
    for layer in range(2):
        own = _of(state, f"model.layers.{layer}.")
        found[f"{2 + layer:02}"] = {
            **{f"{name}.scale": own[f"{name}.weight"] for name in ("input_layernorm", "post_attention_layernorm")},
            "attention.query_key_value.weight": torch.cat([own[f"self_attn.{kind}_proj.weight"] for kind in "qkv"]),
            "attention.dense.weight": own["self_attn.o_proj.weight"],
            "mlp.linear1.weight": torch.cat([own[f"mlp.{kind}_proj.weight"] for kind in ("up", "gate")]),
            "mlp.linear2.weight": own["mlp.down_proj.weight"],
        }
    norm = {"norm.scale": state["model.norm.weight"]}
    return {**found, "05": norm, "06": {"final_linear.weight": state["lm_head.weight"]}}


def _of(state: State, prefix: str, other: str = "") -> State:
    return {f"{other}{name.removeprefix(prefix)}": one for name, one in state.items() if name.startswith(prefix)}


def part_of_rank(name: str, whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """What a tensor-parallel rank has: rows of QKV, of the MLP's first matrix (of gate and up one by one) and of
    vocabularies, columns of what comes after them, all of the rest."""
    if whole.dim() == 2 and ("dense.weight" in name or "4h_to_h" in name or "linear2" in name):
        return whole.chunk(ranks, 1)[rank].clone()
    if name == "attention.query_key_value.weight" and whole.size(0) < 3 * 24:
        return torch.cat([one.chunk(ranks)[rank] for one in whole.split([24, 12, 12])])
    if ("h_to_4h" in name or "linear1" in name) and whole.size(0) == 2 * 40:
        return torch.cat([one.chunk(ranks)[rank] for one in whole.chunk(2)])
    divided = ("query_key_value", "dense_h_to_4h", "word_embeddings.weight", "lm_head", "final_linear", "output_layer")
    return whole.chunk(ranks)[rank].clone() if any(one in name for one in divided) else whole


MODELS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "bloom": (
        {"model_type": "bloom", **SIZES, "n_layer": 2, "seq_length": 32},
        _bloom,
        Namespace(
            **{"num_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "seq_length": 32, "embed_layernorm": True},
            **{"position_embedding_type": 3, "bias_gelu_fusion": True, "params_dtype": torch.float32},
        ),
    ),
    "gpt_neox": (
        {"model_type": "gpt_neox", **SIZES, "num_hidden_layers": 2, "intermediate_size": 96, "rotary_pct": 0.7},
        _neox,
        {
            **{"num_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "seq_length": 32, "pos_emb": "rotary"},
            **{"rotary_pct": 0.7, "no_weight_tying": True, "gpt_j_residual": True, "norm": "layernorm"},
            **{"attention_config": [[["global"], 2]], "activation": "gelu"},
        },
    ),
    "llama": (
        {
            **{"model_type": "llama", **SIZES, "num_hidden_layers": 2, "intermediate_size": 40},
            **{"num_key_value_heads": 2, "rms_norm_eps": 1e-6, "tie_word_embeddings": False},
        },
        _llama,
        Namespace(
            **{"num_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "swiglu": True},
            **{"ffn_hidden_size": 40, "normalization": "rmsnorm", "layernorm_epsilon": 1e-6, "seq_length": 32},
            **{"use_rotary_position_embeddings": True, "untie_embeddings_and_output_weights": True},
            **{"add_bias_linear": False, "rope_theta": 10000, "num_experts": [1]},
        ),
    ),
}
MODELS["glu"] = (
    MODELS["llama"][0],
    _glu,
    Namespace(**{**vars(MODELS["llama"][2]), "swiglu": False, "glu_activation": "swiglu"}),
)
MODELS["neox_llama"] = (
    MODELS["llama"][0],
    _neox_llama,
    {
        **{"num_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "seq_length": 32, "pos_emb": "rotary"},
        **{"num_kv_heads": 2, "activation": "swiglu", "intermediate_size": 120, "norm": "rmsnorm"},
        **{"rms_norm_epsilon": 1e-6, "no_weight_tying": True},
        **{"use_bias_in_attn_linear": False, "use_bias_in_mlp": False},
    },
)


def _as_one_module(number: str, parts: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The names of a run without pipelines."""
    if number == "01":
        return {"embedding": {"word_embeddings": {"weight": parts["word_embeddings.weight"]}}}
    if number == "05":
        return {"output_layer.weight": parts["lm_head.weight"]}
    return {
        f"encoder.{'final_layernorm' if number == '04' else f'layers.{int(number) - 2}'}.{name}": one
        for name, one in parts.items()
    }


def write_both(folder: Path, name: str, ranks: int, flat: bool = False) -> None:
    """Write a model of transformers' and, next to it, the files of DeepSpeed with its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config, modules, args = MODELS[name]
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(folder / "hf")
    tag = folder / "saved" / "global_step7"
    tag.mkdir(parents=True)
    (folder / "saved" / "latest").write_text("global_step7")
    for rank in range(ranks):
        of_rank: dict[str, Any] = {}
        for number, state in modules(model.state_dict()).items():
            parts = {name: part_of_rank(name, one, rank, ranks) for name, one in state.items()}
            if flat:
                of_rank |= _as_one_module(number, parts)
            else:
                torch.save(parts, tag / f"layer_{number}-model_{rank:02}-model_states.pt")
        content = {"module": {"language_model": of_rank} if flat else None, "args": args, "iteration": 7}
        torch.save(content, tag / f"mp_rank_{rank:02}_model_states.pt")


def states_of(folder: Path) -> dict[str, dict[str, np.ndarray]]:
    return {
        state: arrays_of(folder, state) for state in ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")
    }
