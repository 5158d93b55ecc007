"""The options of the optimizer, and of the curves that its learning rate and weight decay follow."""

from dataclasses import dataclass

from megatron_ext.config.derived.newton_schulz import COEFFICIENT_TYPES, SCALE_MODES
from megatron_ext.config.derived.optimizers import OPTIMIZERS
from megatron_ext.config.schema.option import Need, ReadWith, free, option

_DECAYS = ReadWith(
    "lr_decay_style", "with --lr-decay-style constant the learning rate does not decay", but=("constant",)
)
_DECAY_ENDS = ReadWith(
    ("lr_decay_style", "lr_warmup_fraction"),
    "with --lr-decay-style constant the learning rate does not decay",
    but=(None, "constant"),
)
_WSD = ReadWith("lr_decay_style", "only --lr-decay-style WSD reads it", only=("WSD",))

_POWER = ReadWith("lr_decay_style", "only --lr-decay-style power reads it", only=("power",))

_CLIPS_PRODUCTS = ReadWith("qk_clip", "without --qk-clip no product of queries and keys is bounded")

_BY_TENSOR = {"fp8": "it would need a scale for each tensor, which differs between the shards of different layouts"}
"""A value that is refused, and why."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Options of the optimizer. Steps of the curves are iterations; a run given in samples (--train-samples) gives them
    in samples."""

    optimizer: str = free(
        "adam",
        "Update rule (adam is AdamW: decoupled weight decay; muon, adaptive_muon and adafactor have it for all but the "
        "matrices of layers).",
        choices=tuple(OPTIMIZERS),
        refused={
            "dist_muon": "--use-distributed-optimizer shares muon's matrices out among the ranks",
            "soap": "its bases follow the rounding of a gradient, so that each layout would train another curve",
        },
        needs={
            "adafactor": [Need("use_mup", False, "no rates that --use-mup sets: its steps follow the weights' sizes")]
        },
    )
    lr: float = option(None, "Peak learning rate.", resume="curve", required="6e-4", at_least=0)
    min_lr: float = option(0.0, "Learning rate at the end of the decay.", resume="curve", read_with=_DECAYS)
    decoupled_lr: float | None = option(
        None,
        "Peak learning rate of the word embeddings and the output layer; default --lr.",
        resume="curve",
        at_least=0,
    )
    decoupled_min_lr: float | None = option(
        None,
        "Learning rate of the word embeddings and the output layer at the end of the decay; default --min-lr.",
        resume="curve",
        at_least=0,
        read_with=_DECAYS,
    )
    lr_scale_rule: str = option(
        "none",
        "Multiply --lr and --min-lr by --global-batch-size over --lr-scale-base-batch-size, or by the ratio's square "
        "root; a ramp-up counts with its full batch.",
        resume="curve",
        choices=("none", "linear", "sqrt"),
    )
    lr_scale_base_batch_size: int | None = option(
        None,
        "Global batch that --lr and --min-lr were chosen for, in samples; needed by --lr-scale-rule.",
        resume="curve",
        at_least=1,
    )
    lr_decay_style: str = option(
        "linear",
        "Shape of the decay.",
        resume="curve",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD", "power"),
    )
    lr_decay_iters: int | None = option(
        None,
        "Steps until the lowest rate; default the length of the run.",
        resume="curve",
        at_least=1,
        read_with=_DECAY_ENDS,
    )
    lr_decay_samples: int | None = option(
        None,
        "Samples over which the learning rate decays, for a run given by --train-samples.",
        resume="curve",
        at_least=1,
        read_with=_DECAY_ENDS,
    )
    lr_warmup_iters: int = option(0, "Steps of linear warmup.", resume="curve")
    lr_warmup_samples: int = option(
        0, "Samples over which the learning rate warms up, for a run given by --train-samples.", resume="curve"
    )
    lr_warmup_fraction: float | None = option(None, "Warmup as a share of the decay steps.", resume="curve")
    lr_warmup_init: float = option(0.0, "Learning rate at the start of the warmup.", resume="curve")
    lr_wsd_decay_style: str = option(
        "exponential",
        "Shape of the last phase of WSD.",
        resume="curve",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
        read_with=_WSD,
    )
    lr_wsd_decay_iters: int | None = option(None, "Steps of the last phase of WSD.", resume="curve")
    lr_wsd_decay_samples: int | None = option(None, "Samples of the final decay of the WSD curve.", resume="curve")
    curves_in_full_batches: bool = option(
        False,
        "Take the iterations of the curves of learning rate and weight decay for full global batches while the batch "
        "still grows, as runs did whose checkpoints do not say; they then end before the curves do.",
        resume="curve",
        read_with=ReadWith(
            ("rampup_batch_size", "step_batch_size_schedule"),
            "without --rampup-batch-size or --step-batch-size-schedule every global batch is full",
        ),
    )
    lr_power_scale: float = option(
        4.6,
        "With --lr-decay-style power: the rate is this factor x --global-batch-size x a power of the tokens before "
        "the step, and at most --lr.",
        resume="curve",
        positive=True,
        read_with=_POWER,
    )
    lr_power_exponent: float = option(
        -0.51, "The exponent of that power, at most 0.", resume="curve", at_most=0, read_with=_POWER
    )
    weight_decay: float = option(
        0.01, "Weight decay of matrices; norms and biases have none.", resume="curve", at_least=0
    )
    start_weight_decay: float | None = option(
        None, "Weight decay at the start of a changing weight decay.", resume="curve"
    )
    end_weight_decay: float | None = option(None, "Weight decay at the end of a changing weight decay.", resume="curve")
    weight_decay_incr_style: str = option(
        "constant",
        "How the weight decay changes over the run.",
        resume="curve",
        choices=("constant", "linear", "cosine"),
    )
    apply_wd_to_qk_layernorm: bool = option(
        False,
        "Weight decay of the norms of queries and keys, too.",
        resume="curve",
        read_with=ReadWith("qk_layernorm", "without --qk-layernorm there are no norms of queries and keys"),
    )
    lr_group: tuple[str, ...] | None = option(
        None,
        "PATTERN=FACTOR: multiply the learning rate of the weights whose names match (*, ? and [...]); of several "
        "that match, the last counts.",
        resume="curve",
        metavar="PATTERN=FACTOR...",
        repeats=True,
    )
    weight_decay_group: tuple[str, ...] | None = option(
        None,
        "PATTERN=FACTOR: multiply the weight decay of the weights whose names match, as --lr-group does the rate.",
        resume="curve",
        metavar="PATTERN=FACTOR...",
        repeats=True,
    )
    ema_decay: float = free(
        0.0,
        "Keep an exponential moving average of the weights with this decay (0.999, for example), also in "
        "checkpoints; 0: none.",
        share=True,
    )
    eval_ema: bool = free(
        False,
        "Evaluate the averages of --ema-decay in place of the weights.",
        read_with=ReadWith("ema_decay", "without --ema-decay there are no averages"),
        needs={True: [Need("optimizer_cpu_offload", False, "averages on the device")]},
    )
    clip_grad: float = free(1.0, "Largest global gradient norm (L2); 0 for no clipping.", at_least=0)
    adam_beta1: float = free(0.9, "Decay of Adam's first moment.", share=True)
    adam_beta2: float = free(0.999, "Decay of Adam's second moment.", share=True)
    adam_eps: float = free(1e-8, "Adam's epsilon.", positive=True)
    exp_avg_dtype: str = free(
        "fp32",
        "Precision of Adam's first moment; in fp16 its root is kept, whose range suffices.",
        choices=("fp32", "bf16", "fp16"),
        refused=_BY_TENSOR,
    )
    exp_avg_sq_dtype: str = free(
        "fp32",
        "Precision of Adam's second moment; in fp16 its root is kept, whose range suffices.",
        choices=("fp32", "bf16", "fp16"),
        refused=_BY_TENSOR,
    )
    main_grads_dtype: str = free(
        "fp32",
        "Precision in which gradients are kept and reduced with --bf16; bf16 is --grad-reduce-in-bf16.",
        choices=("fp32", "bf16"),
    )
    sgd_momentum: float = free(0.9, "Momentum of SGD.", at_least=0)
    lion_beta1: float = free(0.95, "The momentum's share of the direction in which Lion steps.", share=True)
    lion_beta2: float = free(0.98, "Decay of Lion's momentum.", share=True)
    muon_momentum: float = free(0.9, "Decay of Muon's momentum.", share=True)
    muon_nesterov: bool = free(False, "Have Muon's direction look ahead by a momentum (Nesterov).")
    muon_scale_mode: str = free(
        "spectral",
        "Size of Muon's updates: by the root of the larger dimension, of rows over columns, or of that if above 1.",
        choices=SCALE_MODES,
    )
    muon_extra_scale_factor: float = free(
        1.0, "Muon: further factor of the updates; with --muon-scale-mode spectral, 0.2 makes them as large as Adam's."
    )
    muon_num_ns_steps: int = free(5, "Newton-Schulz iterations that make Muon's updates orthogonal.", at_least=1)
    muon_coefficient_type: str = free(
        "quintic", "Muon: coefficients of the Newton-Schulz iterations.", choices=COEFFICIENT_TYPES
    )
    muon_no_split_qkv: bool = free(False, "Make queries, keys and values orthogonal as one matrix, not as three.")
    muon_tp_mode: str = free(
        "duplicated",
        "Muon with tensor parallelism: each rank gathers and updates the whole matrix (duplicated), a part of each "
        "product (distributed), or its own part as a matrix, which changes the curve (blockwise).",
        choices=("duplicated", "distributed", "blockwise"),
    )
    muon_fp32_matmul_prec: str = free(
        "medium",
        "Muon: precision of the Newton-Schulz products on GPUs, by torch's names: high and medium are TF32; a CPU "
        "computes in fp32. (In emerging-optimizers, which Megatron-LM calls, medium is bf16 on both.)",
        choices=("highest", "high", "medium"),
        refused={"low": "torch has no such precision"},
        unread_on_cpu="Muon's products are in fp32",
    )
    adaptive_muon_moment2_method: str = free(
        "adamuon",
        "What the second moment of AdaptiveMuon's updates is of: each element, each row or column of the shorter "
        "dimension, or (namo) the gradient's norm.",
        choices=("adamuon", "normuon", "namo"),
    )
    adaptive_muon_beta2: float = free(0.95, "Decay of AdaptiveMuon's second moment.", share=True)
    adaptive_muon_eps: float = free(1e-8, "AdaptiveMuon's epsilon.", positive=True)
    adafactor_beta2_decay: float = free(
        -0.8, "Power of the number of updates by which Adafactor's second moment takes in new gradients.", at_most=0
    )
    adafactor_eps2: float = free(
        1e-3, "Smallest root mean square of a matrix that Adafactor's steps are relative to.", at_least=0
    )
    adafactor_clip: float = free(
        1.0, "Adafactor: root mean square above which updates are clipped, before the learning rate.", at_least=1
    )
    qk_clip: bool = free(
        False,
        "After each update rescale the weights of queries and keys whose largest product exceeds --qk-clip-threshold "
        "(MuonClip).",
    )
    qk_clip_alpha: float = free(
        0.5,
        "--qk-clip: exponent of the queries' share of the rescaling; keys have the rest.",
        share=True,
        read_with=_CLIPS_PRODUCTS,
    )
    qk_clip_threshold: float = free(
        100.0,
        "Largest product of a query and a key, with the scale of the scores.",
        positive=True,
        read_with=_CLIPS_PRODUCTS,
    )
    ademamix_beta3: float = free(0.9999, "Decay of AdEMAMix's slow average.", share=True)
    ademamix_alpha: float = free(5.0, "The slow average's share of AdEMAMix's steps.", at_least=0)
    ademamix_warmup: int = free(
        0,
        "AdEMAMix: updates over which alpha and beta3 rise to their values, from 0 and --adam-beta1; the paper "
        "takes all updates.",
        at_least=0,
    )
    optimizer_cpu_offload: bool = free(
        False, "Keep optimizer state in host memory, and update there.", saves_memory=True, untried_with_graphs=True
    )
    optimizer_offload_fraction: float = free(
        1.0, "With --optimizer-cpu-offload, the share of the state (0 to 1) that is in host memory.", saves_memory=True
    )
    use_torch_optimizer_for_cpu_offload: bool = free(
        False, "With --optimizer-cpu-offload, torch's optimizer for what stays on the device, too.", saves_memory=True
    )
    overlap_cpu_optimizer_d2h_h2d: bool = free(
        False,
        "With --optimizer-cpu-offload, copy the gradients and weights of one tensor while another is updated.",
        saves_memory=True,
    )
    no_pin_cpu_grads: bool = free(
        False, "With --optimizer-cpu-offload, pageable host memory for gradients.", saves_memory=True
    )
    no_pin_cpu_params: bool = free(
        False,
        "With --optimizer-cpu-offload or --torch-fsdp2-cpu-offload, pageable host memory for weights.",
        saves_memory=True,
    )
