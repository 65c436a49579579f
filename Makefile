# Each target does its own set-up: Python 3.11 or newer with pip is all a fresh machine needs.
PYTHON ?= python3
VENV := .venv
MIN := .venv-min
SITE := .venv-docs
CLEAN := .venv-dist
AUDIT := .venv-audit
PIP_FLAGS := --quiet --disable-pip-version-check
MIN_PINS := transformers==5.17.0 huggingface_hub==1.33.0
TORCH := torch==2.13.0
# With HASHED=1 every package but torch must be the very file that hashes.txt names. pip cannot check hashes
# and install a project in place by one command: the packages come first, then torch and the project, alone.
ifdef HASHED
ALONE := --no-deps --no-build-isolation
endif
# What only a device can show is soaked where the machine has one.
HAS_GPU := { nvidia-smi --list-gpus | grep -q .; } 2> /dev/null
# The page is tested in a browser where the machine has one; make test-page brings one.
HAS_CHROMIUM := { command -v chromium || command -v chromium-browser || command -v google-chrome; } > /dev/null
# Dozens of processes import the same modules: what one has compiled, the next ones find.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-min test-page lint fuzz soak audit hashes docs docs-check reference dist clean help
.DEFAULT_GOAL := help

help:
	@echo "make train       the embedded example end to end, in minutes on two cores"
	@echo "make test        lint, types, all tests, and the short documentation check"
	@echo "make test-min    the model-facing tests with the oldest supported transformers"
	@echo "make test-page   the page's tests in a browser, which it installs where there is none"
	@echo "make lint        ruff and mypy"
	@echo "make fuzz        12,000 hostile inputs for everything that is read; any outcome but a clean one fails"
	@echo "make soak        runs of every method killed 1,000 times, ranks killed in every phase, and compared; on a GPU also without memory, and for an hour"
	@echo "make audit       known vulnerabilities of the pinned packages"
	@echo "make hashes      write hashes.txt for the pins of constraints.txt; make HASHED=1 test installs by it"
	@echo "make docs        the documentation site in build/site; broken links fail"
	@echo "make docs-check  every command and link of README and docs, run as a reader would"
	@echo "make reference   write docs/reference from the source"
	@echo "make dist        wheel and sdist in dist/, tried in an environment of their own"
	@echo "make clean       remove environments and caches; runs/ is kept"

train: $(VENV)/run.stamp
	@$(VENV)/bin/tfive train nano

# Three workers for two cores: tests of several processes wait a good part of their time.
test: lint
	@$(VENV)/bin/python -m pytest -n 3 --dist loadfile
	@$(VENV)/bin/python tests/docs_check.py --short

test-min: $(MIN)/test.stamp
	@$(MIN)/bin/python -m pytest -m model -n 2 --dist loadfile

test-page: $(VENV)/page.stamp
	@$(VENV)/bin/python -m pytest tests/report/test_page_browser.py tests/report/test_page_looks.py tests/report/test_play_browser.py

lint: $(VENV)/lint.stamp
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/ruff format --check --quiet .
	@$(VENV)/bin/mypy --no-error-summary

EXAMPLES ?= 12000
fuzz: $(VENV)/test.stamp
	@$(VENV)/bin/python tests/fuzz/run.py --examples $(EXAMPLES)

KILLS ?= 1000
soak: $(VENV)/test.stamp
	@$(VENV)/bin/python tests/soak/run.py --kills $(KILLS)
	@$(VENV)/bin/python tests/soak/ranks.py
	@$(VENV)/bin/python tests/soak/network.py
	@if $(HAS_GPU); then $(VENV)/bin/python tests/soak/device.py --only kills --only memory --only growth --out build/device.json; fi

# The newest auditor there is: an old one knows old faults.
audit: $(AUDIT)/audit.stamp
	@$(AUDIT)/bin/pip-audit --strict --disable-pip --no-deps --requirement constraints.txt

# After every change of constraints.txt, on the platform that is tested.
hashes: $(VENV)/run.stamp
	@mkdir -p build
	@$(VENV)/bin/pip install $(PIP_FLAGS) --dry-run --ignore-installed --no-deps --report build/pins.json -r constraints.txt
	@$(VENV)/bin/python .ci/hashes.py build/pins.json > hashes.txt

