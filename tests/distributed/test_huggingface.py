"""Weights from transformers' models: our logits are theirs, in every layout, by every way in and out."""

import copy
import functools
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.forkserver.ranks import RankError, run_ranks
from megatron_ext.plugins.checkpoint_tools.tensors import Tensors
from megatron_ext.plugins.families.state_dict_mapping import state_dict_mapping
from megatron_ext.plugins.huggingface import exported_model
from megatron_ext.plugins.huggingface.commands.convert_checkpoint import main as convert
from megatron_ext.plugins.huggingface.huggingface_folder import HFFolder
from megatron_ext.plugins.huggingface.saved_model import SavedModel
from tests.support.hf_gradients import IN_FP64, our_gradients, put_together, write_gradients
from tests.support.hf_models import (
    FEWER,
    LENGTH,
    TOKENS,
    flags,
    forward,
    greedy,
    logits_of_folder,
    our_logits,
    quiet_transformers,
    reference_logits,
    their_choices,
    whole_vocabulary,
    write_model,
)
from tests.support.hf_shapes import MODELS, VOCABULARY
from tests.support.plain_process import in_plain_process
from tests.support.program import run_program
from tests.support.several_models import in_turn

quiet_transformers()


TOLERANCE = 1e-5
VERIFIED = ("Llama 3.1", "Qwen2", "GPT-2")
# Of families and shapes, those whose tensors are cut in a way of their own. The others: see --all.
CUT_IN_THEIR_OWN_WAY = {
    *("Llama 2", "Llama with biases", "Qwen2", "OLMo-2", "Mixtral", "Qwen3-MoE", "Qwen3-MoE with dense layers"),
    *(
        "Phi-3",
        "Nemotron",
        "DeepSeek-V3, dense",
        "DeepSeek-V3",
        "Qwen2-MoE",
        "Granite with experts",
        "GPT-OSS",
        "MiMo-V2-Flash",
        "GPT-2",
        "Kimi Linear",
    ),
}


