"""Checkpoints of DeepSpeed become ours: what DeepSpeed 0.19.8 itself wrote (tests/data/README.md), and files of the
documented layout with the weights of transformers' models, which an import of their own folder must equal.
"""

import json
import tarfile
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.parallel import groups
from megatron_ext.plugins.huggingface.importer import import_huggingface
from megatron_ext.plugins.huggingface.saved_model import SavedModel
from megatron_ext.plugins.migrate.deepspeed_checkpoint.importer import import_deepspeed
from megatron_ext.plugins.tasks.trained_model import load_trained
from tests.support.deepspeed_folders import MODELS, SIZES, arrays_of, part_of_rank, states_of, write_both

ARCHIVE = Path(__file__).parents[3] / "data" / "deepspeed_0.19.8.tar.xz"


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


def test_shards_of_zero_are_what_deepspeed_makes_of_them(tmp_path: Path) -> None:
    """Of two tensor-parallel x two data-parallel ranks; DeepSpeed itself made a universal checkpoint of them."""
    with tarfile.open(ARCHIVE.with_name("deepspeed_0.19.8_zero.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    for folder in ("global_step3", "uni"):
        import_deepspeed(tmp_path / folder, tmp_path / f"of {folder}")
    ours, theirs = states_of(tmp_path / "of global_step3"), states_of(tmp_path / "of uni")
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
    ours, theirs = states_of(tmp_path / "of shards"), states_of(tmp_path / "of universal")
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
    weights, first, second = states_of(tmp_path / "ours").values()
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
    write_both(tmp_path, name, ranks)
    import_deepspeed(tmp_path / "saved", tmp_path / "of layers")
    tag = tmp_path / "saved/global_step7"
    _divide(tag, name, ranks, replicas)
    import_deepspeed(tmp_path / "saved", tmp_path / "of shards")
    weights = arrays_of(tmp_path / "of layers")
    functions = lambda one: one, lambda one: -one, lambda one: one**2
    for found, function in zip(states_of(tmp_path / "of shards").values(), functions, strict=True):
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
    write_both(tmp_path, "bloom", 1)
    tag = tmp_path / "saved/global_step7"
    _divide(tag, "bloom", 1, 3)
    if how == "ranks are swapped":
        _swap(tag)
    else:
        _change_shard(how, tag)
    with pytest.raises(DataError, match=said):
        import_deepspeed(tmp_path / "saved", tmp_path / "ours")


@pytest.mark.parametrize(
    ("name", "ranks", "flat"), [*((name, 2, False) for name in MODELS), ("llama", 4, True), ("bloom", 1, False)]
)
def test_shards_are_put_together_as_the_folder_of_transformers(
    name: str, ranks: int, flat: bool, tmp_path: Path
) -> None:
    write_both(tmp_path, name, ranks, flat)
    import_huggingface(tmp_path / "hf", tmp_path / "from hf")
    import_deepspeed(tmp_path / "saved", tmp_path / "from deepspeed")
    ours, theirs = arrays_of(tmp_path / "from deepspeed"), arrays_of(tmp_path / "from hf")
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
            name: part_of_rank(name.partition(f"{layer}.")[2] or name, one, rank, ranks) for name, one in common.items()
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
            parts = {name: part_of_rank(name, one, rank, ranks) if divided else one for name, one in whole.items()}
            named = {f"{prefix}.{name}": one for name, one in parts.items()}
            torch.save(named, tag / f"layer_0_expert_{expert}_mp_rank_{rank:02}_model_states.pt")
    return added


@pytest.mark.parametrize(("ranks", "divided", "biases"), [(1, False, True), (2, False, False), (2, True, False)])
def test_experts_are_read_from_a_file_of_each(ranks: int, divided: bool, biases: bool, tmp_path: Path) -> None:
    """They equal the import of transformers' folder; a router has no bias there, which is zero here."""
    added = _write_experts(tmp_path, ranks, divided, biases)
    import_huggingface(tmp_path / "hf", tmp_path / "from hf")
    import_deepspeed(tmp_path / "global_step7", tmp_path / "from deepspeed")
    ours, theirs = arrays_of(tmp_path / "from deepspeed"), arrays_of(tmp_path / "from hf")
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
    write_both(tmp_path, "bloom", 2)
    file = tmp_path / "saved/global_step7/layer_03-model_01-model_states.pt"
    state = torch.load(file)
    first = state["input_layernorm.weight"].clone()
    state["input_layernorm.weight"] = first + 1
    torch.save(state, file)
    import_deepspeed(tmp_path / "saved", tmp_path / "ours")
    assert np.allclose(arrays_of(tmp_path / "ours")["decoder.layers.0.input_layernorm.weight"], first + 0.5)


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
    write_both(tmp_path, "bloom", 2)
    _change(tmp_path / "saved/global_step7", how)
    with pytest.raises(DataError, match=said):
        import_deepspeed(tmp_path / "saved", tmp_path / "ours")
    assert not (tmp_path / "ours").exists() or not any((tmp_path / "ours").iterdir())


def test_nothing_is_written_over(written: Path, tmp_path: Path) -> None:
    import_deepspeed(written, tmp_path)
    with pytest.raises(ConfigurationError, match="holds checkpoints already; give a new folder"):
        import_deepspeed(written, tmp_path)
