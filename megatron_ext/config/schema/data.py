"""The data: files, blends, splits, tokenizer, loading."""

from dataclasses import dataclass

from megatron_ext.config.schema.option import option


@dataclass(frozen=True)
class DataConfig:
    data_path: tuple[str, ...] | None = option(
        None, "Prefixes of .bin/.idx files, each optionally after its weight; --split divides them."
    )
    split: str = option("969,30,1", "Shares of --data-path for training, validation and test.")
    train_data_path: tuple[str, ...] | None = option(None, "Prefixes (and weights) for training alone.")
    valid_data_path: tuple[str, ...] | None = option(None, "Prefixes (and weights) for validation alone.")
    test_data_path: tuple[str, ...] | None = option(None, "Prefixes (and weights) for test alone.")
    data_cache_path: str | None = option(
        None, "Folder of the sample indices; default a folder named cache beside the data."
    )
    mock_data: bool = option(False, "Synthetic tokens, a function of the seed; no files.")
    tokenizer_type: str | None = option(
        None,
        "Tokenizer that made the data.",
        choices=("ByteTokenizer", "SentencePieceTokenizer", "HuggingFaceTokenizer", "NullTokenizer"),
    )
    tokenizer_model: str | None = option(None, "The tokenizer's file, or its folder for HuggingFaceTokenizer.")
    vocab_size: int | None = option(
        None, "Entries of the vocabulary before padding; default the tokenizer's. NullTokenizer needs it."
    )
    eod_mask_loss: bool = option(False, "Do not train on predicting what follows an end of document.")
    num_workers: int = option(2, "Background threads that load batches; 0 loads in the loop.")
