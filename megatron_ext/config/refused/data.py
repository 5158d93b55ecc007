"""Refused options about data and tokenizers. The notation is that of the package."""

REFUSED: tuple[tuple[str, str], ...] = (
    (
        "list the data on the command line or in --config: --data-path, or --train-data-path and --valid-data-path",
        """
        --data-args-path N, --per-split-data-args-path N, --per-dataset-sequences-path N
        """,
    ),
    (
        "data is read through memory maps from a local or mounted disk; leave it out",
        """
        --object-storage-cache-path N, --enable-msc
        """,
    ),
    (
        "samples are shuffled once an epoch, in an order that is a function of the seed and the same in every layout, "
        "so that a run can go on in another one; cyclic would shuffle what is shuffled once more, in an order that "
        "depends on the number of data-parallel ranks; for external, a loader of one's own, docs/extending.md has "
        "pretrain(datasets=...); leave it out",
        """
        --dataloader-type N =single, --sample-rate N =1.0, --no-data-sharding
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
