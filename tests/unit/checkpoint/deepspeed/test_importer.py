"""Checkpoints of DeepSpeed become ours: what DeepSpeed 0.19.8 itself wrote (tests/data/README.md), and files of the
documented layout with the weights of transformers' models, which an import of their own folder must equal.
"""

import itertools
import json
import tarfile
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.checkpoint.deepspeed.importer import import_deepspeed
from megatron_ext.checkpoint.huggingface.importer import import_huggingface
from megatron_ext.checkpoint.huggingface.saved_model import SavedModel
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.parallel import groups
from megatron_ext.parts.catalogue import parameters
from megatron_ext.train.trained_model import load_trained

ARCHIVE = Path(__file__).parents[3] / "data" / "deepspeed_0.19.8.tar.xz"
SIZES = {"vocab_size": 128, "hidden_size": 24, "num_attention_heads": 4}
State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepspeed")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def test_weights_that_deepspeed_wrote_give_its_logits(written: Path, tmp_path: Path) -> None:
    """Of two tensor-parallel ranks in bf16, computed in fp32 there and here."""
    import_deepspeed(written / "global_step3", tmp_path)
    expected = json.loads((written / "expected.json").read_text())
    model = load_trained(["--load", str(tmp_path), "--device", "cpu"])
    try:
        tokens = torch.tensor(expected["tokens"])
        with torch.no_grad():
            logits = model.chunks[0].float()(tokens, torch.arange(tokens.size(1))[None], None)
    finally:
        groups.destroy()
    assert torch.allclose(logits[..., :64], torch.tensor(expected["logits"]), rtol=0, atol=2e-6)


def _arrays(folder: Path, state: str = "") -> dict[str, np.ndarray]:
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


