"""Every field of the configuration, changed alone, changes a real run: its losses, files, messages or traffic.

Each line of `CHANGES` names a field, a run, and the flags that change the field in it. Runs take two steps of a model
of a few thousand weights, four where a second update has to be seen; all of one kind share the start of their ranks. A
field without a line stands in `ELSEWHERE`, with the test that shows what it does.
"""

import contextlib
import dataclasses
import json
import math
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config.parse.options import flag_of
from megatron_ext.config.schema import Config
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.plugins.prove.parity import write_corpus

# Of the second tier: a field that nobody reads is found by tests/unit/config; here each is trained with two values.
pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[2]

BASE = """
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --seq-length 16
    --max-position-embeddings 16 --mock-data --vocab-size 61 --make-vocab-size-divisible-by 16 --attention-dropout 0
    --hidden-dropout 0 --micro-batch-size 2 --global-batch-size 4 --train-iters 2 --lr 1e-2 --lr-decay-style cosine
    --eval-interval 0 --log-interval 1 --metrics-file OUT/metrics.jsonl --init-method-std 0.2
"""
"""With Megatron's deviation of 0.02 scores of attention are near 0, and a field that scales or turns them changes
no more than rounding does."""
ROPE = "--position-embedding-type rope"
MOE = "--num-experts 4 --disable-bias-linear --swiglu --moe-aux-loss-coeff 0.01"
TWO = "--tensor-model-parallel-size 2 --sequence-parallel"
SAVES = "--save OUT/save"
SAVES_EACH = f"{SAVES} --save-interval 1"
FOUR = "--train-iters 4"
DATA = "DATA"
"""Stands for the flags of `write_corpus`."""
SHARED = "SHARED"
"""Stands for the same with its training data alone, of which --split makes shares."""

RUNS: dict[str, tuple[int, str]] = {
    "plain": (1, ""),
    "four steps": (1, FOUR),
    "dropout": (1, "--attention-dropout 0.1 --hidden-dropout 0.1"),
    "rope": (1, ROPE),
    "scaled rope": (1, f"{ROPE} --use-rope-scaling --rope-scaling-original-max-position-embeddings 16"),
    "latents": (1, f"{ROPE} --multi-latent-attention --q-lora-rank 8 --kv-lora-rank 8 --qk-head-dim 8 "
                   "--qk-pos-emb-head-dim 8 --v-head-dim 8 --rotary-scaling-factor 4 --mscale .7 --mscale-all-dim .4"),
    "chosen keys": (1, f"{ROPE} --multi-latent-attention --q-lora-rank 8 --kv-lora-rank 8 --qk-head-dim 8 "
                       "--qk-pos-emb-head-dim 8 --v-head-dim 8 --disable-bias-linear --experimental-attention-variant "
                       "dsa --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 8 --dsa-indexer-topk 6"),
    "delta rules": (1, f"{ROPE} --normalization RMSNorm --disable-bias-linear --experimental-attention-variant "
                       "gated_delta_net --linear-attention-freq [1,0] --linear-num-key-heads 2 "
                       "--linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8"),
    "short convolutions": (1, "--full-attn-idxs 1"),
    "letters": (1, f"{ROPE} --num-layers 4 --normalization RMSNorm --disable-bias-linear --hybrid-layer-pattern M-M* "
                   "--mamba-state-dim 6 --mamba-head-dim 8 --mamba-num-groups 2"),
    "letters ahead": (1, f"{ROPE} --num-layers 4 --normalization RMSNorm --disable-bias-linear --hybrid-layer-pattern "
                         "M-M* --mamba-state-dim 6 --mamba-head-dim 8 --mamba-num-groups 2 --mtp-num-layers 1 "
                         "--mtp-hybrid-override-pattern M"),
    "selective scans": (1, "--num-layers 4 --normalization RMSNorm --disable-bias-linear --hybrid-layer-pattern S-S* "
                           "--scan-state-dim 6 --scan-norm without-weights"),
    "side by side": (1, f"{ROPE} --num-layers 2 --normalization RMSNorm --disable-bias-linear --hybrid-layer-pattern "
                        "BB --mamba-state-dim 6 --mamba-head-dim 8 --mamba-num-groups 2"),
    "longrope": (1, f"{ROPE} --rope-type longrope --original-max-position-embeddings 4 --rotary-scaling-factor 4 "
                    "--kv-channels 4 --longrope-short-factor 1 2 --longrope-long-factor 3 9"),
    "no rotation in layer 2": (1, f"{ROPE} --no-rope-freq 2 --window-size 3,0 --window-attn-skip-freq [1,0] "
                                  "--attention-temperature-scale 0.5 --attention-temperature-step 2"),
    "heads by layer": (1, "--window-size 3,0 --window-attn-skip-freq [1,0] --num-query-groups-local 2"),
    "queries in groups": (1, "--group-query-attention --num-query-groups 2 --disable-bias-linear"),
    "rmsnorm": (1, "--normalization RMSNorm --qk-layernorm"),
    "experts": (1, MOE),
    "biased experts": (1, f"{MOE} --moe-router-enable-expert-bias"),
    "experts of small bias": (1, f"{FOUR} {MOE} --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05"),
    "groups of experts": (1, f"{MOE} --num-experts 8 --moe-router-num-groups 2 --moe-router-group-topk 1"),
    "experts with a capacity": (1, f"{MOE} --moe-router-pre-softmax --moe-expert-capacity-factor 0.5"),
    "z losses": (1, f"{MOE} --moe-z-loss-coeff 0.001 --z-loss-strength 0.001"),
    "experts by scores": (1, f"{MOE} --moe-router-score-function sigmoid"),
    "an expert a token": (1, f"{MOE} --moe-router-topk 1 --moe-router-score-function sigmoid"),
    "shared experts": (1, f"{MOE} --moe-shared-expert-intermediate-size 32"),
    "sgd": (1, f"{FOUR} --optimizer sgd"),
    "lion": (1, f"{FOUR} --optimizer lion"),
    "muon": (1, f"{FOUR} --optimizer muon --group-query-attention --num-query-groups 2"),
    "adaptive muon": (1, "--optimizer adaptive_muon"),
    "adafactor": (1, f"{FOUR} --optimizer adafactor --lr 0.1"),
    "unbiased": (1, "--disable-bias-linear"),
    "mup": (1, "--use-mup --mup-base-hidden-size 8"),
    "normed latents": (1, f"{ROPE} --multi-latent-attention --q-lora-rank 8 --kv-lora-rank 8 --qk-head-dim 8 "
                       "--qk-pos-emb-head-dim 8 --v-head-dim 8 --qk-layernorm"),
    "clipped": (1, "--disable-bias-linear --qk-clip --qk-clip-threshold 0.001"),
    "muon of tensor": (2, f"{TWO} --optimizer muon"),
    "wsd": (1, f"{FOUR} --lr-decay-style WSD --lr-wsd-decay-iters 2 --min-lr 1e-3"),
    "growing": (1, f"{FOUR} --rampup-batch-size 2 2 6 --lr-decay-style linear"),
    "power": (1, "--lr-decay-style power --lr-power-scale 0.001"),
    "decoupled": (1, f"{FOUR} --untie-embeddings-and-output-weights --decoupled-lr 1e-3"),
    "decay": (1, f"{FOUR} --start-weight-decay 0.01 --end-weight-decay 0.5 --weight-decay-incr-style linear"),
    "evaluated": (1, f"{FOUR} --eval-interval 2 --eval-iters 1"),
    "data": (1, DATA),
    "evaluated data": (1, f"{DATA} --eval-interval 2 --eval-iters 1"),
    "shared data": (1, f"{SHARED} --eval-interval 2 --eval-iters 1 --split 1,1,0"),
    "saves": (1, SAVES),
    "saves each step": (1, SAVES_EACH),
    "bf16": (1, "--bf16"),
    "fp16": (1, "--fp16 --initial-loss-scale 1024"),
    "tensorboard": (1, "--tensorboard-dir OUT/tensorboard"),
    "profiled": (1, "--profile --profile-step-start 1 --profile-step-end 2 --use-pytorch-profiler "
                 "--tensorboard-dir OUT/tensorboard"),
    "two": (2, ""),
    "two, distributed": (2, "--use-distributed-optimizer"),
    "two of tensor": (2, TWO),
    "two stages": (2, "--pipeline-model-parallel-size 2 --num-layers 4 --untie-embeddings-and-output-weights"),
    "two chunks": (2, "--pipeline-model-parallel-size 2 --num-layers 4 --num-virtual-stages-per-pipeline-rank 2"),
    "two of context": (2, f"--context-parallel-size 2 {ROPE}"),
    "two of experts": (2, f"{MOE} --expert-model-parallel-size 2"),
    "fsdp2": (2, "--use-torch-fsdp2 --untie-embeddings-and-output-weights"),
}  # fmt: skip

