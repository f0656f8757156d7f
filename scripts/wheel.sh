#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds a wheel that carries the libraries it needs, but for the driver's.
#   [WINNOW_CUDA=1] wheel.sh FOLDER [OPTION OF PIP ...]
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p build
bare=$(mktemp -d build/bare-wheel.XXXX)
trap 'rm -rf "$bare"' EXIT
.venv/bin/pip wheel --no-deps --wheel-dir "$bare" "${@:2}" .
PATH=$PWD/.venv/bin:$PATH auditwheel repair --exclude libcuda.so.1 --wheel-dir "$1" "$bare"/*.whl
