# make demo       train on generated data, from nothing (DATA=path/to/train.txt: a file of Criteo)
# make test       the test suite (TESTS=tests/unit: a part of it; TRIREME_TEST_SEED=n: the sample of run n)
# make long       every case of the tests that `make test` samples or shortens: tens of minutes
# make oldest     the test suite with the oldest versions that pyproject.toml allows, in build/oldest (PYTHON=python3.10)
# make chaos      KILLS=100 kills of processes of real jobs, and other faults: minutes (SEED=n; ROUND=n.m: one round)
# make paddlerec  PADDLEREC=folder of a clone of PaddleRec: run its models, write the table of docs/paddlerec.md
# make gpu        tests and benchmarks that need a CUDA device; says why where there is none
# make check      formatters, linters, types; the C++ tests under sanitizers
# make wheel      wheels in dist/ for the Pythons found (PYTHONS="python3.10 python3.12": for these); tries one
# make bench      benchmarks (BENCH=name: one of them; RIVAL=name: beside a rival)
# make docs       the site in build/docs: the pages, notebooks with their outputs, a reference of all names
# make format     rewrite the sources as `make check` wants them
# make fuzz       SECONDS=150 of random text for each parser (needs clang and libFuzzer)
# make fuzz-wire  SECONDS=150 of mutated messages for the handlers of a server
# make core       build the C++ core in place, for work on it (PYTHONPATH=src finds it)
#
# Each sets up .venv first if necessary. Python >= 3.10 with venv, make and a C++20 compiler suffice.

PYTHON ?= python3
VENV := .venv
CONSTRAINTS := constraints.txt
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
JOBS := $(shell nproc)
SECONDS ?= 150
CXX_FILES := $(shell find core bind -name '*.h' -o -name '*.cc' | sort)
BUILD_FILES := $(shell find core bind -type f) CMakeLists.txt pyproject.toml constraints.txt

# TSan of older compilers fails under the address randomization of newer kernels.
NO_ASLR := $(shell setarch -R true 2>/dev/null && echo setarch -R)

# Hundreds of processes of the tests import the same modules, which are therefore compiled once.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test oldest chaos long paddlerec gpu check bench docs wheel paddle torchrec setup core format fuzz fuzz-wire clean lint cxx-asan cxx-tsan

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

demo: setup
	@$(BIN)/python examples/demo.py $(if $(DATA),--data '$(DATA)')

# Four files at a time, even on two cores: many tests wait for their processes. The files run in the
# order of their folders; the short ones of unit/ come last, so that all four end at about one time.
# Threads of torch that wait for work do not take the cores from the other tests.
test long: export OMP_WAIT_POLICY := PASSIVE
test: setup
	@$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder $(TESTS)

# Each that `dependencies` of pyproject.toml names, as old as it may be; all else as in constraints.txt.
OLDEST := build/oldest
oldest: $(OLDEST)/constraints.txt
	@$(MAKE) test VENV=$(OLDEST)/venv CONSTRAINTS=$(OLDEST)/constraints.txt
$(OLDEST)/constraints.txt: pyproject.toml constraints.txt
	@mkdir -p $(OLDEST)
	@sed -n '/^dependencies/,/^]/s/.*"\(.*\)>=\(.*\)",/\1==\2/p' pyproject.toml > $@
	@echo commonmark >> $@  # of this rich
	@sed -n 's/\(.*==\).*/^\1/p' $@ | grep -vf - constraints.txt > $@.others
	@cat $@.others >> $@ && rm $@.others

KILLS ?= 100
chaos: setup
	@$(BIN)/python -u -m tests.chaos --kills $(KILLS) $(if $(SEED),--seed $(SEED)) $(if $(ROUND),--round $(ROUND))

long: setup
	@TRIREME_TEST_LONG=1 $(BIN)/python -m pytest --timeout=1800 \
	  $$(grep -rl --include='test_*.py' '^from tests.long import' tests)

paddlerec: setup
	@$(BIN)/python -m benchmarks.paddlerec $(PADDLEREC) --page docs/paddlerec.md

