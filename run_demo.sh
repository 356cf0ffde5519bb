#!/usr/bin/env bash
# Trains a tiny policy with GRPO and with GDPO, side by side on two cores, without a GPU and a network, and
# shows what both learn of a format (0 or 1) and of a judge (0 to 100). docs/evidence.md says what to expect.
#
#   ./run_demo.sh [setting=bonus | --model [prompts=N]] [arms=grpo,gdpo,grpo_by_range] [seed=N] [run_dir=FOLDER] [--time-limit SECONDS] [key=value ...]
#
# `grpo_by_range` is GRPO on judge / 100. The settings bonus, length and noise have small rewards that GDPO is meant to
# raise too much, and an arm `gdpo_kept`, whose weights undo it. Other arguments go to ./run.sh, which trains each arm,
# such as trainer.total_training_steps=60.
#
# --model trains a real model of 135 million parameters on sentences, one arm after the other: the asked number of words
# (0 to 100), and two words that are used (0 to 1). Its `grpo_by_range` is GRPO on length / 100. prompts=N draws other
# prompts. It downloads the model, or takes actor_rollout_ref.model.path=FOLDER. docs/without_a_gpu.md has its times.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # as in `sh run_demo.sh`, where sh is dash
set -euo pipefail
root=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
case ${1:-} in -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;; esac
environment=$("$root/setup_env.sh" cpu)
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$environment/bin/python" -m examples.demonstration "$@"
