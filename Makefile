# Every target sets itself up in .venv. PYTHON chooses the interpreter the environment is made from.
PYTHON ?= python3
VENV := .venv
# Compiled files are kept, whatever the caller says: a run of the tests starts a hundred interpreters.
RUN := env -u PYTHONDONTWRITEBYTECODE PYTHONPATH=tests $(VENV)/bin/python
STAMP := $(VENV)/.installed
# As ranks have it (parallel_runtime/process/environment.py): a test's ComfyUI computes on a CPU, too.
export THP_MEM_ALLOC_ENABLE ?= 1
# Debian and Ubuntu keep the venv module in a package of its own. Nothing here may wait: not for an answer, not for
# another apt, not for a mirror that does not answer.
APT := DEBIAN_FRONTEND=noninteractive timeout 600 apt-get -qq -o DPkg::Lock::Timeout=60 -o Acquire::http::Timeout=30 \
	-o Acquire::Retries=1
ENSURE_VENV_MODULE = $(PYTHON) -c "import ensurepip" 2>/dev/null || \
	{ test "$$(id -u)" = 0 && $(APT) update </dev/null && $(APT) install -y python3-venv </dev/null; } || \
	{ echo "$(PYTHON) cannot make environments; install its venv module (apt install python3-venv)" >&2; exit 1; }
# The browser of the browser tests: Debian's own, nothing downloaded by hand. CHROMIUM_PATH names another one.
ENSURE_CHROMIUM = test -n "$$CHROMIUM_PATH" || command -v chromium chromium-browser google-chrome >/dev/null || \
	{ test "$$(id -u)" = 0 && $(APT) update </dev/null && $(APT) install -y --no-install-recommends chromium </dev/null; } || \
	{ echo "the browser tests need Chromium; apt install chromium, or set CHROMIUM_PATH" >&2; exit 1; }
# What torch's compiler calls, in the tests of compiled blocks.
ENSURE_COMPILER = command -v g++ >/dev/null || \
	{ test "$$(id -u)" = 0 && $(APT) update </dev/null && $(APT) install -y --no-install-recommends g++ </dev/null; } || \
	{ echo "the tests of compiled blocks need g++; apt install g++" >&2; exit 1; }

# Two ranks on a CPU; GPUs where there are any: make demo DEMO_FLAGS="--devices cuda:0,cuda:1". --open leaves ComfyUI up
DEMO_FLAGS ?=
PYTEST_FLAGS ?=
# Processes that tests run in, since much of a test is a wait for other processes. WORKERS=0 runs all in one, in order.
WORKERS ?= 2
PYTEST := $(RUN) -m pytest -n $(WORKERS)
PARITY_FLAGS ?=
PARITY_MODELS_FLAGS ?=
FORMATS_FLAGS ?=
BEFORE_FLAGS ?=
TARGETS_FLAGS ?=
SAMPLING_FLAGS ?=
REGISTRY := build/registry
SHOTS := build/pictures
SOAK_FLAGS ?=
FUZZ_FLAGS ?=
MUTANTS_FLAGS ?=
WEEKLY_FLAGS ?=
WEEKLY_HOSTS ?= oldest
MACHINES_FLAGS ?=
PRETEND_FLAGS ?=
QUALITY_FLAGS ?=
IDLE_FLAGS ?=
GPU_FLAGS ?=
TEST_HOST_FLAGS ?=
TEMPLATES_FLAGS ?=

# All of them, none being a file.
TARGETS := $(shell sed -n 's/^\([a-z][a-z-]*\):.*/\1/p' $(firstword $(MAKEFILE_LIST)))
.PHONY: $(TARGETS)

help:
	@echo "make test-quick    pure code, workers of every plan, one graph in a real server; no browser; under 90 seconds"
	@echo "make test          what .ci/run calls: real servers, a browser, every refusal, every plan; under 8 minutes"
	@echo "make test-full     what make test leaves out: large files, an old ComfyUI, compiled blocks, soaks"
	@echo "make coverage      make test, and which lines of the pack it ran, in workers and servers too"
	@echo "make test-host     what depends on ComfyUI, on any: COMFYUI_PATH=DIR, or oldest; ends with a table of what is wrong"
	@echo "all: make $(TARGETS)" | fold -s -w 100

venv: $(STAMP)

$(STAMP): pyproject.toml requirements.txt constraints.txt tools/install.py tests/host/fetch.py tools/mend_cpu_torch.py
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || \
		{ { $(ENSURE_VENV_MODULE); } && $(PYTHON) -m venv --clear $(VENV); }
	PIP_NO_INPUT=1 $(RUN) -m tools.install </dev/null
	touch $@

# What to run while you work; no browser, no compiler.
test-quick: venv
	$(PYTEST) -m "not slow and not full" $(PYTEST_FLAGS)

# What must hold before a change goes in; .ci/run calls it.
test: venv chromium compiler $(REGISTRY)/.installed
	$(PYTEST) -m "not full" $(PYTEST_FLAGS)

