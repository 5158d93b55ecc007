"""Build the index cache of a run before it starts, with no GPU and no process group, from the flags of the training.

    megatron-ext prepare-cache --data-path data/corpus_text_document --data-cache-path cache --world-size 64 ...

Give all the flags of the training, or --config with a file of them, and --world-size with its number of ranks: the
order of the samples follows from their number. A run with the same flags then finds its index where --data-cache-path
(or the folder next to the data) is the same. With --data-order formula there is nothing to prepare. Exit codes: 0 done,
64 the flags cannot work, 65 data that is wrong, 74 the cache cannot be written.
"""

from megatron_ext.terminal import say
from megatron_ext.train.configure import configure


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    if {"-h", "--help"} & set(argv):
        say(__doc__ or "")
        return 0
    configured = configure([*argv, "--dry-run"])
    config = configured.config
    if config.data.mock_data or config.data.data_order == "formula":
        say("nothing to prepare: this order of the samples has no index")
        return 0
    from megatron_ext import device

    device.install("cpu")  # before megatron-core is imported
    from megatron_ext.train.datasets import datasets_of_run, tokenizer_of_run

    datasets = datasets_of_run(config, tokenizer_of_run(config), configured.resume)
    for name in ("train", "valid", "test"):
        samples = getattr(datasets, name)
        if samples is not None:
            sources = ", ".join(source.name for source in samples.sources)
            say(f"{name}: {len(samples)} samples of {sources}")
    return 0
