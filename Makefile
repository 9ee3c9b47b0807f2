# Everything a developer does, on a machine that has make, a C++20 compiler and Python 3.11 or newer: `make run`, `make test`.
# The environment lives in .venv; stamp files there say what is done, so that a second call starts at once.

VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(PY) -m pip install --quiet --progress-bar off
# `make PYTHON=/path/to/python …` names the interpreter; otherwise the first usable one of the list.
PYTHONS := $(or $(PYTHON),python3.11 python3.12 python3.13 python3 python)
CXX ?= g++

NATIVE := $(shell find native -type f)
CXX_SOURCES := $(filter %.cpp %.h,$(NATIVE))

# A usable interpreter is new enough, can make environments, and has the headers that the extension is compiled against.
USABLE := import ensurepip, os, sys, sysconfig, venv; \
  sys.exit(sys.version_info < (3, 11) or not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))
# Requirements are listed once, in pyproject.toml; this prints a list of them.
LISTED := import functools, sys, tomllib; print(*functools.reduce(dict.get, sys.argv[1:], tomllib.load(open("pyproject.toml", "rb"))), sep="\n")

# Long checks by hand: how long `make explore` goes on, inputs of `make fuzz`, and where `make proof` keeps its answers.
MINUTES ?= 10
INPUTS ?= 1000000
PROOF ?= build/proof

.PHONY: run test lint format isa sanitize explore fuzz quality proof clean help
.DELETE_ON_ERROR:

help:
	@echo "make run       build, then generate text with the model that ships, without and with an expert budget"
	@echo "make test      lint, then the test suite"
	@echo "make lint      ruff, mypy --strict, clang-format"
	@echo "make format    rewrite sources as lint wants them"
	@echo "make isa       no instruction above x86-64-v2 outside the kernels that are chosen at run time; aarch64 under qemu"
	@echo "make sanitize  native self-tests under AddressSanitizer + UBSan, then ThreadSanitizer"
	@echo "make explore   new random cases for MINUTES (10), until one fails; says what was covered"
	@echo "make quality   what the recommended settings cost, measured again and held against what is stated"
	@echo "make proof     every long check, and validation/records/proof.md: more than an hour"
	@echo "make fuzz      INPUTS=1000000 damaged containers for the reader, guided by coverage; needs Python 3.13 or older"
	@echo "make clean     remove the environment and everything built"

# ---- what it does -------------------------------------------------------------------------------------------------
PROMPT := Explain recursion in programming.

run: $(VENV)/.built
	$(BIN)/colibri-jax generate --prompt "$(PROMPT)" --max-new-tokens 64
	$(BIN)/colibri-jax generate --prompt "$(PROMPT)" --max-new-tokens 64 --budget 4

# ---- checks -------------------------------------------------------------------------------------------------------
test: lint
	$(PY) -m pytest -q -n 2 --dist loadfile

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

isa: $(VENV)/.built
	PATH="$(abspath $(BIN)):$$PATH" validation/check_isa.sh

# Self-tests are programs without Python, so that nothing has to be preloaded.
sanitize: $(VENV)/.built
	$(MAKE) --no-print-directory build/sanitize-address,undefined build/sanitize-thread

build/sanitize-%: FORCE
	PATH="$(abspath $(BIN)):$$PATH" cmake -S native -B $@ -G Ninja -DCMAKE_BUILD_TYPE=Debug -DCOLIBRI_EXTENSION=OFF \
	  -DCOLIBRI_SELFTEST=ON -DCOLIBRI_SANITIZE=$*
	$(BIN)/cmake --build $@ --target selftests
	UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 $(BIN)/ctest --test-dir $@ --output-on-failure --parallel 2

explore: $(VENV)/.dev
	$(PY) validation/explore.py --minutes $(MINUTES)

quality: $(VENV)/.dev
	$(PY) validation/quality/gate.py

proof: $(VENV)/.dev
	$(PY) validation/proof.py --work $(PROOF)

fuzz: $(VENV)/.built
	@$(PY) -c '$(LISTED)' project optional-dependencies fuzz > $(VENV)/fuzz.txt
	@$(PIP) -r $(VENV)/fuzz.txt
	$(PY) validation/fuzz/fuzz_container.py --inputs $(INPUTS)

FORCE:

# ---- environment --------------------------------------------------------------------------------------------------
$(VENV)/.created:
	@command -v $(firstword $(CXX)) >/dev/null || { echo "No C++ compiler: install g++ 12 or newer, or name one: make CXX=…" >&2; exit 1; }
	@for python in $(PYTHONS); do \
	  if "$$python" -c '$(USABLE)' >/dev/null 2>&1; then \
	    echo "environment: $(VENV), from $$("$$python" -c 'import sys; print(sys.executable, sys.version.split()[0])')"; \
	    "$$python" -m venv --clear $(VENV) && touch $@ && exit 0; exit 1; \
	  fi; \
	done; \
	echo "No usable Python: it must be 3.11 or newer, with the venv module and its C headers" >&2; \
	echo "(on Debian and Ubuntu: python3, python3-venv, python3-dev). Tried: $(PYTHONS)." >&2; \
	echo "Name another one: make PYTHON=/path/to/python" >&2; exit 1

# Editable: Python sources are used where they lie, and a changed native source rebuilds only what depends on it, because
# the build tools stay in the environment instead of an isolated one per build.
$(VENV)/.built: $(VENV)/.created pyproject.toml $(NATIVE)
	@echo "installing requirements and building the native engine: a few minutes the first time"
	@$(PY) -c '$(LISTED)' build-system requires > $(VENV)/build.txt
	@$(PIP) -r $(VENV)/build.txt cmake ninja
	@PATH="$(abspath $(BIN)):$$PATH" $(PIP) --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.built
	@$(PY) -c '$(LISTED)' project optional-dependencies dev > $(VENV)/dev.txt
	@$(PIP) -r $(VENV)/dev.txt
	@touch $@

clean:
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .ruff_cache .pytest_cache colibri_jax/_native*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
