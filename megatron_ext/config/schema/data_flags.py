"""The options of the data: files, blends, splits, tokenizer, loading."""

from dataclasses import dataclass

from megatron_ext.config.schema.option import Need, ReadWith, free, option

_POSITIONS = ReadWith("position_embedding_type", "this model knows no positions", but=("none", "alibi"))

_GPT2 = ReadWith("tokenizer_type", "only --tokenizer-type GPT2BPETokenizer reads it", only=("GPT2BPETokenizer", None))
_TIKTOKEN = ReadWith("tokenizer_type", "only --tokenizer-type TikTokenizer reads it", only=("TikTokenizer", None))
_TOKENIZER = ReadWith("tokenizer_type", "without --tokenizer-type nothing reads it")
_FILES = ReadWith(
    ("data_path", "train_data_path", "valid_data_path", "test_data_path"), "without data files nothing is read"
)
_FIM = ReadWith("fim_data", "without --fim-data documents are read as they are")
_SHUFFLED = ReadWith("data_order", "only --data-order shuffled has index files and maps the data", only=("shuffled",))

TOKENIZER_TYPES = (
    "ByteTokenizer",
    "SentencePieceTokenizer",
    "HuggingFaceTokenizer",
    "TikTokenizer",
    "GPT2BPETokenizer",
    "NullTokenizer",
)
"""Values of --tokenizer-type; `tokenizer/from_flags.py` builds each."""


_FROM_ITS_FOLDER = "use HuggingFaceTokenizer with --tokenizer-model naming the model's folder, which has tokenizer.json"
FOLDER_TOKENIZERS = ("Llama3Tokenizer", "LLama3Tokenizer", "QwenTokenizer", "Qwen2Tokenizer", "Qwen3Tokenizer")
FOLDER_TOKENIZERS += ("DeepSeekV2Tokenizer", "DeepSeekV3Tokenizer", "HFTokenizer", "TokenizerFromFile")
"""Tokenizers of forks that are HuggingFaceTokenizer where --tokenizer-model names their folder."""

_OTHER_TOKENIZERS = {
    "MultimodalTokenizer": "images are not in this version",
    "TokenizerFromFileWithFIM": f"{_FROM_ITS_FOLDER}, and --fim-data",
    **dict.fromkeys(FOLDER_TOKENIZERS, _FROM_ITS_FOLDER),
}
"""Tokenizers of Megatron and of its forks that are not built, with the ones to use instead."""


