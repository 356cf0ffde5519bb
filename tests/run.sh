#!/usr/bin/env bash
# The one test command: environment, lint, types, tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=$(./setup_env.sh cpu dev)
PATH=$venv/bin:$PATH
# one test opens the report in a real browser, and is skipped without one; the tests of the sandbox fail without bubblewrap
missing=()
command -v chromium >/dev/null || missing+=(chromium)
command -v bwrap >/dev/null || missing+=(bubblewrap)
if [ ${#missing[@]} -gt 0 ] && [ "$(id -u)" = 0 ] && command -v apt-get; then
  echo "tests/run.sh: apt-get installs ${missing[*]}" >&2
  export DEBIAN_FRONTEND=noninteractive
  timeout 300 sh -c 'apt-get update -qq && apt-get install -y -qq --no-install-recommends "$@"' - "${missing[@]}" || true
fi >/dev/null
ruff check .
ruff format --check .
lint-imports
python -m compileall -q verl_gdpo # where Python writes no bytecode, each of the processes would do it
mypy --no-error-summary &
types=$!
# one thread per process, and three workers (conftest.py says why); `-n 0` runs without workers
# Ray's own processes get the lowest priority by default, and would wait for the other tests
OMP_NUM_THREADS=1 RAY_worker_niceness=0 python -m pytest -n 3 "$@"
wait "$types"
python tests/help/last_passes.py
