#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the C++ tests under the thread sanitizer.
#   tsan.sh [REGEX]   only the tests whose names match
# It sees only what it has compiled: with the system's oneTBB the hand-over of a task from one
# thread to another would be invisible, and every task would look like a race. So oneTBB is compiled
# with the sanitizer first, from the sources in $ONETBB, a git repository or its address.
set -euo pipefail
cd "$(dirname "$0")/.."
onetbb=${ONETBB:-https://github.com/oneapi-src/oneTBB}
version=v2021.8.0 # Debian 12's
build=$PWD/build/tsan
tbb=$build/onetbb

if [[ ! -e $tbb/installed ]]; then
  rm -rf "$tbb"
  git clone --quiet --depth 1 --branch "$version" "$onetbb" "$tbb/source"
  cmake -G Ninja -S "$tbb/source" -B "$tbb/build" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
    -DTBB_SANITIZE=thread -DTBB_TEST=OFF -DTBB_STRICT=OFF -DTBBMALLOC_BUILD=OFF \
    -DCMAKE_INSTALL_PREFIX="$tbb" -DCMAKE_INSTALL_LIBDIR=lib
  cmake --build "$tbb/build"
  cmake --install "$tbb/build"
  touch "$tbb/installed"
fi

cmake --preset tsan -DTBB_DIR="$tbb/lib/cmake/TBB"
cmake --build "$build"
# Reports go to stderr of the test, and fail it.
TSAN_OPTIONS="halt_on_error=0 second_deadlock_stack=1 suppressions=$PWD/scripts/tsan.supp" \
  ctest --test-dir "$build" -j2 --output-on-failure --no-tests=error --timeout 3000 -R "${1:-.}"