CHANGES: dict[str, tuple[str, str]] = {
    # model
    "num_layers": ("plain", "--num-layers 3"),
    "hidden_size": ("plain", "--hidden-size 40"),
    "ffn_hidden_size": ("plain", "--ffn-hidden-size 64"),
    "num_attention_heads": ("plain", "--num-attention-heads 2"),
    "kv_channels": ("plain", "--kv-channels 16"),
    "group_query_attention": ("plain", "--group-query-attention"),
    "num_query_groups": ("queries in groups", "--num-query-groups 1"),
    "num_query_groups_local": ("heads by layer", "--num-query-groups-local 1"),
    "value_channels": ("plain", "--value-channels 12"),
    "value_multiplier": ("plain", "--value-multiplier 0.5"),
    "softmax_type_local": ("heads by layer", "--softmax-type-local off-by-one"),
    "seq_length": ("plain", "--seq-length 8"),
    "max_position_embeddings": ("saves", "--max-position-embeddings 32"),
    "position_embedding_type": ("plain", ROPE),
    "rotary_base": ("rope", "--rotary-base 100"),
    "rotary_percent": ("rope", "--rotary-percent 0.5"),
    "rotary_seq_len_interpolation_factor": ("rope", "--rotary-seq-len-interpolation-factor 4"),
    "rotary_interleaved": ("rope", "--rotary-interleaved"),
    "use_rope_scaling": ("rope", "--use-rope-scaling --rope-scaling-original-max-position-embeddings 16"),
    "rope_scaling_factor": ("scaled rope", "--rope-scaling-factor 2"),
    "rope_scaling_low_freq_factor": ("scaled rope", "--rope-scaling-low-freq-factor 2"),
    "rope_scaling_high_freq_factor": ("scaled rope", "--rope-scaling-high-freq-factor 16"),
    "rope_scaling_original_max_position_embeddings": (
        "scaled rope", "--rope-scaling-original-max-position-embeddings 64"),
    "multi_latent_attention": ("rope", "--multi-latent-attention --kv-lora-rank 8"),
    "experimental_attention_variant": (
        "rope", "--normalization RMSNorm --disable-bias-linear --experimental-attention-variant gated_delta_net "
        "--linear-attention-freq 2 --linear-num-key-heads 2 --linear-num-value-heads 4"),
    "hybrid_layer_pattern": ("letters", "--hybrid-layer-pattern M-*M"),
    "mtp_hybrid_override_pattern": ("letters ahead", "--mtp-hybrid-override-pattern *"),
    "mamba_state_dim": ("letters", "--mamba-state-dim 4"),
    "mamba_head_dim": ("letters", "--mamba-head-dim 4 --mamba-num-heads 8"),
    "mamba_num_groups": ("letters", "--mamba-num-groups 4"),
    "mamba_num_heads": ("letters", "--mamba-num-heads 4"),
    "mamba_norm": ("letters", "--mamba-norm before-gate"),
    "mamba_multipliers": ("letters", "--mamba-multipliers 1 1 2 1 1"),
    "scan_channels": ("selective scans", "--scan-channels 40"),
    "scan_state_dim": ("selective scans", "--scan-state-dim 4"),
    "scan_conv_kernel_dim": ("selective scans", "--scan-conv-kernel-dim 2"),
    "scan_time_step_rank": ("selective scans", "--scan-time-step-rank 3"),
    "scan_norm": ("selective scans", "--scan-norm none"),
    "scan_norm_epsilon": ("selective scans", "--scan-norm-epsilon 0.5"),
    "scan_bias": ("selective scans", "--scan-bias"),
    "no_scan_conv_bias": ("selective scans", "--no-scan-conv-bias"),
    "mixer_multipliers": ("side by side", "--mixer-multipliers 1 0.5"),
    "full_attn_idxs": ("plain", "--full-attn-idxs 0"),
    "conv_l_cache": ("short convolutions", "--conv-l-cache 4"),
    "conv_bias": ("short convolutions", "--conv-bias"),
    "mlp_multipliers": ("plain", "--swiglu --mlp-multipliers 0.5 1"),
    "linear_attention_freq": ("delta rules", "--linear-attention-freq [0,1]"),
    "linear_conv_kernel_dim": ("delta rules", "--linear-conv-kernel-dim 2"),
    "linear_key_head_dim": ("delta rules", "--linear-key-head-dim 4"),
    "linear_value_head_dim": ("delta rules", "--linear-value-head-dim 4"),
    "linear_num_key_heads": ("delta rules", "--linear-num-key-heads 1"),
    "linear_num_value_heads": ("delta rules", "--linear-num-value-heads 2"),
    "linear_norm_epsilon": ("delta rules", "--linear-norm-epsilon 0.5"),
    "linear_allow_neg_eigval": ("delta rules", "--linear-allow-neg-eigval"),
    "dsa_indexer_n_heads": ("chosen keys", "--dsa-indexer-n-heads 3"),
    "dsa_indexer_head_dim": ("chosen keys", "--dsa-indexer-head-dim 10"),
    "dsa_indexer_topk": ("chosen keys", "--dsa-indexer-topk 3"),
    "dsa_indexer_rope_interleaved": ("chosen keys", "--dsa-indexer-rope-interleaved"),
    "dsa_indexer_k_norm_epsilon": ("chosen keys", "--dsa-indexer-k-norm-epsilon 0.1"),
    "dsa_indexer_loss_coeff": ("chosen keys", "--dsa-indexer-loss-coeff 0.3"),
    "dsa_indexer_use_sparse_loss": ("chosen keys", "--dsa-indexer-use-sparse-loss"),
    "dsa_indexer_warmup": ("chosen keys", "--dsa-indexer-warmup"),
    "q_lora_rank": ("latents", "--q-lora-rank 4"),
    "kv_lora_rank": ("latents", "--kv-lora-rank 4"),
    "qk_head_dim": ("latents", "--qk-head-dim 4"),
    "qk_pos_emb_head_dim": ("latents", "--qk-pos-emb-head-dim 4"),
    "v_head_dim": ("latents", "--v-head-dim 4"),
    "latent_norm_epsilon": ("normed latents", "--latent-norm-epsilon 1"),
    "rope_type": ("latents", "--rope-type rope"),
    "rotary_scaling_factor": ("latents", "--rotary-scaling-factor 2"),
    "original_max_position_embeddings": ("latents", "--original-max-position-embeddings 64"),
    "beta_fast": ("latents", "--beta-fast 200"),
    "beta_slow": ("latents", "--beta-slow 8"),
    "rotary_base_local": ("no rotation in layer 2", "--rotary-base-local 10"),
    "rotary_attention_factor": ("longrope", "--rotary-attention-factor 3"),
    "longrope_short_factor": ("longrope", "--original-max-position-embeddings 4096 --longrope-short-factor 4 5"),
    "longrope_long_factor": ("longrope", "--longrope-long-factor 4 5"),
    "no_yarn_correction_range_round_to_int": (
        "latents", "--original-max-position-embeddings 64 --no-yarn-correction-range-round-to-int"),
    "attention_temperature_scale": ("no rotation in layer 2", "--attention-temperature-scale 5"),
    "attention_temperature_step": ("no rotation in layer 2", "--attention-temperature-step 3"),
    "attention_temperature_of": ("no rotation in layer 2", "--attention-temperature-of rotated"),
    "qk_l2_norm": ("rope", "--qk-l2-norm"),
    "quick_geglu": ("plain", "--quick-geglu"),
    "activation_func_clamp_value": ("plain", "--swiglu --activation-func-clamp-value 0.01"),
    "glu_linear_offset": ("plain", "--swiglu --glu-linear-offset 1"),
    "xielu": ("plain", "--xielu"),
    "mscale": ("latents", "--mscale 1"),
    "mscale_all_dim": ("latents", "--mscale-all-dim 1"),
    "window_size": ("plain", "--window-size 3,0"),
    "window_attn_skip_freq": ("plain", "--window-size 3,0 --window-attn-skip-freq [0,1]"),
    "no_rope_freq": ("rope", "--no-rope-freq 2"),
    "swiglu": ("plain", "--swiglu"),
    "geglu": ("plain", "--geglu"),
    "embed_layernorm": ("plain", "--embed-layernorm"),
    "embedding_multiplier": ("plain", "--embedding-multiplier 4"),
    "residual_multiplier": ("plain", "--residual-multiplier 0.5"),
    "logits_multiplier": ("plain", "--logits-multiplier 0.5"),
    "softmax_scale": ("plain", "--softmax-scale 1"),
    "softmax_type": ("plain", "--softmax-type off-by-one"),
    "attention_logit_softcapping": ("plain", "--attention-logit-softcapping 0.1"),
    "z_loss_strength": ("z losses", "--z-loss-strength 0.01"),
    "final_logit_softcapping": ("plain", "--final-logit-softcapping 1"),
    "attention_output_gate": ("plain", "--attention-output-gate"),
    "moe_router_sparsemixer_eps": ("experts", "--moe-router-sparsemixer-eps 0.3"),
    "attention_output_gate_over": ("plain", "--attention-output-gate --attention-output-gate-over head"),
    "qkv_clip": ("plain", "--qkv-clip 0.1"),
    "relu": ("plain", "--relu"),
    "position_embedding_offset": ("plain", "--position-embedding-offset 2"),
    "squared_relu": ("plain", "--squared-relu"),
    "openai_gelu": ("plain", "--openai-gelu"),
    "normalization": ("plain", "--normalization RMSNorm"),
    "norm_parameters": ("plain", "--norm-parameters weight"),
    "norm_position": ("plain", "--norm-position after"),
    "parallel_residual": ("plain", "--parallel-residual one-norm"),
    "lm_head_bias": ("plain", "--lm-head-bias"),
    "norm_epsilon": ("plain", "--norm-epsilon 1e-2"),
    "untie_embeddings_and_output_weights": ("plain", "--untie-embeddings-and-output-weights"),
    "disable_bias_linear": ("plain", "--disable-bias-linear"),
    "add_qkv_bias": ("queries in groups", "--add-qkv-bias"),
    "add_output_bias": ("queries in groups", "--add-output-bias"),
    "add_mlp_bias": ("queries in groups", "--add-mlp-bias"),
    "qk_layernorm": ("plain", "--qk-layernorm"),
    "qk_layernorm_place": (
        "rmsnorm", f"{ROPE} --qk-layernorm-place after"),
    "qk_layernorm_over": ("rmsnorm", "--qk-layernorm-over projection"),
    "num_experts": ("experts", "--num-experts 8"),
    "moe_layer_freq": ("experts", "--moe-layer-freq 2"),
    "moe_ffn_hidden_size": ("experts", "--moe-ffn-hidden-size 64"),
    "moe_latent_size": ("experts", "--moe-latent-size 8"),
    "moe_router_topk": ("experts", "--moe-router-topk 3"),
    "moe_router_pre_softmax": ("experts", "--moe-router-pre-softmax"),
    "moe_router_enable_expert_bias": ("experts", "--moe-router-enable-expert-bias"),
    "moe_router_bias_of": ("experts of small bias", "--moe-router-bias-of logits"),
    "moe_router_unnormalized": ("experts by scores", "--moe-router-unnormalized"),
    "moe_router_bias_update_rate": ("biased experts", "--moe-router-bias-update-rate 0.5"),
    "moe_router_num_groups": ("groups of experts", "--moe-router-num-groups 4"),
    "moe_router_group_topk": ("groups of experts", "--moe-router-group-topk 2"),
    "moe_router_group_scores": ("groups of experts", "--moe-router-group-scores 1"),
    "moe_router_topk_scaling_factor": ("experts", "--moe-router-topk-scaling-factor 2"),
    "moe_expert_capacity_factor": ("experts", "--moe-expert-capacity-factor 0.5"),
    "moe_token_drop_policy": ("experts with a capacity", "--moe-token-drop-policy position"),
    "moe_apply_probs_on_input": ("an expert a token", "--moe-apply-probs-on-input"),
    "moe_input_jitter_eps": ("experts", "--moe-input-jitter-eps 0.3"),
    "moe_router_force_load_balancing": ("experts", "--moe-router-force-load-balancing"),
    "moe_shared_expert_average": ("shared experts", "--moe-shared-expert-average"),
    "moe_shared_expert_gate": ("shared experts", "--moe-shared-expert-gate"),
    "moe_router_dtype": ("experts", "--bf16 --moe-router-dtype fp32"),
    "moe_router_load_balancing_type": ("experts", "--moe-router-load-balancing-type none"),
    "moe_aux_loss_coeff": ("experts", "--moe-aux-loss-coeff 0.5"),
    "moe_z_loss_coeff": ("z losses", "--moe-z-loss-coeff 0.1"),
    "moe_shared_expert_intermediate_size": ("experts", "--moe-shared-expert-intermediate-size 32"),
    "init_method_std": ("plain", "--init-method-std 0.1"),
    "embedding_init_method_std": ("plain", "--embedding-init-method-std 0.1"),
    "init_method_xavier_uniform": ("plain", "--init-method-xavier-uniform"),
    "attention_dropout": ("plain", "--attention-dropout 0.5"),
    "hidden_dropout": ("plain", "--hidden-dropout 0.5"),
    "make_vocab_size_divisible_by": ("saves", "--make-vocab-size-divisible-by 128"),
    # layout
    "tensor_model_parallel_size": ("two", TWO),
    "sequence_parallel": ("two", TWO),
    "sequence_parallel_keep_gathered": ("two of tensor", "--sequence-parallel-keep-gathered"),
    "pipeline_model_parallel_size": ("two", "--pipeline-model-parallel-size 2"),
    "context_parallel_size": ("two", "--context-parallel-size 2"),
    "cp_comm_type": ("two of context", "--cp-comm-type all_gather"),
    "expert_model_parallel_size": ("two of experts", "--expert-model-parallel-size 1"),
    "expert_tensor_parallel_size": (
        "two of tensor", f"{MOE} --expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall"),
    "moe_token_dispatcher_type": ("two of experts", "--moe-token-dispatcher-type alltoall"),
    "num_virtual_stages_per_pipeline_rank": ("two stages", "--num-virtual-stages-per-pipeline-rank 2"),
    "num_layers_per_virtual_pipeline_stage": ("two stages", "--num-layers-per-virtual-pipeline-stage 1"),
    "decoder_first_pipeline_num_layers": ("two stages", f"--decoder-first-pipeline-num-layers 1 {SAVES}"),
    "decoder_last_pipeline_num_layers": ("two stages", f"--decoder-last-pipeline-num-layers 1 {SAVES}"),
    "use_distributed_optimizer": ("two", "--use-distributed-optimizer"),
    "use_torch_fsdp2": ("two", "--use-torch-fsdp2 --untie-embeddings-and-output-weights"),
    "torch_fsdp2_no_reshard_after_forward": ("fsdp2", "--torch-fsdp2-no-reshard-after-forward"),
    "use_megatron_fsdp": ("two", "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"),
    "num_distributed_optimizer_instances": ("two, distributed", "--num-distributed-optimizer-instances 2"),
    "ddp_bucket_size": ("two, distributed", "--overlap-grad-reduce --ddp-bucket-size 2000"),
    # training
    "micro_batch_size": ("dropout", "--micro-batch-size 1"),
    "global_batch_size": ("plain", "--global-batch-size 2"),
    "rampup_batch_size": ("plain", "--rampup-batch-size 2 2 6"),
    "train_iters": ("plain", "--train-iters 5"),
    "eval_interval": ("evaluated", "--eval-interval 4"),
    "eval_iters": ("evaluated", "--eval-iters 2"),
    "eval_global_batch_size": ("evaluated", "--eval-global-batch-size 2"),
    "start_eval_at_iter": ("evaluated", "--start-eval-at-iter 3"),
    "skip_train": ("evaluated", "--skip-train"),
    "full_validation": ("evaluated data", "--full-validation=false"),
    "eval_at_start": ("evaluated", "--eval-at-start"),
    "exit_interval": ("plain", "--exit-interval 2"),
    "exit_duration_in_mins": ("plain", "--exit-duration-in-mins 0.00001"),
    "seed": ("plain", "--seed 5"),
    "bf16": ("plain", "--bf16"),
    "fp16": ("plain", "--fp16"),
    "loss_scale": ("fp16", "--loss-scale 64"),
    "initial_loss_scale": ("fp16", "--initial-loss-scale 512"),
    "min_loss_scale": ("fp16", "--initial-loss-scale 1e9 --min-loss-scale 1e9 --hysteresis 1"),
    "loss_scale_window": ("fp16", "--loss-scale-window 1"),
    "hysteresis": ("fp16", "--initial-loss-scale 1e9 --hysteresis 4"),
    "check_weight_hash_across_dp_replicas_interval": ("two", "--check-weight-hash-across-dp-replicas-interval 1"),
    # optimizer
    "optimizer": ("plain", "--optimizer sgd"),
    "lr": ("plain", "--lr 1e-3"),
    "min_lr": ("plain", "--min-lr 5e-3"),
    "decoupled_lr": ("decoupled", "--decoupled-lr 2e-2"),
    "decoupled_min_lr": ("decoupled", "--decoupled-min-lr 9e-4"),
    "lr_scale_rule": ("plain", "--lr-scale-rule linear --lr-scale-base-batch-size 1"),
    "lr_scale_base_batch_size": ("plain", "--lr-scale-rule sqrt --lr-scale-base-batch-size 2"),
    "lr_decay_style": ("four steps", "--lr-decay-style linear"),
    "lr_decay_iters": ("four steps", "--lr-decay-iters 2"),
    "lr_warmup_iters": ("four steps", "--lr-warmup-iters 2"),
    "lr_warmup_fraction": ("plain", "--lr-warmup-fraction 0.5"),
    "lr_warmup_init": ("four steps", "--lr-warmup-iters 2 --lr-warmup-init 1e-3"),
    "lr_wsd_decay_style": ("wsd", "--lr-wsd-decay-style linear"),
    "lr_wsd_decay_iters": ("wsd", "--lr-wsd-decay-iters 3"),
    "curves_in_full_batches": ("growing", "--curves-in-full-batches"),
    "lr_power_scale": ("power", "--lr-power-scale 0.0005"),
    "lr_power_exponent": ("power", "--lr-power-exponent -0.8"),
    "weight_decay": ("plain", "--weight-decay 0.5"),
    "start_weight_decay": ("decay", "--start-weight-decay 0.3"),
    "end_weight_decay": ("decay", "--end-weight-decay 0.9"),
    "weight_decay_incr_style": ("decay", "--weight-decay-incr-style cosine"),
    "clip_grad": ("plain", "--clip-grad 0.01"),
    "adam_beta1": ("four steps", "--adam-beta1 0.5"),
    "adam_beta2": ("four steps", "--adam-beta2 0.5"),
    "adam_eps": ("plain", "--adam-eps 1e-2"),
    "exp_avg_dtype": ("saves", "--exp-avg-dtype bf16"),
    "exp_avg_sq_dtype": ("saves", "--exp-avg-sq-dtype bf16"),
    "sgd_momentum": ("sgd", "--sgd-momentum 0.1"),
    "lion_beta1": ("lion", "--lion-beta1 0.5"),
    "lion_beta2": ("lion", "--lion-beta2 0.5"),
    "mup_embedding_mult": ("mup", "--mup-embedding-mult 4"),
    "mup_output_mult": ("mup", "--mup-output-mult 4"),
    "mup_attn_scale_power": ("mup", "--mup-attn-scale-power 0.25"),
    "qk_clip": ("unbiased", "--qk-clip --qk-clip-threshold 0.001"),
    "qk_clip_alpha": ("clipped", "--qk-clip-alpha 0.1"),
    "qk_clip_threshold": ("clipped", "--qk-clip-threshold 0.0001"),
    "muon_momentum": ("muon", "--muon-momentum 0.5"),
    "muon_nesterov": ("muon", "--muon-nesterov"),
    "muon_scale_mode": ("muon", "--muon-scale-mode unit_rms_norm"),
    "muon_extra_scale_factor": ("muon", "--muon-extra-scale-factor 0.5"),
    "muon_num_ns_steps": ("muon", "--muon-num-ns-steps 3"),
    "muon_coefficient_type": ("muon", "--muon-coefficient-type cans"),
    "muon_no_split_qkv": ("muon", "--muon-no-split-qkv"),
    "muon_fp32_matmul_prec": ("muon", "--muon-fp32-matmul-prec highest"),
    "adaptive_muon_moment2_method": ("adaptive muon", "--adaptive-muon-moment2-method namo"),
    "adaptive_muon_beta2": ("adaptive muon", "--adaptive-muon-beta2 0.5"),
    "adaptive_muon_eps": ("adaptive muon", "--adaptive-muon-eps 0.1"),
    "adafactor_beta2_decay": ("adafactor", "--adafactor-beta2-decay=-0.3"),
    "adafactor_eps2": ("adafactor", "--adafactor-eps2 0.5"),
    "adafactor_clip": ("adafactor", "--adafactor-clip 1.5"),
    "muon_tp_mode": ("muon of tensor", "--muon-tp-mode blockwise"),
    # data
    "split": ("shared data", "--split 1,2,0"),
    "train_data_path": ("plain", DATA),
    "data_order": ("data", "--data-order formula"),
    "data_cache_path": ("data", "--data-cache-path OUT/cache"),
    "vocab_size": ("plain", "--vocab-size 62"),
    "reset_position_ids": ("data", "--reset-position-ids"),
    "reset_attention_mask": ("data", "--reset-attention-mask"),
    "skip_samples": ("plain", "--skip-samples 0-4"),
    # checkpoints
    "save": ("plain", SAVES),
    "save_interval": ("saves", "--save-interval 1"),
    "keep_last_checkpoints": ("saves each step", "--keep-last-checkpoints 1"),
    "save_retain_interval": ("saves each step", "--save-retain-interval 2"),
    "no_save_optim": ("saves", "--no-save-optim"),
    "no_save_rng": ("saves", "--no-save-rng"),
    "load": ("plain", "--load OUT"),
    "exit_on_missing_checkpoint": ("plain", "--load OUT --exit-on-missing-checkpoint"),
    # logging
    "log_interval": ("four steps", "--log-interval 2"),
    "log_format": ("plain", "--log-format short"),
    "metrics_file": ("plain", "--metrics-file OUT/other.jsonl"),
    "tensorboard_dir": ("plain", "--tensorboard-dir OUT/tensorboard"),
    "tensorboard_log_interval": ("tensorboard", "--tensorboard-log-interval 2"),
    "log_throughput": ("plain", "--log-throughput"),
    "log_params_norm": ("plain", "--log-params-norm"),
    "log_max_attention_logit": ("plain", "--log-max-attention-logit"),
    "log_num_zeros_in_grad": ("plain", "--log-num-zeros-in-grad"),
    "log_communication_share": ("two", "--log-communication-share"),
    "log_straggler": ("two", "--log-straggler"),
    "timing_log_level": ("plain", "--timing-log-level 2"),
    "log_sample_ids": ("plain", "--log-sample-ids OUT/ids.txt"),
    # profiling
    "profile": ("plain", "--profile --profile-step-start 1 --profile-step-end 2 --use-pytorch-profiler "
                "--tensorboard-dir OUT/tensorboard"),
}  # fmt: skip

