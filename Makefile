# `make demo` and `make test` each work alone in a fresh clone: they need make, Python 3.11 to 3.13 with its venv
# module (or uv), and the package index once. Everything goes into .venv; nothing is installed twice.
#
#   PYTHON=python3.12   the interpreter that .venv is made from
#   CONSTRAINTS=        any version pyproject.toml allows, instead of the tested ones of constraints.txt
#   SYSTEM_SITE=1       .venv also sees the interpreter's own packages
#   WORKERS=            run the tests in one process
#   ARGS="-k zoo"       more arguments for pytest
#
# To keep a torch that is already there, for a GPU say:  make test PYTHON=python3.12 CONSTRAINTS= SYSTEM_SITE=1
# The first three are remembered in .venv until others are given.

VENV := .venv
BIN := $(VENV)/bin
-include $(VENV)/settings.mk
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
SYSTEM_SITE ?=
WORKERS ?= 2
ARGS ?=
# uv would not see the interpreter's own packages, and install them again.
UV := $(if $(SYSTEM_SITE),,$(shell command -v uv 2>/dev/null))

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start many processes: without stored bytecode each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

# A stamp's name holds the checksum of its inputs, so a changed input has no stamp.
checksum = $(shell { $(1); } | cksum | cut -d ' ' -f 1)
MADE := $(VENV)/made-$(call checksum,pwd; echo "$(PYTHON) $(SYSTEM_SITE)")
KEY := $(call checksum,cat pyproject.toml $(CONSTRAINTS))
CORE := $(VENV)/core-$(KEY)
TEST := $(VENV)/test-$(KEY)
# No interpreter, or an interrupted install: start over. A .venv that this Makefile did not create is left alone.
START_OVER := $(if $(wildcard $(VENV)/unfinished),start-over,$(if $(wildcard $(BIN)/python),,start-over))
FOREIGN := $(if $(wildcard $(VENV)),$(if $(wildcard $(VENV)/made-* $(VENV)/unfinished),,yes))

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test verify fast all lint types contracts bench clean start-over

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

demo: $(CORE) ## pre-train a small ViT on digits, fine-tune it at a higher resolution, show the report
	@$(BIN)/python .ci/cpu_time.py "make demo" $(BIN)/vitrail demo

test: $(TEST) ## lint, types, contracts and the fast lane of the tests
	@$(BIN)/python .ci/cpu_time.py "make test" $(MAKE) --no-print-directory lint types contracts fast

verify: $(TEST) ## the same checks with all tests, the slow ones as well
	@$(BIN)/python .ci/cpu_time.py "make verify" $(MAKE) --no-print-directory lint types contracts all

fast: $(TEST) ## the tests that are not marked slow, gpu or network
	$(PYTEST) -m "not slow and not gpu and not network" $(ARGS)

all: $(TEST)
	$(PYTEST) $(ARGS)

# One thread per worker: two workers with a thread pool each are slower than one.
PYTEST = $(if $(WORKERS),OMP_NUM_THREADS=1 )$(BIN)/python -m pytest$(if $(WORKERS), -n $(WORKERS))

lint: $(TEST) ## ruff: rules and format
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

types: $(TEST) ## basedpyright, strict on src
	$(BIN)/python -m basedpyright --pythonpath $(BIN)/python

contracts: $(TEST) ## import-linter: imports point downward, help stays quick
	$(BIN)/lint-imports

bench: ## list the benchmark scripts
	@ls bench/*.py 2>/dev/null || echo "no benchmark scripts yet"

clean: ## remove .venv, caches and build outputs; runs/ stays
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests docs -name __pycache__ -type d -prune -exec rm -rf {} +

$(MADE): $(START_OVER)
	$(if $(FOREIGN),@echo "$(VENV) was not created by this Makefile: move it away or remove it with 'make clean'" >&2; exit 1)
	@mkdir -p $(VENV) && touch $(VENV)/unfinished
	@find $(VENV) -mindepth 1 -maxdepth 1 ! -name unfinished -exec rm -rf {} +
ifdef UV
	uv venv --seed --allow-existing --python $(PYTHON) $(if $(SYSTEM_SITE),--system-site-packages) $(VENV)
else
	$(PYTHON) -m venv $(if $(SYSTEM_SITE),--system-site-packages) $(VENV)
endif
	@touch $@

ifdef UV
pip_install = uv pip install --python $(BIN)/python
else
pip_install = $(BIN)/python -m pip install
endif

# $(1) is what to install. Stamps of other inputs are removed, since they no longer describe .venv. An installer that
# fails leaves .venv as it was; one that is killed does not, and `unfinished` stays to mark that.
define install
	@touch $(VENV)/unfinished
	@rm -f $(filter-out $(CORE) $(TEST),$(wildcard $(VENV)/core-* $(VENV)/test-*))
	$(pip_install) $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e '$(1)' \
	|| { code=$$?; test $$code -gt 128 || rm $(VENV)/unfinished; exit $$code; }
	@printf '%s\n' 'PYTHON ?= $(PYTHON)' 'CONSTRAINTS ?= $(CONSTRAINTS)' 'SYSTEM_SITE ?= $(SYSTEM_SITE)' > $(VENV)/settings.mk
	@rm $(VENV)/unfinished
endef

# The server's three small libraries are included: the demo ends with the command that starts it.
$(CORE): $(MADE)
	$(call install,.[serve])
	@touch $@

$(TEST): $(MADE)
	$(call install,.[test])
	@touch $(CORE) $@