DIVISIBLE = [name for name in MODELS if name != "Mamba-2 of one group"]
"""Models that two tensor-parallel ranks divide: of one group of states neither has a part."""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Folder of every model, and the model, which no test changes."""
    folders = {name: tmp_path_factory.mktemp("hf") for name in MODELS}
    return {name: (folder, write_model(folder, name)) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def models(theirs: dict[str, tuple[Path, Any]]) -> dict[str, Any]:
    """Folder and logits of every model."""
    return {name: (folder, reference_logits(model)) for name, (folder, model) in theirs.items()}


def _difference(world_size: int, arguments: list[str], expected: torch.Tensor) -> float:
    return (whole_vocabulary(run_ranks(world_size, our_logits, arguments)) - expected).abs().max().item()


def _checkpoint(folder: str) -> list[str]:
    """The flags of a run from our checkpoint of a model."""
    return ["--load", folder, "--config", f"{folder}/iter_0000000/config.yaml"]


WAYS_IN = {"test_load_hf": "--load-hf", "test_from_hf": "--load"}
"""By the test that looks at it."""


def _asked(request: pytest.FixtureRequest, tests: Collection[str]) -> list[tuple[Any, ...]]:
    """Return which of these tests are to run, with the model, TP and PP of each."""
    return [
        (item.originalname, *(item.callspec.params[of] for of in ("name", "tp", "pp")))
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path and item.originalname in tests
    ]


@pytest.fixture(scope="module")
def ours(
    request: pytest.FixtureRequest, models: dict[str, Any], imported: dict[str, str]
) -> Callable[[int, int], dict[tuple[str, str], torch.Tensor]]:
    """Our logits on TP x PP ranks, which load the models by the ways in that are asked for, one after the other."""
    sources = {("--load-hf", name): ["--load-hf", str(folder)] for name, (folder, _) in models.items()}
    sources |= {("--load", name): _checkpoint(folder) for name, folder in imported.items()}
    asked = {(WAYS_IN[test], *case) for test, *case in _asked(request, WAYS_IN)}

    @functools.cache
    def of_layout(tp: int, pp: int) -> dict[tuple[str, str], torch.Tensor]:
        cases = [case for case in sources if (*case, tp, pp) in asked]
        runs = [flags(sources[case], tp, pp) for case in cases]
        by_rank = run_ranks(tp * pp, in_turn, our_logits, runs, timeout=550)
        return {case: whole_vocabulary(parts) for case, parts in zip(cases, zip(*by_rank, strict=True), strict=True)}

    return of_layout


LAYOUTS = [
    *((name, 1, 1) for name in MODELS),
    *(pytest.param(name, 2, 2, marks=[pytest.mark.slow] * (name not in CUT_IN_THEIR_OWN_WAY)) for name in DIVISIBLE),
]


@pytest.mark.first("Llama 2-1-1", "Llama 2-2-2")
@pytest.mark.parametrize(("name", "tp", "pp"), LAYOUTS)
def test_load_hf(name: str, tp: int, pp: int, models: dict[str, Any], ours: Any) -> None:
    expected = models[name][1]
    assert expected.abs().max() > 0.5, "logits near zero would agree with anything"
    assert (ours(tp, pp)["--load-hf", name] - expected).abs().max() < TOLERANCE


MADE_ANEW: dict[str, dict[str, Any]] = {
    "Llama with a dynamic base": {},  # transformers' has kept the base of the longest text that it saw
    "Phi-3.5-MoE": {"router_jitter_noise": 1e-9},  # in training it draws its experts: here there is one to draw
}


@pytest.fixture(scope="module")
def gradients(
    request: pytest.FixtureRequest, theirs: dict[str, tuple[Path, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int, int], dict[str, tuple[Path, Path, dict[str, np.ndarray]]]]:
    """By model: its folder, that of transformers' gradients, and ours on TP x PP ranks, which take the models that are
    asked for one after the other."""
    asked = _asked(request, {"test_gradients_are_those_of_transformers"})
    one_batch = ["--global-batch-size", "2", "--seq-length", str(FEWER), "--clip-grad", "0"]

    @functools.cache
    def of_transformers(name: str) -> tuple[Path, Path]:
        source, model = theirs[name]
        model = copy.deepcopy(model)
        if name in MADE_ANEW:
            source = tmp_path_factory.mktemp("model")
            model = write_model(source, name, **MADE_ANEW[name])
        written = tmp_path_factory.mktemp("gradients")
        write_gradients(model, written, in_fp64=name in IN_FP64)
        return source, written

    @functools.cache
    def of_layout(tp: int, pp: int) -> dict[str, tuple[Path, Path, dict[str, np.ndarray]]]:
        folders = {name: of_transformers(name) for _, name, *sizes in asked if sizes == [tp, pp]}
        runs = [
            (name in IN_FP64, [*flags(["--load-hf", str(source)], tp, pp), *one_batch])
            for name, (source, _) in folders.items()
        ]
        by_rank = run_ranks(tp * pp, in_turn, our_gradients, runs, timeout=550)
        found = (put_together(parts) for parts in zip(*by_rank, strict=True))
        return {name: (*folders[name], ours) for name, ours in zip(folders, found, strict=True)}

    return of_layout


@pytest.mark.first("Llama 2-1-1")
@pytest.mark.parametrize(
    ("name", "tp", "pp"),
    # Slow: test_load_hf has the same cuts of the same tensors, and test_matrix.py the gradients of cut ones. One stays
    # of stacked, of transposed, and of low-rank and experts' tensors.
    [
        *((name, 1, 1) for name in MODELS),
        *(
            pytest.param(name, 2, 2, marks=[pytest.mark.slow] * (name not in ("GPT-2", "DeepSeek-V3", "Phi-3")))
            for name in DIVISIBLE
            if name not in IN_FP64
        ),
    ],
)
def test_gradients_are_those_of_transformers(name: str, tp: int, pp: int, gradients: Any) -> None:
    source, written, found = gradients(tp, pp)[name]
    expected, folder = _tensors(written), HFFolder(source)
    config = resolve(folder.values, Facts())
    for mapping in state_dict_mapping(config, folder.family):
        if mapping.dtype is not None or ".indexer." in mapping.parameter.name:  # state, and what no loss there trains
            continue
        ours = torch.from_numpy(found[mapping.parameter.name])
        # Where nothing is rotated a key's bias adds one number to all scores of a query: its gradient is rounding.
        is_of_keys = mapping.parameter.name.endswith("qkv.bias") and config.model.position_embedding_type != "rope"
        tensors = [expected[name] for name in mapping.tensor_shapes()]
        for span in mapping.ranges:
            theirs, part = expected[span.tensor], ours[span.start : span.start + span.count]
            if mapping.transposed:
                matrix = theirs.reshape(-1, theirs.shape[-1]).numpy()
                rows = torch.from_numpy(mapping.transposed_rows(matrix, span, span.start, span.count)).view_as(part)
            else:
                theirs = theirs.flatten(0, 1) if mapping.stacked else theirs
                theirs = theirs.view(-1, *part.shape[1:])  # where a row of a matrix is a vector there
                rows = theirs[span.tensor_start : span.tensor_start + span.count]
            scale = torch.cat(tensors).norm() if is_of_keys else theirs.norm()
            assert (part - rows).norm() <= TOLERANCE * scale, mapping.parameter.name


@pytest.fixture(scope="module")
def written_on(imported: dict[str, str]) -> dict[str, list[list[int]]]:
    """How our models go on from `PROMPTS`."""
    [found] = run_ranks(1, in_turn, greedy, [(["--load", folder], 24) for folder in imported.values()], timeout=550)
    return dict(zip(imported, found, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_transformers(name: str, written_on: dict[str, Any], theirs: dict[str, Any]) -> None:
    found = written_on[name]
    assert [len(tokens) for tokens in found] == [24] * 3
    assert len({token for tokens in found for token in tokens}) > 8, "they go on with one and the same"
    assert their_choices(theirs[name][1], found) == found


def test_load_hf_into_stages_that_differ(models: dict[str, Any]) -> None:
    folder, expected = models["Llama 3.1"]
    uneven = ["--load-hf", str(folder), "--decoder-first-pipeline-num-layers", "3"]
    assert _difference(2, flags(uneven, 1, 2), expected) < TOLERANCE


# Slow: the tests above cut the tensors of each family; how rows go into shards is no matter of the family.
@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["--use-torch-fsdp2", "--use-megatron-fsdp"])
@pytest.mark.parametrize("name", ["Llama 3.1", "Qwen2", "GPT-2"])
def test_load_hf_into_shards(name: str, sharding: str, models: dict[str, Any]) -> None:
    folder, expected = models[name]
    for logits in run_ranks(2, our_logits, flags(["--load-hf", str(folder), sharding])):  # all have the same tokens
        assert (whole_vocabulary([logits]) - expected).abs().max() < TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "heads", "tp"),
    [
        # Slow are numbers of groups that ranks divide evenly, as test_load_hf has them.
        *(pytest.param("Qwen2", heads, tp, marks=pytest.mark.slow) for heads, tp in ((2, 2), (6, 2), (3, 1))),
        ("Qwen2", 3, 3),
        ("OLMo-2", 1, 2),
    ],
)
def test_query_groups(name: str, heads: int, tp: int, tmp_path: Path) -> None:
    expected = reference_logits(write_model(tmp_path, name, num_key_value_heads=heads, intermediate_size=96))
    assert _difference(tp, flags(["--load-hf", str(tmp_path)], tp), expected) < TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        *("Mixtral", "Qwen3-MoE", "Qwen3-MoE with dense layers", "DeepSeek-V3", "Granite with experts", "GPT-OSS"),
        *("Phi-3.5-MoE", "Granite with windows and experts", "Aria"),
        *(
            # Their experts lie as those of DeepSeek-V3 do.
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                *("Solar Open", "Granite with a shared expert", "Hy3", "K-EXAONE", "AFM with experts", "Mellum"),
                *(
                    "Hunyuan with experts",
                    "Jamba",
                    "Flint",
                    "Kolibri",
                    "dots.llm1, unnormalized",
                    "A.X-K1",
                    "Command A+",
                    "Qwen3-Omni, its text model",
                ),
            )
        ),
    ],
)
def test_experts_on_two_ranks(name: str, imported: dict[str, str], models: dict[str, Any]) -> None:
    folder, expected = models[name]
    layout = ["--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall"]
    runs = [flags([*source, *layout]) for source in (["--load-hf", str(folder)], _checkpoint(imported[name]))]
    for of_rank in run_ranks(2, in_turn, our_logits, runs):  # every rank has the same tokens
        for logits in of_rank:
            assert (whole_vocabulary([logits]) - expected).abs().max() < TOLERANCE


def test_weights_of_experts_that_are_not_normalized(tmp_path: Path) -> None:
    expected = reference_logits(write_model(tmp_path, "Qwen3-MoE", norm_topk_prob=False))
    assert _difference(1, flags(["--load-hf", str(tmp_path)]), expected) < TOLERANCE


def test_rope_scaling_is_needed(models: dict[str, Any]) -> None:
    folder, expected = models["Llama 3.1"]
    [logits] = run_ranks(1, our_logits_without_scaling, flags(["--load-hf", str(folder)]))
    assert (whole_vocabulary([logits]) - expected).abs().max() > 100 * TOLERANCE


def our_logits_without_scaling(arguments: list[str]) -> torch.Tensor | None:
    from megatron_ext.parts.attention import rope

    rope.scaled_inverse_frequencies = lambda inverse_frequencies, *_scaling: inverse_frequencies
    return our_logits(arguments)


@pytest.fixture(scope="module")
def imported(models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Our checkpoint of every model."""
    found = {}
    for name, (folder, _) in models.items():
        found[name] = str(tmp_path_factory.mktemp("ours"))
        assert convert(["from-hf", "--load", str(folder), "--save", found[name]]) == 0
    return found


