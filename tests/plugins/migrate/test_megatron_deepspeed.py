"""Scripts of Megatron-DeepSpeed are the runs that they are there: its flags, its experts, and DeepSpeed's JSON file."""

import base64
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config.derived.layer_patterns import read_pattern
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.migrate.megatron_deepspeed import read
from megatron_ext.train.configure import Configured, configure
from megatron_ext.train.pretrain import pretrain
from tests.support.small_runs import WITHOUT_LENGTH

ROOT = Path(__file__).resolve().parents[3]
_BATCH = ("--micro-batch-size", "2", "--global-batch-size", "4")
_LENGTH = "--train-iters 3"
_EXPERTS = "--bf16 --disable-bias-linear --ffn-hidden-size 64 --num-layers 6"
_GATE = "--moe-router-dtype fp32 --moe-router-load-balancing-type aux_loss"
_CURRICULUM = {
    "curriculum_type": "seqlen",
    "schedule_type": "fixed_discrete",
    "schedule_config": {"difficulty": [4, 8], "max_step": [5]},
}
_SCALE = "--loss-scale-window 1000 --hysteresis 2 --min-loss-scale 1"


def _inline(file: dict[str, Any]) -> str:
    return f"--deepspeed --deepspeed_config {base64.urlsafe_b64encode(json.dumps(file).encode()).decode()}"


def _configured(line: str, *, without: tuple[str, ...] = ()) -> Configured:
    text = " ".join(WITHOUT_LENGTH)
    for flag in without:
        text = text.replace(f"{flag} ", "--removed ", 1)
    words, left = text.split(), []
    for place, word in enumerate(words):
        if "--removed" not in (word, words[place - 1]):
            left.append(word)
    return configure([*left, *shlex.split(line)])


def _problems(line: str, **options: Any) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        _configured(line, **options)
    return caught.value.problems


