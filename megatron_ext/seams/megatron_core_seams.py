"""Seams of megatron-core: its model, its checkpoints, its datasets."""

from megatron_ext.seams.seam import Seam

_CORE = "megatron.core"
_SAVE = "megatron.core.dist_checkpointing.strategies.torch"
_DATASETS = "megatron.core.datasets"
_BUILDER = f"{_DATASETS}.blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder"
_DCP = "torch.distributed.checkpoint"
_GPT = f"{_CORE}.models.gpt.gpt_model.GPTModel"
_ATTENTION = f"{_CORE}.transformer.attention.Attention"
_COLUMNS = f"{_CORE}.tensor_parallel.layers.ColumnParallelLinear"
_ROUTER = f"{_CORE}.transformer.moe.router.TopKRouter"
_ROTARY = f"{_CORE}.models.common.embeddings.rotary_pos_embedding.RotaryEmbedding"
_EXPERTS = f"{_CORE}.transformer.moe.moe_layer.MoELayer"

MODEL = (
    Seam(
        f"{_GPT}.forward",
        "overridden to hand our loss to it; the loss is computed by output_processor",
        ("input_ids", "position_ids", "attention_mask", "labels", "packed_seq_params", "loss_mask", "output_processor"),
    ),
    Seam(
        f"{_CORE}.models.common.language_module.language_module.LanguageModule._set_attention_backend",
        "overridden: the variables that choose Transformer Engine's kernel stay the user's, but where a flag names one",
        called_by=(f"{_CORE}.models.common.language_module.language_module.LanguageModule.__init__",),
    ),
    Seam(
        f"{_GPT}._preprocess",
        "overridden: rotary angles by position_ids where these restart, and for inference; returns (decoder input, "
        "rotary table, ...), six values of which four may be None",
        ("input_ids", "position_ids", "packed_seq_params"),
        (f"{_GPT}.forward",),
    ),
    Seam(
        f"{_GPT}._postprocess",
        "overridden: the depths of multi-token prediction are given what the whole samples say, and their losses to us",
        ("hidden_states", "labels", "loss_mask", "rotary_pos_emb", "packed_seq_params", "output_processor_context"),
        (f"{_GPT}.forward",),
    ),
    Seam(
        f"{_CORE}.transformer.multi_token_prediction.MultiTokenPredictionLayer.forward",
        "overridden: embeddings are given; the engine's shifts the tokens that a context-parallel rank holds",
    ),
    Seam(
        f"{_CORE}.transformer.multi_token_prediction.MultiTokenPredictionLayer._proj_and_transformer_layer",
        "called: the norms, the projection of both, the transformer layer and the norm of what comes out",
        ("hidden_states", "decoder_input", "rotary_pos_emb", "packed_seq_params"),
    ),
    Seam(
        f"{_CORE}.transformer.multi_token_prediction.MultiTokenPredictionLayer.mtp_layer_pattern",
        "set for depths with letters: where it is not None the layers' result is a tensor alone, and they are saved as "
        "mtp_model_layer",
        called_by=(
            f"{_CORE}.transformer.multi_token_prediction.MultiTokenPredictionLayer._proj_and_transformer_layer",
            f"{_CORE}.transformer.multi_token_prediction.MultiTokenPredictionLayer.sharded_state_dict",
        ),
    ),
    Seam(
        f"{_CORE}.transformer.transformer_layer.TransformerLayer.forward",
        "overridden by a shorter forward pass; TransformerBlock calls it with these names",
    ),
    Seam(
        f"{_ATTENTION}.forward",
        "overridden by a shorter forward pass, which our layer calls",
        ("hidden_states", "attention_mask", "rotary_pos_emb", "packed_seq_params"),
    ),
    Seam(
        f"{_ATTENTION}.num_query_groups_per_partition",
        "set for the layer: the engine counts the groups of a rank by one configuration of all layers",
        called_by=(f"{_ATTENTION}.__init__",),
    ),
    Seam(
        f"{_ATTENTION}.num_attention_heads_per_partition",
        "set for the layer, as its groups",
        called_by=(f"{_ATTENTION}.__init__",),
    ),
    Seam(
        f"{_CORE}.transformer.mlp.MLP.forward",
        "overridden by a shorter one, which computes what it does without fusions, clamps and scales",
        ("hidden_states", "per_token_scale"),
    ),
    Seam(
        f"{_COLUMNS}.forward",
        "overridden: one plain product on a single tensor-parallel rank",
        ("input_", "weight", "runtime_gather_output"),
    ),
    Seam(
        f"{_COLUMNS}._forward_impl",
        "overridden: one that keeps what it has gathered of a sequence, where --sequence-parallel-keep-gathered asks",
        ("input", "weight"),
        (f"{_COLUMNS}.forward",),
    ),
    Seam(
        f"{_CORE}.tensor_parallel.layers.RowParallelLinear.forward",
        "overridden: one plain product on a single tensor-parallel rank",
        ("input_",),
    ),
    Seam(
        f"{_CORE}.tensor_parallel.layers.RowParallelLinear._forward_impl",
        "overridden: the product of one rank's columns, before the sum over the ranks",
        ("input", "weight"),
        (f"{_CORE}.tensor_parallel.layers.RowParallelLinear.forward",),
    ),
    Seam(
        f"{_CORE}.tensor_parallel.layers._grad_accum_fusion_available",
        "set to True: torch's products stand in for apex's; a layer is built with the fusion only where it is True",
        called_by=(f"{_COLUMNS}.__init__",),
    ),
    Seam(
        f"{_CORE}.tensor_parallel.layers.fused_weight_gradient_mlp_cuda",
        "set to our class; its wgrad_gemm_accum_fp32 and _fp16 are called with input, gradient and main gradient",
        called_by=(f"{_CORE}.tensor_parallel.layers.LinearWithGradAccumulationAndAsyncCommunication.backward",),
        newer=True,  # without apex nothing has the name until we set it
    ),
    Seam(
        f"{_CORE}.tensor_parallel.random._get_share_storage",
        "replaced by a few lines of C++ that compile in a second, or by a copy where none can be compiled: it returns "
        "what gives a freed output the memory of the one that was computed anew, called with the two",
        called_by=(f"{_CORE}.tensor_parallel.random.CheckpointWithoutOutput._recompute",),
    ),
    Seam(
        "parameter.grad_added_to_main_grad",
        "set to True, for good or while the hook runs: the hook of data parallelism then leaves a gradient out that is "
        "in the main gradient already",
        called_by=(f"{_CORE}.distributed.distributed_data_parallel.DistributedDataParallel._make_backward_post_hook",),
    ),
    Seam(
        "parameter.zero_out_wgrad",
        "read: the hook adds what autograd has although the main gradient has its part, which must then be zero; set "
        "to False while the hook runs after a first gradient, which was written; set to True where the last of several "
        "stages reads tied embeddings twice",
        called_by=(f"{_CORE}.distributed.distributed_data_parallel.DistributedDataParallel._make_backward_post_hook",),
    ),
    Seam(
        f"{_ROTARY}.get_emb",
        "overridden: the table of angles in the shape that our attention reads",
        ("max_seq_len", "offset"),
        (f"{_ROTARY}.forward",),
    ),
    Seam(
        f"{_ROTARY}.inv_freq",
        "set to the frequencies of Llama 3.1's scaling",
        called_by=(f"{_ROTARY}.get_freqs_non_repeated",),
    ),
    Seam(
        f"{_ROTARY}.cp_group",
        "set to None, so that the engine does not divide a table that is divided already",
        called_by=(f"{_ROTARY}.forward",),
    ),
    *(
        Seam(f"{_EXPERTS}.{name}", "set: its own needs Transformer Engine")
        for name in ("fc1_latent_proj", "fc2_latent_proj")
    ),
    Seam(
        f"{_EXPERTS}.dispatch",
        "overridden to send tokens and the weights of their experts in one message",
        ("hidden_states", "probs"),
    ),
    Seam(
        f"{_EXPERTS}.combine",
        "overridden to add up between CPU processes what each sends the other at once",
        ("output",),
    ),
    Seam(
        f"{_EXPERTS}.preprocess",
        "overridden to project what experts read down, which needs Transformer Engine there",
        ("hidden_states", "probs", "routing_map"),
    ),
    Seam(
        f"{_EXPERTS}.postprocess",
        "overridden to project what experts gave up, after the dispatcher has added it",
        ("output", "shared_expert_output"),
    ),
    Seam(
        f"{_ROUTER}.routing",
        "overridden to leave out what is beyond an expert's capacity in a whole microbatch, and to count what is left",
        ("logits", "padding_mask"),
        (f"{_ROUTER}.forward",),
    ),
    Seam(
        f"{_CORE}.transformer.moe.router.Router.bias",
        "set: the engine's router has one where all linear layers have biases, and only there",
    ),
    Seam(
        f"{_CORE}.transformer.moe.router.Router.gating",
        "overridden: the engine's moves the router's weight to a GPU",
        ("input",),
        (f"{_ROUTER}.forward",),
    ),
    Seam(
        f"{_ROUTER}.sinkhorn_load_balancing",
        "overridden: the engine's balances the tokens of each rank, so that every layout chooses other experts",
        ("logits",),
        (f"{_ROUTER}.routing",),
    ),
    Seam(
        f"{_ROUTER}._apply_global_aux_loss",
        "overridden: the engine's counts the microbatches of all data-parallel ranks at once, so that every layout "
        "trains another model",
        ("probs", "scores_for_aux_loss", "routing_map", "with_padding_mask"),
        (f"{_ROUTER}.routing",),
    ),
    Seam(
        f"{_ROUTER}.reset_global_aux_loss_tracker",
        "overridden: called at the end of every step, it forgets our counts in place of the engine's",
        called_by=(f"{_CORE}.distributed.finalize_model_grads",),
    ),
    Seam(
        f"{_ROUTER}.global_tokens_per_expert", "set to None: the engine's count would be rounded to bf16 with the model"
    ),
    Seam(f"{_ROUTER}.ga_steps", "set to None, as the count that it divides"),
    Seam(
        f"{_ROUTER}.local_tokens_per_expert",
        "made integers: the engine's count would be rounded to bf16 with the model",
        called_by=(f"{_CORE}.distributed.finalize_model_grads",),
    ),
    Seam(
        f"{_ROUTER}._maintain_float32_expert_bias",
        "called when weights change their dtype: the engine calls it in the next forward pass",
    ),
    Seam(
        f"{_ROUTER}.apply_input_jitter",
        "overridden: the engine's jitters in evaluation, too, and draws from the generator of whole tensors",
        ("input",),
        (f"{_ROUTER}.forward",),
    ),
    Seam(
        f"{_ROUTER}.get_aux_loss_coeff",
        "overridden: the engine asks what chooses experts, which one that mixes sparsely does beside any loss",
        ("aux_loss_type",),
        (f"{_ROUTER}._apply_aux_loss",),
    ),
    Seam(
        f"{_ROUTER}.routing_type",
        "set to sinkhorn, for which the engine asks a method of ours, where two experts are mixed sparsely",
        called_by=(f"{_ROUTER}.routing",),
    ),
    Seam(
        f"{_ROUTER}.router_replay",
        "set to what chooses experts in place of the engine",
        called_by=(f"{_ROUTER}.routing",),
    ),
    Seam(
        f"{_CORE}.transformer.module.MegatronModule.sharded_state_dict",
        "overridden by our experts, which are one parameter, with the keys of the engine's",
        ("prefix", "sharded_offsets", "metadata"),
    ),
    Seam(
        f"{_CORE}.pipeline_parallel.p2p_communication.P2PCommunicator.total_stages",
        "overridden by a benchmark that shows what another order of the schedule would hold in memory",
        called_by=(f"{_CORE}.pipeline_parallel.schedules.forward_backward_pipelining_without_interleaving",),
    ),
)