ELSEWHERE: dict[str, str] = {
    field: why
    for why, fields in {
        "it needs a GPU; tests of device/, parts/ and telemetry/ drive it on stand-ins": (
            "transformer_impl external_kernels attention_backend flash_attention_version tf32 deterministic_mode "
            "recurrence_kernels cuda_graph_warmup_steps disable_bf16_reduced_precision_matmul disable_jit_fuser "
            "no_bias_dropout_fusion no_bias_swiglu_fusion no_triton_kernels no_gradient_accumulation_fusion "
            "nvtx_ranges record_memory_history memory_snapshot_path no_overlap_p2p_communication distributed_backend "
            "nccl_backend tp_comm_overlap"
        ),
        "test_load_checkpoint.py of checkpoint/ sees what it leaves": "no_load_rng",
        "it ends the run; test_numeric.py of resilience/ sees the end": ("error_injection_rate error_injection_type"),
        "it is a service of others; tests of telemetry/ drive it on stand-ins": (
            "wandb_project wandb_exp_name wandb_entity wandb_save_dir mlflow_experiment mlflow_run_name "
            "mlflow_tracking_uri comet_project comet_experiment_name comet_workspace trackio_project trackio_run_name "
            "trackio_space_id"
        ),
        "it is what is in a trace of torch's profiler": (
            "pytorch_profiler_collect_shapes pytorch_profiler_collect_callstack pytorch_profiler_collect_chakra "
            "record_shapes"
        ),
        "it says in samples, or in another word, what a field above says": (
            "lr_decay_samples lr_wsd_decay_samples recompute_activations no_position_embedding data_args_path "
            "per_split_data_args_path test_data_path moe_router_score_function"
        ),
        "it is about other machines, or Python's garbage": "replication_jump manual_gc_interval no_manual_gc_eval",
        "it speaks after a hundred steps": "check_for_large_grads",
        "it exports what was saved; test_at_end.py of plugins/huggingface/ compares the folders": "export_hf_at_end",
        "it is about a save that fails, which test_failed_saves.py next to this file lets happen": "save_failure",
        "it refuses sequences, and changes nothing else": "attention_chunk_size",
        "it is another order of the same passes, which tests/distributed/test_pipeline_tables.py sees": (
            "pipeline_schedule"
        ),
        "config/parse/saved.py reads it": "no_use_tokenizer_model_from_checkpoint_args",
        "it is what every run does, and the flag's only value": "exit_signal_handler ckpt_format",
        "it rearranges documents of a tokenizer with special tokens; tests of data/ read it": (
            "fim_data fim_rate fim_spm_rate fim_split_sample fim_fragment_rate fim_no_prefix fim_prefix_token "
            "fim_middle_token fim_suffix_token fim_pad_token"
        ),
        "tests of tokenizer/ read it": "tokenizer_special_tokens tiktoken_pattern tiktoken_num_special_tokens",
        "tests of layers in FP8 read it": (
            "first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16"
        ),
    }.items()
    for field in fields.split()
}
"""Why a field is changed in no run on ranks of any test."""


