# For a newcomer: `make demo` and `make test`. The others: CONTRIBUTING.md.
#   TORCH='torch==2.13.0'  another torch (default: >= 2.10; PyTorch's CPU index where no NVIDIA GPU is found)
#   TRITON=triton          make test: install it too, and run Triton's kernels in its interpreter (a download of 190 MB)
#   NCCL=nvidia-nccl-cu12  make test: install it too, and check that our communicators can load it (a download of 300 MB)
#   PYTHON=python3.12      another interpreter      VENV=dir  where demo and sanitize install
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
TORCH ?=
TRITON ?=
NCCL ?=
QUICK ?=
PROMPT ?= Why is the sky blue? Answer in two sentences.
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check
SOURCES := $(shell find csrc fastverify CMakeLists.txt setup.py pyproject.toml -type f \
	! -name '*.so' ! -name '*.pyc' ! -name build_info.json)
export PYTHON TORCH TRITON NCCL PYTEST_ARGS

.PHONY: demo test sanitize gpu clean distclean

# Build, fetch the model, answer one prompt with and without speculation.
demo: $(VENV)/.installed
	$(VENV)/bin/fastverify fetch-demo
	$(VENV)/bin/fastverify generate --compare "$(PROMPT)"

# sdist -> wheel -> fresh venv -> every test on the installed wheel.
test:
	@$(PYTHON) .ci/preflight.py
	@bash .ci/test.sh

# The CPU ops and csrc/algo under AddressSanitizer and UndefinedBehaviorSanitizer.
sanitize: $(VENV)/.dev
	@bash .ci/sanitize.sh $(VENV)/bin/python

# On a GPU machine: build for its card, GPU tests, benchmarks into benchmarks/results/, tables anew. Installs nothing.
# QUICK=--quick: two shapes per op, nothing stored.
gpu:
	@bash .ci/gpu.sh $(PYTHON) $(QUICK)

clean:
	rm -rf build dist *.egg-info fastverify/*.so fastverify/build_info.json .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

$(VENV)/.torch:
	@$(PYTHON) .ci/preflight.py
	$(PYTHON) -m venv $(VENV)
	bash .ci/install_torch.sh $(VENV)/bin/python "$(TORCH)"
	$(PIP) install -q 'setuptools>=77' cmake ninja pybind11
	touch $@

# Without a GPU the CUDA kernels would only cost build time.
$(VENV)/.installed: $(VENV)/.torch $(SOURCES)
	@echo "building fastverify: a minute or two for the CPU ops, up to 12 with CUDA kernels"
	@nvidia-smi -L >/dev/null 2>&1 || export FASTVERIFY_NO_CUDA=1; $(PIP) install -q --no-build-isolation .
	touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(PIP) install -q -r <($(VENV)/bin/python .ci/requirements.py)
	touch $@