@pytest.mark.parametrize(
    ("script", "ours"),
    [
        (f"{_LENGTH} --deepspeed", _LENGTH),
        (f"{_LENGTH} --zero-stage 0", _LENGTH),
        (f"{_LENGTH} --zero_stage=1", f"{_LENGTH} --use-distributed-optimizer"),
        (f"{_LENGTH} --zero-stage 2", f"{_LENGTH} --use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward"),
        (f"{_LENGTH} --zero-stage 3", f"{_LENGTH} --use-torch-fsdp2"),
        (
            f"{_LENGTH} --zero-stage 3 --fp16",
            f"{_LENGTH} --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --fp16",
        ),
        (
            f"{_LENGTH} --zero-stage 2 --fp16",
            f"{_LENGTH} --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads --fp16",
        ),
        (
            f"{_LENGTH} --zero-stage 3 --fp16 --cpu-optimizer",
            f"{_LENGTH} --use-distributed-optimizer --optimizer-cpu-offload --fp16",
        ),
        (
            f"{_LENGTH} --rank 1 --world-size 2 --local-rank 1 --dist-url tcp://node:29500 --dry-run",
            f"{_LENGTH} --world-size 2 --dry-run",
        ),
        (f"{_LENGTH} --no-pipeline-parallel --pipeline-model-parallel-size 1", _LENGTH),
        (f"{_LENGTH} --ds-sequence-parallel-size 1", f"{_LENGTH} --cp-comm-type a2a"),
        (
            f"{_LENGTH} --ds-sequence-parallel-size 2 --world-size 2 --dry-run",
            f"{_LENGTH} --context-parallel-size 2 --cp-comm-type a2a --world-size 2 --dry-run",
        ),
        (
            f"{_LENGTH} --deepspeed-activation-checkpointing --checkpoint-activations --partition-activations",
            f"{_LENGTH} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        ),
        (f"{_LENGTH} --deepspeed-activation-checkpointing", _LENGTH),
        (f"{_LENGTH} --universal-checkpoint --zero-reduce-bucket-size 5 --zero-contigious-gradients", _LENGTH),
        (f"{_LENGTH} --glu-activation swiglu", f"{_LENGTH} --swiglu"),
        (f"{_LENGTH} --glu-activation geglu", f"{_LENGTH} --geglu"),
        (f"{_LENGTH} --num-key-value-heads 1", f"{_LENGTH} --group-query-attention --num-query-groups 1"),
        (f"{_LENGTH} --pad-vocab-size-to 512", f"{_LENGTH} --padded-vocab-size 512"),
        (f"{_LENGTH} --intermediate-size 96 --rope-theta 500", f"{_LENGTH} --ffn-hidden-size 96 --rotary-base 500"),
        (f"{_LENGTH} --cpu-optimizer", f"{_LENGTH} --optimizer-cpu-offload"),
        (f"{_LENGTH} --use-z-loss", f"{_LENGTH} --z-loss-strength 1e-4"),
        (f"{_LENGTH} --use-rms-norm --activation-func-type gelu", f"{_LENGTH} --normalization RMSNorm"),
        (f"{_LENGTH} --no-tie-embed-logits", f"{_LENGTH} --untie-embeddings-and-output-weights"),
        (f"{_LENGTH} --attention-head-type multiquery", f"{_LENGTH} --group-query-attention --num-query-groups 1"),
        (f"{_LENGTH} --pp-partition-method type:transformer", _LENGTH),
        (
            f"{_LENGTH} --num-experts 1 --moe-expert-parallel-size 4 --moe-loss-coeff 0.01 --topk 2 "
            "--mlp-type standard --create-moe-param-group --moe-train-capacity-factor 1.0 --expert-interval 2",
            _LENGTH,
        ),
        (
            f"{_LENGTH} {_EXPERTS} --num-experts 4 --disable-moe-token-dropping --create-moe-param-group",
            f"{_LENGTH} {_EXPERTS} --num-experts 4 --moe-router-topk 1 --moe-router-pre-softmax {_GATE} "
            "--moe-aux-loss-coeff 0.1 --moe-layer-freq ([0]*1+[1])*3+[0]*0",
        ),
        (
            f"{_LENGTH} {_EXPERTS} --num-experts 4 4 --topk 3 --expert-interval 4 --moe-loss-coeff 0.02 "
            "--disable-moe-token-dropping --moe-min-capacity 4",
            f"{_LENGTH} {_EXPERTS} --num-experts 4 --moe-router-topk 3 {_GATE} --moe-aux-loss-coeff 0.02 "
            "--moe-layer-freq ([0]*3+[1])*1+[0]*2",
        ),
        (
            f"{_LENGTH} {_EXPERTS} --num-experts 4 --topk 1 --moe-train-capacity-factor 1.25 --moe-min-capacity 4",
            f"{_LENGTH} {_EXPERTS} --num-experts 4 --moe-router-topk 1 --moe-router-pre-softmax {_GATE} "
            "--moe-aux-loss-coeff 0.1 --moe-layer-freq ([0]*1+[1])*3+[0]*0 --moe-expert-capacity-factor 1.25",
        ),
        # 16 tokens and 4 samples a step: 100 tokens are reached in the second.
        ("--train-tokens 100", "--train-samples 8"),
        ("--train-tokens 128 --train-iters 9", "--train-samples 8"),
        ("--train-tokens 1024 --train-samples 12", "--train-samples 12"),
        (
            "--train-samples 12 --lr-decay-tokens 128 --lr-warmup-tokens 40 --lr-decay-samples 3",
            "--train-samples 12 --lr-decay-samples 8 --lr-warmup-samples 2",
        ),
        (
            "--train-iters 3 --lr-decay-tokens 128 --lr-warmup-iters 1",
            "--train-samples 12 --lr-decay-samples 8 --lr-warmup-samples 4",
        ),
    ],
)
def test_a_script_is_the_run_of_the_flags_that_it_means(script: str, ours: str) -> None:
    assert _configured(script).config == _configured(ours).config


def test_experts_are_in_the_last_of_every_few_layers() -> None:
    model = _configured(
        f"{_LENGTH} {_EXPERTS} --num-experts 4 --disable-moe-token-dropping --expert-interval 4"
    ).config.model
    assert read_pattern(model.moe_layer_freq or "", 6) == (False, False, False, True, False, False)


@pytest.mark.parametrize(
    ("file", "script", "ours"),
    [
        # What the file does not say is DeepSpeed's default: no clipping, no sharding.
        ({"steps_per_print": 7}, "", "--clip-grad 0 --log-interval 7"),
        ({"steps_per_print": 7}, "--log-interval 2", "--clip-grad 0 --log-interval 2"),
        ({"gradient_clipping": 0.5}, "--clip-grad 2", "--clip-grad 0.5"),
        ({"gradient_clipping": "auto"}, "--clip-grad 2", "--clip-grad 2"),
        ({"gradient_clipping": "auto"}, "--zero-stage 1", ""),
        (
            {"gradient_clipping": "auto", "zero_optimization": {"stage": "auto"}},
            "--zero-stage 1",
            "--use-distributed-optimizer",
        ),
        (
            {"gradient_clipping": 1, "zero_optimization": {"stage": 1, "overlap_comm": True}},
            "--zero-stage 3",
            "--use-distributed-optimizer --overlap-grad-reduce",
        ),
        (
            {"gradient_clipping": 1, "fp16": {"enabled": True, "initial_scale_power": 11, "loss_scale": 0}},
            "--fp16 --loss-scale 12 --hysteresis 5",
            f"--fp16 --initial-loss-scale 2048 {_SCALE}",
        ),
        (
            {"gradient_clipping": 1, "fp16": {"enabled": "auto", "hysteresis": "auto"}},
            "--fp16 --hysteresis 5 --min-loss-scale 4",
            f"--fp16 --initial-loss-scale 65536 {_SCALE.replace('hysteresis 2', 'hysteresis 5')}",
        ),
        ({"gradient_clipping": 1, "fp16": {"enabled": False, "loss_scale": 8}}, "", ""),
        ({"gradient_clipping": 1, "bf16": {"enabled": True}, "fp16": {"enabled": False}}, "", "--bf16"),
        ({"gradient_clipping": 1, "bfloat16": {"enabled": True}, "pipeline": {"stages": 2}}, "--bf16", "--bf16"),
        (
            {
                "gradient_clipping": 1,
                "zero_optimization": {"stage": 1, "cpu_offload": True, "elastic_checkpoint": True},
            },
            "",
            "--use-distributed-optimizer --optimizer-cpu-offload",
        ),
        ({"gradient_clipping": 1, "bf16": {"enabled": "auto"}}, "--bf16", "--bf16"),
        (
            {
                "gradient_clipping": 1,
                "optimizer": {"type": "Lamb", "params": {"lr": 9}},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 9}},
                "curriculum_learning": {"enabled": False, "min_difficulty": 8},
                "flops_profiler": {"enabled": True, "profile_step": 2},
            },
            "",
            "",
        ),
        ({"gradient_clipping": 1, "train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}, "", ""),
        ({"gradient_clipping": 1, "gradient_accumulation_steps": 2, "train_batch_size": "auto"}, "", ""),
    ],
)
def test_the_files_values_are_those_of_the_run(file: dict[str, Any], script: str, ours: str, tmp_path: Path) -> None:
    expected = _configured(f"{_LENGTH} {ours}").config
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(file))
    assert _configured(f"{_LENGTH} {script} {_inline(file)}").config == expected
    assert _configured(f"{_LENGTH} --deepspeed --deepspeed-config={path} {script}").config == expected


