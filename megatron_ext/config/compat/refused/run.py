"""Refused options about what happens next to the steps: checks, measurements, evaluation, checkpoints. The notation is
that of the package."""

REFUSED: tuple[tuple[str, str], ...] = (
    (
        "no fault is injected into a run; leave it out",
        """
        --error-injection-rate N =0, --error-injection-type N =transient_error,
        --fault-injector-ranks N, --fault-injector-num-ranks N,
        --fault-injector-fault-types N, --fault-injector-fault-probabilities N, --fault-injector-fault-delay N,
        --fault-injector-delay-start-iteration N, --fault-injector-mtti-seconds N, --fault-injector-offset-seconds N,
        --fault-injector-seed N
        """,
    ),
    (
        "SIGTERM and SIGINT save and stop, whatever sends them; leave it out",
        """
        --exit-signal N =SIGTERM
        """,
    ),
    (
        "it is not measured in this version; leave it out",
        """
        --save-params-interval N, --save-activations-interval N, --save-wgrads-interval N,
        --save-dgrads-interval N
        """,
    ),
    (
        "CUDA kernels that do not vary with the batch are not in this version; use --deterministic-mode",
        """
        --batch-invariant-mode
        """,
    ),
    (
        "--load reads any layout, and --ckpt-step, --finetune and --no-load-optim choose what of it; use those",
        """
        --pretrained-checkpoint N, --load-main-params-from-ckpt, --override-ckpt-iteration N,
        --use-mp-args-from-checkpoint-args
        """,
    ),
    (
        "checkpoints are complete and kept until deleted in this version; use --save and --save-interval",
        """
        --ckpt-convert-format N, --ckpt-convert-save N, --ckpt-convert-update-legacy-dist-opt-format
        """,
    ),
    (
        "snapshots are each rank's own, with one copy on another machine; use --non-persistent-ckpt-type local",
        """
        --non-persistent-global-ckpt-dir N, --non-persistent-local-ckpt-algo N =fully_parallel,
        --replication-factor N =2
        """,
    ),
)
