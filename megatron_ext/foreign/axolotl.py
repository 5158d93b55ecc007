"""Translates Axolotl's YAML file."""

from megatron_ext.foreign import fsdp
from megatron_ext.foreign.key_meanings import (
    EPOCHS,
    FULL_RECOMPUTE,
    OFF,
    Cases,
    Default,
    Fact,
    Flags,
    NoCounterpart,
    Table,
    only_off,
    optimizers,
    switch,
)

_TEXT = NoCounterpart("text becomes tokens once, before training: tools/preprocess_data.py, then --data-path")
_ADAPTER = only_off("all weights are trained; adapters and quantized weights are for fine-tuning tools")

TABLE: Table = {
    "base_model": Flags("--load-hf {} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {}"),
    "model_type": Default("config.json of the --load-hf folder says it"),
    "tokenizer_type": Default("tokenizer.json of the --load-hf folder says it"),
    **{f"datasets.*.{name}": _TEXT for name in ("path", "type", "split", "data_files", "ds_type", "name")},
    **{f"datasets.*.{name}": _TEXT for name in ("field", "field_messages", "chat_template")},
    "chat_template": _TEXT,
    "train_on_inputs": Cases({"false": OFF}, _TEXT),
    "dataset_prepared_path": Flags("--data-cache-path {}"),
    "val_set_size": NoCounterpart("--split gives training, validation and test their shares: --split 95,5,0"),
    "tensor_parallel_size": Fact("tensor"),
    "context_parallel_size": Fact("context"),
    "sequence_parallel_degree": Fact("context"),
    "dp_shard_size": Fact("shard"),
    "dp_replicate_size": Fact("replicate"),
    "fsdp_version": fsdp.VERSION,
    "deepspeed": NoCounterpart("import that file too: --from deepspeed"),
    "ddp": Default("data parallelism is what ranks do without a flag"),
    "ddp_timeout": Flags("--distributed-timeout-minutes {}", lambda seconds: float(seconds) / 60),
    "distributed_backend": Flags("--distributed-backend {}"),
    "sequence_len": Flags("--seq-length {}"),
    "sample_packing": switch("--reset-position-ids --reset-attention-mask --eod-mask-loss"),
    "pad_to_sequence_len": Default("every sample has --seq-length tokens"),
    "micro_batch_size": Fact("micro_batch_size"),
    "gradient_accumulation_steps": Fact("accumulation"),
    "num_epochs": EPOCHS,
    "max_steps": Flags("--train-iters {}"),
    "optimizer": optimizers("axolotl"),
    "learning_rate": Flags("--lr {}", float),
    "lr_scheduler": Cases(
        {
            "cosine": Flags("--lr-decay-style cosine"),
            "linear": Flags("--lr-decay-style linear"),
            "constant": Flags("--lr-decay-style constant"),
            "constant_with_warmup": Flags("--lr-decay-style constant"),
            "inverse_sqrt": Flags("--lr-decay-style inverse-square-root"),
        },
        NoCounterpart("the curves are constant, linear, cosine, inverse-square-root and WSD: --lr-decay-style"),
    ),
    "warmup_steps": Flags("--lr-warmup-iters {}"),
    "warmup_ratio": Flags("--lr-warmup-fraction {}"),
    "weight_decay": Flags("--weight-decay {}"),
    "adam_beta1": Flags("--adam-beta1 {}"),
    "adam_beta2": Flags("--adam-beta2 {}"),
    "adam_epsilon": Flags("--adam-eps {}"),
    "max_grad_norm": Flags("--clip-grad {}"),
    "seed": Flags("--seed {}"),
    "bf16": Cases({"true": Flags("--bf16"), "auto": Flags("--bf16"), "full": Flags("--bf16"), "false": OFF}, OFF),
    "fp16": switch("--fp16"),
    "tf32": switch("--tf32"),
    "fp8": switch("--bf16 --fp8-format hybrid"),
    "flash_attention": Cases(
        {"true": Default("torch's scaled_dot_product_attention takes its flash kernel where it can"), "false": OFF}, OFF
    ),
    "sdp_attention": Default("attention is torch's scaled_dot_product_attention"),
    "gradient_checkpointing": Cases(
        {"true": Flags(FULL_RECOMPUTE.format(1)), "false": OFF, "null": OFF},
        NoCounterpart("recomputed layers keep their one input on the GPU"),
    ),
    "torch_compile": switch("--torch-compile"),
    "adapter": _ADAPTER,
    "load_in_8bit": _ADAPTER,
    "load_in_4bit": _ADAPTER,
    "dataloader_num_workers": Flags("--num-workers {}"),
    "dataloader_pin_memory": Default("batches for a GPU are pinned"),
    "dataloader_prefetch_factor": NoCounterpart("the background threads read ahead as far as there are threads"),
    "output_dir": Flags("--save {}"),
    "logging_steps": Flags("--log-interval {}"),
    "save_strategy": Default("--save-interval counts steps"),
    "save_steps": Flags("--save-interval {}"),
    "save_total_limit": Flags("--keep-last-checkpoints {}"),
    "resume_from_checkpoint": Flags("--load {}"),
    "eval_steps": Flags("--eval-interval {}"),
    "wandb_project": Flags("--wandb-project {}"),
    "wandb_entity": Flags("--wandb-entity {}"),
    "wandb_name": Flags("--wandb-exp-name {}"),
    **fsdp.TABLE,
}

IMPLIED = {"base_model": "the folder must be there: download the model into it first"}
# transformers' Trainer takes the steps where both are given.
SHADOWED = {"warmup_ratio": "warmup_steps"}
DEFAULT_ACCUMULATION = 1
