#!/usr/bin/env bash
# Trains on ToolRL's tool-calling rewards from a bare machine: environment, data, policy, training.
#
#   ./run_tool_rl.sh [--resume [RUN_FOLDER]] [--time-limit SECONDS] [key=value ...]
#
# Chooses recipes/hardware/{8gpu,1gpu,cpu} by what it finds; `hardware=...` says otherwise.
# `key=value` are Hydra overrides for verl, such as estimator=grpo or trainer.total_training_steps=5.
# Every number is in recipes/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

say() { echo "== $*"; }

# Each stage runs in a session of its own, so that a signal to this script can end all of it.
child=''
stage() {
  setsid "$@" &
  child=$!
  wait "$child"
  child=''
}
stop() {
  trap '' INT TERM HUP
  if [ -n "$child" ]; then
    kill -TERM -- "-$child" 2>/dev/null || true
    wait "$child" || true
  fi
  exit "$1"
}
trap 'stop 130' INT
trap 'stop 143' TERM
trap 'stop 129' HUP

resume='' limit=() overrides=() hardware=''
while [ $# -gt 0 ]; do
  case $1 in
    --resume)
      resume=latest
      if [ $# -gt 1 ] && [[ $2 != *=* && $2 != --* ]]; then resume=$2; shift; fi
      ;;
    --time-limit) limit=(--time-limit "${2:?--time-limit needs seconds}"); shift ;;
    -h | --help) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 0 ;;
    hardware=*) hardware=${1#hardware=} ;;
    *=*) overrides+=("$1") ;;
    *) echo "run_tool_rl.sh: expected key=value, --resume or --time-limit, got '$1'" >&2; exit 2 ;;
  esac
  shift
done

if [ -z "$hardware" ]; then
  gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)
  if [ "$gpus" -ge 8 ]; then hardware=8gpu; elif [ "$gpus" -ge 1 ]; then hardware=1gpu; else hardware=cpu; fi
  say "found ${gpus} GPUs: hardware=$hardware"
fi
if [ ! -f "recipes/hardware/$hardware.yaml" ]; then
  echo "run_tool_rl.sh: no recipes/hardware/$hardware.yaml" >&2
  exit 2
fi

case $resume in
  '') run=runs/tool_rl-$(date +%Y-%m-%d_%H-%M-%S) ;;
  latest) run=$(find runs -maxdepth 1 -name 'tool_rl-*' 2>/dev/null | sort | tail -n 1 || true) ;;
  *) run=${resume%/} ;;
esac
if [ -n "$resume" ] && [ ! -f "$run/checkpoints/latest_checkpointed_iteration.txt" ]; then
  echo "run_tool_rl.sh: nothing to resume in '${run:-runs}': no checkpoint was finished" >&2
  exit 2
fi

if [ "$hardware" = cpu ]; then
  stage ./setup_env.sh cpu
  # verl reads it while Python starts, so no recipe can say it
  export VERL_PLATFORM=cpu
  # one thread a process: verl starts nine
  export OMP_NUM_THREADS=1
else
  stage ./setup_env.sh gpu
fi
# no usage report to the makers of Ray
export RAY_USAGE_STATS_ENABLED=0
python=$PWD/.venv/bin/python

overridden() { [[ " ${overrides[*]} " == *" $1="* ]]; }
if ! overridden data.train_files; then
  if [ "$hardware" = cpu ]; then source=(--synthetic --size tiny --out data/tool_rl_tiny); else source=(--out data/tool_rl); fi
  if [ ! -f "${source[-1]}/train.parquet" ]; then
    say "preparing the data"
    stage "$python" -m data_prep tool_rl "${source[@]}"
  fi
fi
if [ "$hardware" = cpu ] && ! overridden actor_rollout_ref.model.path; then
  say "the tiny policy: a short supervised training, cached"
  stage "$python" -m verl_gdpo.cpu.warm_start --out data/tiny_policy
fi

say "checking the configuration"
config=(task=tool_rl "hardware=$hardware" "run_dir=$run" "hydra.run.dir=$run/hydra" "${overrides[@]}")
stage "$python" -W ignore -m verl_gdpo check "${config[@]}"

say "training; verl needs a minute or two to start. Everything it prints: $run/train.log"
stage "$python" -m verl_gdpo.launch --run-dir "$run" "${limit[@]}" -- \
  "$python" -m verl.trainer.main_ppo --config-dir recipes --config-name train "${config[@]}"
stage "$python" -m verl_gdpo summary "$run"
