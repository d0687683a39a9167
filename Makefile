# One command each: `make demo`, `make test`, `make check`, `make bench`. Each makes its own .venv first, once.
# Needs Python 3.11 or newer with its venv module (Debian 12: apt-get install python3-venv).

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
VLLM_VENV := .venv-vllm
VLLM_RUN := $(VLLM_VENV)/bin/python
VLLM_READY := $(VLLM_VENV)/.ready
DEMO_FLAGS ?=
TEST_FLAGS ?=
BENCH_FLAGS ?=
BENCHES := hotpath ssd scale

.PHONY: help venv venv-vllm demo test test-vllm check format bench clean

help:
	@echo "make demo    replay a real trace through a real daemon, kill it half-way, verify every byte (< 2 minutes)"
	@echo "make test    the whole test suite (< 5 minutes; TEST_FLAGS=--slow for the long runs)"
	@echo "make test-vllm    the tests of the vLLM connector, on real engines (CPU, < 5 minutes)"
	@echo "make check   ruff, mypy --strict, import-linter"
	@echo "make bench   all benchmarks (BENCH_FLAGS=--quick for a short run)"
	@echo "make venv    only the environment, in $(VENV)"
	@echo "make venv-vllm    an environment with a real vLLM engine for CPU, in $(VLLM_VENV) (2.5 GB)"

venv: $(READY)

$(READY): requirements.txt requirements-dev.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: apt-get install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "$(PYTHON) is too old, Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@test -x $(RUN) || $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "$(PYTHON) has no venv module. On Debian: apt-get install python3-venv (as root), then the same make again." >&2; exit 1; }
	@test -x $(RUN) || { echo "making $(VENV) with $(PYTHON)" >&2; $(PYTHON) -m venv $(VENV); }
	@echo "installing the pinned packages into $(VENV)" >&2
	@$(RUN) -m pip install -qq --disable-pip-version-check --requirement requirements-dev.txt
	@$(RUN) -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $(READY)

venv-vllm: $(VLLM_READY)

# Every step may be repeated: the stamp is written last, and only when the engine imports.
$(VLLM_READY): requirements-vllm.txt pyproject.toml
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { \
	    echo "vLLM's pinned packages are for Python 3.11, not $(PYTHON): make venv-vllm PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(VLLM_RUN) || $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "$(PYTHON) has no venv module. On Debian: apt-get install python3-venv (as root), then the same make again." >&2; exit 1; }
	@test -x $(VLLM_RUN) || { echo "making $(VLLM_VENV) with $(PYTHON)" >&2; $(PYTHON) -m venv $(VLLM_VENV); }
	@echo "installing vLLM for CPU and its pinned packages into $(VLLM_VENV) (2.5 GB, minutes on the first time)" >&2
	@rm -f $(VLLM_READY); $(VLLM_RUN) -m pip install -qq --disable-pip-version-check --no-deps --requirement requirements-vllm.txt || { \
	    echo "the packages of requirements-vllm.txt could not be installed (see above). If it is torch 2.13.0+cpu that was not" >&2; \
	    echo "found: point pip at a place with torch's CPU wheels (PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL), then the same make again." >&2; exit 1; }
	@$(VLLM_RUN) -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@$(VLLM_RUN) -m pip uninstall -qq --yes torchvision torchaudio torchcodec triton 2>/dev/null || true
	@VLLM_NO_USAGE_STATS=1 $(VLLM_RUN) -W ignore -c 'import vllm, kvstore; from vllm import LLM' >$(VLLM_VENV)/check.log 2>&1 || { \
	    tail -n 5 $(VLLM_VENV)/check.log >&2; \
	    echo "vLLM is installed but does not import (all of it: $(VLLM_VENV)/check.log). To start afresh: rm -r $(VLLM_VENV)" >&2; exit 1; }
	@touch $(VLLM_READY)

demo: venv
	$(RUN) -m bench.demo $(DEMO_FLAGS)

test: venv
	$(RUN) -m pytest $(TEST_FLAGS)

test-vllm: venv-vllm
	$(VLLM_RUN) -m pytest tests/vllm tests/connectors $(TEST_FLAGS)

check: venv
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy --package kvstore --package bench
	$(VENV)/bin/lint-imports

format: venv
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

bench: venv
	@for name in $(BENCHES); do $(RUN) -m bench.$$name $(BENCH_FLAGS) || failed="$$failed $$name"; done; \
	    test -z "$$failed" || { echo "below target or failed:$$failed" >&2; exit 1; }

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
