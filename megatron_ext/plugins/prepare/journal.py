"""Records how far an interrupted preprocessing run came, and the inputs of a finished one.

`<prefix>.partial.json` is replaced every few seconds, after the tokens that it speaks of are on the disk.
`<prefix>_manifest.json` is written at the end; nothing in it depends on the machine, the time or the workers.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ext.data.indexed import Written
from megatron_ext.durable import replacing
from megatron_ext.plugins.prepare.documents import InputHashes, ReadPosition
from megatron_ext.plugins.prepare.encode import Sample
from megatron_ext.untrusted.text import load_json, read_file

_LARGEST = 1 << 28  # bytes; it has some hundred for each input file


@dataclass(frozen=True)
class Progress:
    """Totals so far. `text_bytes` counts the text of the records, `bytes_read` the bytes of the files."""

    documents: int = 0
    skipped: int = 0
    text_bytes: int = 0
    tokens: int = 0
    bytes_read: int = 0
    bytes_total: int | None = None  # None if the standard input is among the inputs
    by_reference: int = 0  # texts that the fast tokenizer left to the reference


@dataclass
class Journal:
    """Holds the state that a run needs to go on where an earlier one stopped."""

    job: dict[str, Any]  # all that decides the output
    position: ReadPosition = ReadPosition()  # noqa: RUF009 (frozen)
    progress: Progress = Progress()
    written: list[Written] = field(default_factory=list)
    blocks: int = 0
    samples: list[tuple[int, Sample]] = field(default_factory=list)
    hashes: InputHashes = field(default_factory=InputHashes)

    def save(self, path: Path) -> None:
        """Replace the file in one step."""
        done = {number: content for number, content in self.hashes.of_files.items() if number < self.position.file}
        text = json.dumps(
            {
                "job": self.job,
                "place": vars(self.position),
                "progress": vars(self.progress),
                "written": [vars(one) for one in self.written],
                "blocks": self.blocks,
                "samples": [(number, vars(sample)) for number, sample in self.samples],
                "hashes": done,
            }
        )
        _write_whole(path, text)

    @staticmethod
    def load(path: Path) -> "Journal | None":
        """Return the journal that `save` wrote; None if the file is missing or not readable."""
        try:
            fields = load_json(read_file(path, _LARGEST))
            return Journal(
                job=fields["job"],
                position=ReadPosition(**fields["place"]),
                progress=Progress(**fields["progress"]),
                written=[Written(**one) for one in fields["written"]],
                blocks=fields["blocks"],
                samples=[(number, Sample(**sample)) for number, sample in fields["samples"]],
                hashes=InputHashes(
                    {int(number): (digest, size) for number, (digest, size) in fields["hashes"].items()}
                ),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


def write_manifest(path: Path, content: dict[str, Any]) -> None:
    """Write the manifest in one step, with a line for each field."""
    _write_whole(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _write_whole(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text.encode())