GROUPS = (
    Seam(
        f"{_CORE}.parallel_state.create_group",
        "replaced while the groups are made: those of other ranks are counted and not made",
        ("ranks",),
        (f"{_CORE}.parallel_state.initialize_model_parallel",),
    ),
    Seam(
        f"{_CORE}.parallel_state.generate_masked_orthogonal_rank_groups",
        "replaced while the groups are made, by the same in numpy",
        ("world_size", "parallel_size", "mask"),
        (f"{_CORE}.parallel_state.RankGenerator.get_ranks",),
    ),
)

CHECKPOINTS = (
    Seam(
        f"{_CORE}.dist_checkpointing.strategies.filesystem_async._results_queue",
        "set to a queue of this process; the engine would start a manager process for it",
        called_by=(f"{_CORE}.dist_checkpointing.strategies.filesystem_async.get_write_results_queue",),
    ),
    Seam(
        f"{_CORE}.dist_checkpointing.state_dict_utils.determine_global_metadata",
        "replaced for saves: what all ranks save is sent to rank 0 alone, which alone validates it; returns a pair",
        ("sharded_state_dict", "process_group"),
        (f"{_CORE}.dist_checkpointing.state_dict_utils.save_preprocess",),
    ),
    Seam(
        f"{_SAVE}.TorchDistSaveShardedStrategy._get_save_and_finalize_callbacks",
        "overridden to keep the first plan; save_state_dict_ret[1] is the checkpoint's metadata on the first rank",
        ("writer", "save_state_dict_ret", "async_strategy"),
        (f"{_SAVE}.TorchDistSaveShardedStrategy.async_save",),
    ),
    Seam(
        f"{_SAVE}.TorchDistSaveShardedStrategy.cached_global_metadata",
        "set to the metadata of the first save, which serves all of them",
        called_by=(f"{_SAVE}.TorchDistSaveShardedStrategy.async_save",),
    ),
    Seam(
        f"{_SAVE}.TorchDistSaveShardedStrategy.validated_cache_reuse",
        "set to True: no rank is asked whether the plan is still the same",
        called_by=(f"{_SAVE}.TorchDistSaveShardedStrategy.async_save",),
    ),
    Seam(
        f"{_SAVE}.FileSystemReader",
        "replaced while a checkpoint is loaded, by a reader that trusts no pickle",
        called_by=(f"{_SAVE}.TorchDistLoadShardedStrategy",),
    ),
    Seam(f"{_SAVE}.MCoreMetadata", "a class that older checkpoints name in .metadata; it is not built"),
    Seam(f"{_SAVE}.MCoreSavePlan", "a class that older checkpoints name in .metadata; it is not built"),
    Seam(
        f"{_DCP}.filesystem.FileSystemReader._get_metadata_path",
        "called for the path of .metadata",
        ("rank",),
        (f"{_DCP}.filesystem.FileSystemReader.read_metadata",),
    ),
    Seam(
        f"{_DCP}.filesystem._StorageInfo",
        "made from .metadata and written into it: file, offset and length of a chunk",
        ("relative_path", "offset", "length"),
    ),
    Seam(f"{_DCP}.metadata._MEM_FORMAT_ENCODING", "named in .metadata, with 0, 1 or 2 for a tensor's memory format"),
    Seam("torch.serialization._get_layout", "named in .metadata, called with the text torch.strided", ("name",)),
    Seam(
        "torch._utils._rebuild_tensor_v2",
        "named in the pickle of every tensor, which we write and read without torch",
        ("storage", "storage_offset", "size", "stride", "requires_grad", "backward_hooks"),
    ),
)

