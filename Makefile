# SPDX-License-Identifier: Apache-2.0
# The first of these that runs and is one of the versions upstream.toml names; environment.py says what is wrong otherwise.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do $$p -c 'import ensurepip, tomllib' 2>/dev/null && echo $$p && exit; done; echo python3)
ENV = $(PYTHON) vllm/ampere/environment.py
NOT_HERE = not gpu and not multi_gpu and not image
# Processes that run tests, each a file at a time.
JOBS ?= 2

.PHONY: help demo test test-long search-pipeline test-gpu test-ampere test-image image kernel-table bench charts env patch clean

help:  ## this list
	@sed -nE 's/^([a-z-]+):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 17

demo:  ## serve a tiny random DeepSeek-V4.1 on this machine's CPU and stream one answer (DEMO_PORT, DEMO_ONCE)
	@$(PYTHON) vllm/ampere/demo.py $(if $(DEMO_PORT),--port $(DEMO_PORT)) $(if $(filter 1,$(DEMO_ONCE)),--once)

test:  ## every test that needs no GPU and is not marked long (JOBS=2: files at once)
	@$(ENV) cpu oracle
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n $(JOBS) --no-loadscope-reorder -m "not long and not oracle and $(NOT_HERE)" --durations=10
	.venv-oracle/bin/python -m pytest tests/oracle -m "not long and $(NOT_HERE)" --durations=5

test-long:  ## the tests marked long; they fetch the source archive from the package index
	@$(ENV) cpu
	.venv/bin/python -m pytest -m "long and $(NOT_HERE)" --durations=10

search-pipeline:  ## random schedules over pipeline stages against one process, and a receipt (SEARCH=--help)
	@$(ENV) cpu
	.venv/bin/python -m tests.e2e.pipeline_search $(SEARCH)

test-gpu:  ## every test that needs a card, by the PYTHON that has the patched vLLM; a newer card runs sm_80 code
	$(PYTHON) -m pytest tests/gpu -m "not multi_gpu"

test-ampere:  ## tests/gpu on an A100, A6000, RTX 3090 or like, and a receipt to send (RECEIPT; PYTHON: the one with vLLM)
	$(PYTHON) tests/gpu/ampere_receipt.py $(or $(RECEIPT),ampere-receipt.json)

test-image:  ## build docker/Dockerfile without vLLM's requirements and run what can run of it (root, Debian's packages)
	@$(ENV) cpu
	.venv/bin/python -m pytest -m image -s tests/docker

image:  ## build the image with docker or buildah (IMAGE, IMAGE_ARGS)
	@docker/build.sh $(IMAGE_ARGS)

kernel-table: env  ## write docs/en/kernels.md: registers, shared memory and spills of every Triton kernel
	@.venv/bin/vllm-ampere kernels compile --update docs/en/kernels.md

bench:  ## kernels beside their rivals on this card, and a receipt (RECEIPT, SET=1|2|3|4|5|6; PYTHON: with vLLM)
	$(PYTHON) benchmarks/bench_kernels.py $(if $(SET),--set $(SET)) --output $(or $(RECEIPT),kernels-receipt.json)

charts:  ## summary.json and charts from the receipts in benchmarks/results (PYTHON: one with matplotlib)
	$(PYTHON) benchmarks/summary.py
	$(PYTHON) benchmarks/charts.py

env:  ## the environment .venv: vLLM 0.33.0 for the CPU, patched, with vllm/ampere from this checkout
	@$(ENV) cpu

patch: env  ## what the patch series is, and whether it is on .venv's vLLM
	@.venv/bin/vllm-ampere patches status .venv/lib/python3*/site-packages

clean:  ## remove the environments and caches
	rm -rf .venv .venv-oracle .cache build dist *.egg-info
