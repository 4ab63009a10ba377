#!/usr/bin/env bash
# One machine: torchrun starts 8 ranks. Arguments are configuration overrides, e.g. --train.steps 100.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec torchrun --standalone --nproc-per-node "${NPROC:-8}" -m megafp8 pretrain examples/llama3_70b/pretrain.toml "$@"
