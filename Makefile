# `make` lists what there is.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# The vLLM-Omni releases that are tested; the development tools are taken from the environment of the last one.
RELEASES := 0.28.0 0.30.0
RELEASE := $(lastword $(RELEASES))
BIN := $(CURDIR)/.venvs/$(RELEASE)/bin
export PATH := $(BIN):$(PATH)
export PRE_COMMIT_HOME ?= $(CURDIR)/.cache/pre-commit

.PHONY: help
help:  ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | sort | while IFS=$$'\t' read -r target text; do printf '%-10s %s\n' "$$target" "$$text"; done

.PHONY: env
env:  ## the environment of the newest tested release, in .venvs/
	@tools/environment/create.sh $(RELEASE)

.PHONY: env-all
env-all:  ## the environments of all tested releases
	@for release in $(RELEASES); do tools/environment/create.sh "$$release"; done

ARGS ?=

.PHONY: demo
demo: env  ## serve a tiny model with and without the package and compare; ARGS="..." goes to our arm's vllm serve
	python -m tools.demo $(ARGS)

# The serve tests start servers that use both cores: one after the other. The rest runs two abreast.
.PHONY: test
test: env-all  ## the suite against 0.30.0, real servers included, and the contract suite against 0.28.0
	pytest -n 2 -m "not serve and not slow"
	pytest -m serve
	for release in $(filter-out $(RELEASE),$(RELEASES)); do .venvs/$$release/bin/python -m pytest -n 2 tests/contract; done
	python -m tools.grafts $(RELEASES:%=.venvs/%/bin/python)

.PHONY: test-slow
test-slow: env  ## what takes too long for every change: all model families, two ranks
	pytest -n 2 -m slow

.PHONY: lint
lint: env  ## ruff, mypy, import-linter, codespell and the checks of tools/pre_commit, on all files
	pre-commit run --all-files

.PHONY: format
format: env  ## write what ruff can fix and format
	ruff check --fix-only .
	ruff format .

.PHONY: docs
docs: env  ## render docs/grafts.md and docs/options.md
	python -m tools.pre_commit.render_docs

.PHONY: grafts
grafts: env-all  ## which grafts the releases still need; PYTHON=... asks the environment of a further release too
	python -m tools.grafts $(RELEASES:%=.venvs/%/bin/python) $(PYTHON)

.PHONY: site
site: env  ## the documentation as a site, in build/site/
	NO_MKDOCS_2_WARNING=1 python -m mkdocs build --strict

.PHONY: clean
clean:  ## remove caches and build output; the environments stay
	rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .cache/pre-commit build dist
	find . -name __pycache__ -not -path './.venvs/*' -prune -exec rm -rf {} +
