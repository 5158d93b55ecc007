"""The options of the run around the training: checkpoints, logs and their folders, and traces: of some steps, by Nsight
Systems or torch's profiler, and of GPU memory allocations."""

from dataclasses import dataclass

from megatron_ext.config.schema.option import ReadWith, free

_SAVES = ReadWith("save", "without --save no checkpoint is written")
_LOADS = ReadWith("load", "without --load no checkpoint is read")
_ARGUMENTS = ReadWith("use_checkpoint_args", "without --use-checkpoint-args no flag comes from the checkpoint")
_TENSORBOARD = ReadWith("tensorboard_dir", "without --tensorboard-dir nothing is written for TensorBoard")
_WANDB = ReadWith("wandb_project", "without --wandb-project nothing goes to Weights & Biases")
_MLFLOW = ReadWith("mlflow_experiment", "without --mlflow-experiment nothing goes to MLflow")
_COMET = ReadWith("comet_project", "without --comet-project nothing goes to Comet")
_TRACKIO = ReadWith("trackio_project", "without --trackio-project nothing goes to Trackio")
_PROFILES = ReadWith("profile", "without --profile no step is traced")
_MEMORY = ReadWith("record_memory_history", "without --record-memory-history no memory is recorded")


@dataclass(frozen=True)
class CheckpointConfig:
    """Options of checkpoints: saving, loading, what to keep."""

    save: str | None = free(None, "Folder to write checkpoints to.")
    load: str | None = free(
        None, "Folder to resume from, if it holds a checkpoint; or one checkpoint, as checkpoints/iter_0000100."
    )
    load_hf: str | None = free(
        None,
        "Folder of a Hugging Face model to begin from; model flags that are not given are taken from its config.json.",
        turns_on_a_plugin=True,
    )
    save_interval: int | None = free(
        None,
        "Save a checkpoint every N steps; without it only the end is saved.",
        at_least=1,
        aliases=("--persistent-save-interval",),
        read_with=_SAVES,
        dropped_unread=True,
    )
    async_save: bool = free(
        False, "Write checkpoints in the background; training stops only for a copy in memory.", read_with=_SAVES
    )
    save_failure: str = free(
        "exit",
        "After a save that failed: exit ends the run; warn goes on, and saves again at the next interval. The last "
        "save ends the run either way, for nothing else keeps what was trained.",
        choices=("exit", "warn"),
        read_with=_SAVES,
    )
    keep_last_checkpoints: int | None = free(
        None, "Number of newest checkpoints to keep; default all.", at_least=1, read_with=_SAVES
    )
    save_retain_interval: int | None = free(
        None,
        "Keep checkpoints whose step is a multiple of this number, and the newest of all others.",
        at_least=1,
        read_with=_SAVES,
        dropped_unread=True,
    )
    ckpt_fully_parallel_save: bool = free(
        False,
        "Let all data-parallel ranks write parts of the weights instead of the first rank alone; sharded optimizer "
        "state is always written by all.",
        read_with=_SAVES,
    )
    ckpt_fully_parallel_load: bool = free(
        False,
        "Read each part of a checkpoint on one data-parallel rank, which sends it to the others; default: each rank "
        "reads all that it needs.",
        read_with=_LOADS,
    )
    ckpt_format: str = free("torch_dist", "Format of checkpoints.", choices=("torch_dist",))
    no_fallback: bool = free(
        False,
        "Fail when the checkpoint to load is damaged; default warn and use the newest that is whole.",
        read_with=_LOADS,
    )
    ckpt_step: int | None = free(None, "Load the checkpoint of this iteration; default the latest.", at_least=0)
    finetune: bool = free(
        False,
        "Load the weights alone and begin at iteration 0: no optimizer state, no random state, no data position.",
        read_with=_LOADS,
    )
    moe_use_upcycling: bool = free(
        False,
        "Where --load holds a dense model, begin with experts that are copies of its MLPs, as --finetune; a checkpoint "
        "with experts is resumed.",
        read_with=_LOADS,
    )
    moe_upcycling_granularity: int = free(
        1,
        "Number of experts that hold one dense MLP together.",
        at_least=1,
        read_with=ReadWith("moe_use_upcycling", "without --moe-use-upcycling no expert comes from an MLP"),
    )
    no_load_optim: bool = free(
        False,
        "Leave the optimizer state and the position on the learning-rate curve of the checkpoint aside.",
        read_with=_LOADS,
    )
    no_load_rng: bool = free(
        False, "Leave the state of the random generators (dropout) of the checkpoint aside.", read_with=_LOADS
    )
    no_save_optim: bool = free(
        False, "Save no optimizer state: smaller, but the run cannot be resumed exactly.", read_with=_SAVES
    )
    no_save_rng: bool = free(False, "Save no state of the random generators.", read_with=_SAVES)
    use_checkpoint_args: bool = free(
        False, "Take the flags of the model, and of the tokenizer where none is named, from the checkpoint in --load."
    )
    no_use_tokenizer_model_from_checkpoint_args: bool = free(
        False,
        "With --use-checkpoint-args, take no flag of the tokenizer from the checkpoint.",
        aliases=("--disable-use-tokenizer-model-from-checkpoint-args",),
        read_with=_ARGUMENTS,
    )
    override_opt_param_scheduler: bool = free(
        False,
        "Follow the learning-rate and weight-decay curves of the flags, where the checkpoint's are others.",
        aliases=("--override-opt_param-scheduler",),
        read_with=_LOADS,
    )
    use_checkpoint_opt_param_scheduler: bool = free(
        False,
        "Follow the checkpoint's learning-rate and weight-decay curves, whatever the flags say.",
        aliases=("--use-checkpoint-opt_param-scheduler",),
        read_with=_LOADS,
    )
    accept_changed_data: bool = free(
        False,
        "Go on from a checkpoint although the data, or what the order of its samples follows from, is another; samples "
        "may then be repeated or left out.",
        read_with=_LOADS,
    )
    exit_on_missing_checkpoint: bool = free(False, "Fail when --load holds no checkpoint; default start afresh.")