DATA = (
    Seam(
        f"{_DATASETS}.gpt_dataset.GPTDataset._build_document_sample_shuffle_indices",
        "overridden: index files that any process may write and none reads half-written; returns three arrays",
        ("self",),
        (f"{_DATASETS}.gpt_dataset.GPTDataset",),
    ),
    Seam(
        f"{_DATASETS}.gpt_dataset.GPTDataset.__getitem__",
        "overridden without its masks of padding; returns tokens, labels, loss_mask and position_ids",
        ("idx",),
    ),
    Seam(
        f"{_DATASETS}.gpt_dataset.GPTDataset._query_document_sample_shuffle_indices",
        "the tokens of a sample and one more, int64, as the first of three values",
        ("idx",),
        (f"{_DATASETS}.gpt_dataset.GPTDataset.__getitem__",),
    ),
    Seam(
        f"{_DATASETS}.gpt_dataset.GPTDataset.build_low_level_dataset",
        "overridden: tokens behind a URL are read through fsspec; returns what has sequence_lengths and get",
        ("dataset_path", "config"),
    ),
    Seam(
        f"{_DATASETS}.blended_dataset.BlendedDataset._build_indices",
        "overridden likewise; returns two arrays",
        ("self",),
        (f"{_DATASETS}.blended_dataset.BlendedDataset.__init__",),
    ),
    Seam(
        f"{_BUILDER}._build_megatron_datasets_parallel",
        "overridden without the engine's barriers and threads; returns a list of datasets for each split",
        ("prefixes", "split", "sizes_per_dataset"),
        (f"{_BUILDER}._build_blended_dataset_splits",),
    ),
    Seam(
        f"{_BUILDER}._build_megatron_dataset_splits",
        "called for the datasets of one file, without synchronization of the ranks",
        ("dataset_path", "split", "sizes", "synchronize_ranks"),
    ),
    Seam(
        f"{_BUILDER}.build_generic_dataset",
        "overridden: it builds where it is called, and takes our blended dataset",
        ("cls", "is_built_on_rank", "synchronize_ranks", "args"),
        (f"{_BUILDER}._build_megatron_dataset_splits",),
    ),
)
