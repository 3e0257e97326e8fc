#!/bin/sh
# What the CUDA path does on one GPU: its tests, then what saving a billion parameters costs. Under eight minutes.
#   benchmarks/gpu.sh [directory on the disk to be measured]
# Needs torch with CUDA, this package's dependencies with pytest and safetensors, 40 GB of GPU memory, 48 GB of memory,
# 40 GB of disk.
cd "$(dirname "$0")/.." || exit 2
PYTHON=${PYTHON:-python3}
export PYTHONPATH="$PWD/src:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
$PYTHON -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo "no CUDA device" >&2; exit 2; }
timeout 120 "$PYTHON" -m pytest -m gpu tests/gpu
tested=$?
timeout 340 "$PYTHON" benchmarks/gpu.py --dir "${1:-.}" || exit 1
exit $tested
