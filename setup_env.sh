#!/usr/bin/env bash
# Makes .venv with pinned versions, and prints its folder:  ./setup_env.sh cpu|gpu [EXTRA...]
#
# .venv is a link to .venv-cpu-HASH or .venv-gpu-HASH. A finished environment never changes; new
# requirements get a new environment. So a running training keeps its own. The script uses uv if it
# is installed, and pip otherwise.
set -euo pipefail

say() { echo "setup_env: $*" >&2; }
die() { say "$*"; exit 2; }

[ "$(uname -s)" = Linux ] || die "verl needs Linux, or WSL2 on Windows; this is $(uname -s)"
cd -P "$(dirname "${BASH_SOURCE[0]}")"
case ${1:-} in cpu | gpu) hardware=$1 ;; *) die "usage: ./setup_env.sh cpu|gpu [EXTRA...]" ;; esac
extras=$(IFS=,; echo "$*")
pins=requirements/$hardware.txt

find_python() {
  local python candidates=(python3 python3.12 python3.11 python3.10) newest='(3, 13)' least='(3, 10)'
  # most wheels for CUDA are built for 3.12, and that of flash-attn for no other
  [ "$hardware" = cpu ] || candidates=(python3.12 "${candidates[@]}")
  [[ ,$extras, != *,flash-attn,* ]] || least='(3, 12)'
  for python in "${candidates[@]}"; do
    if "$python" -c "import sys; sys.exit(not $least <= sys.version_info < $newest)" 2>/dev/null; then
      echo "$python"
      return
    fi
  done
  [ "$least" = '(3, 10)' ] || die "no Python 3.12 found on PATH; the wheel of flash-attn is for no other"
  die "no Python 3.10, 3.11 or 3.12 found on PATH; verl supports no other"
}

python=$(find_python)
wanted="$extras $("$python" -c '
import hashlib, pathlib, sys
files = b"".join(pathlib.Path(name).read_bytes() for name in sys.argv[1:])
print(sys.version.split()[0], hashlib.sha256(files).hexdigest())' pyproject.toml "$pins")"
stamp=verl_gdpo_env

# Ends the script if the environment $1 has what the user asks for.
done_with() {
  local folder have
  folder=$(readlink -f "$1") && have=$(cat "$folder/$stamp" 2>/dev/null) || return 0
  # an environment for cpu,dev also serves cpu
  if [ "$have" = "$wanted" ] || [[ $have == "$extras",* && ${have#* } == "${wanted#* }" ]]; then
    if ! [ .venv -ef "$folder" ]; then
      ln -sfn "$1" .venv.new
      mv -T .venv.new .venv # a rename, so that .venv always exists
    fi
    echo "$folder"
    exit 0
  fi
}
done_with .venv

exec 9>.venv.lock
flock --nonblock 9 || { say "another start is making an environment; waiting for it"; flock 9; }
done_with .venv

if [ -d .venv ] && [ ! -L .venv ]; then # not made by this version of the script
  ! grep -qsF "$PWD/.venv/" /proc/[0-9]*/maps || die "$PWD/.venv is not a link and in use; end what runs from it"
  kept=$(mktemp -d ".venv.$(date +%Y-%m-%d_%H-%M-%S)-XXX") # the same second may occur twice
  mv -T .venv "$kept"
  say ".venv was a folder, and becomes a link; the folder is $kept now"
fi
for made in .venv-*; do done_with "$made"; done

venv=.venv-$hardware-$(sha256sum <<<"$wanted" | cut -c 1-12)
say "making $venv for [$extras] with $("$python" --version); minutes, once"
rm -rf "$venv" # an interrupted start may have left an incomplete one
if command -v uv >/dev/null; then
  uv venv --quiet --python "$("$python" -c 'import sys; print(sys.executable)')" "$venv"
  # uv does not read pip's settings, so pass the folder of local wheels
  install() {
    uv pip install --python "$venv/bin/python" --compile-bytecode \
      ${PIP_FIND_LINKS:+--find-links "$PIP_FIND_LINKS"} "$@" >&2
  }
else
  "$python" -m venv "$venv" || die "'$python -m venv' failed; install python3-venv, or uv"
  install() { "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off "$@" >&2; }
fi

if [ "$hardware" = cpu ]; then
  # PyPI's torch brings gigabytes of CUDA; PyTorch's own index has a build without CUDA
  index=https://download.pytorch.org/whl/cpu
  if "$venv/bin/python" -c "import urllib.request as u; u.urlopen('$index/torch/', timeout=5)" 2>/dev/null; then
    install --extra-index-url "$index" torch==2.13.0
  else
    say "$index is out of reach; torch comes from the default index"
    install torch==2.13.0
  fi
fi
wheels=()
if [[ ,$extras, = *,flash-attn,* ]]; then # built by verl's makers for CUDA 13 and torch 2.11
  wheels=(--extra-index-url https://verl-project.github.io/verl-wheelhouse/simple/ --only-binary flash-attn)
fi
install "${wheels[@]}" --constraint "$pins" --editable ".[$extras]"
for other in .venv-"$hardware"-*; do
  [ "$other" = "$venv" ] || say "$other is not needed any more: remove it once nothing runs from it"
done
echo "$wanted" >"$venv/$stamp"
done_with "$venv"