CLEAR = 1e-4
"""Relative difference of two numbers that is no rounding. The same run in fp32 with AVX2 and with AVX-512 differs by
up to 1.5e-5, of what is compared here mostly 3e-7."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run left, on all ranks, without times, rates and names of folders."""

    codes: list[int]
    said: list[str]
    rows: list[Any]
    files: dict[str, str]
    traffic: list[Any]

    def distance(self, other: "Outcome") -> float:
        """Return the largest relative difference of two numbers in the same place, or infinity where words differ. A
        number below 1e-2 is seen as one of that size, such as a loss that should be 0."""
        texts = [json.dumps(vars(outcome)) for outcome in (self, other)]
        words, other_words = (_NUMBER.split(text) for text in texts)
        if words != other_words:
            return math.inf
        pairs = zip(*([float(number) for number in _NUMBER.findall(text)] for text in texts), strict=True)
        return max(abs(a - b) / max(abs(a), abs(b), 1e-2) for a, b in pairs)


def run_each(lines: list[str], folder: str) -> list[Any]:
    """Run the program on this rank once for each line of flags."""
    from benchmarks.traffic import Traffic
    from megatron_ext.parallel import groups
    from tests.support.program import run_program

    found = []
    for number, line in enumerate(lines):
        out = Path(folder, f"{number:04}")
        out.mkdir(exist_ok=True)
        # One rank sends nothing, and is asked about every operation; saves gather objects, which the counter leaves
        # to others.
        counts = os.environ["WORLD_SIZE"] != "1" and "--save" not in line
        traffic = Traffic() if counts else contextlib.nullcontext(None)
        with traffic:
            ended = run_program(shlex.split(line.replace("OUT", str(out))))
        groups.destroy()
        counted = traffic.sent.items() if isinstance(traffic, Traffic) else ()
        sent = sorted((kind, one.calls, one.bytes) for (kind, _), one in counted)
        found.append((ended.code, ended.output + ended.errors, sent))
    return found


