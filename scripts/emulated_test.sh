#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs tests of the CUDA backend on the emulated GPU, two programs at a time.
#   emulated_test.sh BUILD   a build with the preset emulated
# The tests are those of short_gpu_tests.txt, see gpu_sanitize.sh, and of emulated_tests.txt, which are
# quick on it; the fuzzer runs for a while. Those of short_gpu_tests.txt run once more on a GPU of Ada's,
# which has other code and less shared memory; those of rows that are too wide for it on Blackwell's. WINNOW_EMULATOR_SEED chooses the order in which warps
# and copies take turns. The last line counts the tests; the exit code is 0 only if none failed.
set -euo pipefail
build=$1
lists=$(dirname "$0")
seconds=900 # of one program
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

run() {  # GPU PROGRAM FILTER
  local log=$logs/$1.$2 arguments=(--gtest_filter="$3")
  [[ $2 == fuzz ]] && arguments=(--backend cuda --seconds 30)
  if ! WINNOW_EMULATOR_GPU=$1 timeout "$seconds" "$build/$2" "${arguments[@]}" >"$log" 2>&1; then
    echo failed >"$log.failed"
    tail -n 40 "$log"
  fi
  echo "$1 $2: $(grep -cE '^\[ +OK \]' "$log" || true) tests passed"
}

while read -r gpu program filter; do
  run "$gpu" "$program" "$filter" &
  while [[ $(jobs -rp | wc -l) -ge 2 ]]; do wait -n; done
done < <(sed 's/^/sm_90 /' "$lists"/short_gpu_tests.txt "$lists"/emulated_tests.txt
  sed 's/^/sm_89 /' "$lists"/short_gpu_tests.txt
  echo 'sm_120 harness_test */cuda_sparse_attention_*widest_rows')
wait
count() { cat "$logs"/*_test "$logs"/*.fuzz | grep -cE "^\[ +($1) \] .* ms\)$" || true; }
failed=$(find "$logs" -name '*.failed' | wc -l)
echo "$(count OK) passed, $failed failed, $(count SKIPPED) skipped"
[[ $failed == 0 && $(count OK) -gt 0 ]]
