"""Refused old spellings, and what the command line says otherwise here. The notation is that of the package."""

REFUSED: tuple[tuple[str, str], ...] = (
    (
        "it belongs to a model of encoder and decoder; use --num-layers and --seq-length",
        """
        --decoder-num-layers N, --decoder-seq-length N
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
        --spec N..., --te-precision-config-file N
        """,
    ),
)
