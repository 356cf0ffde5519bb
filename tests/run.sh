#!/usr/bin/env bash
# The one test command: environment, lint, types, tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=$(./setup_env.sh cpu dev)
PATH=$venv/bin:$PATH
# the report is looked at in a real browser; without one that test is skipped, and says so
if ! command -v chromium && [ "$(id -u)" = 0 ] && command -v apt-get; then
  export DEBIAN_FRONTEND=noninteractive
  timeout 300 sh -c 'apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium' || true
fi >/dev/null
ruff check .
ruff format --check .
mypy
lint-imports
# one thread a process, and two workers (conftest.py says for what); `-n 0` is one process
OMP_NUM_THREADS=1 python -m pytest -n 2 "$@"
