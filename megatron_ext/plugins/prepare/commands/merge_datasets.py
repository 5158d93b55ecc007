"""Merges all .bin/.idx pairs of a folder into one pair.

    megatron-ext merge-datasets --input data/parts --output-prefix data/corpus_text_document

The documents come in the order of the files' names. Exit codes: 0 done, 64 the flags cannot work, 65 a pair is damaged,
or the manifests next to two pairs name different tokenizers.
"""

from megatron_ext.commandline import ToolParser
from megatron_ext.plugins.prepare.merge import find_prefixes, merge_indexed_files
from megatron_ext.terminal import say


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    parser = ToolParser("Merge the .bin/.idx pairs of a folder into one.", __doc__)
    parser.add_argument("--input", required=True, metavar="FOLDER", help="folder of the pairs")
    parser.add_argument("--output-prefix", required=True, help="path of the merged pair, without .bin or .idx")
    parser.add_argument(
        "--accept-other-tokenizer", action="store_true", help="merge although the manifests name different tokenizers"
    )
    options = parser.parse_args(argv)
    prefixes = find_prefixes(options.input)
    merged = merge_indexed_files(prefixes, options.output_prefix, accept_other_tokenizer=options.accept_other_tokenizer)
    say(
        f"wrote {options.output_prefix}.bin and .idx: {len(prefixes)} pairs, {merged.documents} documents, "
        f"{merged.sequences} sequences, {merged.token_bytes / 1e6:.1f} MB"
    )
    return 0
