"""The options of the training: batches, length, precision, recomputation, when to evaluate and when to stop."""

from dataclasses import dataclass

from megatron_ext.config.schema.option import Need, ReadWith, free

_FP16 = ReadWith("fp16", "without --fp16 there is no loss scale")
_RECOMPUTES = ReadWith(
    ("recompute_granularity", "recompute_activations"), "without --recompute-granularity nothing is recomputed"
)
_MANUAL_GC = ReadWith("manual_gc", "without --manual-gc Python collects its garbage by itself")
_EVALUATES = ReadWith("eval_interval", "with --eval-interval 0 nothing is evaluated")
_CHECKED = ReadWith(
    "no_check_for_nan_in_loss_and_grad", "with --no-check-for-nan-in-loss-and-grad nobody looks", only=(False,)
)
_SAMPLES = ReadWith("sample_interval", "without --sample-interval the model writes no samples")


@dataclass(frozen=True)
class TrainingConfig:
    """Options of the training."""

    micro_batch_size: int = free(None, "Samples in one microbatch of one data-parallel rank.", required="4", at_least=1)
    global_batch_size: int = free(
        None, "Samples in one optimizer step over all ranks; default micro-batch x data-parallel size.", at_least=1
    )
    rampup_batch_size: tuple[int, ...] | None = free(
        None,
        "Start batch, increment and samples over which the global batch grows to its full size.",
        metavar="START INCREMENT SAMPLES",
    )
    step_batch_size_schedule: str | None = free(
        None,
        "Global batch by tokens consumed, as '0:768 250B:1536' (K, M, B, T stand for 1e3 to 1e12 tokens); the last one "
        "is the --global-batch-size of the curves.",
        metavar="TOKENS:SAMPLES",
        joined=True,
    )
    train_iters: int | None = free(None, "Length of the run in optimizer steps.", at_least=1)
    train_samples: int | None = free(None, "Length of the run in samples; an alternative to --train-iters.", at_least=1)
    stages: str | None = free(
        None,
        "YAML file of the blend, length, rotary base and micro batch from an iteration on; the run saves, and goes on "
        "as resumed, where a stage begins.",
        metavar="FILE",
    )
    eval_interval: int = free(1000, "Steps between two evaluations on the validation data; 0 for none.", at_least=0)
    eval_iters: int = free(
        100,
        "Global batches of one evaluation, at most one pass over the validation data; 0 for no evaluation.",
        at_least=0,
        read_with=_EVALUATES,
    )
    eval_global_batch_size: int | None = free(
        None,
        "Samples in one global batch of an evaluation; default --global-batch-size.",
        at_least=1,
        read_with=_EVALUATES,
    )
    eval_micro_batch_size: int | None = free(
        None,
        "Samples in one microbatch of an evaluation; default --micro-batch-size.",
        at_least=1,
        read_with=_EVALUATES,
    )
    start_eval_at_iter: int | None = free(
        None, "No evaluation at --eval-interval before this step.", at_least=0, read_with=_EVALUATES
    )
    skip_train: bool = free(
        False, "Train no step: load what --load names, evaluate on validation and test data, and end without saving."
    )
    full_validation: bool = free(False, "Evaluate on one whole pass over the validation data, whatever --eval-iters.")
    multiple_validation_sets: bool = free(
        False,
        "Evaluate on --eval-iters batches of each validation source; default of all sources together.",
        read_with=_EVALUATES,
    )
    validation_set_names: tuple[str, ...] | None = free(
        None, "Names of the validation sources in log lines and TensorBoard, with --multiple-validation-sets."
    )
    eval_tasks: str | None = free(
        None,
        "YAML file of tasks on local files (PERPLEXITY, LAMBADA, MULTIPLE_CHOICE) to evaluate the model on every "
        "--eval-interval steps and at the end.",
        metavar="FILE",
        turns_on_a_plugin=True,
    )
    sample_interval: int | None = free(
        None,
        "Steps between two samples of text that the model makes of --sample-prompts.",
        at_least=1,
        turns_on_a_plugin=True,
    )
    sample_prompts: str | None = free(
        None, 'Prompts of --sample-interval: one a line, or .jsonl with "prompt".', metavar="FILE"
    )
    sample_tokens: int = free(32, "Most tokens of a sample of --sample-interval.", at_least=1, read_with=_SAMPLES)
    eval_at_start: bool = free(False, "Evaluate before the first step too.", read_with=_EVALUATES)
    exit_interval: int | None = free(
        None, "Save and stop at the first step that is a multiple of this number.", at_least=1
    )
    exit_duration_in_mins: float | None = free(None, "Save and stop after this many minutes.", positive=True)
    exit_signal_handler: bool = free(
        False, "Accepted for Megatron's sake: SIGTERM always saves and stops here (exit code 75)."
    )
    exit_signal_deadline: float | None = free(
        None,
        "Seconds from SIGTERM to the end of the process: a save that does not fit is given up, and the newest finished "
        "checkpoint stays; default as long as the save takes.",
        positive=True,
    )
    seed: int = free(1234, "Seed of weights, dropout and sample order.", at_least=0)
    bf16: bool = free(False, "Compute in bfloat16, with fp32 master weights.")
    fp16: bool = free(False, "Compute in float16, with fp32 master weights and a loss scale.")
    attention_backend: str = free(
        "auto",
        "Kernel of attention over whole sequences: flash (FlashAttention), fused (cuDNN's), unfused (written out), or "
        "auto: on GPUs the fastest, which is measured at the start and kept on resuming.",
        choices=("auto", "flash", "fused", "unfused", "local"),
    )
    flash_attention_version: int | None = free(
        None,
        "Version of FlashAttention: 2 (torch's own), or 3 or 4 where its package is installed; default the fastest.",
        choices=(2, 3, 4),
    )
    cpu_gemm: str = free(
        "auto",
        "Library for fp32 matrix products on a CPU: blas (MKL on x86), onednn, mixed (oneDNN but for weight "
        "gradients), or auto: by the processor's vectors and a measurement at the start, which is kept on resuming.",
        choices=("auto", "blas", "mixed", "onednn"),
    )
    tf32: bool = free(False, "Let fp32 matrix products use TF32 on GPUs that have it.")
    disable_bf16_reduced_precision_matmul: bool = free(
        False,
        "On GPUs, let no bf16 matrix product add up parts of its sums in bf16.",
        unread_on_cpu="sums of products in bf16 are in fp32",
    )
    loss_scale: float | None = free(
        None,
        "Fixed loss scale for --fp16, of the mean loss over the global batch; default dynamic.",
        read_with=_FP16,
    )
    initial_loss_scale: float = free(2.0**32, "First value of the dynamic loss scale.", read_with=_FP16)
    min_loss_scale: float = free(1.0, "Lowest value of the dynamic loss scale.", read_with=_FP16)
    loss_scale_window: int = free(
        1000, "Good steps after which the dynamic loss scale doubles.", at_least=1, read_with=_FP16
    )
    hysteresis: int = free(2, "Bad steps before the dynamic loss scale halves.", at_least=1, read_with=_FP16)
    accumulate_allreduce_grads_in_fp32: bool = free(
        False, "Accumulate and reduce gradients in fp32 (always on with --bf16)."
    )
    grad_reduce_in_bf16: bool = free(
        False, "With --bf16, accumulate and reduce gradients in bf16: half the memory and traffic, less exact."
    )
    recompute_activations: bool = free(False, "Short for --recompute-granularity selective.", saves_memory=True)
    recompute_granularity: str | None = free(
        None,
        "Activation recomputation in the backward pass: full (whole layers) or selective (the parts of "
        "--recompute-modules).",
        saves_memory=True,
        choices=("full", "selective"),
    )
    moe_layer_recompute: bool = free(
        False,
        "Short for --recompute-granularity selective with moe among --recompute-modules.",
        saves_memory=True,
        read_with=ReadWith("num_experts", "without --num-experts there are no experts"),
    )
    recompute_modules: tuple[str, ...] | None = free(
        None,
        "Parts that selective recomputation covers: core_attn (the default), mlp, moe (experts with their router), "
        "layernorm.",
        saves_memory=True,
        metavar="PART",
    )
    recompute_method: str | None = free(
        None,
        "Which layers full recomputation covers.",
        saves_memory=True,
        choices=("uniform", "block"),
        read_with=_RECOMPUTES,
        dropped_unread=True,
    )
    recompute_num_layers: int | None = free(
        None,
        "uniform: layers in one recomputed unit; block: layers recomputed on each stage.",
        at_least=1,
        saves_memory=True,
        read_with=_RECOMPUTES,
        dropped_unread=True,
    )
    deterministic_mode: bool = free(False, "Only kernels whose result does not vary from run to run.")
    no_check_for_nan_in_loss_and_grad: bool = free(
        False, "Do not stop (exit code 70) when a loss or a gradient is NaN or infinite."
    )
    error_injection_rate: int = free(
        0,
        "For tests of resilience: one in this many steps of a rank gives NaN for its loss; 0: none.",
        at_least=0,
        read_with=_CHECKED,
    )
    error_injection_type: str = free(
        "transient_error",
        "Whether the step is computed well when the ranks are started again (transient_error), or never "
        "(persistent_error, correct_result).",
        choices=("transient_error", "persistent_error", "correct_result"),
        read_with=ReadWith("error_injection_rate", "without --error-injection-rate no error is injected"),
    )
    check_for_large_grads: bool = free(
        False, "Warn of a step whose gradient norm is ten times the largest of the first 100 steps."
    )
    check_before_update: bool = free(
        False,
        "On GPUs, wait for the loss and the norm of the gradients before every update, as a CPU process does, instead "
        "of reading them when the next step is under way.",
        unread_on_cpu="numbers are read before the update in any case",
    )
    manual_gc: bool = free(False, "Collect Python's garbage at the same steps on all ranks.")
    manual_gc_interval: int = free(
        0,
        "With --manual-gc, steps between two collections; 0: only at evaluations.",
        at_least=0,
        read_with=_MANUAL_GC,
    )
    no_manual_gc_eval: bool = free(
        False,
        "With --manual-gc, do not collect before and after an evaluation.",
        aliases=("--disable-manual-gc-eval",),
        read_with=_MANUAL_GC,
    )
    cuda_graph_impl: str = free(
        "none",
        "full_iteration: on GPUs, capture the forward and backward passes of a step, all microbatches together, into "
        "one CUDA graph and replay it, for models so small that the GPU waits for the host. With flags that stand in "
        "the way (tensor, pipeline or context parallelism, dropout, fp16 and others) steps run without and compute "
        "the same: a warning names each of them. Graphs of layers (local, transformer_engine) are never made.",
        choices=("none", "full_iteration", "local", "transformer_engine"),
        needs_gpu=("full_iteration",),
    )
    cuda_graph_warmup_steps: int = free(
        3,
        "Steps that run without a graph before --cuda-graph-impl full_iteration captures one; 0 is taken for 1.",
        at_least=0,
    )
    torch_compile: bool = free(False, "Compile each layer with torch.compile.", untried_with_graphs=True)
    disable_jit_fuser: bool = free(
        False, "Do not compile megatron-core's small functions (on GPUs: dropout with residual, SwiGLU and others)."
    )
    no_bias_dropout_fusion: bool = free(False, "On GPUs, do not compile bias, dropout and residual into one kernel.")
    no_bias_swiglu_fusion: bool = free(False, "On GPUs, do not compile SwiGLU and its bias into one kernel.")
    no_triton_kernels: bool = free(
        False,
        "On GPUs, do without our Triton kernels: of clipping and averages, and, without --torch-compile, of norms with "
        "their residual, rotary heads, SwiGLU and cross-entropy. They need Triton and a C compiler.",
        unread_on_cpu="no Triton kernel runs",
    )
    linear_cross_entropy: bool = free(
        False,
        "Compute output layer and cross-entropy together, for a part of the tokens at a time, so that the full "
        "logits are never in memory; gradients are exact.",
        saves_memory=True,
    )
    gradient_accumulation_fusion: bool = free(
        False,
        "Add weight gradients of linear layers to the main gradients inside the matrix product that computes them, "
        "on GPUs without rounding to 16 bits; on GPUs the default unless another flag rules it out.",
    )
    no_gradient_accumulation_fusion: bool = free(
        False,
        "On GPUs, add weight gradients to the main gradients after the matrix product that computes them.",
        needs={True: [Need("gradient_accumulation_fusion", False, "products that do not add")]},
        unread_on_cpu="products add only with --gradient-accumulation-fusion",
    )

    @property
    def params_dtype(self) -> str:
        """Name of the torch dtype that weights and activations have in the forward pass."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else "float32"

    @property
    def mixed_precision(self) -> bool:
        """Whether weights and activations have 16 bits (--bf16, --fp16), and main parameters are fp32."""
        return self.bf16 or self.fp16

    @property
    def params_bytes(self) -> int:
        """Bytes of an element of `params_dtype`."""
        return 2 if self.mixed_precision else 4