@dataclass(frozen=True)
class DataConfig:
    """Options of the data."""

    data_path: tuple[str, ...] | None = free(
        None, "Prefixes of .bin/.idx files, each optionally after its weight; --split divides them."
    )
    split: str = free(
        "969,30,1",
        "Shares of --data-path for training, validation and test.",
        read_with=ReadWith(("data_path", "data_args_path"), "without --data-path there is no data to share out"),
    )
    train_data_path: tuple[str, ...] | None = free(None, "Prefixes (and weights) for training alone.")
    valid_data_path: tuple[str, ...] | None = free(None, "Prefixes (and weights) for validation alone.")
    test_data_path: tuple[str, ...] | None = free(None, "Prefixes (and weights) for test alone.")
    data_args_path: str | None = free(None, "File whose words stand for --data-path, for long lists.")
    per_split_data_args_path: str | None = free(
        None,
        "JSON file with lists train, valid and test, in place of --train-data-path, --valid-data-path and "
        "--test-data-path.",
    )
    data_order: str = free(
        "shuffled",
        "shuffled: megatron-core's order, from index files that are built at the first start; "
        "formula: computed, no index.",
        choices=("shuffled", "formula"),
        read_with=_FILES,
    )
    data_cache_path: str | None = free(
        None,
        "Folder of the sample indices; default a folder named cache beside the data.",
        read_with=_SHUFFLED,
    )
    verify_data: str = free(
        "background",
        "Compare the data with the checksums of its manifest: some blocks at the start and all while training (1% of "
        "a core of the machine), all at the start, or none.",
        choices=("start", "background", "off"),
    )
    mock_data: bool = free(False, "Synthetic tokens, a function of the seed; no files.")
    tokenizer_type: str | None = option(
        None,
        "Tokenizer that made the data.",
        resume="tokenizer",
        choices=TOKENIZER_TYPES,
        refused=_OTHER_TOKENIZERS,
    )
    accept_other_tokenizer: bool = free(
        False, "Train although a manifest next to the data says that another tokenizer made it; default refuse."
    )
    tokenizer_model: str | None = option(
        None,
        "File of the tokenizer, or its folder for HuggingFaceTokenizer.",
        resume="tokenizer",
        read_with=_TOKENIZER,
    )
    vocab_size: int = option(
        None,
        "Entries of the vocabulary before padding; default: the tokenizer's (131072 for TikTokenizer). "
        "NullTokenizer needs it.",
        resume="shape",
        at_least=1,
    )
    vocab_file: str | None = option(
        None,
        "GPT2BPETokenizer: path of vocab.json, from token to id.",
        resume="tokenizer",
        read_with=_GPT2,
        dropped_unread=True,
    )
    merge_file: str | None = option(
        None,
        "GPT2BPETokenizer: path of merges.txt, one merge a line.",
        resume="tokenizer",
        read_with=_GPT2,
        dropped_unread=True,
    )
    tokenizer_special_tokens: tuple[str, ...] | None = option(
        None,
        "Special tokens: appended to the vocabulary of HuggingFaceTokenizer and GPT2BPETokenizer; the first ids of "
        "TikTokenizer, default <unk> <s> </s> <mask> <pad> <cls> <sep>.",
        resume="tokenizer",
        aliases=("--tiktoken-special-tokens",),
        read_with=_TOKENIZER,
    )
    tiktoken_pattern: str | None = option(
        None,
        "TikTokenizer: how a text is split before the merges; default v2.",
        resume="tokenizer",
        choices=("v1", "v2"),
        read_with=_TIKTOKEN,
        dropped_unread=True,
    )
    tiktoken_num_special_tokens: int = option(
        1000,
        "TikTokenizer: number of special ids before the vocabulary; ids without a name are <SPECIAL_n>.",
        resume="tokenizer",
        read_with=_TIKTOKEN,
    )
    reset_position_ids: bool = free(
        False,
        "Count positions, learned or rotary, from the beginning of each document in a sample.",
        read_with=_POSITIONS,
        computed_by_ours=True,
    )
    reset_attention_mask: bool = free(
        False, "Mask attention between documents of the same sample.", computed_by_ours=True
    )
    eod_mask_loss: bool = free(False, "Do not train on predicting what follows an end of document.")
    assistant_only_loss: bool = free(
        False,
        "Train only on the tokens that the .mask file next to the data names: the assistant's.",
        needs={True: (Need("mock_data", False, "data with a mask"),)},
    )
    fim_data: bool = free(
        False,
        "Fill in the middle: rearrange documents, drawn by the --fim rates, so that a model learns to fill in their "
        "middle.",
        needs={
            True: (Need("mock_data", False, "texts"), Need("assistant_only_loss", False, "documents without a mask"))
        },
    )
    fim_rate: float = free(0.5, "Share of documents that are rearranged.", read_with=_FIM)
    fim_spm_rate: float = free(
        0.5,
        "Fill in the middle: share of rearranged documents that begin with the suffix (SPM) instead of the prefix "
        "(PSM).",
        read_with=_FIM,
    )
    fim_split_sample: str | None = free(
        None,
        "Fill in the middle: token that divides a document into fragments, such as files of a repository.",
        read_with=_FIM,
    )
    fim_fragment_rate: float | None = free(
        None,
        "Share of the fragments that are rearranged, of a document that is; default --fim-rate.",
        read_with=ReadWith("fim_split_sample", "without --fim-split-sample no document is divided"),
    )
    fim_no_prefix: str | None = free(
        None, "Fill in the middle: leave documents and fragments that begin with this text as they are.", read_with=_FIM
    )
    fim_prefix_token: str = free("<fim_prefix>", "Token before a prefix.", read_with=_FIM)
    fim_middle_token: str = free("<fim_middle>", "Token before a middle.", read_with=_FIM)
    fim_suffix_token: str = free("<fim_suffix>", "Token before a suffix.", read_with=_FIM)
    fim_pad_token: str = free("<fim_pad>", "Token that fills up a sample that became shorter.", read_with=_FIM)
    no_mmap_bin_files: bool = free(
        False,
        "Read tokens from their place in the .bin files; default map the files into memory.",
        read_with=_SHUFFLED,
    )
    skip_samples: tuple[str, ...] | None = free(
        None,
        "Samples to leave out, by position in the training order: numbers, ranges such as 4096-4159, or files of "
        "either, such as a spike's samples.jsonl. No other sample moves; skipped positions hold padding without "
        "loss.",
        metavar="SAMPLES",
    )
    num_workers: int = free(2, "Background threads that load batches; 0 loads in the loop.", at_least=0)
