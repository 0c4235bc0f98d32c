# Recipes for people who work on Paddock; `make` alone lists them.
.DEFAULT_GOAL := help
BIN := .venv/bin

help:           ## list the recipes
	@grep -hE '^[a-z-]+: *.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 20

up:             ## install and run Paddock on this machine
	scripts/up

test:           ## install what tests need, then lint, types, imports, tests
	scripts/test

check:          ## format, lint, imports, layout and types, in under a minute
	$(BIN)/ruff format --check -q src tests bench tools
	$(BIN)/ruff check -q src tests bench tools
	$(BIN)/lint-imports
	$(BIN)/pytest -q -p no:cacheprovider tests/project/test_architecture.py
	$(BIN)/pyright -p bench & $(BIN)/pyright && wait $$!

format:         ## put the code in shape
	$(BIN)/ruff format src tests bench tools
	$(BIN)/ruff check --fix src tests bench tools

test-kubernetes:  ## the cluster tests, on a real API server
	scripts/test-kubernetes

image:          ## the image for clusters, without Docker, in build/image
	deploy/image/build-rootfs build/image

lock:           ## pin the dependencies again
	$(BIN)/uv pip compile pyproject.toml --generate-hashes --python-version 3.11 --universal --no-header --no-annotate -q -o requirements/run.txt
	$(BIN)/uv pip compile pyproject.toml --group dev --generate-hashes --python-version 3.11 --universal --no-header --no-annotate -q -o requirements/dev.txt
	for name in server python; do $(BIN)/uv pip compile requirements/interpreter-$$name.in --generate-hashes --python-version 3.11 --python-platform linux --no-header --no-annotate -q -o requirements/interpreter-$$name.txt; done
	for name in openai:3.11 langchain-smolagents:3.11 inspect:3.12; do $(BIN)/uv pip compile requirements/frameworks-$${name%:*}.in --generate-hashes --python-version $${name#*:} --universal --no-header --no-annotate -q -o requirements/frameworks-$${name%:*}.txt; done

bench:          ## every benchmark, one JSON line each
	$(BIN)/paddock bench

.PHONY: help up test check format test-kubernetes image lock bench
