# make demo     the main job, from nothing (DATA=path/to/train.txt: Criteo's own file)
# make test     the whole suite (TESTS=tests/unit: a part of it)
# make chaos    KILLS=100 processes of real jobs are killed, and more: minutes (SEED=n; ROUND=n.m: one alone)
# make long     those tests alone that try much more than `make test` lets them: minutes
# make check    formatters, linters, types; the C++ tests under sanitizers
# make bench    benchmarks (BENCH=name: one of them; RIVAL=name: beside a rival)
# make format   rewrite the sources as `make check` wants them
# make fuzz     SECONDS=150 of random text for each parser (needs clang and libFuzzer)
# make fuzz-wire  SECONDS=150 of mutated messages for the handlers of a server
# make core     build the C++ core in place, quick while working on it (PYTHONPATH=src finds it)
#
# Each sets up .venv first, if need be: Python >= 3.10 with venv, make and a C++20 compiler suffice.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
JOBS := $(shell nproc)
SECONDS ?= 150
CXX_FILES := $(shell find core bind -name '*.h' -o -name '*.cc' | sort)
BUILD_FILES := $(shell find core bind -type f) CMakeLists.txt pyproject.toml constraints.txt

# TSan of older compilers cannot live with the address randomization of newer kernels.
NO_ASLR := $(shell setarch -R true 2>/dev/null && echo setarch -R)

# Hundreds of processes of the tests import the same modules: compile these once, whatever the
# environment says.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test chaos long check bench paddle setup core format fuzz fuzz-wire clean lint cxx-asan cxx-tsan

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

demo: setup
	@$(BIN)/python examples/demo.py $(if $(DATA),--data '$(DATA)')

# Two files at a time: tests wait for processes of theirs more than they compute. In their own order,
# in which those of unit/, each a second or less, come last: so neither of the two ends alone.
test: setup
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(TESTS)

KILLS ?= 100
chaos: setup
	@$(BIN)/python -u -m tests.chaos --kills $(KILLS) $(if $(SEED),--seed $(SEED)) $(if $(ROUND),--round $(ROUND))

long: setup
	@TRIREME_TEST_LONG=1 $(BIN)/python -m pytest --timeout=1800 \
	  $$(grep -rl --include='test_*.py' '^from tests.long import' tests)

check: lint cxx-asan cxx-tsan

bench: setup $(if $(filter paddle%,$(RIVAL)),paddle)
	@$(BIN)/python -m benchmarks $(BENCH) $(if $(RIVAL),--rival $(RIVAL))

# The rival that Python environments cannot share with us: the last release with a parameter server.
paddle: build/paddle/ready
build/paddle/ready:
	@echo "setup: Paddle in build/paddle, to measure beside it"
	@$(PYTHON) -m venv build/paddle
	@build/paddle/bin/python -m pip --disable-pip-version-check --quiet install \
	  paddlepaddle==2.6.2 protobuf==4.25.3 pyyaml six setuptools 'numpy<2'
	@touch $@

setup: $(VENV)/ready

# torch comes first and alone: asked for by exactly this version it is the build for CPUs.
$(VENV)/tools: constraints.txt
	@echo "setup: a virtual environment in $(VENV), torch and the other dependencies (minutes, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@start=$$(date +%s) && \
	  $(PIP) install $$(grep '^torch==' constraints.txt) && \
	  $(PIP) install -r constraints.txt && \
	  echo "setup: dependencies took $$(($$(date +%s) - start)) s"
	@touch $@

# The editable install builds the C++ core, again when its sources change. It knows the Python files
# by name, so a new one needs it too: $(VENV)/names changes with the list.
$(VENV)/ready: $(VENV)/tools $(VENV)/names $(BUILD_FILES)
	@echo "setup: building the C++ core ($(JOBS) cores)"
	@start=$$(date +%s) && \
	  CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) PATH=$(CURDIR)/$(BIN):$$PATH \
	  $(PIP) install --no-build-isolation --no-deps -e . && \
	  echo "setup: the core took $$(($$(date +%s) - start)) s"
	@touch $@

$(VENV)/names: FORCE | $(VENV)/tools
	@find src -name '*.py' | sort | cmp -s - $@ || find src -name '*.py' | sort > $@
FORCE:

core:
	@cmake -S . -B build/dev -G Ninja -DPython_EXECUTABLE=$$(command -v $(PYTHON)) >/dev/null
	@cmake --build build/dev
	@cp build/dev/bind/_core*.so src/trireme/

lint: setup
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

cxx-asan: SANITIZE := address,undefined
cxx-tsan: SANITIZE := thread
cxx-asan cxx-tsan: cxx-%: setup
	@echo "check: C++ tests under -fsanitize=$(SANITIZE)"
	@PATH=$(CURDIR)/$(BIN):$$PATH && \
	  cmake -S . -B build/$* -G Ninja -DTRIREME_TESTS=ON -DTRIREME_PYTHON=OFF \
	    -DTRIREME_SANITIZE=$(SANITIZE) -DCMAKE_BUILD_TYPE=RelWithDebInfo >/dev/null && \
	  cmake --build build/$* --parallel $(JOBS) && \
	  $(if $(filter tsan,$*),$(NO_ASLR)) ctest --test-dir build/$* --output-on-failure

format: setup
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .
	@$(BIN)/clang-format -i $(CXX_FILES)

# Inputs that reach new code stay in build/fuzz; the smallest set that reaches all of it is the corpus.
FUZZ := core/tests/fuzz
FUZZ_SOURCES := core/tests/fuzz/fuzz.cc core/base/pool.cc $(addprefix core/feed/,columns.cc criteo.cc csv.cc \
  fields.cc libsvm.cc multislot.cc numbers.cc rows.cc strings.cc text.cc)
fuzz:
	@for format in criteo csv libsvm multislot; do \
	  mkdir -p build/fuzz/$$format build/fuzz/kept $(FUZZ)/corpus/$$format && \
	  clang++ -std=c++20 -O2 -g -Icore -DFUZZ_FORMAT="\"$$format\"" \
	    -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all \
	    $(FUZZ_SOURCES) -pthread -o build/fuzz/fuzz_$$format && \
	  build/fuzz/fuzz_$$format -max_total_time=$(SECONDS) -max_len=600 -verbosity=0 \
	    -artifact_prefix=build/fuzz/ build/fuzz/$$format $(FUZZ)/corpus/$$format && \
	  rm -rf build/fuzz/kept && mkdir build/fuzz/kept && \
	  build/fuzz/fuzz_$$format -set_cover_merge=1 -use_counters=0 -max_len=600 -verbosity=0 build/fuzz/kept \
	    $(FUZZ)/corpus/$$format build/fuzz/$$format && \
	  rm -rf $(FUZZ)/corpus/$$format && mv build/fuzz/kept $(FUZZ)/corpus/$$format || exit 1; \
	done

# Messages whose answers differ from all before become the corpus that the tests replay.
fuzz-wire: setup
	@PYTHONPATH=. $(BIN)/python -m tests.hostile.fuzzing --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) --keep

clean:
	rm -rf build $(VENV) src/trireme/_core*
