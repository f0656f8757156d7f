# SPDX-License-Identifier: Apache-2.0
# Everything a person types. `make help` lists it; CMakePresets.json holds the builds behind it.
PYTHON ?= python3

venv := .venv/bin
nvcc := $(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
cpp_files = $(wildcard $(shell git ls-files -co --exclude-standard '*.h' '*.cc' '*.cu' '*.cuh'))
build = cmake --preset $(1) && cmake --build --preset $(1)
emulated_tests = $(shell cut -d' ' -f1 scripts/short_gpu_tests.txt scripts/emulated_tests.txt)

.DEFAULT_GOAL := help
.NOTPARALLEL: # ninja already uses all cores
.PHONY: help run report test-report docs bench bench-eager check test test-all fuzz tsan emulated-test gpu-test gpu-sanitize gpu-bundle wheel cuda-wheel lint format tidy clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

run: build/.packages ## build the tool and show what it does
	$(call build,release) --target winnow_tool
	build/release/winnow run

report: build/.packages .venv/.installed ## measure this machine, write build/report.html
	$(call build,release) --target winnow_tool
	@mkdir -p build/report
	build/release/winnow run --tokens 2048 --json > build/report/run.json
	build/release/winnow bench --case glm-5.2 --tokens 64 --keys 4096 --repeat 3 --json build/report/bench.json
	$(venv)/python -m winnow report build/report/run.json build/report/bench.json \
	  --measure --keep build/report/measured.json --output build/report.html

test-report: build/.packages .venv/.installed ## look at a report in a browser: nothing overlaps, light and dark
	scripts/setup.sh browser
	$(call build,release) --target winnow
	$(venv)/python -m pytest python/tests/test_report.py

docs: .venv-docs/.installed ## build the pages of docs/ as a site, build/site, links checked
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet
	@echo "open build/site/index.html"

bench: build/.packages .venv/.installed ## build the tool, time the operators, write bench.json
	$(call build,release) --target winnow_tool
	build/release/winnow bench --scaling --json bench.json
	PYTHONPATH=python $(venv)/python -m winnow bench overhead

bench-eager: build/.packages .venv/.installed ## race the cpu backend against eager PyTorch
	$(call build,release) --target winnow
	PYTHONPATH=python $(venv)/python python/benchmarks/against_eager.py

check: build/.packages .venv/.installed ## release build and its tests, two minutes behind the build
	$(call build,release)
	$(venv)/python scripts/test.py release

test: build/.packages .venv/.installed ## build with and without sanitizers, run all but slow tests
	$(call build,dev) --target winnow_tests
	$(call build,release)
ifeq ($(wildcard src/cuda/*/*.cu),)
else ifeq ($(nvcc),)
	@echo "note: no nvcc here, the CUDA kernels are not compiled"
else
	CUDACXX=$(nvcc) $(call build,cuda-check) --target winnow_kernels
endif
	$(venv)/python scripts/test.py $(slow) dev release

test-all: ## the same with the slow tests
	$(MAKE) test slow=--slow

fuzz: build/.packages ## make random calls under sanitizers for SECONDS (60)
	$(call build,dev) --target fuzz
	build/dev/fuzz --seconds $(or $(SECONDS),60)

tsan: build/.packages ## run the C++ tests under the thread sanitizer
	scripts/tsan.sh

emulated-test: build/.packages ## run the CUDA kernels on an emulated GPU, in minutes; nvcc is needed
ifeq ($(nvcc),)
	@echo "note: no nvcc here, the CUDA kernels are not run"
else
	CUDACXX=$(nvcc) $(call build,emulated) --target $(emulated_tests)
	scripts/emulated_test.sh build/emulated
endif

gpu-test: build/.packages .venv/.installed ## build with CUDA, run all tests on this machine's GPU
	CUDACXX=$(nvcc) $(call build,cuda)
	$(venv)/python scripts/test.py --slow cuda

gpu-sanitize: build/.packages ## build with CUDA, run short tests under compute-sanitizer's tools
	CUDACXX=$(nvcc) $(call build,cuda) --target winnow_tests
	scripts/gpu_sanitize.sh build/cuda

gpu-bundle: build/.packages ## build with CUDA, pack build/gpu for a machine with a GPU and a driver
	CUDACXX=$(nvcc) $(call build,cuda)
	scripts/gpu_bundle.sh build/cuda build/gpu

wheel: build/.packages .venv/.installed ## build dist/winnow-*.whl with all the libraries it needs
	scripts/wheel.sh dist

cuda-wheel: build/.packages .venv/.installed ## the same with the CUDA backend, for GPUs since sm_80
	WINNOW_CUDA=1 CUDACXX=$(nvcc) scripts/wheel.sh dist

lint: .venv/.installed ## check format, style, layers and types
	@$(venv)/clang-format --dry-run -Werror $(cpp_files)
	$(venv)/ruff check
	$(venv)/ruff format --check
	$(venv)/python scripts/check_includes.py
	$(venv)/mypy --cache-dir build/mypy

format: .venv/.installed ## format all files
	@$(venv)/clang-format -i $(cpp_files)
	$(venv)/ruff check --fix
	$(venv)/ruff format

tidy: build/.packages .venv/.installed ## run clang-tidy on the library
	cmake --preset release
	git ls-files 'src/*.cc' ':!src/cuda' | \
	  xargs -r -n 1 -P $$(nproc) $(venv)/clang-tidy -p build/release --quiet

clean: ## remove all builds; .venv and .venv-docs stay
	rm -rf build

# Set-up. The stamps keep a second call from doing it again.
build/.packages: scripts/setup.sh
	scripts/setup.sh packages
	@mkdir -p build && touch $@

.venv/.installed: requirements.txt scripts/setup.sh | build/.packages
	scripts/setup.sh venv $(PYTHON)
	@touch $@

.venv-docs/.installed: requirements-docs.txt | build/.packages
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --disable-pip-version-check -r requirements-docs.txt
	@touch $@
