#!/usr/bin/env bash
# Makes .venv with pinned versions, and prints its folder:  ./setup_env.sh cpu|gpu [dev] [flash-attn], or cpu vllm
# With `python` before these words, it prints the Python that it would take, and makes nothing.
#
# .venv is a link to .venv-cpu-HASH or .venv-gpu-HASH, which is beside it, or in ~/.cache/verl-gdpo if the
# checkout's path has a space or another sign of the shell. A finished environment never changes; other
# requirements, or another place of the checkout, get a new one. So a running training keeps its own.
# pip installs everything, so pip's settings hold. Each package has a hash in requirements/, except
# torch for the CPU with what it brings, which has two indexes, and flash-attn. `nox -s pins` renews the hashes.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # as in `sh setup_env.sh`, where sh is dash
set -euo pipefail

say() { echo "setup_env: $*" >&2; }
die() { say "$*"; exit 2; }

[ "$(uname -s)" = Linux ] || die "verl needs Linux, or WSL2 on Windows; this is $(uname -s)"
cd -P "$(dirname "${BASH_SOURCE[0]}")"
usage="usage: ./setup_env.sh cpu|gpu [dev] [flash-attn], or cpu vllm; got '$*'"
only_python=''
if [ "${1:-}" = python ]; then only_python=yes; shift; fi
case ${1:-} in cpu | gpu) hardware=$1 ;; *) die "$usage" ;; esac
files=("requirements/$hardware.txt") flash_attn='' vllm=''
case "$*" in
  cpu | gpu) ;;
  'cpu dev' | 'gpu dev') files+=(requirements/dev.txt) ;;
  'gpu flash-attn') flash_attn=yes ;;
  'gpu dev flash-attn') files+=(requirements/dev.txt) flash_attn=yes ;;
  'cpu vllm') vllm=yes files=(requirements/cpu_vllm.txt) ;;
  *) die "$usage" ;;
esac
extras=$(IFS=,; echo "$*")

find_python() {
  local python candidates=(python3 python3.12 python3.11 python3.10) versions='3.10, 3.11 or 3.12' least='(3, 10)'
  # most wheels for CUDA are built for 3.12, and that of flash-attn for no other
  [ "$hardware" = cpu ] || candidates=(python3.12 "${candidates[@]}")
  [ -z "$flash_attn" ] || least='(3, 12)' versions='3.12 (flash-attn has a wheel for no other)'
  for python in "${candidates[@]}"; do
    if "$python" -c "import sys; sys.exit(not $least <= sys.version_info < (3, 13))" 2>/dev/null; then
      echo "$python"
      return
    fi
  done
  die "found $(python3 --version 2>/dev/null || echo "no Python"), and verl needs $versions:" \
    "install Python 3.12 so that python3.12 is on PATH, as with 'uv python install 3.12' or conda, and start again"
}

python=$(find_python)
if [ -n "$only_python" ]; then echo "$python"; exit 0; fi
wanted="$extras $PWD $("$python" -c '
import hashlib, pathlib, sys
files = b"".join(pathlib.Path(name).read_bytes() for name in sys.argv[1:])
print(sys.version.split()[0], hashlib.sha256(files).hexdigest())' pyproject.toml "${files[0]}" requirements/dev.txt)"
stamp=verl_gdpo_env

# as a checkout of verl's main branch, which the extra gpu would replace by a release
pinned=$(sed -n 's/^verl==\([^ ]*\).*/\1/p' "${files[0]}")
if own=$(python3 -c 'import importlib.metadata as m, sys; print(m.version("verl"), sys.executable)' 2>/dev/null) &&
  [ "${own%% *}" != "$pinned" ]; then
  say "${own#* } has verl ${own%% *}, which stays as it is and is not used; the environment here has verl $pinned." \
    "To train with yours: ${own#* } -m pip install --no-deps --editable $PWD"
fi

# Ray 2.60 gives the path of Python to a shell without quotes, so none of these may be in it
signs=$'[][ \t\n\\\'"`$&;|<>(){}*?]'
environments=.venv
if [[ $PWD =~ $signs ]]; then
  [ -n "${XDG_CACHE_HOME:-${HOME:-}}" ] || die "Ray starts no worker with a Python in a path like $PWD, and there is no HOME." \
    "Set HOME or XDG_CACHE_HOME to a folder whose path has no space, quote or other sign of the shell, and start again"
  cache=${XDG_CACHE_HOME:-$HOME/.cache}/verl-gdpo/$(sha256sum <<<"$PWD" | cut -c 1-12)
  [[ ! $cache =~ $signs ]] || die "Ray starts no worker with a Python in a path like $PWD or $cache." \
    "Set XDG_CACHE_HOME to a folder whose path has no space, quote or other sign of the shell, and start again"
  mkdir -p "$cache"
  environments=$cache/.venv
fi

