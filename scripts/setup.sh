#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Prepares a Debian 12 or Ubuntu 24.04 machine.
#   setup.sh packages        the system packages that the C++ build needs
#   setup.sh browser         Chromium, with which `make test-report` looks at a report
#   setup.sh venv [PYTHON]   .venv with winnow from this tree, the pinned Python packages of the tests
#                            and linters, and Megatron-Core, without which its tests are skipped
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(
  cmake ninja-build g++ pkg-config git python3-venv
  libfmt-dev nlohmann-json3-dev libcli11-dev libgtest-dev libtbb-dev libhwy-dev
  libopenblas0 libopenmpi-dev openmpi-bin
)

is_installed() {
  [[ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" == installed ]]
}

install_packages() {
  local missing=() package
  for package in "$@"; do
    is_installed "$package" || missing+=("$package")
  done
  ((${#missing[@]})) || return 0

  local as_root=()
  if ((EUID != 0)); then
    as_root=(sudo)
    # Without a terminal sudo could only wait for a password that nobody types.
    [[ -t 0 ]] || as_root=(sudo -n)
  fi
  if ! command -v apt-get >/dev/null || ! "${as_root[@]}" true; then
    echo "Packages are missing and cannot be installed from here. Install these, then try again:" >&2
    echo "  apt-get install ${missing[*]}" >&2
    return 1
  fi
  "${as_root[@]}" apt-get update
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y --no-install-recommends "${missing[@]}"
}

# In a folder of its own: Megatron-Core's wheel asks for Python 3.12 but runs on others, and Triton,
# which it imports, must not be seen by the other tests.
get_megatron() {
  local folder=.venv/megatron-core-0.19.2
  local install=(.venv/bin/python -m pip install --disable-pip-version-check --no-deps
    --only-binary :all: --target "$folder.partial")
  [[ -d "$folder" ]] && return
  rm -rf "$folder.partial"
  "${install[@]}" --python-version 3.12 --ignore-requires-python megatron-core==0.19.2 &&
    "${install[@]}" triton==3.9.0 &&
    mv "$folder.partial" "$folder"
}

make_venv() {
  "$1" -m venv .venv
  .venv/bin/python -m pip install --disable-pip-version-check -r requirements.txt
  # Examples and tests import winnow from this tree; it loads build/release/libwinnow.so.
  local site
  site="$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  echo "$PWD/python" >"$site/winnow.pth"
  get_megatron || echo "note: megatron-core 0.19.2 is not to be had here, its tests are skipped" >&2
}

case "${1:-}" in
  packages) install_packages "${packages[@]}" ;;
  browser) install_packages chromium ;;
  venv) make_venv "${2:-python3}" ;;
  *) echo "usage: setup.sh packages | browser | venv [PYTHON]" >&2; exit 2 ;;
esac
