"""Files of Megatron-Bridge, OLMo-core, nanotron and torchtitan, whose model stands in them, become whole launches."""

from pathlib import Path

import pytest

from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.migrate.translate import read, translate
from megatron_ext.train.configure import configure

EXAMPLES = Path(__file__).resolve().parents[2] / "golden/import_config"


@pytest.mark.parametrize(
    ("name", "ranks", "shape"),
    [
        ("megatron-bridge/llama3.2_1b.yaml", 8, (16, 2048, 32, 8, 2, 2, 32)),
        ("olmo-core/olmo2_190m.json", 4, (12, 768, 12, 12, 1, 1, 64)),
        ("nanotron/llama.yaml", None, (8, 512, 8, 4, 2, 2, 64)),
        ("torchtitan/llama3_debugmodel.json", 8, (6, 256, 16, 16, 2, 2, 8)),
    ],
)
def test_a_file_with_its_model_is_launched_as_it_stands(name: str, ranks: int | None, shape: tuple[int, ...]) -> None:
    """Files that the programs themselves have written; the data and the tokenizer's folder alone are not here."""
    result = translate(name.split("/")[0], read(str(EXAMPLES / name)), ranks)
    assert result.problems() == []
    words = result.words()
    for flag in {"--tokenizer-type", "--tokenizer-model", "--data-path", "--split"} & {*words}:
        place = words.index(flag)
        del words[place : place + 2]
    world = result.layout.world_size
    config = configure([*words, "--mock-data", "--world-size", str(world), "--dry-run", "--device", "cpu"]).config
    model, layout = config.model, config.layout
    assert shape == (
        *(model.num_layers, model.hidden_size, model.num_attention_heads, model.num_key_value_heads),
        *(layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size, config.training.global_batch_size),
    )
    assert model.normalization == "RMSNorm"
    assert (model.hidden_dropout, model.attention_dropout, model.swiglu) == (0.0, 0.0, True)
    assert config.training.bf16


def test_layers_that_differ_are_refused() -> None:
    content = read(str(EXAMPLES / "torchtitan/llama3_debugmodel.json"))
    content["model_spec"]["model"]["layers"][3]["feed_forward"]["w1"]["out_features"] = 512
    [problem] = translate("torchtitan", content, 8).problems()
    assert problem.startswith("model_spec.model.n_layers: differ is not translated: its layers are not all alike")


def test_a_batch_in_tokens_is_counted_in_samples() -> None:
    content = read(str(EXAMPLES / "olmo-core/olmo2_190m.json"))
    content["data_loader"]["global_batch_size"] = 64 * 1024 + 1
    [problem] = translate("olmo-core", content, 4).problems()
    assert "it is not a multiple of dataset.sequence_length, which is 1024" in problem
    older = {"train_module": {"optim": {"_CLASS_": "olmo_core.optim.lion.LionConfig", "lr": 0.5}}}
    assert translate("olmo-core", older).command == {"--optimizer": "lion", "--lr": "0.5"}


def test_a_decay_that_starts_late_is_wsd() -> None:
    schedule = {"learning_rate": 0.5, "lr_warmup_steps": 5, "lr_decay_style": "1-sqrt", "lr_decay_steps": 20}
    content = {"optimizer": {"learning_rate_scheduler": {**schedule, "lr_decay_starting_step": 80}}}
    assert translate("nanotron", content).command == {
        "--lr": "0.5", "--lr-warmup-iters": "5", "--lr-decay-style": "WSD", "--lr-wsd-decay-style": "minus_sqrt",
        "--lr-wsd-decay-iters": "20", "--lr-decay-iters": "100",
    }  # fmt: skip


def test_experts_of_megatron_bridge_are_read_where_there_are_any() -> None:
    experts = {"moe_router_topk": 8, "moe_ffn_hidden_size": 96, "moe_layer_freq": [0, 1], "moe_token_dropping": False}
    assert translate("megatron-bridge", {"model": experts}).command == {}
    assert translate("megatron-bridge", {"model": {"num_moe_experts": 16, **experts}}).command == {
        "--num-experts": "16", "--moe-router-topk": "8", "--moe-ffn-hidden-size": "96", "--moe-layer-freq": "'[0,1]'"
    }  # fmt: skip
    data = {"blend": [["a", "b"], [0.25, 0.75]], "blend_per_split": [[["c"], None], [["d"], None], None]}
    assert translate("megatron-bridge", {"dataset": data}).command == {
        "--data-path": "0.25 a 0.75 b", "--train-data-path": "c", "--valid-data-path": "d"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("source", "key"),
    [
        ("megatron-bridge", "train.train_itres"),
        ("megatron-bridge", "optimizer.nesterov"),
        ("megatron-bridge", "scheduler.lr_cycles"),
        ("megatron-bridge", "checkpoint.finetnue"),
        ("olmo-core", "trainer.max_duratoin"),
        ("olmo-core", "dataset.mask"),
        ("olmo-core", "data_loader.curriculum"),
        ("torchtitan", "checkpoint.initial_load"),
        ("torchtitan", "loss.label_smoothing"),
    ],
)
def test_a_key_of_no_schema_is_not_taken_for_harmless(source: str, key: str) -> None:
    section, name = key.split(".")
    [problem] = translate(source, {section: {name: 3}}).problems()
    assert problem.startswith(f"{key}: 3 is not translated: not a key that this tool knows; change it in the file")


@pytest.mark.parametrize(
    ("source", "key"), [("olmo-core", "trainer.load_path"), ("torchtitan", "checkpoint.initial_load_path")]
)
def test_a_run_that_begins_with_weights_of_others_is_not_begun_without_them(source: str, key: str) -> None:
    section, name = key.split(".")
    assert translate(source, {section: {"enable": True, name: None}}).keys[-1].became == "default"
    *_, problem = translate(source, {section: {"enable": True, name: "/weights/step0"}}).problems()
    assert "it begins with weights of others: give --load-hf with their folder" in problem


def test_torchtitans_toml_is_refused_with_what_to_give(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("[training]\nsteps = 10\n")
    with pytest.raises(ConfigurationError, match=r"give the JSON that --debug\.save_config_file"):
        read(str(tmp_path / "job.toml"))
