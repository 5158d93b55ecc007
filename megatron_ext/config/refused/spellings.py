"""Refused old spellings, and what the command line says otherwise here. The notation is that of the package."""

REFUSED: tuple[tuple[str, str], ...] = (
    (
        "it is an old spelling; use --micro-batch-size",
        """
        --batch-size N
        """,
    ),
    (
        "it is an old spelling; use --tensor-model-parallel-size",
        """
        --model-parallel-size N
        """,
    ),
    (
        "it is an old spelling; use --lr-warmup-fraction or --lr-warmup-iters",
        """
        --warmup N
        """,
    ),
    (
        "it is an old spelling; use --recompute-activations or --recompute-granularity",
        """
        --checkpoint-activations
        """,
    ),
    (
        "it is an old spelling; use --position-embedding-type rope",
        """
        --use-rotary-position-embeddings
        """,
    ),
    (
        "a GPT is a decoder only; use --num-layers and --seq-length",
        """
        --encoder-num-layers N, --decoder-num-layers N, --encoder-seq-length N, --decoder-seq-length N
        """,
    ),
    (
        "use --config run.yaml, whose names are the flags' own",
        """
        --yaml-cfg N
        """,
    ),
    (
        "layer specs are not loaded from a module that the command line names; choose with --transformer-impl",
        """
        --spec N..., --enable-experimental, --use-te-activation-func, --use-transformer-engine-op-fuser,
        --te-rng-tracker, --te-precision-config-file N, --config-logger-dir N
        """,
    ),
)
