# make demo   train a small GPT on two nodes of two ranks, lose a node, resume, prove nothing changed
# make test   build .venv if needed and run all tests (20 to 25 minutes on 2 cores)
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1

.PHONY: venv demo test lint soak chaos bench clean
venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade-strategy only-if-needed -c constraints.txt -e '.[torchdata,datasets,transformers,lightning,deepspeed,ray,examples,dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/unbroken prove --nodes 2 --nproc 2 --faults node --trials 1 --seed 7 -- examples/ddp.py --out {out} --steps 60 --every 10

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

soak: $(STAMP)
	$(BIN)/python -m pytest -m slow -o addopts="-q --strict-markers -ra --import-mode=importlib"

chaos: $(STAMP)
	$(BIN)/python -m pytest tests/chaos -s -m "slow or not slow"

bench: $(STAMP)
	$(BIN)/pip install --quiet --upgrade-strategy only-if-needed -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/saving.py
	$(BIN)/python benchmarks/saving.py --small --rounds 3
	$(BIN)/python benchmarks/turns.py --peer raw --peer safetensors --peer torch_checkpointing --peer unbroken --rounds 0
	$(BIN)/python benchmarks/turns.py --peer torch_checkpointing --peer unbroken --rounds 40 --loads 0
	$(BIN)/python benchmarks/cadence.py
	$(BIN)/python benchmarks/sharded.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info
