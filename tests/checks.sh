#!/usr/bin/env bash
# Checks what no run of the program shows, in seconds: lint, format, the shape of the house, names, docstrings, pages.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/environment.sh requirements-dev.txt
echo "== ruff"
python -m ruff check .
python -m ruff format --check .
echo "== checks"
python -m pytest -p no:xdist tests/checks "$@"
