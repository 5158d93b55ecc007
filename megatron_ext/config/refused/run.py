"""Refused options about what happens next to the steps: checks, measurements, evaluation, checkpoints. The notation is
that of the package."""

REFUSED: tuple[tuple[str, str], ...] = (
    (
        "a NaN or infinity in the loss or a gradient ends the run and names its rank; to compare replicas use "
        "--check-weight-hash-across-dp-replicas-interval",
        """
        --gpu-sniff-test-interval N, --check-for-large-grads,
        --check-for-spiky-loss, --result-rejected-tracker-filename N
        """,
    ),
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
        "a run that lost a rank starts anew and goes on from its checkpoint; use torchrun --max-restarts with --save "
        "and --load",
        """
        --enable-ft-package, --calc-ft-timeouts, --inprocess-restart,
        --inprocess-max-iterations N, --inprocess-monitor-thread-interval N =1.0,
        --inprocess-monitor-process-interval N =1.0, --inprocess-progress-watchdog-interval N =1.0,
        --inprocess-heartbeat-interval N =30, --inprocess-soft-timeout N =60, --inprocess-hard-timeout N =90,
        --inprocess-heartbeat-timeout N =60, --inprocess-barrier-timeout N =120,
        --inprocess-completion-timeout N =120, --inprocess-last-call-wait N =1,
        --inprocess-termination-grace-time N =1, --inprocess-granularity N =node, --inprocess-active-world-size N =1,
        --inprocess-empty-cuda-cache
        """,
    ),
    (
        "SIGTERM and SIGINT save and stop, whatever sends them; leave it out",
        """
        --adlr-autoresume, --exit-signal N =SIGTERM
        """,
    ),
    (
        "it is not measured in this version; leave it out",
        """
        --log-max-attention-logit, --log-energy,
        --save-params-interval N, --save-activations-interval N, --save-wgrads-interval N, --save-dgrads-interval N,
        --run-workload-inspector-server
        """,
    ),
    (
        "CUDA kernels that do not vary with the batch are not in this version; use --deterministic-mode",
        """
        --batch-invariant-mode
        """,
    ),
    (
        "evaluation uses the training batch sizes; use --eval-interval and --eval-iters",
        """
        --start-eval-at-iter N, --eval-global-batch-size N, --eval-micro-batch-size N, --test-mode
        """,
    ),
    (
        "evaluation alone is not in this version; leave it out",
        """
        --skip-train
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
        --non-persistent-save-interval N,
        --non-persistent-ckpt-type N, --non-persistent-global-ckpt-dir N, --non-persistent-local-ckpt-dir N,
        --non-persistent-local-ckpt-algo N =fully_parallel, --replication, --replication-jump N,
        --replication-factor N =2, --async-strategy N =nvrx, --async-ckpt-cpu-priority N =10,
        --async-ckpt-io-priority N =3, --async-ckpt-use-cpu-shm, --use-persistent-ckpt-worker,
        --ckpt-convert-format N, --ckpt-convert-save N, --ckpt-convert-update-legacy-dist-opt-format,
        --verify-integrity, --dist-ckpt-save-pre-mcore-014, --dist-ckpt-strictness N =assume_ok_unexpected,
        --dist-ckpt-format N =torch_dist, --no-ckpt-load-validate-sharding-integrity,
        --disable-ckpt-load-validate-sharding-integrity
        """,
    ),
)
