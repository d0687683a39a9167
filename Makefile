# One command each: `make demo`, `make test`, `make check`, `make bench`. Each makes its own .venv first, once.
# Needs Python 3.11 or newer with its venv module (Debian 12: apt-get install python3-venv).

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
DEMO_FLAGS ?=
TEST_FLAGS ?=
BENCH_FLAGS ?=
BENCHES := hotpath ssd scale

.PHONY: help venv demo test check format bench clean

help:
	@echo "make demo    replay a real trace through a real daemon, kill it half-way, verify every byte (< 2 minutes)"
	@echo "make test    the whole test suite (< 5 minutes; TEST_FLAGS=--slow for the long runs)"
	@echo "make check   ruff, mypy --strict, import-linter"
	@echo "make bench   all benchmarks (BENCH_FLAGS=--quick for a short run)"
	@echo "make venv    only the environment, in $(VENV)"

venv: $(READY)

$(READY): requirements.txt requirements-dev.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: apt-get install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "$(PYTHON) is too old, Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@test -x $(RUN) || $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "$(PYTHON) has no venv module. On Debian: apt-get install python3-venv (as root), then the same make again." >&2; exit 1; }
	@test -x $(RUN) || { echo "making $(VENV) with $(PYTHON)" >&2; $(PYTHON) -m venv $(VENV); }
	@echo "installing the pinned packages into $(VENV)" >&2
	@$(RUN) -m pip install --quiet --disable-pip-version-check --requirement requirements-dev.txt
	@$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $(READY)

demo: venv
	$(RUN) -m bench.demo $(DEMO_FLAGS)

test: venv
	$(RUN) -m pytest $(TEST_FLAGS)

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
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
