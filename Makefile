# Every target sets up what it needs first; a second call finds it done.
.DEFAULT_GOAL := help
# A uv that does not run (a pyenv shim of another version, say) counts as none.
UV := $(or $(shell uv --version >/dev/null 2>&1 && command -v uv),.uv/bin/uv)
PY := .venv/bin/python
READY := .venv/.ready
# Where most tests do not see it: every program that imports PEFT would import it, and have its warnings.
APART := .venv/apart
PLUGIN := plugins/lerobot_policy_smolvla_reflow
EXTRAS ?= dev
PYTHON_VERSION ?= 3.12

help: ## show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /  make \1	/' | expand -t 22

setup: $(READY) ## environment in .venv with pinned versions; Python 3.12, or PYTHON_VERSION=3.13

# Run from / because a pyenv shim in this folder would look for the version that .python-version names. Renamed only
# when complete, so that an interrupted set-up starts again.
.uv/bin/uv:
	@echo "setup: uv is not installed; putting it into .uv"
	@rm -rf .uv .uv-draft
	@cd / && python3 -m venv "$(CURDIR)/.uv-draft" || { echo "setup: python3 is missing or cannot make virtual \
	environments. Install uv, or python3 with its venv module (Debian, Ubuntu: python3-venv), and run make again." >&2; exit 1; }
	@.uv-draft/bin/python -m pip install --disable-pip-version-check uv || { echo "setup: pip could not install uv \
	(its error is above). Install uv by other means and run make again." >&2; exit 1; }
	@mv .uv-draft .uv

# A complete environment is brought up to date; one that an interrupt left incomplete is made anew.
$(READY): setup.cfg setup.py pyproject.toml $(PLUGIN)/pyproject.toml constraints.txt .python-version | $(UV)
	@echo "setup: Python $(PYTHON_VERSION) and the pinned packages into .venv (several GB; minutes the first time)"
	@if [ -e $(READY) ]; then rm $(READY); else rm -rf .venv; fi
	"$(UV)" venv --allow-existing --python $(PYTHON_VERSION) .venv
	"$(UV)" pip install --python $(PY) --constraint constraints.txt --build-constraint constraints.txt \
	  --compile-bytecode --editable ".[$(EXTRAS)]" --editable $(PLUGIN)
	"$(UV)" pip install --python $(PY) --constraint constraints.txt --no-deps --target $(APART) bitsandbytes
	@touch $(READY)

demo: $(READY) ## the main job end to end on the CPU, in 5 minutes: results in outputs/demo
	$(PY) -m hf_memopt.recipes.reflow.demo --output outputs/demo --overwrite

demo-metaworld: $(READY) ## reflow proven in Meta-World, on the CPU, in about 20 minutes: results in outputs/demo_metaworld
	"$(UV)" pip install --python $(PY) --constraint constraints.txt metaworld
	$(PY) -m benchmarks.metaworld.demo --output outputs/demo_metaworld --overwrite

LAUNCH := .venv/bin/accelerate launch --cpu --num_processes=1 --num_machines=1 --mixed_precision=no --dynamo_backend=no -m
COMPARE := $(LAUNCH) hf_memopt.cli compare
# Copies on a CPU, which saves no memory there.
TRY_OUT := --cpu_copies --offload_threshold_mb 0.25 --budget_gib

demo-lm: $(READY) ## a small language model with offloading on the CPU, in about 2 minutes: results in outputs/demo_lm
	rm -rf outputs/demo_lm
	$(COMPARE) causal_lm --modes off,all,auto --config_path recipes/configs/causal_lm_demo.yaml
	$(LAUNCH) hf_memopt.recipes.train_causal_lm --config_path recipes/configs/causal_lm_demo.yaml

demo-darcy: $(READY) ## a neural operator on Darcy flow with offloading on the CPU, in about 2 minutes: results in outputs/demo_darcy
	rm -rf outputs/demo_darcy
	$(COMPARE) neural_operator --modes off,all,auto --steps 8 --config_path recipes/configs/neural_operator_demo.yaml
	$(LAUNCH) hf_memopt.recipes.train_neural_operator --config_path recipes/configs/neural_operator_demo.yaml