docs-check: $(VENV)/test.stamp
	@$(VENV)/bin/python tests/docs_check.py

docs: $(SITE)/docs.stamp
	@NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs --quiet build --strict
	@echo "build/site/index.html"

reference: $(VENV)/run.stamp
	@$(VENV)/bin/python docs/tools/reference.py

# What a stranger gets from the wheel alone: commands, presets, the embedded model and its text.
dist: $(VENV)/run.stamp
	@rm -rf dist build/lib build/bdist* $(CLEAN)
	@$(VENV)/bin/python -c 'from setuptools import build_meta as build; build.build_sdist("dist"); build.build_wheel("dist")' > /dev/null
	@$(PYTHON) -m venv $(CLEAN)
	@$(CLEAN)/bin/pip install $(PIP_FLAGS) -c constraints.txt $(TORCH)
	@$(CLEAN)/bin/pip install $(PIP_FLAGS) -c constraints.txt dist/*.whl
	@cd dist && ../$(CLEAN)/bin/tfive --version && ../$(CLEAN)/bin/tfive train nano --set window.windows=1 --out tried && rm -rf tried
	@ls -1 dist

# The exact torch goes in first: an unpinned one would be replaced, at the cost of a second large download.
$(VENV)/run.stamp: pyproject.toml constraints.txt
	@echo "setting up $(VENV) (once)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tfive needs Python 3.11 or newer; try make PYTHON=python3.11")'
	@$(PYTHON) -m venv $(VENV)
ifdef HASHED
	@$(VENV)/bin/pip install $(PIP_FLAGS) --no-deps --require-hashes -r hashes.txt
endif
	@$(VENV)/bin/pip install $(PIP_FLAGS) -c constraints.txt $(if $(HASHED),--no-deps) $(TORCH)
	@$(VENV)/bin/pip install $(PIP_FLAGS) -c constraints.txt $(ALONE) -e .
	@touch $@

$(VENV)/test.stamp: $(VENV)/run.stamp
	@$(VENV)/bin/pip install $(PIP_FLAGS) -c constraints.txt $(ALONE) -e ".[test]"
	@if $(HAS_CHROMIUM); then $(VENV)/bin/pip install $(PIP_FLAGS) -c constraints.txt $(ALONE) -e ".[page-test]"; fi
	@touch $@

$(VENV)/page.stamp: $(VENV)/test.stamp
	@$(VENV)/bin/pip install $(PIP_FLAGS) -c constraints.txt $(ALONE) -e ".[page-test]"
	@$(HAS_CHROMIUM) || $(VENV)/bin/playwright install --with-deps chromium
	@touch $@

$(VENV)/lint.stamp: $(VENV)/test.stamp
	@$(VENV)/bin/pip install $(PIP_FLAGS) -c constraints.txt $(ALONE) -e ".[lint]"
	@touch $@

$(MIN)/test.stamp: pyproject.toml constraints.txt
	@echo "setting up $(MIN) (once)"
	@$(PYTHON) -m venv $(MIN)
	@grep -vE '^(transformers|huggingface_hub)==' constraints.txt > $(MIN)/constraints.txt
	@$(MIN)/bin/pip install $(PIP_FLAGS) -c $(MIN)/constraints.txt $(TORCH)
	@$(MIN)/bin/pip install $(PIP_FLAGS) -c $(MIN)/constraints.txt $(MIN_PINS) -e ".[test]"
	@touch $@

# The site needs MkDocs alone: the pages of docs/reference are committed.
$(SITE)/docs.stamp: constraints.txt
	@echo "setting up $(SITE) (once)"
	@$(PYTHON) -m venv $(SITE)
	@$(SITE)/bin/pip install $(PIP_FLAGS) -c constraints.txt mkdocs-material
	@touch $@

$(AUDIT)/audit.stamp:
	@echo "setting up $(AUDIT) (once)"
	@$(PYTHON) -m venv $(AUDIT)
	@$(AUDIT)/bin/pip install $(PIP_FLAGS) pip-audit
	@touch $@

clean:
	@rm -rf $(VENV) $(MIN) $(SITE) $(CLEAN) $(AUDIT) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	@find src tests benchmarks studies recipes docs -name __pycache__ -type d -prune -exec rm -rf {} +