def test_sizes_that_the_script_leaves_out_are_the_files() -> None:
    expected = _configured(f"{_LENGTH} --clip-grad 1").config
    file = {"gradient_clipping": 1, "train_micro_batch_size_per_gpu": 2}
    without = ("--micro-batch-size", "--global-batch-size")
    for more in ({"train_batch_size": 4}, {"gradient_accumulation_steps": 2}):
        assert _configured(f"{_LENGTH} {_inline(file | more)}", without=without).config == expected


@pytest.mark.parametrize(
    ("file", "script", "said"),
    [
        ({"bf16": {"enabled": True}}, "--fp16", "--fp16, but fp16.enabled false and bf16.enabled true in "),
        ({}, "--bf16", "--bf16, but fp16.enabled false and bf16.enabled false in --deepspeed_config"),
        ({"train_batch_size": 8}, "", "--global-batch-size 4 and train_batch_size 8 of --deepspeed_config differ"),
        (
            {"train_micro_batch_size_per_gpu": 1},
            "",
            "--micro-batch-size 2 and train_micro_batch_size_per_gpu 1 of --deepspeed_config differ",
        ),
        (
            {"gradient_accumulation_steps": 3},
            "",
            "--global-batch-size 4 is not gradient_accumulation_steps 3 of --deepspeed_config x --micro-batch-size 2 "
            "x 1 data-parallel ranks; use --global-batch-size 6",
        ),
        (
            {"gradient_accumulation_steps": 2},
            "--world-size 2 --dry-run",
            "x --micro-batch-size 2 x 2 data-parallel ranks; use --global-batch-size 8",
        ),
        ({"zero_optimization": {"stage": 4}}, "", "zero_optimization.stage 4 of --deepspeed_config is not translated"),
        ({"zero_optimisation": {"stage": 1}}, "", "zero_optimisation.stage 1 of --deepspeed_config is not translated"),
        ({"fp16": {"loss_scaling": 1}}, "", "fp16.loss_scaling 1 of --deepspeed_config is not translated"),
        ({"curriculum_learning": {"enabled": True}}, "", "lengths that grow are --stages FILE here"),
        (
            {"curriculum_learning": {"enabled": True, **_CURRICULUM}},
            "",
            "put {0: {seq_length: 4}, 5: {seq_length: 8}} into a file, and give it as --stages FILE",
        ),
        (
            {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}},
            "",
            "compression_training of --deepspeed_config is not supported",
        ),
    ],
)
def test_what_contradicts_or_is_not_known_is_named(file: dict[str, Any], script: str, said: str) -> None:
    [problem] = _problems(f"{_LENGTH} {script} {_inline(file)}")
    assert said in problem


