#!/usr/bin/env bash
# Every check that needs a CUDA device, in one call: tests/gpu/run.sh [pytest's arguments]
# PYTHON=/path/to/python picks another interpreter; autoddp need not be installed in it.
set -eu
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

"$PYTHON" - <<'SHOW'
import torch

print(f"torch {torch.__version__}  CUDA {torch.version.cuda}", end="")
if torch.cuda.is_available():
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    print(f"  NCCL {nccl}  {torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
else:
    raise SystemExit("  no CUDA device here: nothing to check")
SHOW
exec "$PYTHON" -m pytest -m gpu tests -q -s "$@"
