# `make demo` draws a picture with the bundled model; `make test` runs all tests. Both install what they need in .venv.

PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin

.PHONY: demo test lint clean

demo: .venv/demo-ready
	$(BIN)/ballast demo

test: lint
	$(BIN)/python -m pytest tests -n 2 --dist loadfile

lint: .venv/test-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p .venv/types && ln -sfn ../.. .venv/types/ballast
	cd .venv/types && ../bin/mypy --config-file ../../pyproject.toml -p ballast

.venv/demo-ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	touch $@

.venv/test-ready: .venv/demo-ready
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[test]"
	touch $@

clean:
	rm -rf .venv demo.png timeline.png
