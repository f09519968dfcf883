# `make demo` and `make test` are all a newcomer needs; both set up .venv first.

PYTHON ?= python3
VENV ?= .venv
SEED ?= 0
ARGS ?=
MODEL ?=
WORKERS ?= 3
DIST ?= dist
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
CLIENTS := .venv-clients
VLLM := .venv-vllm
DEEPSPEED := .venv-deepspeed
ENVIRONMENTS := $(sort $(wildcard environments/*/pyproject.toml))
PACKAGES := -e .[anthropic,train,gym,mcp,otel,ray,rg,sandbox,ta] -e servers/embedded[json] -e servers/dataserver $(patsubst %/pyproject.toml,-e %,$(ENVIRONMENTS))

export HF_HUB_DISABLE_TELEMETRY ?= 1
export MODEL
# each worker and each command that a test starts would compile every module again
unexport PYTHONDONTWRITEBYTECODE
# pip compiles on one core; in the venvs beside ours a module is compiled when it is imported
export PIP_COMPILE ?= 0

.PHONY: help install demo demo-tiny test test-slow test-clients test-families test-vllm test-deepspeed clients vllm podman dist check docs docs-test bench bench-vllm test-gpu bench-gpu gpu-on-cpu clean

help:
	@echo "make demo        train a real language model on this machine (four to seven minutes; MODEL= names another)"
	@echo "make demo-tiny   the same with a model of letters that is made on the spot (about 8 minutes)"
	@echo "make test        the tests that everyone runs"
	@echo "make test-slow   faults, ranks, kills, and what takes over five seconds"
	@echo "make podman      prepare podman for the slow tests of containers (Debian, as root)"
	@echo "make test-clients  other people's clients against the embedded server"
	@echo "make test-families  every model family, small: embedded server, pushes, training, tools (8 minutes at most)"
	@echo "make test-vllm   a real vLLM on this machine's CPU (Linux; about 11 minutes)"
	@echo "make test-deepspeed  ZeRO-2 and ZeRO-3 on two CPU processes (a C++ compiler; about 2 minutes)"
	@echo "make dist        wheels of verifiers and its servers, into dist/"
	@echo "make check       format, lint, types, import directions"
	@echo "make docs        build the site into site/"
	@echo "make bench       the benchmarks, one line of JSON each"
	@echo "make bench-vllm  those that need the real vLLM"
	@echo "make test-gpu    promises on a GPU (9 minutes at most); make bench-gpu for speeds, make gpu-on-cpu tries their code"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt servers/embedded/pyproject.toml servers/dataserver/pyproject.toml $(ENVIRONMENTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "verifiers needs Python 3.11 or later; $$($(PYTHON) --version) was found. Run: make PYTHON=python3.11"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PACKAGES) -r requirements-dev.txt
	@# on all cores; other packages' syntax warnings come here, not into a newcomer's first run; their templates do not compile
	@$(BIN)/python -W ignore -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@

demo: $(INSTALLED)
	$(BIN)/python examples/demo/run.py --seed $(SEED) $(ARGS)

demo-tiny: $(INSTALLED)
	$(BIN)/python examples/demo/tiny.py --seed $(SEED) $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist worksteal

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow --durations=20 -n $(WORKERS) --dist worksteal --ignore tests/clients --ignore tests/vllm --ignore tests/families

test-families: $(INSTALLED)
	$(BIN)/python -m pytest tests/families -n 2 --dist worksteal

test-clients: $(INSTALLED) $(CLIENTS)/.installed
	$(BIN)/python -m pytest tests/clients

clients: $(CLIENTS)/.installed

# a venv of their own: litellm and inspect-ai want other versions than ours, and aider and MLflow want others than they;
# OpenEnv asks for gradio, which its client does not need.
# Agents of npm come where it is; two of them are put in place by scripts, which npm leaves to who installs
$(CLIENTS)/.installed: requirements-clients.txt requirements-agents.txt tests/clients/openenv.txt
	test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-clients.txt
	test -x $(CLIENTS)/aider/bin/python || $(PYTHON) -m venv $(CLIENTS)/aider
	$(CLIENTS)/aider/bin/python -m pip install --quiet --disable-pip-version-check aider-chat==0.86.2
	test -x $(CLIENTS)/mlflow/bin/python || $(PYTHON) -m venv $(CLIENTS)/mlflow
	$(CLIENTS)/mlflow/bin/python -m pip install --quiet --disable-pip-version-check mlflow==3.17.2
	test -x $(CLIENTS)/openenv/bin/python || $(PYTHON) -m venv $(CLIENTS)/openenv
	$(CLIENTS)/openenv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps openenv-core==0.3.0
	$(CLIENTS)/openenv/bin/python -m pip install --quiet --disable-pip-version-check -r tests/clients/openenv.txt
	if command -v npm > /dev/null; then \
	  npm install --no-audit --no-fund --loglevel=error --prefix $(CLIENTS)/agents $$(cat requirements-agents.txt); \
	  cd $(CLIENTS)/agents/node_modules && node @anthropic-ai/claude-code/install.cjs && node opencode-ai/postinstall.mjs; \
	fi
	@touch $@

# for the slow tests of containers: packages and a base image where they can be had, "not available" where not
podman:
	tests/sandbox/podman.sh

test-vllm: $(INSTALLED) $(VLLM)/.installed
	$(BIN)/python -m pytest tests/vllm -n 2 --dist loadfile --no-loadscope-reorder

vllm: $(VLLM)/.installed

# a venv of their own: vLLM wants other versions of torch's companions and of transformers than the trainer
$(VLLM)/.installed: servers/vllm/install.sh servers/vllm/pyproject.toml
	PYTHON=$(PYTHON) servers/vllm/install.sh cpu $(VLLM)
	@touch $@

test-deepspeed: $(INSTALLED) $(DEEPSPEED)/.installed
	VERIFIERS_DEEPSPEED_PYTHON=$(CURDIR)/$(DEEPSPEED)/bin/python $(BIN)/python -m pytest -m slow \
	  tests/end_to_end/test_sharded.py -k deepspeed

# on top of ours; the first run compiles deepspeed's collectives for the CPU, which needs a C++ compiler
$(DEEPSPEED)/.installed: tests/end_to_end/install_deepspeed.sh
	PYTHON=$(BIN)/python bash tests/end_to_end/install_deepspeed.sh $(DEEPSPEED)
	@touch $@

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy -p verifiers_embedded
	$(BIN)/mypy -p verifiers_dataserver
	MYPYPATH=servers/vllm $(BIN)/mypy -p verifiers_vllm
	$(BIN)/mypy environments/*/*.py examples/demo/*.py
	$(BIN)/lint-imports

# each package alone: what it requires comes from where the wheel is installed
dist:
	rm -rf $(DIST)
	$(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-deps -w $(DIST) \
	  . ./servers/embedded ./servers/dataserver ./servers/vllm

docs: $(INSTALLED)
	$(BIN)/zensical build --clean --strict
	@# each page as Markdown beside it, for programs that read
	(cd docs && find . -name '*.md' | tar -cf - -T -) | tar -xf - -C site

docs-test: $(INSTALLED)
	$(BIN)/python -m pytest tests/docs

bench: $(INSTALLED)
	$(BIN)/python benchmarks/rollouts.py
	$(BIN)/python benchmarks/gateway.py
	$(BIN)/python benchmarks/evaluate.py
	$(BIN)/python benchmarks/workers.py
	$(BIN)/python benchmarks/python_tool.py
	$(BIN)/python benchmarks/containers.py
	$(BIN)/python benchmarks/embedded_server.py
	$(BIN)/python benchmarks/dataserver.py
	$(BIN)/python benchmarks/overlap.py
	$(BIN)/python benchmarks/padding.py
	$(BIN)/python benchmarks/prefixes.py
	$(BIN)/python benchmarks/log_probs.py
	$(BIN)/python benchmarks/objectives.py
	$(BIN)/python benchmarks/trl.py
	$(BIN)/python benchmarks/real_model.py

# against a real vLLM
bench-vllm: $(INSTALLED) $(VLLM)/.installed
	$(BIN)/python benchmarks/weight_sync.py

# on one GPU, with the packages that benchmarks/gpu/README.md lists; PYTHON chooses the interpreter that has them
test-gpu:
	PYTHONPATH=.:servers/embedded $(PYTHON) benchmarks/gpu.py tests

bench-gpu:
	PYTHONPATH=.:servers/embedded $(PYTHON) benchmarks/gpu.py speed

# the same code without a GPU, in a minute each
gpu-on-cpu: $(INSTALLED)
	$(BIN)/python benchmarks/gpu.py tests --device cpu --tiny
	$(BIN)/python benchmarks/gpu.py speed --device cpu --tiny

clean:
	rm -rf $(VENV) $(CLIENTS) $(VLLM) .venv-bench-* runs site outputs $(DIST) build .mypy_cache .ruff_cache .pytest_cache
