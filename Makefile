# Two commands: `make grpo` and `make test`. Both set up .venv when it is missing or out of date.
#   make install TORCH_INDEX=<index url>   take torch from another index (its CPU or another CUDA build)
#   make grpo SEEDS=3                                               seeds 0 to 2 in one figure
#   make grpo ARGS="--steps 10"                                     any option of recipes/grpo.py
#   make grpo MODEL=hybrid                                          a model with Mamba layers, into runs/grpo-hybrid
#   make grpo MODEL=gdn                                             a model with Gated DeltaNet layers, into runs/grpo-gdn
#   make grpo MODEL=moe                                             a model with routed experts, into runs/grpo-moe
#   make grpo MODEL=mla                                             a model with latent attention too, into runs/grpo-mla
#   make grpo-async                                                 one step off policy, the worker in its own process
#   make verl-grpo                                                  GRPO in verl, with samebit as its rollout
#   make verl-grpo MODEL=hybrid                                     a model with Mamba layers, into runs/verl-grpo-hybrid
#   make verl-grpo MODEL=gdn                                        a model with Gated DeltaNet layers, into runs/verl-grpo-gdn
#   make verl-grpo MODEL=moe                                        a model with routed experts, into runs/verl-grpo-moe
#   make verl-grpo MODEL=mla                                        a model with latent attention too, into runs/verl-grpo-mla
#   make trl-grpo                                                   GRPO in TRL, with samebit as its rollout
#   make trl-grpo ARGS="--trainer rloo"                             RLOO; or async
#   make trl-grpo ARGS="--model Qwen/Qwen3-0.6B --dtype bfloat16"   your model, by its chat template
#   make verl-matrix                                                verl's mismatch over many kinds of runs; takes about an hour
#   make accuracy MODEL=dsa                                         few-shot answers, prefix cache on and off; or mla
#   make soak COUNT=2000                                            long hypothesis campaigns
#   make bench-vllm ARGS="--parts 5m_fp32_groups"                   vLLM beside samebit, in an environment of its own
#   make test-next                                                  what transformers can change, under the next one

PYTHON ?= python3
VENV ?= .venv
NEXT ?= .venv-next
VLLM ?= .venv-vllm
TORCH_INDEX ?=
SEEDS ?= 1
MODEL ?= dense
COUNT ?= 500
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.samebit-installed

# Read when the OpenMP runtime loads, so before torch: idle threads soon sleep instead of spinning on a shared core
# (they spin just long enough for the gaps between the operations of a step), and Numba's thread pool is of the kind
# that several Python threads may call.
export OMP_WAIT_POLICY := passive
export GOMP_SPINCOUNT := 4000
export NUMBA_THREADING_LAYER := omp

# Tests start many processes: they share what Python has compiled, also where a container says otherwise.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install grpo grpo-async verl-grpo trl-grpo verl-matrix test test-next soak check lock bench bench-vllm mismatch accuracy clean

# venv keeps the Python that an environment has. So what an attempt of ours left, which was not finished, is made anew;
# an environment that was finished, or that was there before, stays.
define environment
	$(if $(wildcard $(@D)/.samebit-begun),rm -rf $(@D))
	test -e $(@D) || { mkdir -p $(@D) && touch $(@D)/.samebit-begun; }
	$(PYTHON) -m venv $(@D)
endef

# Marks an environment as finished.
define finished
	rm -f $(@D)/.samebit-begun
	touch $@
endef

install: $(STAMP)

$(STAMP): pyproject.toml setup.py constraints.txt
	$(environment)
	$(BIN)/python -m pip install $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c constraints.txt -e '.[recipes,dev]'
	$(finished)

grpo: install
	$(BIN)/python recipes/grpo.py --seeds $(SEEDS) \
		$(if $(filter-out dense,$(MODEL)),--architecture $(MODEL) --out runs/grpo-$(MODEL)) $(ARGS)

grpo-async: install
	$(BIN)/python recipes/grpo_async.py --seeds $(SEEDS) \
		$(if $(filter-out dense,$(MODEL)),--architecture $(MODEL) --out runs/grpo-async-$(MODEL)) $(ARGS)

verl-grpo: install
	$(BIN)/python recipes/verl_grpo/run.py \
		$(if $(filter-out dense,$(MODEL)),--architecture $(MODEL) --out runs/verl-grpo-$(MODEL)) $(ARGS)

trl-grpo: install
	$(if $(filter-out dense,$(MODEL)),$(error trl-grpo has no MODEL=$(MODEL): give ARGS="--model FOLDER"))
	$(BIN)/python recipes/trl_grpo/run.py $(ARGS)

verl-matrix: install
	$(BIN)/python benchmarks/verl_matrix/matrix.py $(ARGS)

# Three processes of one thread each on two cores: one of them has the tests that mostly wait for other processes.
# Which files come first, and which of them wait: tests/order.py. Idle threads of the processes that tests start sleep.
test: install
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder --durations 10 $(ARGS)

# The tests of what Hugging Face's classes, configs and files have a part in. Its own environment has no verl, which asks
# for an older transformers. ARGS as for test.
NEXT_TESTS := tests/exactness tests/weight_sync tests/rollout/requests tests/rollout/worker tests/rollout/http \
	tests/kernels/triton/test_model.py

test-next: $(NEXT)/.samebit-installed
	OMP_NUM_THREADS=1 $(NEXT)/bin/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 10 \
		$(or $(ARGS),$(NEXT_TESTS))

$(NEXT)/.samebit-installed: pyproject.toml setup.py constraints-next.txt
	$(environment)
	$(NEXT)/bin/python -m pip install $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c constraints-next.txt -e '.[test,serve]'
	$(finished)

soak: install
	SAMEBIT_SOAK_CASES=$(COUNT) $(BIN)/pytest -m soak $(ARGS)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The runtime dependencies with hashes, of this machine's platform, Python and torch build.
lock: install
	$(BIN)/python -m pip install --dry-run --ignore-installed --quiet --report - $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
		-c constraints.txt . | $(BIN)/python .ci/lock > requirements.lock

bench: install
	$(BIN)/python benchmarks/rollout.py $(ARGS)

# vLLM's environment takes torch first, so that no other build of it comes along.
bench-vllm: install $(VLLM)/.samebit-installed
	$(BIN)/python benchmarks/beside_vllm.py --vllm $(VLLM)/bin/python $(ARGS)

mismatch: install $(VLLM)/.samebit-installed
	$(BIN)/python benchmarks/mismatch.py --vllm $(VLLM)/bin/python $(ARGS)

accuracy: install
	$(BIN)/python benchmarks/accuracy.py $(if $(filter-out dense,$(MODEL)),$(MODEL),mla) $(ARGS)

$(VLLM)/.samebit-installed: constraints-vllm.txt
	$(environment)
	$(VLLM)/bin/python -m pip install $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c constraints-vllm.txt torch
	$(VLLM)/bin/python -m pip install --no-deps -r constraints-vllm.txt
	$(finished)

clean:
	rm -rf $(VENV) $(NEXT) $(VLLM) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