# What `make test` leaves out. A part of it: make test-full PYTEST_FLAGS=tests/families
test-full: venv compiler
	$(PYTEST) -m full $(PYTEST_FLAGS)

# What depends on ComfyUI, on the one in COMFYUI_PATH (`oldest`: the oldest that the pack names, fetched), with what that one
# requires. Some of it: TEST_HOST_FLAGS="--only modules"; newer packages: TEST_HOST_FLAGS="--with comfyui-frontend-package"
test-host:
	@$(MAKE) --no-print-directory COMFYUI_PATH= venv chromium compiler
	$(RUN) -m tools.on_comfyui $(TEST_HOST_FLAGS) -n $(WORKERS) $(PYTEST_FLAGS)

# ComfyUI's own templates of the package that its requirements name, with the stock loader and with ours; writes
# docs/templates.md. On any ComfyUI: COMFYUI_PATH=DIR; some of them: make templates TEMPLATES_FLAGS="--only NAME"
templates:
	@$(MAKE) --no-print-directory COMFYUI_PATH= venv chromium
	$(RUN) -m tools.official_templates $(TEMPLATES_FLAGS)

# As `make test`, slower; less of it: make coverage PYTEST_FLAGS=tests/pool
coverage: venv chromium compiler $(REGISTRY)/.installed
	$(RUN) -m line_coverage -n $(WORKERS) -m "not full" $(PYTEST_FLAGS)

# Every kind of graph with the stock loader and with ours, under every kind of plan; writes docs/parity.md.
# Part of it: make parity PARITY_FLAGS="--only kontext --plan 'ring 2'"
parity: venv
	$(RUN) -m tools.graph_matrix $(PARITY_FLAGS)

# Every family of models with the stock loader and with ours, under every plan; writes docs/models.md.
# Part of it: make parity-models PARITY_MODELS_FLAGS="--only Wan --plan 'ring 2'"
parity-models: venv
	$(RUN) -m tools.model_matrix $(PARITY_MODELS_FLAGS)

# The section of docs/models.md on each class that ComfyUI knows: its plan with the cases that show it, or why it has none
models-list: venv
	$(RUN) -m tools.class_list

# Our nodes as ComfyUI describes them, for a ComfyUI that cannot have them; writes nodes/host/contract/stand_ins.json
stand-ins: venv
	$(RUN) -m tools.stand_ins

# README's table of models, from docs/models.md
readme-models: venv
	$(RUN) -m tools.readme_table

# Files in each quantised format with the stock loader and with ours, plain and with a LoRA; writes docs/formats.md.
# Part of it: make formats FORMATS_FLAGS="--only int8"
formats: venv
	$(RUN) -m tools.formats $(FORMATS_FLAGS)

# A plan of models/specs against one process on a tiny model, at 2 and 3 ranks: make try-plan CASE="Wan VACE" (SHOW=1: what it can name)
try-plan: venv
	$(RUN) -m tools.try_plan $(if $(SHOW),--show) "$(CASE)"

# What is refused, with its message, from a real server; writes docs/refusals.md.
refusals: venv
	$(RUN) -m tools.refusals_table

# 50 prompts of two models and two plans in turn; writes benchmarks/endurance.md.
endurance: venv
	$(RUN) -m tools.endurance

# Faults mixed at random for 10 minutes: make soak SOAK_FLAGS="--minutes 30 --seed 7"
soak: venv
	$(RUN) -m faults.soak $(SOAK_FLAGS)

# Each of the soak's thirteen faults three times, and how long recovery took, in about four minutes
recovery: venv
	$(RUN) -m faults.soak --minutes 0 --steady-prompts 0 --faults 39

# A million inputs for each parser, with assertions and without: make fuzz FUZZ_FLAGS="--inputs 100000"
fuzz: venv
	$(RUN) -m faults.fuzz $(FUZZ_FLAGS)
	$(RUN) -O -m faults.fuzz $(FUZZ_FLAGS)

# Every kind of plan on tensors that say cuda:N, with streams watched, memory refused, and mistakes that must be found.
# Part of it: make pretend-cuda PRETEND_FLAGS="--only mistakes --match stage"
pretend-cuda: venv compiler
	$(RUN) -m gpu.pretend_cuda $(PRETEND_FLAGS)

# Experiments for one GPU in the order of what they decide, each under eight minutes, as many as fit half an hour; what is
# done is not done again. Writes benchmarks/gpu.md, the choices by capability and the planner's constants. One of them:
# make gpu GPU_FLAGS="--only 3"; do they run, on a CPU: make gpu GPU_FLAGS=--small
gpu: venv
	$(RUN) -m benchmarks.gpu $(GPU_FLAGS)

# Every kind of plan on this machine's GPUs; where there is one, four ranks share it, once through NCCL and once through
# gloo. Part of it: make gpu-plans GPU_FLAGS="--match ring"
gpu-plans: venv
	$(RUN) -m gpu.real_cuda $(GPU_FLAGS)

# Several machines, as network namespaces of this one: plans, faults, who can reach what. Its last line: N cases, 0 wrong.
# Part of it: make machines MACHINES_FLAGS="--only cable"
machines: venv
	$(RUN) -m machines.cases $(MACHINES_FLAGS)

