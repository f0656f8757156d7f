#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a short list of tests on this machine's GPU under each tool of compute-sanitizer.
#   gpu_sanitize.sh [FOLDER]   where the tests are: a build with CUDA. Default: beside this script,
#                              as gpu_bundle.sh packs it
# Prints one line a tool, and the end of the log of each program that failed. Exits with 1 if a tool
# found an error, a test failed, or a program ran no test.
set -euo pipefail
folder=${1:-$(dirname "$0")}
# A program and its filter a line. Together they launch every kernel of src/cuda, at sizes that take
# seconds where the tools slow them down a hundredfold: every op by the general kernels of all types,
# then the shapes that have kernels of their own. Left out is the kernel of remaining_chunks.cu, whose
# test passes under memcheck, but did not end in time under racecheck.
list=$(dirname "$0")/short_gpu_tests.txt
seconds=180 # of one program under one tool; a hang ends as a failure
PATH=$PATH:/usr/local/cuda/bin
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

if ! command -v compute-sanitizer >/dev/null; then
  echo "compute-sanitizer is not here; it comes with the CUDA toolkit" >&2
  exit 1
fi

# Tests of such an outcome, OK or SKIPPED. Those of Hopper's instructions skip on other GPUs.
count() { cat "${@:2}" | grep -cE "^\[ +($1) \]" || true; }

# Under one tool all programs run beside each other, so that their starts do not add up.
sanitize() {
  local tool=$1 start=$SECONDS failed="" program filter log
  local -A jobs=()
  while read -r program filter; do
    # racecheck does not follow barriers at which one side only arrives, which hopper_barrier_test
    # tests. Under it a launch of a persistent kernel takes a second and more, the tests of
    # sparse_attention many minutes; harness_test has the same kernels at small sizes.
    [[ $tool == racecheck && $program =~ ^(hopper_barrier|sparse_attention.*)_test$ ]] && continue
    # initcheck does not see what TMA writes, as the parts of d_w.
    [[ $tool == initcheck && $program == value_projection_test ]] && continue
    timeout "$seconds" compute-sanitizer --tool "$tool" --error-exitcode 1 \
      "$folder/$program" --gtest_filter="$filter" >"$logs/$tool.$program" 2>&1 &
    jobs[$program]=$!
  done <"$list"
  for program in "${!jobs[@]}"; do
    log=$logs/$tool.$program
    if ! wait "${jobs[$program]}" || [[ $(count "OK|SKIPPED" "$log") == 0 ]]; then
      failed+=" $program"
    fi
  done
  echo "$tool: ${#jobs[@]} programs, $(count OK "$logs/$tool".*) tests passed," \
    "$((SECONDS - start)) s${failed:+, FAILED:$failed}"
  for program in $failed; do
    log=$logs/$tool.$program
    echo "--- $tool $program, the first of $(grep -c '^=========' "$log" || true) lines of the tool:"
    grep -m 20 '^=========' "$log" || true
    tail -n 20 "$log"
  done >&2
  [[ -z $failed ]]
}

status=0
for tool in memcheck racecheck initcheck synccheck; do
  sanitize "$tool" || status=1
done
exit $status
