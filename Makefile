# make train            learn CartPole over MPI (PRESET=pong-small for Pong; ARGS="--ranks 6")
# make test             run every test, three at a time (WORKERS=1: one at a time; ARGS=-x)
# make test-slurm       run the job scripts on a real SLURM, started for the tests (needs root and SLURM's packages)
# make test-hosts       run the tests between two hosts: network namespaces of this machine (needs root and iproute2)
# make soak             train for ten minutes over each transport and watch the memory; then kill actors at random for as long,
#                       and kill and resume whole jobs (SECONDS=60, TRANSPORTS=zmq, PRESET=pong-small)
# make figures          run the tests that measure endings, kills, resumes and fuzz; print a table of the measurements
# make native           build the C part
# make test-native      run the C tests under the address and undefined-behaviour sanitizers
# make lint             check style and types
# make clean            remove everything that make built; keep runs/
# make sizes            print the lines of the core and of every option
#
# The first call makes .venv and installs pinned packages (constraints.txt); later calls do not.

PRESET ?= cartpole
ARGS ?=
SECONDS ?= 600
WORKERS ?= 3
TRANSPORTS ?= mpi zmq
MEASURED = tests/end_to_end/test_endings.py tests/end_to_end/test_resume.py tests/end_to_end/test_tolerance.py tests/fuzz \
	tests/apex/transport/test_mpi_ports.py tests/apex/transport/test_zmq_ports.py
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN = .venv/bin
READY = .venv/.ready
PIP = $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt

# Each check names in one line what is missing and what to install.
refuse = { echo "make: $(1)" >&2; exit 1; }
NEED_COMPILER = command -v $(CC) >/dev/null || $(call refuse,the C compiler '$(CC)' is missing; install one (Debian: apt install gcc))
NEED_PYTHON = test -n "$(PYTHON)" || $(call refuse,Python is missing; install Python 3.11 (Debian: apt install python3 python3-venv)); \
	'$(PYTHON)' -c '' 2>/dev/null || $(call refuse,'$(PYTHON)' does not run; install Python 3.11 and run make PYTHON=/path/to/it); \
	'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| $(call refuse,$$('$(PYTHON)' --version 2>&1) is too old; install Python 3.11 or newer and run make PYTHON=/path/to/it); \
	'$(PYTHON)' -c 'import venv, ensurepip' 2>/dev/null \
		|| $(call refuse,$(PYTHON) cannot make virtual environments; install its venv module (Debian: apt install python3-venv))

train: $(READY) native
	@$(BIN)/apex train $(PRESET) $(ARGS)

test: $(READY) native
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder $(ARGS)

test-slurm: $(READY) native
	@$(BIN)/python -m pytest tests/slurm $(ARGS)

test-hosts: $(READY) native
	@$(BIN)/python -m pytest tests/hosts $(ARGS)

soak: $(READY) native
	@test "$(SECONDS)" -ge 20 2>/dev/null || $(call refuse,SECONDS=$(SECONDS) must be a whole number of seconds, at least 20; try make soak SECONDS=60)
	@SOAK_SECONDS="$(SECONDS)" SOAK_TRANSPORTS="$(TRANSPORTS)" SOAK_PRESET="$(PRESET)" $(BIN)/python -m pytest tests/soak $(ARGS)
	@KILL_ROUNDS=4 $(BIN)/python -m pytest tests/end_to_end/test_resume.py -k killed_at_random $(ARGS)

figures: $(READY) native
	@rm -f .figures.jsonl
	@FIGURES='$(CURDIR)/.figures.jsonl' KILL_ROUNDS=2 $(BIN)/python -m pytest -q $(or $(ARGS),$(MEASURED))
	@$(BIN)/python tests/figures.py .figures.jsonl

native:
	@$(NEED_COMPILER)
	@$(NEED_PYTHON)
	@$(MAKE) --silent -C native PYTHON='$(PYTHON)'

test-native:
	@$(NEED_COMPILER)
	@$(MAKE) --silent -C native test

sizes: $(READY)
	@$(BIN)/python tests/sizes.py

lint: $(READY)
	@$(PIP) ruff mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || $(call refuse,some files are not formatted; run $(BIN)/ruff format .)
	@$(BIN)/mypy

clean:
	@$(MAKE) --silent -C native clean
	rm -rf .venv build *.egg-info .pytest_cache .hypothesis .ruff_cache .mypy_cache

$(READY): pyproject.toml setup.py constraints.txt
	@$(NEED_PYTHON)
	@$(NEED_COMPILER)
	@echo "setting up .venv (once)"
	@test -x $(BIN)/python || '$(PYTHON)' -m venv .venv
	@$(PIP) --editable ".[mpi,test]"
	@touch $(READY)


.PHONY: sizes train test test-hosts test-slurm soak figures native test-native lint clean
