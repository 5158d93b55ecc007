#!/usr/bin/env python3
"""Pretrain a GPT model. `python pretrain_gpt.py --help` lists the flags; the README shows how to begin."""

import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Configure, then train. Returns the exit code (megatron_ext/errors.py)."""
    from megatron_ext.resilience.report import run_guarded
    from megatron_ext.train.configure import configure

    rank = int(os.environ.get("RANK", "0"))
    configured = None

    def run() -> int:
        nonlocal configured
        configured = configure(argv)
        for warning in configured.typed.warnings if rank == 0 else ():
            print(f"warning: {warning}", file=sys.stderr)
        if configured.typed.dry_run:
            from megatron_ext.config.report import describe

            print(describe(configured.config))
            return 0
        from megatron_ext.train.pretrain import pretrain

        pretrain(configured.config)
        return 0

    return run_guarded(run, rank)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
