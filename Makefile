# Everything a person or CI runs. A fresh clone needs Python 3.11+, a C compiler and nothing else.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: serve serve-redis test test-slow check manifests prometheus format proto clean install

TIERS := --host-cache-bytes=1GiB --disk-cache-dir=~/.cache/baton/kv --disk-cache-bytes=4GiB

serve: install          ## router, 1 prefill and 1 decode worker, host and disk tiers; ARGS="--prefill 2 --port 9000"
	@$(BIN)/baton serve $(TIERS) $(ARGS)

serve-redis: install    ## the same and a redis-server of its own as a third tier
	@$(BIN)/baton serve $(TIERS) --redis-url=local://1GiB $(ARGS)

test: install           ## the default tests: minutes on 2 cores
	$(BIN)/python -m pytest $(ARGS)

test-slow: install      ## the long ones
	$(BIN)/python -m pytest -m "slow and not gpu" $(ARGS)

check: install          ## style, types, walls between the rooms, stubs against proto/
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	PYTHON=$(BIN)/python proto/check.sh

manifests: install      ## render every Kubernetes overlay, check it against schemas and our own rules
	$(BIN)/python -m deploy.check

prometheus: install     ## a Prometheus for the tests of queries, out of Debian's package; without it they are skipped
	cd $(VENV) && apt-get download --quiet prometheus && dpkg --extract prometheus_*.deb prometheus && rm prometheus_*.deb

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: install          ## make wire/v1 from proto/
	PYTHON=$(BIN)/python proto/generate.sh

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml requirements-nodeps.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[worker,dev]'
	$(BIN)/python -m pip install --quiet --no-deps --requirement requirements-nodeps.txt
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
