#!/usr/bin/env bash
# Makes .venv with pinned versions:  ./setup_env.sh cpu|gpu [EXTRA...]
# Uses uv where it is there, pip otherwise. Does nothing when .venv is already what is asked for.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

say() { echo "setup_env: $*" >&2; }
die() { say "$*"; exit 2; }

case ${1:-} in cpu | gpu) hardware=$1 ;; *) die "usage: ./setup_env.sh cpu|gpu [EXTRA...]" ;; esac
extras=$(IFS=,; echo "$*")
pins=requirements/$hardware.txt

find_python() {
  local python
  for python in python3 python3.12 python3.11 python3.10; do
    if "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2>/dev/null; then
      echo "$python"
      return
    fi
  done
  die "no Python 3.10, 3.11 or 3.12 found on PATH; verl supports no other"
}

python=$(find_python)
wanted="$extras $("$python" -c '
import hashlib, pathlib, sys
files = b"".join(pathlib.Path(name).read_bytes() for name in sys.argv[1:])
print(sys.version.split()[0], hashlib.sha256(files).hexdigest())' pyproject.toml "$pins")"
stamp=.venv/verl_gdpo_env
have=$(cat "$stamp" 2>/dev/null || true)
# cpu,dev is good enough for cpu
if [ "$have" = "$wanted" ] || [[ $have == "$extras",* && ${have#* } == "${wanted#* }" ]]; then
  exit 0
fi

say "making .venv for [$extras] with $("$python" --version); minutes, once"
rm -rf .venv
if command -v uv >/dev/null; then
  uv venv --quiet --python "$("$python" -c 'import sys; print(sys.executable)')" .venv
  # uv reads none of pip's settings; local wheels are one that matters
  install() {
    uv pip install --python .venv/bin/python --compile-bytecode \
      ${PIP_FIND_LINKS:+--find-links "$PIP_FIND_LINKS"} "$@"
  }
else
  "$python" -m venv .venv || die "'$python -m venv' failed; install python3-venv, or uv"
  install() { .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off "$@"; }
fi

if [ "$hardware" = cpu ]; then
  # PyPI's torch brings gigabytes of CUDA; its own index has a build without
  index=https://download.pytorch.org/whl/cpu
  if .venv/bin/python -c "import urllib.request as u; u.urlopen('$index/torch/', timeout=5)" 2>/dev/null; then
    install --extra-index-url "$index" torch==2.13.0
  else
    say "$index is out of reach; torch comes from the default index"
    install torch==2.13.0
  fi
fi
install --constraint "$pins" --editable ".[$extras]"
echo "$wanted" >"$stamp"
say ".venv is ready"
