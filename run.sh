#!/usr/bin/env bash
# Makes environment, data and policy on a bare machine, and trains on a task of recipes/task/.
#
#   ./run.sh TASK [--resume [RUN_FOLDER]] [--allow-change KEY] [--time-limit SECONDS]
#            [--allow-flat] [--seconds SECONDS] [key=value ...]
#
# ./run_tool_rl.sh is ./run.sh tool_rl. The script chooses recipes/hardware/, and the keys of memory, by the GPUs that it finds and
# that CUDA_VISIBLE_DEVICES allows; `hardware=...` overrides this choice.
# Where it cannot tell what a GPU is, it stops, and with `hardware=...` it goes on. `key=value` are Hydra overrides
# for verl, such as estimator=grpo or trainer.total_training_steps=5. With hydra.searchpath=[FOLDER],
# TASK may be one of FOLDER/task/: docs/adding_a_task.md. `run_dir=FOLDER` is a new
# folder for everything that the run writes. Paths are relative to the current folder.
# --resume goes on from a run's last checkpoint, with the configuration that it was started with and
# the given overrides. docs/failures.md says what may change, and what needs --allow-change.
# --allow-flat and --seconds are those of `verl-gdpo check`, which runs meanwhile: docs/check.md.
# Every number is in recipes/.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # as in `sh run.sh`, where sh is dash
set -euo pipefail

say() { echo "== $*"; }
die() { echo "run.sh: $*" >&2; exit 2; }

[ "$(uname -s)" = Linux ] || die "verl needs Linux, or WSL2 on Windows; this is $(uname -s)"
root=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")

# Each stage runs in its own session, so that a signal to this script can end all its processes. If this script
# gets SIGKILL, what reads the other end of its pipe ends them.
child=''
# shellcheck disable=SC2016 # the other bash expands it
exec {alive}> >(exec setsid bash -c '
  while read -r line; do child=$line; done
  [ -z "$child" ] || kill -TERM -- "-$child"' 2>/dev/null)
stage() {
  setsid "$@" {alive}>&- &
  child=$!
  echo "$child" >&"$alive"
  wait "$child"
  child=''
  echo >&"$alive"
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

case ${1:-} in
  -h | --help | '') task='' ;;
  *)
    task=$1; shift
    # the recipe of a task of another distribution is found through hydra.searchpath
    [ -f "$root/recipes/task/$task.yaml" ] || [[ " $* " == *' hydra.searchpath='* || " $* " == *' --resume '* ]] || die "expected a task first, one of: $(cd "$root/recipes/task" && echo *.yaml | sed 's/\.yaml//g'), or another with hydra.searchpath=[FOLDER], where task/$task.yaml is; got '$task'"
    ;;
esac
# quotes a value for Hydra, so that `,`, `=` and other signs have no meaning
quoted() { local quote="'"; echo "'${1//$quote/\\$quote}'"; }
resume='' run='' data=$root/data hardware='' count='' active='' allowed=() extras=() options=(--end-with-parent) overrides=("task=$task")
while [ $# -gt 0 ]; do
  case $1 in
    --resume)
      resume=yes
      if [ -d "${2:-}" ] || [[ ${2:-=} != *=* && $2 != --* ]]; then run=$2; shift; fi
      ;;
    --allow-change) allowed+=("${2:?--allow-change needs a key}"); shift ;;
    --allow-flat) options+=(--check-option=--allow-flat) ;;
    --seconds) options+=("--check-option=--seconds=${2:?--seconds needs a number}"); shift ;;
    --time-limit) options+=(--time-limit "${2:?--time-limit needs seconds}"); shift ;;
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    hardware=*) hardware=${1#hardware=} ;;
    trainer.n_gpus_per_node=* | +trainer.n_gpus_per_node=* | ++trainer.n_gpus_per_node=*)
      count=${1#*=} overrides+=("$1")
      ;;
    run_dir=*) run=${1#run_dir=} ;;
    data_dir=*) data=$(realpath -m -- "${1#data_dir=}"); overrides+=("data_dir=$(quoted "$data")") ;;
    [!-]*=* | '~'*) overrides+=("$1") ;;
    *) die "expected key=value, --resume, --allow-change or --time-limit, got '$1'" ;;
  esac
  shift
done
[ -n "$task" ] || die "expected a task first: ./run.sh TASK ... (--help says more)"

# Prints what the last override of $1 says; fails if there is none.
given() {
  local override value='' code=1
  for override in "${overrides[@]}"; do
    case $override in "$1="* | "+$1="* | "++$1="*) value=${override#*=} code=0 ;; esac
  done
  echo "$value"
  return "$code"
}
overridden() { given "$1" >/dev/null; }

