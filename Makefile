# Every target does its own set-up: a virtual environment pinned by constraints.txt.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
BENCH := .venv/installed-bench
DOCS := .venv/installed-docs
INTEROP := .venv-interop
RUN ?= runs/quick

.PHONY: quick test check slow docs bench interop lock clean

quick: $(INSTALLED)
	$(BIN)/iclens run quick --out $(RUN)

test: $(INSTALLED)
	$(BIN)/pytest -m "not slow" --numprocesses auto --maxprocesses 8 --dist loadfile

slow: $(INSTALLED)
	$(BIN)/pytest -m slow tests/test_quick.py # by itself, for it is timed
	$(BIN)/pytest -m slow --ignore tests/test_quick.py --numprocesses auto --maxprocesses 8

check: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(BENCH)
	$(BIN)/python benchmarks/bench.py
	$(BIN)/python benchmarks/sweep.py

# An environment of its own: these libraries are large and pin much.
interop: $(INTEROP)/installed
	$(INTEROP)/bin/pytest tests/interop_env

docs: $(DOCS)
	$(BIN)/sphinx-build -q -W --keep-going -E -d build/doctrees docs build/docs
	$(BIN)/python docs/check.py build/docs

$(INSTALLED): constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --require-hashes -r constraints.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

$(BENCH): $(INSTALLED) constraints-bench.txt
	$(BIN)/pip install --quiet -r constraints-bench.txt
	touch $@

$(DOCS): $(INSTALLED) constraints-docs.txt
	$(BIN)/pip install --quiet -r constraints-docs.txt
	touch $@

# The interpreter compiles what is used of some 20000 modules; pip would compile all of them.
$(INTEROP)/installed: constraints.txt constraints-interop.txt pyproject.toml
	$(PYTHON) -m venv $(INTEROP)
	$(INTEROP)/bin/pip install --quiet --no-compile --require-hashes -r constraints.txt
	$(INTEROP)/bin/pip install --quiet --no-compile -r constraints-interop.txt
	$(INTEROP)/bin/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# Pins the newest versions that pyproject.toml admits, for every platform and Python at once.
lock:
	uv pip compile pyproject.toml --group dev --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-header --no-annotate --upgrade --output-file constraints.txt

clean:
	rm -rf .venv $(INTEROP)