@dataclass(frozen=True)
class LoggingConfig:
    """Options of logging: content and destinations."""

    log_interval: int = free(100, "Steps between two log lines.", at_least=1)
    log_format: str = free(
        "auto",
        "megatron: Megatron-LM's log line; short: step, loss, tokens per second and remaining time; auto: short where "
        "the output is a terminal, Megatron-LM's elsewhere.",
        choices=("auto", "megatron", "short"),
    )
    metrics_file: str | None = free(None, "JSON lines, one object per logged step; default metrics.jsonl in --save.")
    log_sample_ids: str | None = free(
        None, "JSON-lines file of the samples of each step, each as source and number in the source."
    )
    tensorboard_dir: str | None = free(None, "Folder for TensorBoard.")
    tensorboard_log_interval: int = free(1, "Steps between two TensorBoard points.", at_least=1, read_with=_TENSORBOARD)
    wandb_project: str | None = free(
        None, "Weights & Biases project; needs the wandb package.", turns_on_a_plugin=True, packages={None: "wandb"}
    )
    wandb_exp_name: str | None = free(None, "Weights & Biases run name.", read_with=_WANDB)
    wandb_entity: str | None = free(None, "Weights & Biases entity.", read_with=_WANDB)
    wandb_save_dir: str | None = free(None, "Folder for the local files of Weights & Biases.", read_with=_WANDB)
    mlflow_experiment: str | None = free(None, "MLflow experiment; needs the mlflow package.", turns_on_a_plugin=True)
    mlflow_run_name: str | None = free(None, "MLflow run name.", read_with=_MLFLOW)
    mlflow_tracking_uri: str | None = free(
        None,
        "MLflow server, or database (sqlite:///mlflow.db); default as MLflow's own variables say.",
        read_with=_MLFLOW,
    )
    comet_project: str | None = free(None, "Comet project; needs the comet_ml package.", turns_on_a_plugin=True)
    comet_experiment_name: str | None = free(None, "Comet experiment name.", read_with=_COMET)
    comet_workspace: str | None = free(None, "Comet workspace.", read_with=_COMET)
    trackio_project: str | None = free(None, "Trackio project; needs the trackio package.", turns_on_a_plugin=True)
    trackio_run_name: str | None = free(None, "Trackio run name.", read_with=_TRACKIO)
    trackio_space_id: str | None = free(
        None, "Hugging Face Space of Trackio's dashboard; default local files.", read_with=_TRACKIO
    )
    log_throughput: bool = free(False, "Put TFLOP/s per GPU into the log line.")
    log_params_norm: bool = free(False, "Log the L2 norm of all parameters.")
    log_num_zeros_in_grad: bool = free(False, "Log how many gradients are exactly zero, vocabulary padding aside.")
    log_max_attention_logit: bool = free(
        False, "Log the largest product of a query and a key, with the scale of the scores; --qk-clip does, too."
    )
    log_communication_share: bool = free(
        False,
        "Log how the ranks' time divides into computing, communicating, and waiting for a pipeline neighbour, to "
        "--metrics-file and TensorBoard.",
        turns_on_a_plugin=True,
    )
    log_straggler: bool = free(
        False,
        "Compare compute times of ranks, waiting excluded, and name a rank that is slower than the others of its "
        "pipeline stage, in the log, --metrics-file and TensorBoard.",
        turns_on_a_plugin=True,
    )
    timing_log_level: int = free(
        0, "0: step time only; 1: forward-backward and optimizer; 2: every part.", choices=(0, 1, 2)
    )


