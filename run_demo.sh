#!/usr/bin/env bash
# Trains a tiny policy with GRPO and with GDPO, side by side on two cores, without a GPU and a network, and
# shows what both earn of a format (0 or 1) and of a judge (0 to 100).
#
#   ./run_demo.sh [setting=bonus | --model] [arms=grpo,gdpo,grpo_divided] [seed=N] [run_dir=FOLDER] [--time-limit SECONDS] [key=value ...]
#
# `grpo_divided` is GRPO on judge / 100. The settings bonus, length and noise have rewards that GDPO harms, and an
# arm `gdpo_kept`, whose weights undo it. With --model, a real model of 135 M parameters is trained instead, for half
# an hour: actor_rollout_ref.model.path=FOLDER names one that is not downloaded. Other arguments go to ./run.sh, which trains each arm, such as
# trainer.total_training_steps=60. docs/when_gdpo_helps.md says what to expect.
set -euo pipefail
root=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
case ${1:-} in -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;; esac
environment=$("$root/setup_env.sh" cpu)
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$environment/bin/python" -m examples.demonstration "$@"