def test_stages_that_a_curriculum_is_refused_for_take_its_place(tmp_path: Path) -> None:
    curriculum = _inline({"curriculum_learning": {"enabled": True, **_CURRICULUM}})
    [problem] = _problems(f"{_LENGTH} {curriculum}")
    stages = tmp_path / "stages.yaml"
    stages.write_text(problem[problem.index("{") : problem.index("} into a file") + 1])
    typed = _configured(f"{_LENGTH} --stages {stages} --save {tmp_path} {curriculum}").typed
    assert any("--stages says which lengths there are" in warning for warning in typed.warnings)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (f"{_LENGTH} --zero-stage 7", "ZeRO has the stages 0 to 3"),
        (f"{_LENGTH} --zero-stage much", "--zero-stage: 'much' is not an integer"),
        (f"{_LENGTH} --deepspeed --deepspeed_config nowhere.json", "--deepspeed_config nowhere.json does not exist"),
        (f"{_LENGTH} --deepspeed --deepspeed_config Wzcs", "--deepspeed_config Wzcs does not exist"),
        (
            f"{_LENGTH} --no-pipeline-parallel --pipeline-model-parallel-size 2 --world-size 2 --dry-run",
            "--no-pipeline-parallel, but --pipeline-model-parallel-size 2; leave one out",
        ),
        (f"{_LENGTH} --glu-activation reglu", "--glu-activation: 'reglu' is not one of swiglu, geglu"),
        (f"{_LENGTH} --pp-partition-method parameters", "--pp-partition-method: 'parameters' is not one of"),
        (f"{_LENGTH} --curriculum-learning", "--curriculum-learning is not supported: lengths that grow are --stages"),
        (f"{_LENGTH} --random-ltd", "--random-ltd is not supported: all layers compute all tokens"),
        ("--train-iters 3 --lr-warmup-tokens 16", "--lr-warmup-tokens without --lr-decay-tokens"),
        ("--train-tokens 1e3", "--train-tokens: '1e3' is not an integer"),
        (f"{_LENGTH} --hostfile hosts", "start torchrun --nproc-per-node GPUS --nnodes MACHINES"),
        *(
            (f"{_LENGTH} {_EXPERTS} --num-experts 4 {more}", said)
            for more, said in (
                ("--topk 3 --moe-loss-coeff 0.1", "add --disable-moe-token-dropping"),
                ("--disable-moe-token-dropping --topk 2", "--topk 2 draws the second expert"),
                ("--disable-moe-token-dropping --mlp-type residual", "--mlp-type residual: no layer adds an MLP"),
                ("--disable-moe-token-dropping --expert-interval 9", "--expert-interval 9: none of 6 layers"),
                ("8 --disable-moe-token-dropping", "--num-experts 4 8: layers have one number of experts here"),
            )
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(script: str, said: str) -> None:
    assert any(said in problem for problem in _problems(script))


def test_tokens_need_the_sizes_that_they_are_counted_by() -> None:
    without = ("--global-batch-size",)
    [problem] = _problems("--train-tokens 100", without=without)
    assert problem.startswith("--train-tokens are counted in samples here, which needs --seq-length and --global-batch")


@pytest.mark.parametrize(
    ("file", "script", "said"),
    [
        ({}, "", "--clip-grad 1.0 changes nothing, there too: gradient_clipping of --deepspeed_config is 0.0"),
        ({}, "--zero-stage 1", "--zero-stage 1 changes nothing, there too: zero_optimization.stage of --deepspeed_"),
        (
            {"fp16": {"enabled": True}},
            "--fp16 --loss-scale 12",
            "--loss-scale 12 changes nothing, there too: fp16.loss_scale of --deepspeed_config is 0",
        ),
        ({"optimizer": {"type": "Adam"}}, "", "optimizer of --deepspeed_config changes nothing, there too"),
        ({"scheduler": {"type": "WarmupLR"}}, "", "scheduler of --deepspeed_config changes nothing, there too"),
        ({"train_bach_size": 4}, "--allow-unknown-flags", "train_bach_size 4 of --deepspeed_config is not translated"),
        (
            {"zero_optimization": {"stage": 1, "reduce_bucket_size": 5}},
            "",
            "zero_optimization.reduce_bucket_size 5 of --deepspeed_config changes nothing here",
        ),
    ],
)
def test_what_has_no_effect_is_told(file: dict[str, Any], script: str, said: str) -> None:
    warnings = _configured(f"{_LENGTH} {script} {_inline(file)}").typed.warnings
    assert sum(said in warning for warning in warnings) == 1
    assert sum(warning.startswith("--deepspeed changes nothing here: megatron-core is") for warning in warnings) == 1


def test_a_file_without_its_engine_is_not_read() -> None:
    configured = _configured(f"{_LENGTH} --deepspeed_config nowhere.json")
    assert configured.config == _configured(_LENGTH).config
    assert configured.typed.warnings[0].startswith("--deepspeed_config changes nothing, there too: without --deepspeed")


@pytest.mark.parametrize(
    ("flags", "kind", "model"),
    [
        ("--tokenizer-type TokenizerFromFile --tokenizer-file {}/tokenizer.json", "HuggingFaceTokenizer", "{}"),
        ("--tokenizer-type QwenTokenizer --tokenizer-model {}", "HuggingFaceTokenizer", "{}"),
        ("--tokenizer-type HFTokenizer --tokenizer-model {}/tokenizer.json", "HuggingFaceTokenizer", "{}"),
        ("--tokenizer-type DeepSeekV2Tokenizer --tokenizer-model {}", "HuggingFaceTokenizer", "{}"),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model {}", "HuggingFaceTokenizer", "{}"),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model {}/a.model", "SentencePieceTokenizer", "{}/a.model"),
    ],
)
def test_tokenizers_of_forks_are_ours_where_what_is_given_fits(
    flags: str, kind: str, model: str, tmp_path: Path
) -> None:
    values = read(flags.format(tmp_path).split()).values
    assert (values["tokenizer_type"], values["tokenizer_model"]) == (kind, model.format(tmp_path))


