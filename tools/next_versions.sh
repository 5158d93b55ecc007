#!/usr/bin/env bash
# What would newer versions of the libraries change? Installs them in an environment of its own (some GB, minutes), runs
# the canaries of the seams, the golden losses, rows of docs/parity.md and the tests that docs/libraries.md names, and
# says what changed, by name. The project's own environment stays as it is.
#   bash tools/next_versions.sh                                        the newest of five libraries, in a temporary folder
#   bash tools/next_versions.sh --torch 2.13.0 --megatron-core 0.18.2  these two, and the newest of the other three
#   bash tools/next_versions.sh --folder DIR                           keeps the environment in DIR, for the next time
# Exit codes: 0 nothing changed, 1 something did, 64 the flags or the versions cannot work.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/environment.sh --no-install
PYTHONPATH="$PWD" exec python -m tests.support.next_versions "$@"