# One machine and two, each plan, by link; writes benchmarks/machines.md
machines-table: venv
	$(RUN) -m benchmarks.machines $(MACHINES_FLAGS)

# A million connections of strangers to where machines join: it lives, stays small, and lets who has the token in.
machines-fuzz: venv
	$(RUN) -m machines.strangers $(FUZZ_FLAGS)

# Plausible mistakes at 200 places that a seed chooses, and the panel's; prints those that no test finds. Which tests run a
# line is recorded first, as by `make coverage`. Others, or some: make mutants MUTANTS_FLAGS="--seed 7 --match parallel/ring"
mutants: venv chromium
	$(RUN) -m mutants $(MUTANTS_FLAGS)

# Every slow matrix in order, for hours; what passed on this code is not run again. Ends with one table. Logs: build/weekly.
# The ComfyUIs of test-host: make weekly WEEKLY_HOSTS="oldest /path/to/comfyui"; some: make weekly WEEKLY_FLAGS="--only soak"
weekly: export WEEKLY_HOSTS := $(WEEKLY_HOSTS)
weekly: venv chromium compiler
	$(RUN) -m tools.weekly $(WEEKLY_FLAGS)

demo: venv
	$(RUN) -m demo.run $(DEMO_FLAGS)

lint: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: venv
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

types: venv
	$(VENV)/bin/mypy

imports: venv
	$(RUN) tests/test_imports_point_down.py

# A step, its hand-over, loading and memory of six families in this checkout and another, in turn:
# make before-after BEFORE=../earlier
before-after: venv
	$(RUN) -m benchmarks.before_after $(BEFORE_FLAGS) $(BEFORE)

# The planner beside measurements on two CPU ranks, for ten families; writes benchmarks/planner_families.md.
# Some of them: make planner-families PLANNER_FLAGS="--only wan --keep /tmp/wan.json"
planner-families: venv
	$(RUN) -m benchmarks.planner_families $(PLANNER_FLAGS)

# Hand-over, memory, what timing costs, and a step against stock ComfyUI's:
# make targets TARGETS_FLAGS="hand_over stock"
targets: venv
	$(RUN) -m benchmarks.targets $(TARGETS_FLAGS)

# Every sampler with its loop in the workers and in ComfyUI; writes benchmarks/in_worker_sampling.md.
# Some of them: make in-worker-sampling SAMPLING_FLAGS="--only euler heun --output /dev/stdout"
in-worker-sampling: venv
	$(RUN) -m benchmarks.in_worker_sampling $(SAMPLING_FLAGS)

# What PipeFusion sends, its bubbles and timelines; writes benchmarks/pipefusion.md.
pipefusion: venv
	$(VENV)/bin/python -m benchmarks.pipefusion

# Memory of a rank and time of a call with 100,000 tokens; writes benchmarks/long_video.md. Half an hour on two cores.
long-video: venv
	$(RUN) -m benchmarks.long_video --write benchmarks/long_video.md

# The READMEs' install line, from the address in pyproject.toml's [project.urls]
address: venv
	$(RUN) -m tools.address

# The shell lines that get each template's files: docs/get_models.md and the templates' notes
get-models: venv
	$(RUN) -m tools.get_models --write

# What the registry is given: node.zip, as below. It fails while the pack has no address, and says so.
pack: venv
	@$(RUN) -m tools.address --check
	@$(MAKE) --no-print-directory archive

# The pack judged by the registry's own tool, and packed into node.zip. It needs no address.
archive: venv $(REGISTRY)/.installed
	$(REGISTRY)/bin/comfy --skip-prompt --no-enable-telemetry node validate </dev/null
	$(REGISTRY)/bin/comfy --skip-prompt --no-enable-telemetry node pack </dev/null

chromium:
	@$(ENSURE_CHROMIUM)

compiler:
	@$(ENSURE_COMPILER)

# The help's and the README's pictures, from real servers; look at them before they are committed.
pictures: venv chromium
	mkdir -p $(SHOTS)
	PARALLEL_DIT_SCREENSHOTS=$(SHOTS) $(RUN) -m pytest -q tests/browser
	$(RUN) -m tools.pictures readme $(SHOTS)
	taskset -c 0,1 $(RUN) -m tools.pictures

# Chromium's processor time with the pack's web/ and without, while nothing happens; 12 minutes, on a quiet machine.
# A mistake that it must find: make idle IDLE_FLAGS=--control
idle: venv chromium
	$(RUN) -m tools.idle $(IDLE_FLAGS)

# The tool brings many packages that nothing else needs, so it has an environment of its own.
$(REGISTRY)/.installed: constraints.txt | venv
	$(VENV)/bin/python -m venv --clear $(REGISTRY)
	PIP_NO_INPUT=1 $(REGISTRY)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt comfy-cli </dev/null
	touch $@

clean:
	rm -rf $(VENV) build demo_output .pytest_cache .ruff_cache .mypy_cache
