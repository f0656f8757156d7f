#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Packs a CUDA build into a folder that runs on a machine with a GPU and its driver.
#   gpu_bundle.sh BUILD FOLDER
# Programs and libraries stand beside each other and find each other there. glibc and the
# compiler's libraries are the machine's own: it must not be older than the one that built.
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1
folder=$2

rm -rf "$folder"
mkdir -p "$folder"
cp "$build"/libwinnow.so "$build"/winnow "$build"/*_test "$folder"

ldd "$folder"/* | awk '$2 == "=>" && $3 ~ /^\// { print $3 }' | sort -u |
  grep -Ev '/(ld-linux-[^/]*|libwinnow|lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s))\.so' |
  xargs -r cp -L -t "$folder"
strip "$folder"/*

mkdir "$folder/python"
cp -r python/winnow python/tests "$folder/python"
find "$folder/python" -name __pycache__ -prune -exec rm -r {} +
cp scripts/gpu_run.sh "$folder/run.sh"
du -sh "$folder"
