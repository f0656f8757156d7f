#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs what gpu_bundle.sh packed on this machine's GPU. It stands in the bundle as run.sh.
#   run.sh                 the tests, then the benchmark
#   run.sh tests           the C++ tests, then the Python ones where there are torch and pytest
#   run.sh sanitize        short tests under each tool of compute-sanitizer
#   run.sh fuzz ...        random calls on the GPU, with the options of the fuzzer
#   run.sh tables FILE     every command behind the tables of docs/performance.md, to FILE as JSON
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
# The machine's own MPI goes with its mpirun; where it has none, the bundle's lets the tool load.
if ldd winnow | grep -q 'libmpi\.so.* not found'; then
  LD_LIBRARY_PATH=$LD_LIBRARY_PATH:$PWD/mpi
fi
export WINNOW_LIBRARY PYTHONPATH=$PWD/python
WINNOW_LIBRARY=$(ls "$PWD"/libwinnow.so.*)

tests() {
  local count=0 failed=() test
  for test in ./*_test; do
    count=$((count + 1))
    "$test" --gtest_brief=1 || failed+=("$test")
  done
  for test in forward training_step gpu; do  # the examples
    count=$((count + 1))
    "./$test" || failed+=("$test")
  done
  if python3 -c 'import torch, pytest, hypothesis' 2>/dev/null; then
    count=$((count + 1))
    python3 -m pytest -q python/tests || failed+=(python/tests)
  else
    echo "no torch, pytest and hypothesis here: the Python tests are left out"
  fi
  echo "$count test programs, ${#failed[@]} failed: ${failed[*]:-none}"
  ((${#failed[@]} == 0))
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
  sanitize) ./sanitize.sh . ;;
  fuzz) ./fuzz --backend cuda "${@:2}" ;;
  tables) python3 python/benchmarks/performance_tables.py measure "${2:?a file for the figures}" --winnow ./winnow ;;
  *) ./winnow "$@" ;;
esac
