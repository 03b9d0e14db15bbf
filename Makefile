# Everything here begins with `make setup`, which is quick when there is nothing to do.
#
#   make demo                     the whole path on throwaway servers, a relay killed midway
#   make test                     the short tests          make test-long   those that take minutes
#   make lint types               ruff, mypy --strict
#   make sim SEEDS=500 FROM=0     random histories in simulation
#   make soak HOURS=1             hours at half the ceiling with random faults; a result and its picture
#   make mutants                  plants each known bug: which random history finds it (minutes)
#   make faults                   the fault matrix on real servers, and its table in docs/guarantees.md (minutes)
#   make bench                    the benchmark suite: ten minutes of a quiet machine (bench-long: hours)
#
# make test PYTEST="tests/core -x" passes arguments on; WORKERS files at once (0: one after the other).

PYTHON := .venv/bin/python
SEEDS ?= 500
FROM ?= 0
HOURS ?= 1
PYTEST ?=
# They wait for servers most of the time, and each worker has servers of its own.
WORKERS ?= 3
# These bring servers to their knees; recovery times are judged.
WORKERS_LONG ?= 2

.PHONY: setup demo test test-long lint types format bench bench-long sim mutants soak faults

setup:
	@.ci/setup

demo: setup
	$(PYTHON) -m relay demo

test: setup
	$(PYTHON) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST)

test-long: setup
	$(PYTHON) -m pytest -m long -n $(WORKERS_LONG) --dist loadfile --no-loadscope-reorder $(PYTEST)

lint: setup
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

format: setup
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

types: setup
	$(PYTHON) -m mypy

bench: setup
	$(PYTHON) -m bench --short --json bench/results/short.json
	$(PYTHON) -m bench.readme

bench-long: setup
	$(PYTHON) -m bench --long --json bench/results/long.json

sim: setup
	$(PYTHON) -m tests.sim --seeds $(SEEDS) --from $(FROM)

faults: setup
	$(PYTHON) -m tests.faults --table --jobs 2

mutants: setup
	$(PYTHON) -m tests.mutants

soak: setup
	$(PYTHON) -m tests.soak --hours $(HOURS)