def test_tokenizers_of_forks_say_what_to_give_where_it_does_not_fit() -> None:
    for flags in ("QwenTokenizer --vocab-file v --merge-file m", "TokenizerFromFileWithFIM", "DeepSeekV2Tokenizer"):
        problems = _problems(f"{_LENGTH} --tokenizer-type {flags}", without=("--vocab-size",))
        assert any(
            "use HuggingFaceTokenizer with --tokenizer-model naming the model's folder" in one for one in problems
        )


def test_the_line_of_torchrun_is_printed_where_deepspeed_has_started_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _configured(_LENGTH).typed.warnings
    monkeypatch.setenv("LOCAL_SIZE", "8")
    monkeypatch.setenv("MASTER_ADDR", "node-7")
    for machines, words in ("2", "8 --nnodes 2 --node-rank RANK --master-addr node-7"), ("1", "8"):
        monkeypatch.setenv("CROSS_SIZE", machines)
        [warning] = _configured(f"{_LENGTH} --local_rank=0").typed.warnings
        assert f"torchrun --nproc-per-node {words} --max-restarts 3 pretrain_gpt.py" in warning


def test_tokens_and_the_files_batch_are_what_is_trained(tmp_path: Path) -> None:
    file = {"train_batch_size": 4, "gradient_clipping": 0.25}
    pretrain([*WITHOUT_LENGTH, *shlex.split(f"--train-tokens 100 --log-interval 1 --save {tmp_path} {_inline(file)}")])
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["consumed_tokens"] for row in rows if "lm_loss" in row][-1] == 128


def test_the_program_starts_as_deepspeeds_launcher_starts_it() -> None:
    flags = f"--local_rank=0 {' '.join(WITHOUT_LENGTH)} {_LENGTH} {_inline({'fp16': {'enabled': False}})} --dry-run"
    ended = subprocess.run(
        [sys.executable, "pretrain_gpt.py", *flags.split()], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "--deepspeed changes nothing here: megatron-core is always the engine" in ended.stdout + ended.stderr
