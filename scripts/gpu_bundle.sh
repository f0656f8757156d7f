#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Packs a CUDA build into a folder that runs on a machine with a GPU and its driver.
#   gpu_bundle.sh BUILD FOLDER
# Programs and libraries stand beside each other and find each other there, and whatever else the
# tests read comes along. glibc and the compiler's libraries are the machine's own: it must not be
# older than the one that built.
set -euo pipefail
shopt -s extglob
cd "$(dirname "$0")/.."
build=$1
folder=$2

rm -rf "$folder"
mkdir -p "$folder"
# The libraries under the names that programs ask the loader for, which end in two numbers.
cp "$build"/libwinnow*.so.+([0-9]).+([0-9]) "$build"/winnow "$build"/fuzz "$build"/*_test "$folder"
cp "$build"/{forward,training_step,gpu} "$folder"
if [[ -e $build/mpi_test ]]; then
  cp "$build"/mpi_rank "$build"/mpi_failing_rank "$build"/context_parallel "$folder"
fi

# The libraries that a program loads, but for those of the system.
libraries() {
  ldd "$@" | awk '$2 == "=>" && $3 ~ /^\// { print $3 }' | sort -u |
    grep -Ev '/(ld-linux-[^/]*|libwinnow[^/]*|lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s))\.so'
}
libraries "$folder"/* | xargs cp -L -t "$folder"
# With the mpirun of a machine works only the MPI of that machine. So the one of this machine stands
# apart, and run.sh takes it, for the tool and the tests of MPI, where there is no other.
if mpi=$(libraries "$folder"/libwinnow_mpi.so.* 2>/dev/null | grep '/libmpi\.so'); then
  mkdir "$folder/mpi"
  for library in "$mpi" $(libraries "$mpi"); do
    mv "$folder/$(basename "$library")" "$folder/mpi"
  done
fi
find "$folder" -type f -exec strip {} +

mkdir "$folder/python"
cp -r python/winnow python/tests python/benchmarks "$folder/python"
find "$folder/python" -name __pycache__ -prune -exec rm -r {} +
cp -r README.md docs examples "$folder"
# For the origin of what is measured there.
git describe --always --dirty >"$folder/COMMIT" || echo unknown >"$folder/COMMIT"
cp scripts/gpu_run.sh "$folder/run.sh"
cp scripts/gpu_sanitize.sh "$folder/sanitize.sh"
cp scripts/short_gpu_tests.txt "$folder"
du -sh "$folder"
