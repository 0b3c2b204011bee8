# `make demo` draws a picture with the bundled model; `make test` runs all tests, `make check` those that take long. Each
# installs what it needs in .venv, and uses the torch that is there, or the one named by TORCH, such as TORCH=torch==2.14.1.
# On Windows: in Git Bash, with make from a package manager.

ifeq ($(OS),Windows_NT)
PYTHON ?= python
BIN := .venv/Scripts
else
PYTHON ?= python3
BIN := .venv/bin
endif

# After a crash the run ends and says which test it was: what is left may otherwise never be given to another worker.
PYTEST := $(BIN)/python -m pytest -n 2 --max-worker-restart=0

# Tests that run once more on cards that make copies as late as CUDA and XPU may.
LATE := tests/memory/engine/test_stream.py tests/memory/engine/test_pinned_windows.py tests/memory/codecs/test_rows.py

.PHONY: demo test check soak gpu lint contracts clean always

demo: .venv/demo-ready
	$(BIN)/ballast demo

test: lint
	$(PYTEST) tests --dist loadfile

check: .venv/test-ready
	BALLAST_LONG=1 $(PYTEST) tests -m "long and not soak" --dist loadfile
	for copies in cuda xpu; do BALLAST_COPIES=$$copies $(PYTEST) $(LATE) -m "not eager" \
		-k "not (bound_says or 3-1 or 0.2-1)" || exit 1; done
	BALLAST_COPIES=xpu $(PYTEST) tests/memory/engine/test_arriving.py -k "books_whatever or first_step"

# All families, budgets and walks: more than an hour.
soak: .venv/test-ready
	BALLAST_SOAK=1 $(PYTEST) tests -m soak
	BALLAST_SOAK=1 $(PYTEST) tests/pipelines/planning/test_budgets.py tests/pipelines/decoding/test_decode_budgets.py \
		tests/pipelines/planning/test_plans.py tests/pipelines/families/test_pyramid_surface.py \
		tests/pipelines/generic/test_pictures.py tests/memory/test_left_behind.py tests/memory/test_faults.py \
		tests/memory/test_fault_mix.py tests/memory/test_sharing.py tests/memory/test_tiers.py \
		tests/memory/test_disk_tier.py tests/bench -m "not soak"
	for copies in cuda xpu; do BALLAST_COPIES=$$copies BALLAST_SOAK=1 $(PYTEST) tests/memory/engine \
		tests/memory/striped tests/memory/codecs tests/pipelines/lora tests/pipelines/sampling -m "not eager" || exit 1; done

# All figures of this machine's CUDA card, in 9 minutes. Without one: make gpu ARGS=--dry. It installs nothing where
# python3 has torch: on a machine without network it runs from the checkout, with diffusers from a wheel in .whl.
gpu:
	if test -x $(BIN)/python || ! $(PYTHON) -c "import torch"; then $(MAKE) .venv/test-ready; fi
	if test -x $(BIN)/python; then $(BIN)/python -m bench gpu $(ARGS); else $(PYTHON) -m bench gpu $(ARGS); fi

lint: contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd .venv/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p ballast

contracts: .venv/test-ready .venv/types/ballast
	PYTHONPATH=.venv/types $(BIN)/lint-imports

# mypy finds the package by the name of its folder. Not `ln -s`, which in Git Bash copies.
.venv/types/ballast: | .venv/test-ready
	mkdir -p $(@D)
	$(BIN)/python -c "import os; os.symlink(os.path.join(os.pardir, os.pardir), '$@', target_is_directory=True)"

.venv/demo-ready: pyproject.toml $(if $(TORCH),always)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(if $(TORCH),false,$(BIN)/python -c "import torch" 2>/dev/null) || \
		$(BIN)/pip install --quiet --disable-pip-version-check "$(or $(TORCH),torch==2.13.0)"
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[charts]"
	touch $@

.venv/test-ready: .venv/demo-ready
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[test]"
	touch $@

clean:
	rm -rf .venv demo.png timeline.png
