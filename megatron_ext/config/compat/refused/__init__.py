"""Lists every option of Megatron's own command line that is refused, with what to use instead, by reason; a file a
subject. What is refused would change what is trained or what is kept, and is not built.

Flags are separated by commas: `--flag` is a switch, `--flag N` takes a value, `--flag N...` takes several. `=value` is
Megatron's default, or another value that asks for nothing: that one passes. The list was read from Megatron-LM as the
megatron-core 0.19.2 wheel holds it; tests/unit/config/compat/test_megatron_options.py reads that wheel and fails when
an option is missing here, is listed twice, or takes another number of values.
"""

from megatron_ext.config.compat.refused import data, model, other_programs, run, spellings, training
from megatron_ext.config.compat.refused import parallelism as layout

REFUSED: tuple[tuple[str, str], ...] = tuple(
    entry for part in (spellings, layout, model, training, data, run, other_programs) for entry in part.REFUSED
)