demo-lgt: $(READY) ## style transfer in a latent space on the CPU, in about 3 minutes: results in outputs/demo_lgt
	rm -rf outputs/demo_lgt
	$(PY) -m hf_memopt.recipes.landscapes.prepare --output_dir=outputs/demo_lgt/landscapes
	$(COMPARE) lgt --modes off,all,auto --steps 8 --config_path recipes/configs/lgt_demo.json $(TRY_OUT) 0.02
	$(LAUNCH) hf_memopt.recipes.train_lgt --config_path recipes/configs/lgt_demo.json

demo-fluxflow: $(READY) ## a VAE-GAN on painted landscapes on the CPU, in about 4 minutes: results in outputs/demo_fluxflow
	rm -rf outputs/demo_fluxflow
	$(COMPARE) fluxflow --modes off,all,auto --steps 8 --config_path recipes/configs/fluxflow_demo.yaml $(TRY_OUT) 0.04
	$(LAUNCH) hf_memopt.recipes.train_fluxflow --config_path recipes/configs/fluxflow_demo.yaml

demo-fit: $(READY) ## training dies at a memory limit, and runs through below it with a disk, in 3 minutes: results in outputs/demo_fit
	$(PY) -m benchmarks.limit.demo --output outputs/demo_fit --overwrite

app: $(READY) ## a page in the browser that estimates and plans: http://127.0.0.1:7860
	$(PY) space/app.py

# Work is stolen in blocks, so that most modules' fixtures and imports happen in one process only.
PYTEST := $(PY) -m pytest -n auto --dist worksteal
QUICK := not gpu and not multi_gpu and not slow

test: $(READY) ## the unit tests (CPU, no network), in some 20 minutes on two cores
	$(PYTEST) -m "$(QUICK) and not e2e and not ranks and not fake_gpu and not canary"

test-e2e: $(READY) ## whole commands and recipes, and others that take more than 5 s each
	$(PYTEST) -m "$(QUICK) and e2e and not ranks and not fake_gpu and not canary"

test-ranks: $(READY) ## two and more processes that train together; they need both cores, so one test at a time
	$(PY) -m pytest -m "$(QUICK) and ranks"

test-fake-gpu: $(READY) ## what a GPU would be needed for, on the fake CUDA runtime (Linux)
	$(PYTEST) tests/test_fake_gpu.py

test-canaries: $(READY) ## the behaviour of other libraries that we rely on, with the versions in constraints.txt
	$(PYTEST) tests/canaries

test-all: test test-e2e test-ranks test-fake-gpu ## all of these but the canaries, which change with constraints.txt only

test-slow: $(READY) ## the tests that take minutes
	$(PY) -m pytest -m slow

test-gpu: ## the tests that need a GPU; PYTHON=python3 for the interpreter at hand instead of .venv
	$(if $(PYTHON),,$(MAKE) setup)
	$(or $(PYTHON),$(PY)) -m pytest -m "gpu or multi_gpu" tests/gpu

gpu-bundle: $(READY) ## wheels and a head script for a GPU machine without a network: .whl and .gpu
	$(PY) -m benchmarks.gpu_bundle --pip "$(UV)" tool run pip

style: $(READY) ## format and fix
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

