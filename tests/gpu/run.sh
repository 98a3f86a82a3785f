#!/usr/bin/env bash
# Every check that needs a CUDA device, in one call: tests/gpu/run.sh [words in the names of the checks to run]
# PYTHON=/path/to/python picks another interpreter. Neither autoddp nor all that it needs have to be installed in it: what
# is missing comes from tests/gpu/wheels (tests/gpu/wheels.sh fills that folder). Nothing is installed into it either.
# The table at the end is also written as JSON into the folder $OUT, if that is set.
set -eu
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
"$PYTHON" tests/gpu/carried.py "$site"
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}"
"$PYTHON" tests/gpu/run_checks.py "$@"