# On a GPU kernels are compiled. The torch of `make setup` is for CPUs: on a machine with a GPU install
# the build for CUDA of the same version into $(VENV) first.
gpu: setup
	@TRITON_INTERPRET=0 $(BIN)/python -m pytest -m gpu $(TESTS)
	@$(BIN)/python -m benchmarks gpu_step

# Only here: other compilers warn of other things, and a user who installs needs the core all the same.
check: WERROR := ON
check: lint cxx-asan cxx-tsan

bench: setup $(if $(filter paddle%,$(RIVAL)),paddle)
	@$(BIN)/python -m benchmarks $(BENCH) $(if $(RIVAL),--rival $(RIVAL))

# Wheels run on systems as old as the one that builds them: auditwheel says which.
wheel:
	@$(PYTHON) wheels/build.py $(if $(PYTHONS),--pythons '$(PYTHONS)')

# A warning is an error: a link that leads nowhere, a page that no other lists, a notebook that fails.
docs: setup
	@$(BIN)/python -m sphinx -W --keep-going -q -c docs/site . build/docs
	@echo "docs: build/docs/index.html"

# The last release of Paddle with a parameter server. Its dependencies exclude ours, so it has an
# environment of its own.
torchrec: build/torchrec/ready
build/torchrec/ready: | setup
	@echo "setup: torchrec in build/torchrec, to measure beside it, with the torch of .venv"
	@$(BIN)/python -m venv build/torchrec
	@build/torchrec/bin/python -m pip --disable-pip-version-check --quiet install --no-deps \
	  torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0 tensordict pyvers orjson cloudpickle importlib_metadata \
	  zipp pyre-extensions typing-inspect mypy-extensions iopath portalocker torchmetrics \
	  lightning-utilities tqdm
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > $$(build/torchrec/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth
	@touch $@

paddle: build/paddle/ready
build/paddle/ready:
	@echo "setup: Paddle in build/paddle, to measure beside it"
	@$(PYTHON) -m venv build/paddle
	@build/paddle/bin/python -m pip --disable-pip-version-check --quiet install \
	  paddlepaddle==2.6.2 protobuf==4.25.3 pyyaml six setuptools 'numpy<2'
	@touch $@

setup: $(VENV)/ready

# torch is installed first and alone: this exact version is the build for CPUs.
$(VENV)/tools: $(CONSTRAINTS)
	@echo "setup: a virtual environment in $(VENV), torch and the other dependencies (minutes, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@start=$$(date +%s) && \
	  $(PIP) install $$(grep '^torch==' $(CONSTRAINTS)) && \
	  $(PIP) install --no-deps -r $(CONSTRAINTS) && \
	  echo "setup: dependencies took $$(($$(date +%s) - start)) s"
	@touch $@

# The editable install builds the C++ core, again when its sources change. It lists the Python files
# by name, so a new file needs it too: $(VENV)/names changes with the list.
$(VENV)/ready: $(VENV)/tools $(VENV)/names $(BUILD_FILES)
	@echo "setup: building the C++ core ($(JOBS) cores)"
	@start=$$(date +%s) && \
	  CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) PATH=$(CURDIR)/$(BIN):$$PATH \
	  $(PIP) install --no-build-isolation --no-deps $(if $(WERROR),-C cmake.define.TRIREME_WERROR=ON) -e . && \
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
	    -DTRIREME_SANITIZE=$(SANITIZE) -DTRIREME_WERROR=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	    >/dev/null && \
	  cmake --build build/$* --parallel $(JOBS) && \
	  $(if $(filter tsan,$*),$(NO_ASLR)) ctest --test-dir build/$* --parallel $(JOBS) --output-on-failure

format: setup
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .
	@$(BIN)/clang-format -i $(CXX_FILES)

# Inputs that reach new code stay in build/fuzz. The corpus is the smallest set that reaches all of it.
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

# Messages with a new kind of answer are added to the corpus that the tests replay.
fuzz-wire: setup
	@PYTHONPATH=. $(BIN)/python -m tests.hostile.fuzzing --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) --keep

clean:
	rm -rf build $(VENV) src/trireme/_core*
