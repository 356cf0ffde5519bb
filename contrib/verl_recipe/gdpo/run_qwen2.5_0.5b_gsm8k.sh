#!/usr/bin/env bash
# GDPO on GSM8K with two rewards. Arguments override any key, as in: trainer.n_gpus_per_node=8
set -euo pipefail
RECIPE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export RECIPE
verl-gdpo check --config-dir "$RECIPE/config" --config-name gdpo_trainer "$@"
python3 -m verl.trainer.main_ppo --config-dir "$RECIPE/config" --config-name gdpo_trainer "$@"