_OF_TIME = re.compile(r"\[\d{4}-[^\]]*\]|\(ms\): *[\d.]+|[\d.]+ m?s\b|[\d.]+ TFLOP|GPU\): [\d.]+|\d+ tokens/s|0x\w+")
# The metrics have these too, with all digits.
_FRACTION = re.compile(r"-?\d+\.\d+(?:[eE][-+]?\d+)?")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_BANNER = ("megatron-ext ", "device ", "layout ", "model ", "data ", "to go ", "kernels ", "warning: no --save")


def outcomes(lines: list[str], ranks: int, folder: Path) -> Iterator[Outcome]:
    """Yield how the program ended for each line of flags."""
    data = shlex.join(write_corpus(folder))
    folder = folder / "runs"
    folder.mkdir()
    of_data = BASE.replace("--mock-data --vocab-size 61", f"--max-position-embeddings 32 {data}")
    shared = re.sub(r"--train-data-path (\S+) --valid-data-path \S+", r"--data-path \1", of_data)
    kinds = {DATA: of_data, SHARED: shared}
    asked = [
        next((one + line.replace(word, "") for word, one in kinds.items() if word in line), BASE + line)
        for line in lines
    ]
    each_rank = run_ranks(ranks, run_each, asked, str(folder), timeout=900)
    for number, runs in enumerate(zip(*each_rank, strict=True)):
        out = folder / f"{number:04}"  # of one length: TensorBoard writes it down
        said = [_OF_TIME.sub("_", line).replace(str(out), "OUT") for run in runs for line in run[1].splitlines()]
        metrics = sorted(out.glob("*.jsonl"))
        rows = [json.loads(line) for path in metrics for line in path.read_text().splitlines()]
        yield Outcome(
            codes=[run[0] for run in runs],
            said=[_FRACTION.sub("_", line) for line in said if not line.startswith(_BANNER)],
            rows=[{name: value for name, value in row.items() if not _is_rate(name)} for row in rows],
            files=dict(_files(out)),
            traffic=[run[2] for run in runs],
        )