@pytest.mark.first("Llama 2-1-1")
@pytest.mark.parametrize(
    ("name", "tp", "pp"),
    # What a checkpoint of ours holds one process shows; that layouts share it is no matter of the family.
    [
        *((name, 1, 1) for name in MODELS),
        *(pytest.param(name, 2, 2, marks=[pytest.mark.slow] * (name not in ("GPT-2", "OLMo-2"))) for name in DIVISIBLE),
    ],
)
def test_from_hf(name: str, tp: int, pp: int, models: dict[str, Any], ours: Any) -> None:
    assert (ours(tp, pp)["--load", name] - models[name][1]).abs().max() < TOLERANCE


@pytest.mark.first("Llama 2-False")
@pytest.mark.parametrize(
    ("name", "verified"),
    # Verifying takes another interpreter with transformers in it; test_a_trained_model_exports does it in every run.
    [*((name, False) for name in MODELS), *(pytest.param(name, True, marks=pytest.mark.slow) for name in VERIFIED)],
)
def test_to_hf_gives_back_the_files(
    name: str,
    verified: bool,
    imported: dict[str, str],
    models: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    written = tmp_path / "hf"
    arguments = ["to-hf", "--load", imported[name], "--save", str(written), "--max-shard-size", "100KB"]
    assert convert(arguments if verified else [*arguments, "--no-verify"]) == 0
    expected, found = _tensors(models[name][0]), _tensors(written)
    assert found.keys() == expected.keys()
    added = dict.fromkeys(expected, 0.0) | _added(models[name][0])
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype, key
        if added[key]:  # what our model has by the files that came back, is what it has by those that it read
            found[key], tensor = found[key] + added[key], tensor + added[key]
        assert torch.equal(found[key].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), key
    assert len(list(written.glob("*.safetensors"))) > 1
    assert HFFolder(written).family is HFFolder(models[name][0]).family, "its shape may be that of another one, too"
    theirs = in_plain_process(logits_of_folder, str(written))  # by the config.json that was written
    assert (theirs - models[name][1]).abs().max() < TOLERANCE
    assert ("largest difference of logits" in capsys.readouterr().out) == verified


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, as the safetensors package itself reads them."""
    return {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}


def _added(folder: Path) -> dict[str, float]:
    """What our model adds to each tensor of a folder."""
    source = HFFolder(folder)
    mappings = state_dict_mapping(resolve(source.values, Facts()), source.family)
    return {name: mapping.added for mapping in mappings for name in mapping.tensor_shapes()}


@pytest.mark.full
def test_the_text_model_inside_of_gemma_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of a model of text and images: its text model has the logits of the whole without an image; the rest is
    left out, and said to be."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {key: value for key, value in MODELS["Gemma 3"].items() if key not in ("model_type", "tie_word_embeddings")}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {"model_type": "siglip_vision_model", **sizes, "image_size": 28, "patch_size": 14}
    torch.manual_seed(2)
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1)
    whole = Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    whole.save_pretrained(tmp_path / "whole")
    expected = reference_logits(whole)
    assert _difference(1, flags(["--load-hf", str(tmp_path / "whole")]), expected) < TOLERANCE
    assert convert(["from-hf", "--load", str(tmp_path / "whole"), "--save", str(tmp_path / "ours")]) == 0
    assert "left out: 34 not of the text model (multi_modal_projector." in capsys.readouterr().out
    assert convert(["to-hf", "--load", str(tmp_path / "ours"), "--save", str(tmp_path / "hf"), "--no-verify"]) == 0
    theirs = in_plain_process(logits_of_folder, str(tmp_path / "hf"))
    assert (theirs - expected).abs().max() < TOLERANCE


def _train(arguments: list[str], save: str | None) -> tuple[float, torch.Tensor | None]:
    """Load, take three steps, and save; the last loss and the logits afterwards."""
    from megatron_ext import device
    from megatron_ext.checkpoint.native.load_checkpoint import load_checkpoint
    from megatron_ext.checkpoint.native.save import save_checkpoint
    from megatron_ext.plugins.huggingface.load_hf import load_huggingface
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure
    from megatron_ext.train.trainer import Trainer

    config = configure(arguments).config
    run = build_run(config, device.install("cpu"))
    if config.checkpoint.load is not None:
        load_checkpoint(run, config.checkpoint.load)
    else:
        assert config.checkpoint.load_hf is not None
        load_huggingface(run, config.checkpoint.load_hf)
    trainer = Trainer(run, [])
    losses = [trainer.step().loss for _ in range(3)]
    if save is not None:
        save_checkpoint(run, save)
    return losses[-1], forward(run)


@pytest.mark.full
def test_training_goes_on_from_either_way_in(imported: dict[str, str], models: dict[str, Any], tmp_path: Path) -> None:
    """From weights in bf16: of those in fp32 a checkpoint of ours keeps masters, which --load-hf with --bf16 rounds."""
    folder, saved = str(tmp_path / "bf16"), str(tmp_path / "ours")
    out = ["to-hf", "--load", imported["Qwen3"], "--save", folder, "--dtype", "bf16", "--no-verify"]
    assert convert(out) == convert(["from-hf", "--load", folder, "--save", saved]) == 0
    sharded = ["--bf16", "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    settings = ["--global-batch-size", "4", *sharded]
    # Another padding than the checkpoint's, which has rows for multiples of 128.
    padding = ["--make-vocab-size-divisible-by", "7"]
    model = ["--config", f"{saved}/iter_0000000/config.yaml", "--padded-vocab-size", "1008"]
    direct = run_ranks(2, _train, flags(["--load-hf", folder, *settings, *padding]), None)
    ours = run_ranks(2, _train, flags(["--load", saved, *model, *settings]), None)
    assert direct[0][0] == ours[0][0]
    assert torch.equal(direct[0][1], ours[0][1])
    assert (whole_vocabulary([direct[0][1]]) - models["Qwen3"][1]).abs().max() > 0.01, "three steps change the model"


@pytest.fixture
def kept_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for `run_ranks` with `fresh`, which the quickstart (test_examples.py) has as it is."""

    def computed(world_size: int, function: Callable[..., Any], *arguments: Any, fresh: bool = False) -> list[Any]:
        assert (world_size, fresh) == (1, True)
        return [in_plain_process(function, *arguments)]

    monkeypatch.setattr(exported_model, "run_ranks", computed)


@pytest.mark.usefixtures("kept_interpreter")
def test_a_trained_model_exports(models: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, written = tmp_path / "saved", tmp_path / "hf"
    arguments = flags(["--load-hf", str(models["Qwen3"][0])], tp=2, pp=2)
    parts = [logits for _, logits in run_ranks(4, _train, arguments, str(saved))]
    assert convert(["to-hf", "--load", str(saved), "--save", str(written)]) == 0
    assert "largest difference of logits" in capsys.readouterr().out
    # Where the tool compares, transformers reads the folder; here its model is given the tensors, in this process.
    model = write_model(tmp_path / "untrained", "Qwen3")
    model.load_state_dict(_tensors(written))
    assert (whole_vocabulary(parts) - reference_logits(model)).abs().max() < TOLERANCE


@pytest.mark.full
def test_an_fp16_run_goes_out_and_in(models: dict[str, Any], tmp_path: Path) -> None:
    saved, written, back = (tmp_path / name for name in ("saved", "hf", "back"))
    fp16 = ["--fp16", "--initial-loss-scale", "65536", "--global-batch-size", "4", "--use-distributed-optimizer"]
    trained = run_ranks(2, _train, flags(["--load-hf", str(models["Qwen3"][0]), *fp16]), str(saved))
    assert convert(["to-hf", "--load", str(saved), "--save", str(written), "--no-verify"]) == 0
    assert {tensor.dtype for tensor in _tensors(written).values()} == {torch.float16}
    loaded = run_ranks(2, our_logits, flags(["--load-hf", str(written), *fp16]))
    assert torch.equal(loaded[0], trained[0][1])
    assert (whole_vocabulary([loaded[0]]) - models["Qwen3"][1]).abs().max() > 0.01, "three steps change the model"
    assert convert(["from-hf", "--load", str(written), "--save", str(back)]) == 0
    ours, theirs = Tensors(saved / "iter_0000003"), Tensors(back / "iter_0000000")
    weights = [name for name in ours.names() if not name.startswith("optimizer.")]
    assert weights == theirs.names()
    for name in weights:
        before, after = ours.read(name), theirs.read(name)
        rows = min(len(before), len(after))  # the layouts pad the vocabulary to other sizes
        assert torch.equal(before[:rows], after[:rows]), name
        assert not before[rows:].any()
        assert not after[rows:].any()


def test_export_in_bf16_is_the_rounded_model(imported: dict[str, str], models: dict[str, Any], tmp_path: Path) -> None:
    written = tmp_path / "hf"
    arguments = ["to-hf", "--load", imported["Llama 2"], "--save", str(written), "--dtype", "bf16"]
    assert convert([*arguments, "--no-verify"]) == 0
    found = _tensors(written)
    for key, tensor in _tensors(models["Llama 2"][0]).items():
        assert torch.equal(found[key], tensor.bfloat16()), key


def _with_depths(source: Path, folder: Path, depths: int) -> dict[str, torch.Tensor]:
    """Write a model with depths of multi-token prediction as DeepSeek publishes them, which transformers leaves out; or
    as Qwen does, next to the layers, once."""
    tensors = {**_tensors(source)}
    config = json.loads((source / "config.json").read_text())
    layers = config["num_hidden_layers"]
    generator = torch.Generator().manual_seed(2)
    last = f"model.layers.{layers - 1}."
    width = len(tensors["model.norm.weight"])
    if config["model_type"] == "qwen3_next":
        ahead = {
            "fc": (width, 2 * width),
            **dict.fromkeys(("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"), (width,)),
        }
        shapes = {
            f"layers.0.{one.removeprefix(last)}": two.shape for one, two in tensors.items() if one.startswith(last)
        }
        shapes |= {f"{name}.weight": torch.Size(shape) for name, shape in ahead.items()}
        tensors |= {f"mtp.{name}": torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}
        depths = 0
    for depth in range(depths):
        prefix = f"model.layers.{layers + depth}."
        ahead = {"eh_proj": (width, 2 * width), "enorm": (width,), "hnorm": (width,), "shared_head.norm": (width,)}
        shapes = {name.removeprefix(last): tensor.shape for name, tensor in tensors.items() if name.startswith(last)}
        shapes |= {f"{name}.weight": torch.Size(shape) for name, shape in ahead.items()}
        tensors |= {f"{prefix}{name}": torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}
        tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    said = {"num_nextn_predict_layers": depths} if depths else {}
    (folder / "config.json").write_text(json.dumps({**config, **said}))
    return tensors


@pytest.mark.full
@pytest.mark.usefixtures("kept_interpreter")
@pytest.mark.parametrize(
    ("name", "depths"), [("DeepSeek-V3, dense", 2), ("GLM-4.5", 2), ("GLM-4.7 Flash", 2), ("Qwen3-Next", 1)]
)
def test_depths_of_multi_token_prediction_go_in_and_out(
    name: str, depths: int, models: dict[str, Any], tmp_path: Path
) -> None:
    original, logits = models[name]
    folder, ours, written, saved = (tmp_path / name for name in ("published", "ours", "hf", "saved"))
    tensors = _with_depths(original, folder, depths)
    assert convert(["from-hf", "--load", str(folder), "--save", str(ours)]) == 0
    assert convert(["to-hf", "--load", str(ours), "--save", str(written)]) == 0  # compares logits with transformers
    assert json.loads((written / "config.json").read_text())["num_nextn_predict_layers"] == depths
    found = _tensors(written)
    assert found.keys() == tensors.keys()
    # 1 and back: what a norm's weight differs from 1 is rounded once.
    rounding = 2.0**-24 if name == "Qwen3-Next" else 0.0
    assert all((found[one] - tensor).abs().max() <= rounding for one, tensor in tensors.items())
    runs = [flags(source, tp=2, pp=2) for source in (["--load-hf", str(folder)], _checkpoint(str(ours)))]
    for parts in zip(*run_ranks(4, in_turn, our_logits, runs), strict=True):
        assert (whole_vocabulary(parts) - logits).abs().max() < TOLERANCE
    # Ranks that have loaded the folder save what the import has written, by place and by byte.
    run_ranks(2, _load_and_save, flags(["--load-hf", str(folder)], pp=2), str(saved))
    one, other = Tensors(ours / "iter_0000000"), Tensors(saved / "iter_0000000")
    names = [name for name in other.names() if not name.startswith("optimizer.")]
    assert names == one.names()
    assert f"mtp.layers.{depths - 1}.transformer_layer.self_attention.linear_proj.weight" in names
    for name in names:
        before, after = one.read(name), other.read(name)
        rows = min(len(before), len(after))  # the vocabulary is padded to other sizes
        assert (before[:rows] == after[:rows]).all(), name


@pytest.mark.full
@pytest.mark.usefixtures("kept_interpreter")
@pytest.mark.parametrize(
    "layout",
    ["--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tmL"],
)
def test_depths_that_no_family_has_are_left_out(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Llama that predicts two tokens is written as one that predicts one, by which its logits are the same."""
    saved, written = tmp_path / "saved", tmp_path / "hf"
    model = "--num-layers 2 --hidden-size 48 --num-attention-heads 6 --group-query-attention --num-query-groups 2 "
    model += "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear --seq-length 32 "
    training = "--mtp-num-layers 1 --mock-data --micro-batch-size 2 --train-iters 4 --lr 1e-2 --eval-iters 0 "
    words = f"{model}{training}--vocab-size {VOCABULARY} {layout} --save {saved}".split()
    assert [ended.code for ended in run_ranks(2, run_program, words)] == [0, 0]
    assert convert(["to-hf", "--load", str(saved), "--save", str(written)]) == 0
    said = capsys.readouterr()
    assert "llama has no depths of multi-token prediction: those of --mtp-num-layers 1 are left out" in said.err
    assert "largest difference of logits" in said.out
    with exported_model.our_model(SavedModel(saved), "F32", LENGTH) as trained:
        ours = trained(torch.tensor(TOKENS))
    assert (in_plain_process(logits_of_folder, str(written)) - ours).abs().max() < TOLERANCE
    assert not [name for name in _tensors(written) if "layers.2." in name or "mtp" in name]
    parts = run_ranks(1, our_logits, flags(["--load-hf", str(written)]))
    assert (whole_vocabulary(parts) - ours).abs().max() < TOLERANCE


def test_files_without_the_depths_that_their_config_names(models: dict[str, Any], tmp_path: Path) -> None:
    """As transformers writes them again: the model is read without. Files with a part of them are refused."""
    original, logits = models["DeepSeek-V3, dense"]
    folder = tmp_path / "hf"
    tensors = _with_depths(original, folder, 1)
    save_file(_tensors(original), folder / "model.safetensors", {"format": "pt"})
    parts = run_ranks(1, our_logits, flags(["--load-hf", str(folder)]))
    assert (whole_vocabulary(parts) - logits).abs().max() < TOLERANCE
    some = {name: one for name, one in tensors.items() if not name.endswith("eh_proj.weight")}
    save_file(some, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(RankError, match=r"eh_proj.weight is missing.*--mtp-num-layers 0"):
        run_ranks(1, our_logits, flags(["--load-hf", str(folder)]))


def _load_and_save(arguments: list[str], folder: str) -> None:
    from megatron_ext import device
    from megatron_ext.checkpoint.native.save import save_checkpoint
    from megatron_ext.plugins.huggingface.load_hf import load_huggingface
    from megatron_ext.train.build import build_run
    from megatron_ext.train.configure import configure

    config = configure(arguments).config
    run = build_run(config, device.install("cpu"))
    assert config.checkpoint.load_hf is not None
    load_huggingface(run, config.checkpoint.load_hf)
    save_checkpoint(run, folder)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "named", "kind", "said"),
    [
        ("Phi-3", "", "phi3", ""),
        ("Llama 2", "--hf-model-type iquestcoder", "iquestcoder", ""),
        (
            "Llama 2",
            "--hf-model-type qwen3",
            "llama",
            "as llama, and not by --hf-model-type qwen3: it has --qk-layernorm",
        ),
    ],
)
def test_a_run_is_exported_as_the_type_that_it_began_from_or_names(
    name: str,
    named: str,
    kind: str,
    said: str,
    models: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A type whose shape the model does not have is named, with what it has."""
    saved, written = str(tmp_path / "saved"), tmp_path / "hf"
    run_ranks(1, _load_and_save, flags(["--load-hf", str(models[name][0]), *named.split()]), saved)
    assert convert(["to-hf", "--load", saved, "--save", str(written), "--no-verify"]) == 0
    assert json.loads((written / "config.json").read_text())["model_type"] == kind
    printed = "".join(capsys.readouterr())
    assert (said in printed) if said else ("--hf-model-type" not in printed)


@pytest.mark.full
@pytest.mark.parametrize("name", ["DeepSeek-V3.2", "GLM-5"])
def test_a_prefix_of_a_text_keeps_its_logits_next_to_an_indexer(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two heads make many equal scores, of which ours takes the earliest; an export is compared with transformers that
    does so too, and a word says it."""
    folder = tmp_path / "theirs"
    write_model(folder, name, index_n_heads=2, index_topk=16)
    assert convert(["from-hf", "--load", str(folder), "--save", str(tmp_path / "ours")]) == 0
    source = SavedModel(tmp_path / "ours")
    with exported_model.our_model(source, "F32", LENGTH) as model:
        text = torch.tensor(TOKENS)
        whole = model(text)
        assert all((whole[:, :length] - model(text[:, :length])).abs().max() < TOLERANCE for length in (24, 40))
    saved = ["--load", str(tmp_path / "ours"), "--save", str(tmp_path / "hf"), "--no-tokenizer"]
    assert convert(["to-hf", *saved]) == 0
    assert "equal scores of an indexer both took the earliest" in capsys.readouterr().out
