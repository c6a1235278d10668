# Everything is installed into .venv, which the targets make. Needs Python >= 3.11 and make.

# The first interpreter that is new enough; `make PYTHON=/path/to/python3` overrides it.
PYTHON ?= $(firstword $(foreach name,python3 python3.14 python3.13 python3.12 python3.11 python,\
  $(shell $(name) -c 'import sys; sys.version_info >= (3, 11) and print("$(name)")' 2>/dev/null)))
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
TORCH := torch==2.13.0
DEEPSPEED := deepspeed==0.19.8

# Tiny tensors: a second thread only makes the tests fight for the cores.
TEST_ENV := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 \
  DS_ACCELERATOR=cpu HF_HUB_OFFLINE=1 TORCH_EXTENSIONS_DIR=$(CURDIR)/$(VENV)/extensions

# Processes that share the test modules; a machine with more cores and memory may have more of them.
PROCESSES ?= 2

# Modules that the scripts share are no benchmarks.
BENCHMARKS := $(if $(B),benchmarks/$(B).py,$(filter-out %/measure.py %/synthetic.py,\
  $(wildcard benchmarks/*.py)))

.PHONY: demo test check quick kills bench matrix fuzz clean

demo: $(VENV)/.package
	@$(BIN)/restride demo

test: check
	@echo '==> pytest'
	@$(TEST_ENV) $(BIN)/python -m pytest -m 'not thorough' -n $(PROCESSES) --dist loadscope

check: $(VENV)/.tests
	@echo '==> format, lint, types, import contracts, public names'
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-cache >$(VENV)/contracts.txt || { cat $(VENV)/contracts.txt; exit 1; }
	@$(BIN)/python tests/architecture/test_public_api.py | diff tests/architecture/public_api.txt -

# The inner loop: `make quick`, `make quick K=fold`.
quick: $(VENV)/.tests
	@$(TEST_ENV) $(BIN)/python -m pytest -q -m 'not interop and not slow' $(if $(K),-k '$(K)')

# Each script is a comparison of its own, in one call; `make bench B=conversion` runs one.
bench: $(VENV)/.tests
	@for script in $(BENCHMARKS); do echo "==> $$script"; $(BIN)/python $$script || exit 1; done

# What the real engine makes of every conversion, in docs/matrix.md (some twenty minutes); a part of it
# with `make matrix ONLY='llama.*'`. The tests that are too thorough for every run come first.
matrix: $(VENV)/.tests
	@$(TEST_ENV) $(BIN)/python -m pytest -m thorough -n $(PROCESSES) --dist loadscope
	@$(TEST_ENV) $(BIN)/python scripts/matrix.py $(if $(ONLY),--only '$(ONLY)')

# Conversions that are killed at random moments and resumed must end the same; any number of kills.
KILLS ?= 200
kills: $(VENV)/.tests
	@$(BIN)/python scripts/kill_conversions.py --kills $(KILLS)
	@$(BIN)/python scripts/kill_conversions.py --kills $(KILLS) --processes 4

# Laws and hostile files with many more examples (`make fuzz K=hostile` for a part of them), then
# readers, planner and conversions for FUZZ_SECONDS in all: docs/fuzzing.md. Log and finds are kept.
FUZZ_SECONDS ?= 3600
fuzz: $(VENV)/.tests
	@RESTRIDE_HYPOTHESIS=nightly $(TEST_ENV) $(BIN)/python -m pytest -q -m 'not interop and not slow' \
	  $(if $(K),-k '$(K)')
	@$(PIP) install atheris || echo 'without atheris, inputs are changed blindly'
	@$(TEST_ENV) $(BIN)/python scripts/fuzz.py --seconds $(FUZZ_SECONDS) --out build/fuzzed

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# A virtual environment that could not be finished is removed, so that the next run starts afresh.
$(BIN)/python:
	@if [ -z '$(PYTHON)' ]; then \
	  echo 'restride needs Python 3.11 or newer, and none is on the PATH;' \
	    'name one with: make PYTHON=/path/to/python3' >&2; exit 1; fi
	@echo '==> $(VENV) with $(PYTHON)'
	@$(PYTHON) -m venv $(VENV) >/dev/null || { rm -rf $(VENV); \
	  echo 'python3 -m venv failed; on Debian and Ubuntu install it with:' \
	    'apt install python3-venv' >&2; exit 1; }

# The package without extras. Editable: a change in src needs no new install, but for the kernel.
KERNEL := hatch_build.py $(wildcard src/restride/arrays/*.[ch])
$(VENV)/.package: pyproject.toml $(KERNEL) | $(BIN)/python
	@echo '==> the package and its four dependencies'
	@$(PIP) install -e .
	@touch $@

# torch first: DeepSpeed's own set-up imports it, and must neither build operators nor fetch
# another torch.
$(VENV)/.tests: $(VENV)/.package Makefile
	@echo '==> the test dependencies: $(TORCH), the test extra, $(DEEPSPEED) (some minutes)'
	@$(PIP) install setuptools wheel $(TORCH)
	@$(PIP) install -e '.[test]'
	@DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(PIP) install --no-build-isolation $(DEEPSPEED)
	@touch $@
