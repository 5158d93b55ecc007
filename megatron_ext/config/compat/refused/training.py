"""Refused options about precision, optimizer, recomputation, and the batch. The notation is that of the package."""

from megatron_ext.config.derived.optimizers import FLAGS_OF_OTHERS, OPTIMIZERS
from megatron_ext.config.parse.words import listed

REFUSED: tuple[tuple[str, str], ...] = (
    (
        "products in FP4 are not in this version; use --fp8-format hybrid, or leave it out to train in bf16",
        """
        --fp4-format N, --fp4-recipe N =nvfp4, --fp4-quantizer-factory N, --fp4-param-gather
        """,
    ),
    (
        "with --fp8-format all three products of a linear layer are in FP8, with scales as large as the format allows, "
        "and the output layer's in --bf16; leave it out",
        """
        --no-fp8-wgrad, --disable-fp8-wgrad, --fp8-output-proj, --fp8-margin N =0, --fp8-quantizer-factory N
        """,
    ),
    (
        "main parameters are in fp32; use --use-distributed-optimizer or --exp-avg-dtype bf16 to save memory",
        """
        --main-params-dtype N =fp32
        """,
    ),
    (f"use --optimizer {listed(OPTIMIZERS)}", FLAGS_OF_OTHERS),
    (
        "weight decay leaves out norms and biases, and every weight is trained; leave it out",
        """
        --apply-wd-to-qk-layernorm, --no-weight-decay-cond-type N, --freeze-all-layers
        """,
    ),
    (
        "reinforcement learning is not part of pretraining; leave it out, or use --cuda-graph-impl full_iteration for "
        "CUDA graphs of training",
        """
        --rl-persist-cuda-graphs, --no-rl-persist-cuda-graphs, --rl-training-cuda-graphs,
        --no-rl-training-cuda-graphs
        """,
    ),
    (
        "a batch must be divisible by micro batch x data-parallel size; use --micro-batch-size",
        """
        --decrease-batch-size-if-needed
        """,
    ),
    (
        "use --skip-samples, with the samples of these iterations",
        """
        --iterations-to-skip N...
        """,
    ),
    (
        "no step is altered; leave it out",
        """
        --phase-transition-iterations N
        """,
    ),
)