# The manifest of the start that trained up to the checkpoint of $run, or nothing if it is not recorded; fails without a checkpoint.
# Any Python will do, also that of an environment that was made before.
trained_up_to() { PATH=$PATH:$root/.venv/bin python3 "$root/verl_gdpo/tools/run/checkpoints.py" "${run:-runs}"; }

# Stops if a launcher holds the folder. It locks this file until it ends.
refuse_a_living_run() {
  [ -e "$1/lock" ] || return 0
  local code=0
  flock --nonblock -E 75 "$1/lock" true 2>/dev/null || code=$?
  [ "$code" != 75 ] ||
    die "run_dir=$1 is in use by process $(cat "$1/lock"), which is alive: wait for it, end it, or choose another folder"
}

manifest=''
if [ -n "$resume" ]; then
  run=${run:-$(find "$root/runs" -maxdepth 1 -name "$task-*" 2>/dev/null | sort | tail -n 1 || true)}
  refuse_a_living_run "$run"
  manifest=$(trained_up_to) || die "to start anew, without --resume: $(printf '%q ' "$root/run.sh" "${overrides[@]#task=}")"
  if [ -n "$manifest" ]; then
    was=$(sed -n '/^recipes:/,/^[^ ]/s/^  hardware: //p' "$manifest")
    hardware=${hardware:-$was}
    case $hardware in
      cpu) ! grep -qx '  rollout_engine: vllm_cpu' "$manifest" || extras=(vllm) ;;
      *) ! grep -qx '  attention: flash_attn' "$manifest" || extras=(flash-attn) ;;
    esac
  else
    say "no start is recorded that trained up to the checkpoint of $run: it goes on with the configuration of this command"
  fi
elif [ -n "$(ls -A -- "$run" 2>/dev/null)" ]; then
  refuse_a_living_run "$run"
  trained_up_to >/dev/null || die "run_dir=$run is not empty; choose another, or start anew in it after: rm -r $(printf '%q' "$run")"
  die "run_dir=$run is not empty; choose another, or go on with it: --resume $run"
fi

# setup_env.sh prints the environment's folder into it, which later starts do not change. Made before Ray's folders are looked at, as they
# may lie in the same TMPDIR
answer=$(mktemp 2>/dev/null) ||
  die "cannot make a file in TMPDIR=${TMPDIR:-/tmp}; expected a folder that can be written to: make it with mkdir -p, or unset TMPDIR"
exec {scratch}<>"$answer" # has no name from here on, so that nothing can leave it behind
rm "$answer"
answer=/dev/fd/$scratch

# before anything is installed; the configuration of an earlier start may say other folders
if [ -z "$manifest" ]; then
  denied=0
  PATH=$PATH:$root/.venv/bin python3 "$root/verl_gdpo/tools/run/ray_folders.py" "${overrides[@]}" || denied=$?
  [ "$denied" != 3 ] || exit 2 # another code is of a Python that is missing or old
fi

[ -z "$hardware" ] || [ -f "$root/recipes/hardware/$hardware.yaml" ] || die "no recipes/hardware/$hardware.yaml"
if [ "$hardware" != cpu ]; then
  case " ${overrides[*]} " in *' attention=flash_attn '*) extras=(flash-attn) ;; esac
  [ "$hardware" != 1gpu ] || count=1
  # the Python of the environment that will be made, or of an image that has verl
  if active=$(python3 -c '
import importlib.metadata as m, sys
print(sys.executable, ", ".join(f"{name} {m.version(name)}" for name in ("verl", "vllm", "verl-gdpo")), sep="\n")' 2>/dev/null); then
    python=${active%%$'\n'*}
    say "using $python as it is: ${active#*$'\n'}"
  else
    python=$("$root/setup_env.sh" python gpu "${extras[@]}") || exit 2
  fi
  # before anything is installed or downloaded; who names the hardware goes on with what the recipe has
  fitting=$("$python" "$root/verl_gdpo/tools/run/gpus.py" "$task" "$count" "${overrides[@]}" ${manifest:+--resume}) || [ -n "$hardware" ] ||
    die "to go on all the same, give hardware=1gpu or hardware=8gpu, and the keys of memory that recipes/README.md names"
  [ "$fitting" != hardware=cpu ] || [ -z "$hardware" ] || die "hardware=$hardware, but there is no GPU here"
  for choice in $fitting; do
    case $choice in
      hardware=*) hardware=${hardware:-${choice#hardware=}} ;;
      *) [ -n "$manifest" ] || overridden "${choice%%=*}" || overrides+=("$choice") ;;
    esac
  done
  say "hardware=$hardware"
fi

if [ "$hardware" = cpu ]; then
  case " ${overrides[*]} " in *' rollout_engine=vllm_cpu '*) extras=(vllm) ;; esac
  stage "$root/setup_env.sh" cpu "${extras[@]}" >"$answer"
  # verl reads it while Python starts, so no recipe can set it
  export VERL_PLATFORM=cpu
  # one thread per process, because verl starts nine processes; some recipes give those of Ray more
  export OMP_NUM_THREADS=1