def _is_rate(name: str) -> bool:
    return any(word in name for word in ("_ms", "_bytes", "per_second", "memory", "seconds", "tflops"))


def _files(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the files of a run, and the sizes of those that name no time, which rounding leaves as they are."""
    for path in sorted(folder.rglob("*")):
        name = re.sub(r"\d{9,}|tfevents.*", "_", str(path.relative_to(folder)))
        if path.is_file():
            yield name, str(path.stat().st_size) if "tfevents" in path.name or path.suffix == ".distcp" else ""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_field_that_is_changed_changes_the_outcome(ranks: int, tmp_path: Path) -> None:
    runs = {name: flags for name, (of, flags) in RUNS.items() if of == ranks}
    changes = {field: f"{runs[run]} {line}" for field, (run, line) in CHANGES.items() if run in runs}
    others = {field: f"{runs[CHANGES[field][0]]} {line}" for field, line in _others_of_lines() if field in changes}
    # What a process says once, it says in the first run.
    lines = ["", *runs.values(), *runs.values(), *others.values(), *changes.values()]
    _, *rest = outcomes(lines, ranks, tmp_path)
    found = iter(rest)
    plain, again, by_others, changed = (dict(zip(of, found)) for of in (runs, runs, others, changes))  # noqa: B905
    for run, outcome in plain.items():
        assert outcome.codes == [0] * ranks, (run, outcome.said)
        differ = [name for name in vars(outcome) if getattr(outcome, name) != getattr(again[run], name)]
        assert not differ, [(run, getattr(outcome, name), getattr(again[run], name)) for name in differ]
    references = {field: [plain[CHANGES[field][0]], by_others.get(field)] for field in changed}
    without = [
        field
        for field, outcome in changed.items()
        if any(other and outcome.distance(other) < CLEAR for other in references[field])
    ]
    refused = {field: outcome.said[-3:] for field, outcome in changed.items() if 64 in outcome.codes}
    assert not without, f"changing them changes nothing: {without}"
    assert set(refused) <= {"exit_on_missing_checkpoint"}, refused


def _others_of_lines() -> Iterator[tuple[str, str]]:
    """Yield the fields that a line of `CHANGES` changes together with others, and its flags of the others alone."""
    for field, (_, line) in CHANGES.items():
        flags = ["--" + words for words in line.removeprefix("--").split(" --")]
        others = [flag for flag in flags if flag.split()[0] != flag_of(field)]
        if 0 < len(others) < len(flags):
            yield field, " ".join(others)


def test_a_field_that_needs_another_has_an_effect_without_it_or_is_warned_of(tmp_path: Path) -> None:
    """A flag that changes a run only next to others is, alone, refused, warned of, or seen to do something;
    `--rope-type rope`, which takes YaRN from latents, and `--full-validation=false` ask for nothing, and another size
    of microbatches changes no number but by dropout."""
    others = {run for run, (ranks, flags) in RUNS.items() if ranks == 1 and SAVES not in flags}
    runs = others - {"plain", "four steps"}
    of_others = {
        field: line
        for field, (run, line) in CHANGES.items()
        if run in runs and field not in ("rope_type", "full_validation", "micro_batch_size")
    }
    _, plain, *alone = outcomes(["", "", *of_others.values()], 1, tmp_path)
    silent = [field for field, outcome in zip(of_others, alone, strict=True) if outcome.distance(plain) < CLEAR]
    assert not silent, f"they change nothing, and nothing says so: {silent}"


def test_no_field_is_left_out() -> None:
    """A field is changed here, or its flag is given to a run on ranks by another test, or `ELSEWHERE` says why not."""
    files = [path for room in ("tests/distributed", "tests/parity") for path in (ROOT / room).glob("*.py")]
    files += [
        *(ROOT / "megatron_ext/plugins/prove").glob("compared_*.py"),
        *(ROOT / "tests/support/losses").glob("*.py"),
    ]
    words = {word for path in files if path != Path(__file__) for word in re.findall(r"--[\w-]+", path.read_text())}
    groups: list[Any] = [group.type for group in dataclasses.fields(Config)]
    fields = {field.name for group in groups for field in dataclasses.fields(group)}
    on_ranks = {field for field in fields if "--" + field.replace("_", "-") in words}
    assert not fields - CHANGES.keys() - ELSEWHERE.keys() - on_ranks
    assert not ELSEWHERE.keys() & CHANGES.keys()
    assert not (CHANGES.keys() | ELSEWHERE.keys()) - fields
