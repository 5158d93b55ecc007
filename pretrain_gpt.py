#!/usr/bin/env python3
"""Pretrain a GPT model. `python pretrain_gpt.py --help` lists the flags; the README shows how to begin."""

import sys

from megatron_ext.cli.pretrain import main, start

__all__ = ["main"]

if __name__ == "__main__":
    start(sys.argv[1:])
