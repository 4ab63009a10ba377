#!/usr/bin/env bash
# What this machine's FP8 is worth, in under 10 minutes and without a network:
#
#   bash tests/gpu/run.sh [--out DIR] [--budget SECONDS] [--only PART ...] [--tiny]
#
# Correctness of every recipe on the backends that this machine has (native; te where Transformer Engine imports)
# against the emulated definition, the speed of one linear, then BF16 and FP8 training of the 1.5B model of
# examples/fp8_vs_bf16 on made-up tokens. Figures go to DIR/gpu.json (default: runs/gpu). Exit 0: every check passed; 1: one
# failed; 2: nothing could run. Without a GPU it is a dry run at tiny size, and says so.
#
# PYTHON=/path/to/python names the interpreter; else the first one found that has torch, best with CUDA.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

rate() { # 2: torch with CUDA, 1: torch, 0: neither
    "$1" -c 'import torch; print(2 if torch.cuda.is_available() else 1)' 2>/dev/null | tail -n 1
}

chosen=""
if [ -n "${PYTHON:-}" ]; then
    chosen=$PYTHON
else
    best=0
    for candidate in "${VIRTUAL_ENV:-/nonexistent}/bin/python" .venv/bin/python python3 python; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        found=$(rate "$candidate") || found=0
        if [ "${found:-0}" -gt "$best" ]; then
            best=$found chosen=$candidate
        fi
        [ "$best" -eq 2 ] && break
    done
fi
if [ -z "$chosen" ]; then
    echo "tests/gpu/run.sh: no Python with torch was found; name one: PYTHON=/path/to/python bash tests/gpu/run.sh" >&2
    exit 2
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
exec "$chosen" tests/gpu/launch.py tests.gpu.main "$@"