# Ends the script if the environment $1 has what the user asks for.
done_with() {
  local folder have
  folder=$(readlink -f "$1") && have=$(cat "$folder/$stamp" 2>/dev/null) || return 0
  [[ ! $folder =~ $signs ]] || return 0 # of an earlier version of this script
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

touch .venv.lock 2>/dev/null ||
  die "cannot write to $PWD, where environments are made: copy it to a folder of your own (cp -r), and start there"
exec 9>.venv.lock
flock --nonblock 9 || { say "another start is making an environment; waiting for it"; flock 9; }
done_with .venv

if [ -d .venv ] && [ ! -L .venv ]; then # not made by this version of the script
  ! grep -qsF "$PWD/.venv/" /proc/[0-9]*/maps || die "$PWD/.venv is not a link and in use; end what runs from it"
  kept=$(mktemp -d ".venv.$(date +%Y-%m-%d_%H-%M-%S)-XXX") # the same second may occur twice
  mv -T .venv "$kept"
  say ".venv was a folder, and becomes a link; the folder is $kept now"
fi
for made in "$environments"-*; do done_with "$made"; done

venv=$environments-$hardware-$(sha256sum <<<"$wanted" | cut -c 1-12)
whole=$(readlink -m "$venv")
log=$whole/install.log
count=$(cat "${files[@]}" | grep -c ==)
say "making $venv for [$extras] with $("$python" --version): some $count packages, minutes, once; pip's output is in $log"
rm -rf "$venv" # an interrupted start may have left an incomplete one
mkdir -p "$venv/tmp"
export TMPDIR=$whole/tmp # what pip unpacks, gigabytes, goes with the environment if this is killed
"$python" -m venv "$venv" >"$log" 2>&1 ||
  die "'$python -m venv' failed: on Debian or Ubuntu, install python3-venv; $log says more"

# Keeps pip's output in the log, and shows how far it is.
progress() {
  local line packages=0
  while IFS= read -r line || [ -n "$line" ]; do
    echo "$line" >>"$log"
    case $line in
      Collecting\ * | Processing\ *) [ $((++packages % 50)) != 0 ] || say "fetched $packages packages" ;;
      'Installing collected'*) [ "$packages" -lt 50 ] || say "installing $packages packages" ;;
    esac
  done
}
failed() {
  if grep -qE 'NewConnectionError|ConnectTimeout|NameResolutionError|ProxyError' "$log"; then
    die "pip does not reach a package index; set PIP_INDEX_URL or HTTPS_PROXY, or PIP_NO_INDEX=1 with" \
      "PIP_FIND_LINKS=FOLDER_OF_WHEELS, and start again; $log says more"
  fi
  tail -n 15 "$log" >&2
  die "pip failed; all of its output is in $log"
}
pip() { "$venv/bin/python" -m pip "$@" --disable-pip-version-check 2>&1 | progress || failed; }
install() { pip install --progress-bar off --no-compile "$@"; } # pip would compile 300 MB of Python on one core
# also for those whose Python writes no bytecode itself; a package may hold files of another Python. What is left out
# is a third of all, and nothing here imports much of it
compile() {
  local without='/tests/|/transformers/models/|/torch/testing/|/ray/(data|llm|rllib|serve|train|tune)/'
  "$venv/bin/python" -m compileall -qq -j 0 -x "$without" "$venv/lib" >>"$log" 2>&1 || true
}

# what installs, and what builds the few packages without a wheel, and this one, has a hash too
sed -nE '/^(pip|setuptools)==/,/[^\\]$/p' "${files[0]}" >"$venv/build.txt"
# few tries, so that a missing network is noticed soon
install --retries 1 --require-hashes --no-deps --requirement "$venv/build.txt"
torch=()
if [ "$hardware" = cpu ]; then
  # PyPI's torch brings gigabytes of CUDA; PyTorch's own index has a build without CUDA
  index=https://download.pytorch.org/whl/cpu torch=(torch==2.13.0)
  if "$venv/bin/python" -c "import urllib.request as u; u.urlopen('$index/torch/', timeout=5)" 2>/dev/null; then
    torch+=(--extra-index-url "$index")
  else
    say "$index is out of reach; torch comes from the default index"
  fi
  # beside the others, so that two cores work; it ends with this script
  "$venv/bin/python" -m pip install --progress-bar off --no-compile --no-deps "${torch[@]}" >"$log.torch" 2>&1 &
  job=$!
  trap 'kill "$job" 2>/dev/null || true' EXIT
fi
install --require-hashes --no-deps --no-build-isolation "${files[@]/#/--requirement=}"
if [ "$hardware" = cpu ]; then
  code=0
  wait "$job" || code=$?
  trap - EXIT
  cat "$log.torch" >>"$log"
  [ "$code" = 0 ] || failed
fi
if [ -n "$flash_attn" ]; then # built by verl's makers for CUDA 13 and torch 2.11
  install --extra-index-url https://verl-project.github.io/verl-wheelhouse/simple/ --only-binary flash-attn flash-attn==2.8.3
fi
compile & # it holds the lock, so no other start removes what it reads
[ "$hardware" = gpu ] || install "${torch[@]}" # what PyPI's needs beside the packages that are here
install --no-deps --no-build-isolation --editable .
# vLLM asks for torch under another name, and for packages of pictures and sound
[ -n "$vllm" ] || pip check
wait
for other in "$environments-$hardware"-*; do
  [ "$other" = "$venv" ] || say "$other stays: remove it if nothing needs it any more"
done
rm -rf "$TMPDIR"
echo "$wanted" >"$venv/$stamp"
done_with "$venv"
