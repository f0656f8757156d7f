#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs what gpu_bundle.sh packed on this machine's GPU. It stands in the bundle as run.sh.
#   run.sh                 the tests, then the benchmark
#   run.sh tests           the C++ tests, then the Python ones where there are torch and pytest
#   run.sh COMMAND ...     a command of the tool: info, check, bench, with its options
set -euo pipefail
cd "$(dirname "$0")"

# cuBLAS measures what the device can do, NCCL connects ranks. Where the loader does not know them,
# torch's packages do.
libraries() {
  python3 - <<'PYTHON' 2>/dev/null || true
import importlib.util, pathlib
for root in importlib.util.find_spec("nvidia").submodule_search_locations:
    for name in "libcublas.so.1[23]", "libnccl.so.2":
        for library in pathlib.Path(root).glob(f"*/lib/{name}"):
            print(library.parent)
PYTHON
}
LD_LIBRARY_PATH=$PWD:$(libraries | paste -sd:):${LD_LIBRARY_PATH:-}
export LD_LIBRARY_PATH
export WINNOW_LIBRARY=$PWD/libwinnow.so PYTHONPATH=$PWD/python

tests() {
  local failed=0 test
  for test in ./*_test; do
    "$test" --gtest_brief=1 || { failed=1; echo "FAILED: $test"; }
  done
  if python3 -c 'import torch, pytest, hypothesis' 2>/dev/null; then
    python3 -m pytest -q python/tests || failed=1
  else
    echo "no torch, pytest and hypothesis here: the Python tests are left out"
  fi
  return $failed
}

case "${1:-all}" in
  all)
    ./winnow info
    status=0
    tests || status=1
    ./winnow bench --backend cuda
    exit $status
    ;;
  tests) ./winnow info; tests ;;
  *) ./winnow "$@" ;;
esac