elif [ -z "$active" ]; then
  stage "$root/setup_env.sh" gpu "${extras[@]}" >"$answer"
fi
[ ! -s "$answer" ] || python=$(cat "$answer")/bin/python
# Ray sends no usage report to its makers
export RAY_USAGE_STATS_ENABLED=0

# the model of the command, or else of the recipe
if ! model=$(given actor_rollout_ref.model.path); then
  recipe=$root/recipes/task/$task.yaml
  [ "$hardware" != cpu ] || recipe=$root/recipes/task_on_hardware/$task-cpu.yaml
  [ ! -f "$recipe" ] || model=$(sed -n 's/^    path: //p' "$recipe")
fi
is_of_hub='' # and has to be downloaded; a resume has it
[[ -n $manifest || -d $model || ! $model =~ ^[[:alnum:]._-]+/[[:alnum:]._-]+$ ]] || is_of_hub=yes
policy=''
if [ "$hardware" = cpu ] && [ -z "$manifest" ] && ! overridden actor_rollout_ref.model.path; then
  if [ "$task" = tool_rl ]; then # the package has this policy
    overrides+=("actor_rollout_ref.model.path=$(quoted "$root/verl_gdpo/cpu/tool_rl_policy")") is_of_hub=''
  elif [ -z "$is_of_hub" ]; then
    policy=$data/${task}_policy
  fi
fi
# a policy is made of the rows, also for a user who trains it on others
if [ -n "$policy" ] || { [ -z "$manifest" ] && { ! overridden data.train_files || ! overridden data.val_files; }; }; then
  say "the data: made once, and again when what makes it changes"
  source=(--out "$data/$task")
  [ "$hardware" != cpu ] || source=(--synthetic --out "$data/${task}_tiny")
  stage env -C "$root" "$python" -m data_prep "$task" --if-needed --keep-others "${source[@]}"
fi
if [ -n "$policy" ]; then
  say "the tiny policy: a short supervised training, cached"
  stage env -C "$root" "$python" -m workshop.tiny_policy --data "$data/${task}_tiny/train.parquet" --out "$policy"
fi

[ ${#allowed[@]} -eq 0 ] || overrides+=("++allow_change=[$(IFS=,; echo "${allowed[*]}")]")
if [ -n "$manifest" ]; then
  stage "$python" -m verl_gdpo.tools.run.resume "$run" "hardware=$hardware" "${overrides[@]}" >"$answer"
  mapfile -d '' -t config <"$answer"
else
  config=(--config-dir "$root/recipes" --config-name train "hardware=$hardware" "data_dir=$(quoted "$data")" "${overrides[@]}")
fi
# before GPUs are held, and so that `check` finds its tokenizer
if [ -n "$is_of_hub" ]; then
  say "the model $model, downloaded once; without a network: actor_rollout_ref.model.path=FOLDER"
  weights=() # once, as safetensors; no other framework's
  for kind in json safetensors txt model jinja py; do weights+=(--include "*.$kind"); done
  stage "$python" -m huggingface_hub.cli.hf download "$model" "${weights[@]}"
fi
if [ -z "$run" ]; then
  mkdir -p "$root/runs"
  first=$root/runs/$task-$(date +%Y-%m-%d_%H-%M-%S)
  # another start may have made the folder in the same second
  for run in "$first" "$first"-{2..9}; do mkdir "$run" 2>/dev/null && break; done
fi
run=$(realpath -m -- "$run")
say "training; verl needs a minute or two to start. Everything it prints: $run/train.log"
say "checking the configuration meanwhile; a problem ends the run"
[ -n "$manifest" ] || config+=("run_dir=$(quoted "$run")")
options+=(--go-on "$(printf '%q ' "$root/run.sh" "$task" --resume "$run")")
stage "$python" -m verl_gdpo run --check "${options[@]}" --run-dir "$run" -- \
  "$python" -m verl.trainer.main_ppo "${config[@]}"
# the launcher has said where the folder is, if somebody has moved it
[ ! -d "$run" ] || stage "$python" -m verl_gdpo summary "$run"
