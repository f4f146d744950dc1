# Two commands do everything: `make pretrain` (the main job on real data) and `make test`.
PYTHON ?= python3
BIN := .venv/bin
RUN := runs/mru_shakespeare
# python -m and torchrun -m would put the root, with its folders named data and kernels, on sys.path.
export PYTHONSAFEPATH := 1
# Hundreds of processes of tests import the package, each a third of a second faster where it is compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: pretrain test test-all lint docs format clean help
help:
	@echo "make pretrain   install into .venv, prepare the bundled corpus, train, evaluate, sample and export"
	@echo "make test       install into .venv and run the tests (test-all adds the slow ones)"
	@echo "make lint       ruff, the contract between the rooms, and hadolint"
	@echo "make docs       the documentation as a site in build/site; links that lead nowhere are errors"

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "matmix needs Python 3.11 or newer; run: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 2; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
	  { echo "Python's venv module is incomplete; on Debian or Ubuntu run: apt-get install python3-venv"; exit 2; }
	@# --use-pep517: seqeval has no wheel, and is built apart also where .venv has setuptools and wheel already.
	@echo "Installing the pinned set into .venv (about 6 GB on disk, a few minutes) ..."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --use-pep517 -c constraints.txt -e '.[test,bench,docs]'
	@touch $@

# Each command says so and does nothing where its work is already done, so a second `make pretrain` resumes or ends.
pretrain: .venv/installed
	@$(BIN)/matmix prepare bundled:shakespeare --out datasets/shakespeare_char --model-type char \
	  --byte-fallback False --max-document-chars 4000 --validation-fraction 0.03
	@$(BIN)/matmix train mru_shakespeare
	@echo && $(BIN)/matmix generate $(RUN) --prompt "ROMEO:" --max-new-tokens 300
	@echo; if [ -d exports/mru_shakespeare ]; then echo "Already exported to exports/mru_shakespeare."; \
	  else $(BIN)/matmix export $(RUN) --out exports/mru_shakespeare; fi
	@echo
	@echo "All done. On held-out text, in nats per character:"
	@$(BIN)/python -P -m matmix.train.evaluators $(RUN)
	@echo "What you can do next:"
	@echo "  more text:               $(BIN)/matmix generate $(RUN) --prompt 'To be'"
	@echo "  the curves:              $(BIN)/tensorboard --logdir runs"
	@echo "  against its peers:       $(BIN)/matmix compare quickstart --dry-run"
	@echo "  the same without mixers: $(BIN)/matmix train mru_shakespeare --model.layers none --run-dir runs/no_mixer"

test: .venv/installed
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -m "not slow" tests

test-all: .venv/installed
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto tests

lint: .venv/installed
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports && $(BIN)/hadolint Dockerfile

# The rooms of the package, by the names that they are imported by.
ROOMS := kernels model data train use launch

docs: .venv/installed
	@mkdir -p build/docs/matmix
	@for room in $(ROOMS) __init__.py; do ln -sfn ../../../$$room build/docs/matmix/$$room; done
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "The documentation is in build/site/index.html"

format: .venv/installed
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache
