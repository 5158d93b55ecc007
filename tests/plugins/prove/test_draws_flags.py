"""Each flag on which a model or its training depends is drawn, or named here with the reason why it is not."""

from pathlib import Path
from random import Random

from megatron_ext.config.parse.options import options
from megatron_ext.plugins.prove.draws import ONE_PROCESS, Draws, drawn_kinds, drawn_layout, drawn_model, words
from megatron_ext.plugins.prove.parity import write_corpus

DATA = "the corpus of every draw (`parity.write_corpus`) sets it, or the data that it is about is not in that corpus"
CURVE = "a function of the step alone, and the same in every layout: tests/unit/optim compares it with its formula"
LENGTH = "a draw has four steps, whatever it says"
HELD_OUT = "a draw evaluates once, on all of its validation data"
LOOP = "a callback of the program's loop, which no draw but a killed one runs"
CHECKPOINT = "a draw saves once and resumes once; the tests of checkpoints have the rest"
GPU = "read on GPUs alone"
RANDOM = "random numbers, which no two layouts draw alike"

NEVER_DRAWN = {
    DATA: {
        *("data_path", "split", "train_data_path", "valid_data_path", "test_data_path", "data_args_path"),
        *("per_split_data_args_path", "data_cache_path", "verify_data", "mock_data", "tokenizer_type", "vocab_size"),
        *("accept_other_tokenizer", "tokenizer_model", "vocab_file", "merge_file", "tokenizer_special_tokens"),
        *("tiktoken_pattern", "tiktoken_num_special_tokens", "eod_mask_loss", "assistant_only_loss", "fim_data"),
        *("fim_rate", "fim_spm_rate", "fim_split_sample", "fim_fragment_rate", "fim_no_prefix", "fim_prefix_token"),
        *("fim_middle_token", "fim_suffix_token", "fim_pad_token", "no_mmap_bin_files", "skip_samples"),
        *("num_workers", "seq_length", "full_validation", "multiple_validation_sets", "validation_set_names"),
    },
    CURVE: {
        *("min_lr", "decoupled_min_lr", "lr_scale_rule", "lr_scale_base_batch_size", "lr_decay_iters"),
        *("lr_decay_samples", "lr_warmup_samples", "lr_warmup_fraction", "lr_wsd_decay_style", "lr_wsd_decay_iters"),
        *("lr_wsd_decay_samples", "curves_in_full_batches", "lr_power_scale", "lr_power_exponent"),
        *("start_weight_decay", "end_weight_decay", "weight_decay_incr_style"),
    },
    LENGTH: {"train_samples", "stages", "step_batch_size_schedule", "exit_interval", "exit_duration_in_mins"},
    HELD_OUT: {
        *("eval_interval", "eval_iters", "start_eval_at_iter", "skip_train", "eval_tasks", "eval_at_start"),
        *("sample_interval", "sample_prompts", "sample_tokens"),
    },
    LOOP: {
        *("exit_signal_handler", "exit_signal_deadline", "manual_gc", "manual_gc_interval", "no_manual_gc_eval"),
        *("spike_threshold", "no_check_for_nan_in_loss_and_grad", "error_injection_rate", "error_injection_type"),
    },
    GPU: {
        *("flash_attention_version", "tf32", "disable_bf16_reduced_precision_matmul", "cuda_graph_warmup_steps"),
        *("tp_comm_overlap", "nccl_backend", "external_kernels", "transformer_impl", "recurrence_kernels"),
    },
    RANDOM: {"seed", "moe_input_jitter_eps", "moe_router_force_load_balancing", "elastic"},
    "the scale of a loss in fp16, of which a draw has the first": {
        *("loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
    },
    "set by whoever starts the ranks": {
        *("world_size", "distributed_backend", "distributed_timeout_minutes", "device"),
    },
    "torch.compile takes longer than all else of a draw; parity.md has its layouts": {"torch_compile"},
    "the comparison in fp64 chooses the library of matrix products itself": {"cpu_gemm"},
    "another word for what is drawn": {"no_position_embedding", "no_gradient_accumulation_fusion"},
    "refused, or without effect, in samples that one chunk holds": {"attention_chunk_size"},
    "the size that the checkpoint of another program has padded to": {"padded_vocab_size"},
}


def test_a_flag_is_drawn_or_has_a_reason(tmp_path: Path) -> None:
    draws, random = Draws(7, write_corpus(tmp_path, 5)), Random(7)
    plain = ("--num-layers 4 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 --global-batch-size 8",)
    with_experts = (*plain, "--num-experts 8 --moe-router-topk 2")
    more = ("--train-iters 20 --lr 1e-3",)
    alone = [draws.configured((*model, *more), ONE_PROCESS) for model in (plain, with_experts)]
    drawn = {"--hf-model-type"}
    for number in range(4000):
        pieces = [*drawn_model(random, drawn_kinds(random)), *drawn_layout(random, 2 << number % 3, alone[number % 2])]
        drawn |= {word for word in words(pieces) if word.startswith("--")}
    drawn = {flag.removeprefix("--").replace("-", "_") for flag in drawn}
    excused = {name for names in NEVER_DRAWN.values() for name in names}
    asked = {one.name for one in options() if one.group in ("model", "layout", "training", "optimizer", "data")}
    assert asked - drawn - excused == set(), "draw it in the describe.py of its kind, or say here why not"
    assert excused & drawn == set()
    assert excused <= asked
