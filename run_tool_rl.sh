#!/usr/bin/env bash
# Trains on ToolRL's tool-calling rewards: `./run.sh tool_rl`, whose --help says more.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # as in `sh run_tool_rl.sh`, where sh is dash
set -euo pipefail
exec "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/run.sh" tool_rl "$@"
