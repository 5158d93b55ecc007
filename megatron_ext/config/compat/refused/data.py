"""Refused options about data and tokenizers. The notation is that of the package."""

REFUSED: tuple[tuple[str, str], ...] = (
    (
        "all samples of an epoch are read, and each data-parallel rank reads its share of a batch; leave it out",
        """
        --sample-rate N =1.0, --no-data-sharding
        """,
    ),
    (
        "use --reset-attention-mask, which needs no mask and no padding",
        """
        --dataloader-inter-document-masking
        """,
    ),
    (
        "fill-in-the-middle and masked language modelling are not in this version; leave it out",
        """
        --fim-data, --fim-rate N =0.5, --fim-spm-rate N =0.5, --fim-split-sample N, --fim-fragment-rate N,
        --fim-no-prefix N, --fim-prefix-token N =<fim_prefix>, --fim-middle-token N =<fim_middle>,
        --fim-suffix-token N =<fim_suffix>, --fim-pad-token N =<fim_pad>, --fim-eod-token N =<|endoftext|>,
        --mask-prob N =0.15, --short-seq-prob N =0.1
        """,
    ),
    (
        "a tokenizer is what its files say; use --tokenizer-type with --tokenizer-model",
        """
        --vocab-extra-ids N =0, --tokenizer-metadata N,
        --tokenizer-sentencepiece-legacy, --no-tokenizer-sentencepiece-ignore-extra-whitespaces,
        --disable-tokenizer-sentencepiece-ignore-extra-whitespaces, --tokenizer-hf-no-use-fast,
        --tokenizer-hf-no-include-special-tokens, --null-tokenizer-eod-id N, --null-tokenizer-pad-id N =-1,
        --chat-template N
        """,
    ),
)