@dataclass(frozen=True)
class ProfilingConfig:
    """Options of profiling."""

    profile: bool = free(
        False,
        "Mark the steps of the range for `nsys profile --capture-range=cudaProfilerApi`; with --use-pytorch-profiler, "
        "which a CPU needs, write torch's traces instead.",
        needs_gpu=(True,),
    )
    profile_step_start: int = free(10, "First step that is profiled.", read_with=_PROFILES)
    profile_step_end: int = free(12, "First step that no longer is profiled.", read_with=_PROFILES)
    profile_ranks: tuple[int, ...] | None = free(
        None, "Ranks that profile and record memory; default all.", metavar="RANK ..."
    )
    use_pytorch_profiler: bool = free(
        False,
        "With --profile: a Chrome trace per rank, profile/rankN.json in --save, else in --tensorboard-dir, else here.",
        read_with=_PROFILES,
    )
    pytorch_profiler_collect_shapes: bool = free(
        False, "Put the tensors' shapes into torch's trace.", read_with=_PROFILES
    )
    pytorch_profiler_collect_callstack: bool = free(
        False, "Put the callers' lines into torch's trace.", read_with=_PROFILES
    )
    pytorch_profiler_collect_chakra: bool = free(
        False,
        "Write a Chakra execution trace (the graph of operators) beside torch's trace.",
        read_with=_PROFILES,
    )
    record_shapes: bool = free(
        False, "Record operators with the shapes of their tensors in Nsight's trace.", read_with=_PROFILES
    )
    nvtx_ranges: bool = free(False, "Put megatron-core's own ranges into Nsight's trace.", read_with=_PROFILES)
    record_memory_history: bool = free(
        False,
        "Record every allocation of GPU memory; written at each log line, at the end, and when the run fails, to be "
        "opened at pytorch.org/memory_viz.",
        needs_gpu=(True,),
    )
    memory_snapshot_path: str = free(
        "snapshot.pickle",
        "File of recorded memory; the rank number goes before its suffix.",
        read_with=_MEMORY,
    )