def _part(name: str, whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
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
        {"model_type": "gpt_neox", **SIZES, "num_hidden_layers": 2, "intermediate_size": 96, "rotary_pct": 0.5},
        _neox,
        {
            **{"num_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "seq_length": 32, "pos_emb": "rotary"},
            **{"rotary_pct": 0.5, "no_weight_tying": True, "gpt_j_residual": True, "norm": "layernorm"},
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


def _write(folder: Path, name: str, ranks: int, flat: bool = False) -> None:
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
            parts = {name: _part(name, one, rank, ranks) for name, one in state.items()}
            if flat:
                of_rank |= _as_one_module(number, parts)
            else:
                torch.save(parts, tag / f"layer_{number}-model_{rank:02}-model_states.pt")
        content = {"module": {"language_model": of_rank} if flat else None, "args": args, "iteration": 7}
        torch.save(content, tag / f"mp_rank_{rank:02}_model_states.pt")


def _states(folder: Path) -> dict[str, dict[str, np.ndarray]]:
    return {state: _arrays(folder, state) for state in ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")}


def test_shards_of_zero_are_what_deepspeed_makes_of_them(tmp_path: Path) -> None:
    """Of two tensor-parallel x two data-parallel ranks; DeepSpeed itself made a universal checkpoint of them."""
    with tarfile.open(ARCHIVE.with_name("deepspeed_0.19.8_zero.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    for folder in ("global_step3", "uni"):
        import_deepspeed(tmp_path / folder, tmp_path / f"of {folder}")
    ours, theirs = _states(tmp_path / "of global_step3"), _states(tmp_path / "of uni")
    for state, arrays in theirs.items():
        assert any(array.any() for array in arrays.values())
        for name, array in arrays.items():
            np.testing.assert_array_equal(ours[state][name], array, name)


@pytest.mark.parametrize("folder", ["uni", "uni_by_rank"])
def test_gates_of_a_universal_checkpoint_are_those_of_its_shards(folder: str, tmp_path: Path) -> None:
    """Of two tensor-parallel ranks, whose gates the first one has together, and the second one rank by rank, as
    DeepSpeed writes it of programs that do not name gated matrices to it."""
    with tarfile.open(ARCHIVE.with_name("deepspeed_0.19.8_gated.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    import_deepspeed(tmp_path / "global_step3", tmp_path / "of shards")
    import_deepspeed(tmp_path / folder, tmp_path / "of universal")
    ours, theirs = _states(tmp_path / "of shards"), _states(tmp_path / "of universal")
    for state, arrays in ours.items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(theirs[state][name], array, f"{state} {name}")


@pytest.mark.parametrize("zero", ["", "_without_zero"])
def test_states_of_experts_that_deepspeed_wrote_are_each_experts_own(zero: str, tmp_path: Path) -> None:
    """Of two expert-parallel ranks with two experts each, on four data-parallel ranks, and without ZeRO on two. Moments
    were set to -3 times the master and to its square before the engine saved; its files of the experts have their
    weights in bf16."""
    with tarfile.open(ARCHIVE.with_name(f"deepspeed_0.19.8_experts{zero}.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    tag = tmp_path / "global_step3"
    import_deepspeed(tag, tmp_path / "ours")
    weights, first, second = _states(tmp_path / "ours").values()
    for name, weight in weights.items():
        np.testing.assert_array_equal(first[name], np.float32(-3) * weight, name)
        np.testing.assert_array_equal(second[name], weight**2, name)
    kinds = {"dense_h_to_4h": "linear_fc1", "dense_4h_to_h": "linear_fc2"}
    for expert in range(4):
        saved = torch.load(tag / f"layer_0_expert_{expert}_mp_rank_00_model_states.pt")
        for name, tensor in saved.items():
            module, kind = name.split(".")[-2:]
            own = weights[f"decoder.layers.1.mlp.experts.{expert}.{kinds[module]}.{kind}"]
            assert torch.equal(torch.from_numpy(own).bfloat16(), tensor), name
    if zero:
        return
    for rank in (2, 3):
        (tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(DataError, match="elements of its"):
        import_deepspeed(tag, tmp_path / "of half the ranks")
    (tag / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(DataError, match="1 data-parallel ranks of 2 experts each do not have 4"):
        import_deepspeed(tag, tmp_path / "of one rank")


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("changed", [False, True])
def test_states_without_names_are_found_by_the_weights(
    flat: bool, changed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two tensor-parallel ranks x two pipeline stages without ZeRO. A master that is not rounded to its weight makes
    all doubtful: weights are read alone."""
    _write(tmp_path, "gpt_neox", 2)
    tag = tmp_path / "saved/global_step7"
    for path in tag.glob("mp_rank_*"):
        torch.save(torch.load(path, weights_only=False), tag / f"mp_rank_{int(path.name[8:10]) + 2:02}_model_states.pt")
    for rank, stage in itertools.product(range(2), range(2)):
        own = {}
        for path in sorted(tag.glob(f"layer_*-model_{rank:02}-model_states.pt"))[3 * stage :][: 3 - stage]:
            wide = torch.load(path)
            torch.save({name: one.bfloat16() for name, one in wide.items()}, path)
            own |= {f"{path.name[:8]}.{name}": one for name, one in wide.items() if "inv_freq" not in name}
        groups = [[one for one in own.values() if (one.dim() > 1) == big] for big in (True, False)]
        if changed and rank and stage:
            groups[1][-1][0] *= 2
        masters = [torch.cat([one.flatten() for one in group]) if flat else group for group in groups]
        vectors = masters if flat else [one for group in masters for one in group]
        state = {number: {"step": 7, "exp_avg": -one, "exp_avg_sq": one**2} for number, one in enumerate(vectors)}
        saved = {"fp32_groups_flat" if flat else "fp32_groups": masters, "optimizer_state_dict": {"state": state}}
        file = tag / f"mp_rank_{2 * stage + rank:02}_model_states.pt"
        torch.save(torch.load(file, weights_only=False) | {"optimizer": saved}, file)
    import_huggingface(tmp_path / "hf", tmp_path / "from hf")
    import_deepspeed(tag, tmp_path / "ours")
    assert ("weights alone" in capsys.readouterr().out) == changed
    functions = lambda one: one, lambda one: -one, lambda one: one**2
    for found, function in zip(() if changed else _states(tmp_path / "ours").values(), functions, strict=not changed):
        for name, weight in _arrays(tmp_path / "from hf").items():
            np.testing.assert_array_equal(found[name], function(weight), name)


@dataclass
class _Range:
    """deepspeed.utils.tensor_fragment.fragment_address."""

    numel: int
    start: int


def _divide(tag: Path, name: str, ranks: int, replicas: int) -> None:
    """Write what BF16_Optimizer writes of two groups of parameters, each divided evenly, and take the layers away."""
    for rank in range(ranks):
        own: dict[str, torch.Tensor] = {}
        for path in sorted(tag.glob(f"layer_*-model_{rank:02}-model_states.pt")):
            own |= {f"{int(path.name[6:8])}.{key}": one for key, one in torch.load(path).items()}
            path.unlink()
        groups = [{key: one for key, one in own.items() if (one.dim() > 1) == big} for big in (True, False)]
        file = tag / f"mp_rank_{rank:02}_model_states.pt"
        shapes = [{key: one.shape for key, one in group.items()} for group in groups]
        torch.save(torch.load(file, weights_only=False) | {"param_shapes": shapes}, file)
        for replica in range(replicas):
            flats, places = [], []
            for group in groups:
                flat = torch.cat([one.reshape(-1).float() for one in group.values()])
                size = -(-len(flat) // replicas)
                low, high, at = replica * size, (replica + 1) * size, 0
                flats.append(torch.nn.functional.pad(flat, (0, replicas * size - len(flat)))[low:high].clone())
                places.append({})
                for key, one in group.items():
                    first, last = max(at, low), min(at + one.numel(), high)
                    if first < last:
                        places[-1][key] = _Range(last - first, first - low)
                    at += one.numel()
            adam = {group: {"step": 7, "exp_avg": -one, "exp_avg_sq": one**2} for group, one in enumerate(flats)}
            state = {"single_partition_of_fp32_groups": flats, "param_slice_mappings": places}
            content = {"optimizer_state_dict": state | {"base_optimizer_state": {"state": adam}}}
            torch.save(content, tag / f"bf16_zero_pp_rank_{replica}_mp_rank_{rank:02}_optim_states.pt")


@pytest.mark.parametrize(
    ("name", "ranks", "replicas"), [("llama", 2, 3), ("bloom", 1, 2), ("gpt_neox", 2, 2), ("neox_llama", 2, 2)]
)
def test_states_that_zero_divides_are_put_together(name: str, ranks: int, replicas: int, tmp_path: Path) -> None:
    _write(tmp_path, name, ranks)
    import_deepspeed(tmp_path / "saved", tmp_path / "of layers")
    tag = tmp_path / "saved/global_step7"
    _divide(tag, name, ranks, replicas)
    import_deepspeed(tmp_path / "saved", tmp_path / "of shards")
    weights = _arrays(tmp_path / "of layers")
    functions = lambda one: one, lambda one: -one, lambda one: one**2
    for found, function in zip(_states(tmp_path / "of shards").values(), functions, strict=True):
        for key, weight in weights.items():
            np.testing.assert_array_equal(found[key], function(weight), key)
    (tag / f"bf16_zero_pp_rank_0_mp_rank_{ranks - 1:02}_optim_states.pt").unlink()
    with pytest.raises(DataError, match="copy the files of all ranks"):
        import_deepspeed(tmp_path / "saved", tmp_path / "other")


def _swap(tag: Path) -> None:
    first, second, _ = sorted(tag.glob("bf16_zero_*"))
    kept = first.read_bytes()
    second.replace(first)
    second.write_bytes(kept)


def _change_shard(how: str, tag: Path) -> None:
    shard, model = tag / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", tag / "mp_rank_00_model_states.pt"
    state, shapes = torch.load(shard, weights_only=False), torch.load(model, weights_only=False)
    own = state["optimizer_state_dict"]
    places, masters = own["param_slice_mappings"][0], own["single_partition_of_fp32_groups"]
    if how == "an unknown name":
        places["3.other"] = _Range(0, 0)
    elif how == "half an element":
        places["1.word_embeddings.weight"].start = 0.5
    elif how == "another precision":
        masters[0] = masters[0].bfloat16()
    elif how == "an infinite shape":
        shapes["param_shapes"][0]["1.word_embeddings.weight"] = (float("inf"), 1)
    torch.save(state, shard)
    torch.save(shapes, model)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("an unknown name", r"shards of 3\.other have 0 elements of its 0, in F32; take the files of all ranks"),
        ("half an element", r"no state of Adam in ZeRO's form \('float' object cannot"),
        ("another precision", r"elements of its (\d+), in BF16 and F32"),
        ("an infinite shape", "model_states.pt has no param_shapes"),
        ("ranks are swapped", "does not go on where the rank before it ends"),
    ],
)
def test_damaged_shards_are_refused(how: str, said: str, tmp_path: Path) -> None:
    _write(tmp_path, "bloom", 1)
    tag = tmp_path / "saved/global_step7"
    _divide(tag, "bloom", 1, 3)
    if how == "ranks are swapped":
        _swap(tag)
    else:
        _change_shard(how, tag)
    with pytest.raises(DataError, match=said):
        import_deepspeed(tmp_path / "saved", tmp_path / "ours")


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


@pytest.mark.parametrize(
    ("name", "ranks", "flat"), [*((name, 2, False) for name in MODELS), ("llama", 4, True), ("bloom", 1, False)]
)
def test_shards_are_put_together_as_the_folder_of_transformers(
    name: str, ranks: int, flat: bool, tmp_path: Path
) -> None:
    _write(tmp_path, name, ranks, flat)
    import_huggingface(tmp_path / "hf", tmp_path / "from hf")
    import_deepspeed(tmp_path / "saved", tmp_path / "from deepspeed")
    ours, theirs = _arrays(tmp_path / "from deepspeed"), _arrays(tmp_path / "from hf")
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not np.array_equal(ours[name], theirs[name])] == []
    models = [SavedModel(tmp_path / folder).config.model for folder in ("from deepspeed", "from hf")]
    same = [(one.position_embedding_type, one.rotary_percent, one.openai_gelu, one.norm_epsilon) for one in models]
    assert same[0] == same[1]


def _write_experts(folder: Path, ranks: int, divided: bool, biases: bool) -> dict[str, torch.Tensor]:
    """Write a Mixtral of transformers' and the files that DeepSpeed's engine writes of a model with experts in the
    second layer of two, without pipelines; return the biases of its experts."""
    from transformers import AutoModelForCausalLM, MixtralConfig

    sizes = {"num_hidden_layers": 1, "intermediate_size": 40, "num_key_value_heads": 2, "num_local_experts": 4}
    model = AutoModelForCausalLM.from_config(MixtralConfig(**SIZES, **sizes, num_experts_per_tok=3, rms_norm_eps=1e-6))
    torch.manual_seed(5)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(folder / "hf")
    state, own = model.state_dict(), "model.layers.0"
    q, k, v = (state[f"{own}.self_attn.{kind}_proj.weight"].view(2, -1, 24) for kind in "qkv")
    encoder, layer = "language_model.encoder", "language_model.encoder.layers.0"
    common = {
        "language_model.embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
        f"{layer}.input_layernorm.weight": state[f"{own}.input_layernorm.weight"],
        f"{layer}.post_attention_layernorm.weight": state[f"{own}.post_attention_layernorm.weight"],
        f"{layer}.self_attention.query_key_value.weight": torch.cat((q, k, v), 1).flatten(0, 1),
        f"{layer}.self_attention.dense.weight": state[f"{own}.self_attn.o_proj.weight"],
        f"{layer}.mlp.deepspeed_moe.gate.wg.weight": state[f"{own}.mlp.gate.weight"],
        f"{encoder}.final_layernorm.weight": state["model.norm.weight"],
        "language_model.output_layer.weight": state["lm_head.weight"],
    }
    added: dict[str, torch.Tensor] = {}
    if biases:
        for module, size in (("query_key_value", 48), ("dense", 24)):
            common[f"{layer}.self_attention.{module}.bias"] = torch.zeros(size)
    args = Namespace(**{**vars(MODELS["llama"][2]), "num_layers": 1, "num_experts": [4], "topk": 3, "seq_length": 32})
    args.expert_interval, args.moe_token_dropping, args.add_bias_linear = 1, False, biases
    args.enable_expert_tensor_parallelism = divided
    tag = folder / "global_step7"
    tag.mkdir()
    for rank in range(ranks):
        of_rank = {
            name: _part(name.partition(f"{layer}.")[2] or name, one, rank, ranks) for name, one in common.items()
        }
        torch.save({"module": of_rank, "args": args, "iteration": 7}, tag / f"mp_rank_{rank:02}_model_states.pt")
        for expert in range(4):
            prefix = f"{layer}.mlp.deepspeed_moe.experts.deepspeed_experts.{expert}"
            whole = {
                "dense_h_to_4h.weight": state[f"{own}.mlp.experts.gate_up_proj"][expert],
                "dense_4h_to_h.weight": state[f"{own}.mlp.experts.down_proj"][expert],
            }
            if biases:
                generator = torch.Generator().manual_seed(expert)
                whole |= {
                    f"dense_{kind}.bias": torch.randn(size, generator=generator)
                    for kind, size in (("h_to_4h", 80), ("4h_to_h", 24))
                }
                added[f"decoder.layers.0.mlp.experts.{expert}.linear_fc1.bias"] = whole["dense_h_to_4h.bias"]
                added[f"decoder.layers.0.mlp.experts.{expert}.linear_fc2.bias"] = whole["dense_4h_to_h.bias"]
            parts = {name: _part(name, one, rank, ranks) if divided else one for name, one in whole.items()}
            named = {f"{prefix}.{name}": one for name, one in parts.items()}
            torch.save(named, tag / f"layer_0_expert_{expert}_mp_rank_{rank:02}_model_states.pt")
    return added


@pytest.mark.parametrize(("ranks", "divided", "biases"), [(1, False, True), (2, False, False), (2, True, False)])
def test_experts_are_read_from_a_file_of_each(ranks: int, divided: bool, biases: bool, tmp_path: Path) -> None:
    """They equal the import of transformers' folder; a router has no bias there, which is zero here."""
    added = _write_experts(tmp_path, ranks, divided, biases)
    import_huggingface(tmp_path / "hf", tmp_path / "from hf")
    import_deepspeed(tmp_path / "global_step7", tmp_path / "from deepspeed")
    ours, theirs = _arrays(tmp_path / "from deepspeed"), _arrays(tmp_path / "from hf")
    for name, one in ours.items():
        np.testing.assert_array_equal(one, theirs.get(name, added.get(name, np.zeros_like(one))), name)
    assert theirs.keys() | added.keys() <= ours.keys()
    model = SavedModel(tmp_path / "from deepspeed").config.model
    assert (model.num_experts, model.moe_router_topk, model.moe_router_pre_softmax) == (4, 3, False)
    for file in tmp_path.glob("global_step7/layer_0_expert_3_*"):
        file.unlink()
    with pytest.raises(DataError, match=r"experts\.3\.linear_fc1\.weight are missing"):
        import_deepspeed(tmp_path / "global_step7", tmp_path / "other")


def test_norms_that_differ_between_ranks_are_averaged(tmp_path: Path) -> None:
    _write(tmp_path, "bloom", 2)
    file = tmp_path / "saved/global_step7/layer_03-model_01-model_states.pt"
    state = torch.load(file)
    first = state["input_layernorm.weight"].clone()
    state["input_layernorm.weight"] = first + 1
    torch.save(state, file)
    import_deepspeed(tmp_path / "saved", tmp_path / "ours")
    assert np.allclose(_arrays(tmp_path / "ours")["decoder.layers.0.input_layernorm.weight"], first + 0.5)


def _change(tag: Path, how: str) -> None:
    file = tag / "layer_03-model_01-model_states.pt"
    state = torch.load(file)
    if how == "a tensor is missing":
        for rank in range(2):
            other = tag / f"layer_03-model_{rank:02}-model_states.pt"
            state = torch.load(other)
            del state["mlp.dense_h_to_4h.bias"]
            torch.save(state, other)
    elif how == "a rank is missing":
        file.unlink()
    elif how == "another shape":
        torch.save({**state, "mlp.dense_h_to_4h.bias": torch.ones(5)}, file)
    elif how == "an unknown tensor":
        for rank in range(2):
            other = tag / f"layer_03-model_{rank:02}-model_states.pt"
            torch.save({**torch.load(other), "mlp.gate.weight": torch.ones(2)}, other)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("a tensor is missing", r"weights of decoder\.layers\.0\.mlp\.linear_fc1\.bias are missing"),
        ("a rank is missing", r"3\.\S+ is no tensor of weights in order on every rank"),
        (
            "another shape",
            r"mlp\.linear_fc1\.bias has shards of \[\(5,\)\]; by its flags they should have \(48,\)",
        ),
        ("an unknown tensor", r"holds 3\.mlp\.gate\.weight, which no model here has"),
    ],
)
def test_files_that_are_not_the_model_are_refused(how: str, said: str, tmp_path: Path) -> None:
    _write(tmp_path, "bloom", 2)
    _change(tmp_path / "saved/global_step7", how)
    with pytest.raises(DataError, match=said):
        import_deepspeed(tmp_path / "saved", tmp_path / "ours")
    assert not (tmp_path / "ours").exists() or not any((tmp_path / "ours").iterdir())


def test_nothing_is_written_over(written: Path, tmp_path: Path) -> None:
    import_deepspeed(written, tmp_path)
    with pytest.raises(ConfigurationError, match="holds checkpoints already; give a new folder"):
        import_deepspeed(written, tmp_path)
