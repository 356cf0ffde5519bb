#!/usr/bin/env bash
# The one test command: environment, lint, types, tests. Arguments go to pytest.
# It installs the environment .venv and, as root with apt-get, what the tests need of the machine.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # as in `sh run.sh`, where sh is dash
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=$(./setup_env.sh cpu dev)
PATH=$venv/bin:$PATH
# one test opens the report in a real browser, and tests of the sandbox need bubblewrap: they are skipped without it
missing=()
command -v chromium >/dev/null || missing+=(chromium)
command -v bwrap >/dev/null || missing+=(bubblewrap)
if [ ${#missing[@]} -gt 0 ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "== installing with apt-get: ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  said=$(timeout 300 sh -c 'apt-get update -qq && apt-get install -y -qq --no-install-recommends "$@"' - "${missing[@]}" 2>&1) ||
    { echo "apt-get failed:"; tail -n 5 <<<"$said"; } >&2
elif [ ${#missing[@]} -gt 0 ]; then
  echo "== not here: ${missing[*]}; install with: sudo apt-get install ${missing[*]}" >&2
fi
ruff check .
ruff format --check .
lint-imports
unset PYTHONDONTWRITEBYTECODE # without bytecode, each process would compile all modules, and rewrite the asserts, anew
nice -n 10 mypy --no-error-summary & # Ray must not wait for it
types=$!
# Temporary files lie in one folder that is removed. The path of pytest's base folder has another length each time,
# so that no test depends on it. Ray's sockets need a short one
around=${TMPDIR:-/tmp}
[ ${#around} -le 28 ] || around=/tmp
made=$(mktemp -d "$around/vg-XXXXXX") || { echo "TMPDIR=$around: expected a folder that can be written to" >&2; exit 2; }
trap 'rm -rf "$made"' EXIT
chmod 755 "$made" # tests as root start programs as another user
length=${TESTS_BASE_LENGTH:-$((RANDOM % 101 + 20))}
padding=$(printf '%*s' "$((length > ${#made} + 1 ? length - ${#made} - 1 : 1))" '')
base=$made/${padding// /b}
echo "== the path of the base folder has ${#base} characters; the same length again: TESTS_BASE_LENGTH=${#base} bash tests/run.sh"
# one thread per process, and a worker a core: more would starve the start of Ray. `-n 0` runs without workers.
# A test that hangs ends its worker, which names it
TMPDIR=$made OMP_NUM_THREADS=1 python -m pytest -n 2 --basetemp "$base" \
  -o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true "$@"
wait "$types"
