#!/usr/bin/env bash
# One machine: 8 ranks, started again after a fault, at most RESTARTS times in a row without a new checkpoint.
# Arguments are configuration overrides, e.g. --train.steps 100.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec megafp8 pretrain examples/mixtral_8x7b/pretrain.toml --nproc "${NPROC:-8}" --restarts "${RESTARTS:-3}" "$@"
