# make train            learn CartPole over MPI (PRESET=pong-small for Pong, ARGS="--ranks 6" and the like)
# make test             run every test
# make native           build the C part
# make test-native      run the C tests under the address and undefined-behaviour sanitizers
# make lint             check style
# make clean            remove what make built, but not runs/
#
# The first call makes .venv and installs pinned packages (constraints.txt); later calls do not.

PRESET ?= cartpole
ARGS ?=
PYTHON ?= $(shell command -v python3.11 || command -v python3)
CC_FOUND = $(shell command -v $(CC))
BIN = .venv/bin
READY = .venv/.ready

train: $(READY) native
	@$(BIN)/apex train $(PRESET) $(ARGS)

test: $(READY) native
	@$(BIN)/python -m pytest $(ARGS)

native: compiler
	@$(MAKE) --silent -C native

test-native: compiler
	@$(MAKE) --silent -C native test

lint: $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt ruff
	@$(BIN)/ruff check .

clean:
	@$(MAKE) --silent -C native clean
	rm -rf .venv build *.egg-info .pytest_cache .hypothesis .ruff_cache

$(READY): pyproject.toml setup.py constraints.txt
	@$(MAKE) --silent python compiler
	@echo "setting up .venv (once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable ".[mpi,test]"
	@touch $(READY)

python:
	@test -n "$(PYTHON)" || { echo "make: Python is missing; install Python 3.11 (Debian: apt install python3 python3-venv)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "make: $$($(PYTHON) --version) is too old; install Python 3.11 or newer and run make PYTHON=/path/to/it" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
		|| { echo "make: $(PYTHON) cannot make virtual environments; install its venv module (Debian: apt install python3-venv)" >&2; exit 1; }

compiler:
	@test -n "$(CC_FOUND)" || { echo "make: the C compiler '$(CC)' is missing; install one (Debian: apt install gcc)" >&2; exit 1; }

.PHONY: train test native test-native lint clean python compiler
