# demo: the main job. test: the whole suite. check: formatters, linters, types, C++ tests under sanitizers.
# bench: benchmarks (BENCH=name, RIVAL=name). Everything is set up in .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
SOURCES := $(shell find core bind CMakeLists.txt pyproject.toml constraints.txt -type f 2>/dev/null)

.PHONY: demo test check bench setup core format clean

setup: $(VENV)/ready

# The editable install builds the C++ core; it is repeated when a source of the core changes.
$(VENV)/ready: $(SOURCES)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV): dependencies, then the C++ core (minutes the first time)"
	@$(PIP) install torch==$$(sed -n 's/^torch==//p' constraints.txt)
	@$(PIP) install -c constraints.txt nanobind scikit-build-core cmake ninja
	@$(PIP) install -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

# The core alone, built in place: quick while working on it. PYTHONPATH=src then finds it.
core:
	@cmake -S . -B build/dev -G Ninja -DPython_EXECUTABLE=$$(command -v $(PYTHON)) >/dev/null
	@cmake --build build/dev
	@cp build/dev/bind/_core*.so src/trireme/
