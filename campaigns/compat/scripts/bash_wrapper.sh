#!/bin/bash
# The wrapper of bash_wrapper.py: modules and variables first, then Python, as in many clusters' job scripts.
set -euo pipefail
export MODEL_WIDTH=160
echo "rank $RANK of $WORLD_SIZE begins on $(hostname)" >> "started-$RANK.log"
python -u "$(dirname "$0")/bash_wrapper.py" "$@"
echo "rank $RANK has ended" >> "started-$RANK.log"
