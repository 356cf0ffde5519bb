#!/usr/bin/env bash
# Trains on ToolRL's tool-calling rewards: `./run.sh tool_rl`, whose --help says more.
set -euo pipefail
exec "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/run.sh" tool_rl "$@"