# mypy and mkdocs see the tree as it is installed: with callbacks/ and recipes/ inside hf_memopt.
installed-tree:
	@rm -rf build/types && mkdir -p build/types/hf_memopt
	@ln -s $(CURDIR)/hf_memopt/* build/types/hf_memopt/
	@ln -sfn $(CURDIR)/callbacks $(CURDIR)/recipes build/types/hf_memopt/

quality: $(READY) installed-tree ## what continuous integration checks before the tests
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	cd build/types && ../../.venv/bin/mypy --config-file ../../setup.cfg --cache-dir ../../.mypy_cache -p hf_memopt

# Without lerobot, whose pins decide everybody's versions. Warnings of new versions are shown, not errors.
LATEST := .newest/latest
LATEST_EXTRAS := neuralop,fluxflow,deepspeed,lightning,sentence-transformers,peft,trl,report,completion
LATEST_TOOLS := pytest pytest-xdist hypothesis expecttest tensorboard torchao torchdiffeq
LATEST_PYTEST := $(LATEST)/bin/python -m pytest -W default -k "not smolvla and not for_a_policy" --ignore-glob="*lerobot*" \
  --ignore-glob="*smolvla*" --ignore-glob="*pi0*" --ignore-glob="*coupling_canaries*" --ignore-glob="*reflow_plan*" \
  --ignore-glob="*recipes/reflow*" --ignore-glob="*metaworld*"
# What needs neither lerobot nor more than these tools.
CORE := activations callbacks canaries checkpoint commands disk distributed docs estimate integrations jobs memory \
  operations peers recipes training transfer weights

latest: | $(UV)
	"$(UV)" venv --clear --python $(PYTHON_VERSION) $(LATEST)
	"$(UV)" pip install --python $(LATEST)/bin/python --editable ".[$(LATEST_EXTRAS)]" $(LATEST_TOOLS)

canaries: latest ## what we rely on in torch, transformers and others, tried with their newest versions in .newest/latest
	$(LATEST_PYTEST) -m canary tests/canaries

test-latest: latest ## the suite's core with the newest versions of everything but lerobot, in .newest/latest
	$(LATEST_PYTEST) -n auto --dist worksteal $(CORE:%=tests/%)

wheel: $(READY) ## source archives and wheels in dist: the library, and its plug-in for lerobot
	rm -rf dist
	$(PY) -m build
	$(PY) -m build --outdir dist $(PLUGIN)

install-texts: ## how to install, in the pages, as [tool:hf_memopt] in setup.cfg says; then read git diff
	python3 docs/install_texts.py

# With --quiet warnings would be no errors.
docs: $(READY) installed-tree ## the site, with the API from the docstrings, in build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --site-dir build/site
	@echo "docs: open build/site/index.html, or run make docs-serve"

docs-serve: $(READY) installed-tree ## the site on this machine, rebuilt at each change
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs serve

bench: $(READY) ## GPU tests and benchmarks, the most valuable first, within an hour: results in outputs/benchmarks
	$(PY) -m benchmarks.run_all --minutes 60

# The newest transformers that the benchmarks without lerobot are known to run with, beside the pinned one.
NEWEST_TRANSFORMERS := 5.23.0
NEWEST := .newest/transformers-$(NEWEST_TRANSFORMERS)
WITHOUT_LEROBOT := activations-32k longest-24 estimates-small-recipes offload-bytes

rehearse: $(READY) ## all benchmarks at toy size on the CPU: results in outputs/rehearsal
	$(PY) -m benchmarks.run_all --dry-run --overwrite

rehearse-newest: $(READY) ## some benchmarks at toy size with the newest transformers, which a GPU machine may have
	@if [ ! -d $(NEWEST) ]; then rm -rf .newest && mkdir .newest && \
	  grep -v -E "^(transformers|tokenizers|huggingface-hub)==" constraints.txt > .newest/constraints.txt && \
	  "$(UV)" pip install --python $(PY) --target $(NEWEST) --constraint .newest/constraints.txt \
	    transformers==$(NEWEST_TRANSFORMERS); fi
	PYTHONPATH=$(NEWEST) $(PY) -m benchmarks.run_all --dry-run --overwrite --output outputs/rehearsal/newest \
	  --only $(WITHOUT_LEROBOT)

clean: ## remove the environment and all outputs
	rm -rf .venv .typed .newest .uv .uv-draft build dist outputs *.egg-info

.PHONY: help setup installed-tree latest demo demo-metaworld demo-darcy demo-lm demo-lgt demo-fluxflow demo-fit test test-e2e test-ranks test-fake-gpu test-canaries test-all test-slow test-gpu gpu-bundle style quality canaries test-latest wheel install-texts docs docs-serve bench rehearse rehearse-newest clean
