#!/usr/bin/env bash
# The one test command: environment, lint, types, tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./setup_env.sh cpu dev
PATH=$PWD/.venv/bin:$PATH
ruff check .
ruff format --check .
mypy
# one thread a process: verl starts nine of them, and two cores are enough for the tests
OMP_NUM_THREADS=1 python -m pytest "$@"
