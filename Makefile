# Everything that a person runs. `make demo` and `make test` are all that a fresh machine needs.
PYTHON ?= python3
BIN := .venv/bin
LOWEST := .venv-lowest/bin
PIP_INSTALL := pip install --quiet --disable-pip-version-check
# What users see while gigabytes come.
PIP_SHOWN := pip install --disable-pip-version-check
# cpu, or cuda: PyPI has the builds for NVIDIA cards, with gigabytes of their libraries.
TORCH ?= cpu
TORCH_INDEX := $(if $(filter cuda,$(TORCH)),,--extra-index-url https://download.pytorch.org/whl/cpu)
DATA ?= digits
DEMO ?= demo-out
# Images of containers often set it. Then every process compiles every module anew, and every run of tests all tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install develop test walk docs site conformance attacks fuzz lowest same-bits homes chaos chaos-quick check measure demo proto ray flower bench bench-quick bench-links gpu paper-gpu python clean

# The commands in .venv/bin, for users: without the tools for tests.
install: .venv/installed

# torch first: with --no-deps, its index is asked for nothing else. "2.13.0+cpu" counts as newer than "2.13.0".
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/$(PIP_SHOWN) --no-deps $(TORCH_INDEX) $$(grep '^torch==' constraints.txt)
	$(BIN)/$(PIP_SHOWN) --constraint constraints.txt --editable '.[data,server]'
	touch $@

# What tests and benchmarks need besides.
develop: .venv/developed

.venv/developed: .venv/installed
	$(BIN)/$(PIP_INSTALL) --constraint constraints.txt --editable '.[dev]'
	touch $@

# What the oldest Python does not have. `str.decode` and `long` are other things here: names of our own, and torch's.
OLDEST := --quiet --no-tips --violations --target=3.10- --exclude str.decode --exclude long --exclude-regex '/pb/' \
	__init__.py common fedserver fedclient simulation contrib tests benchmarks examples docs

check: develop
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/vermin $(OLDEST)
	$(BIN)/lint-imports

# How large and how readable the code and the documents are, beside the targets. MEASURE=--files also names the files on an update's way.
measure: develop
	$(BIN)/python -m benchmarks.measure $(MEASURE)

# Files of tests are dealt to as many processes as there are cores; the tests of one file run in turn in one process.
# A process of tests that dies ends the run as red: xdist would start another one, and may then wait for ever.
PARALLEL := -n auto --dist loadfile --no-loadscope-reorder --max-worker-restart 0

test: check
	$(BIN)/pytest $(PARALLEL) --ignore=tests/conformance --ignore=tests/walk

# The README and the tutorial, command by command. WALK=--real also installs into a new environment, and runs the demo.
walk: develop
	$(BIN)/pytest tests/walk $(WALK)

# Every method over gRPC and mutual TLS, and simulated: a minute or two.
conformance: develop
	$(BIN)/pytest $(PARALLEL) tests/conformance

# The working tree beside another revision: every method in simulation, six over the network. Every bit must be the same.
REV ?= 82b576c
same-bits: develop
	$(BIN)/python -m tests.same_bits --rev $(REV)

# The homes that later versions go on with, made anew by another revision; commit tests/homes.
homes: develop
	$(BIN)/python -m tests.homes.make --rev $(REV)

# What a hostile peer can try, each with what it is answered.
attacks: develop
	$(BIN)/pytest tests/attacks -v

# Inputs that nobody thought of, ten minutes for each target; what is found is kept in tests/fuzz/found, which `make test` reads.
FUZZ_SECONDS ?= 600
fuzz: develop
	$(BIN)/$(PIP_INSTALL) atheris==3.0.0
	$(BIN)/python -m tests.fuzz.run --seconds $(FUZZ_SECONDS) --out benchmarks/results/fuzz.json

# The lowest versions that pyproject.toml allows, in an environment of their own: bytes, identity, server, and the wheel with a
# federation. Warnings are not shown: what is old uses what newer libraries deprecate.
lowest: .venv-lowest/installed
	$(LOWEST)/pytest $(PARALLEL) --disable-warnings tests/wire tests/identity tests/server tests/packaging

.venv-lowest/installed: pyproject.toml constraints.txt constraints-lowest.txt
	$(PYTHON) -m venv .venv-lowest
	$(LOWEST)/$(PIP_INSTALL) --constraint constraints-lowest.txt --editable '.[data,knn,server]' grpcio-tools setuptools
	$(LOWEST)/$(PIP_INSTALL) --constraint constraints.txt hypothesis packaging pytest pytest-timeout pytest-xdist safetensors
	touch $@

# Federations under faults, from seeds: nothing lost, nothing hung, the same bits. CHAOS_RUNS, CHAOS_SEED, CHAOS_LONGEST_S (of a
# silence). Results are appended to chaos.jsonl as they come.
CHAOS := PYTHONPATH=.package:. $(BIN)/python -m tests.chaos
chaos: develop
	$(CHAOS)

# What CI runs: twice every kind of fault. The machine may be busy, so a seed counts as red when it was red twice.
chaos-quick: develop
	$(CHAOS) --runs 40 --longest 4 --tries 2

# Everything once more on another Python, in an environment of its own, with what README says: make python VERSION=3.10
python: .venv-py$(VERSION)/installed
	.venv-py$(VERSION)/bin/pytest $(PARALLEL) --ignore=tests/conformance --ignore=tests/chaos --ignore=tests/benchmarks

.venv-py%/installed: pyproject.toml constraints.txt
	python$* -m venv .venv-py$*
	.venv-py$*/bin/$(PIP_SHOWN) --no-deps $(TORCH_INDEX) $$(grep '^torch==' constraints.txt)
	.venv-py$*/bin/$(PIP_INSTALL) --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: install
	$(BIN)/python -m examples.demo --data $(DATA) --out $(DEMO)

# Executor "ray" and `fedserver --lab ray` in clusters on this machine, in an environment of its own: some six minutes.
ray: .venv-ray/installed
	.venv-ray/bin/pytest tests/simulation/test_ray.py tests/cluster

.venv-ray/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/$(PIP_SHOWN) --no-deps $(TORCH_INDEX) $$(grep '^torch==' constraints.txt)
	.venv-ray/bin/$(PIP_INSTALL) --constraint constraints.txt --editable '.[data,ray,server]' hypothesis pytest pytest-timeout pytest-xdist
	touch $@

# Flower's own client classes as a device's training, in an environment of its own: flwr wants an older protobuf.
flower: .venv-flower/installed
	.venv-flower/bin/pytest tests/contrib/test_flower.py

.venv-flower/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-flower
	.venv-flower/bin/$(PIP_SHOWN) --no-deps $(TORCH_INDEX) $$(grep '^torch==' constraints.txt)
	.venv-flower/bin/$(PIP_INSTALL) --editable '.[data,server]' flwr==1.41.0 pytest pytest-timeout pytest-xdist
	touch $@

# The generator is the oldest that pyproject.toml allows beside grpcio and protobuf: its code runs on later ones too.
proto: .venv-proto/installed
	.venv-proto/bin/python -m grpc_tools.protoc -Iattune/common/pb=proto/attune/v1 -Iattune/fedserver/pb=proto/attune/v1 \
		--python_out=.package --pyi_out=.package --grpc_python_out=.package \
		attune/common/pb/federation.proto attune/fedserver/pb/admin.proto

.venv-proto/installed: constraints-lowest.txt
	$(PYTHON) -m venv .venv-proto
	.venv-proto/bin/$(PIP_INSTALL) --constraint constraints-lowest.txt grpcio-tools
	touch $@

# What docs/performance.md shows, each figure beside its roof of the same run: an hour on a quiet machine. With FLOWER, the python of
# an environment with flwr, the same exchange with Flower too.
RESULTS := benchmarks/results
bench: develop
	$(BIN)/python -m benchmarks.table --out $(RESULTS)
	$(BIN)/python -m benchmarks.floor --out $(RESULTS)/floor.json
	$(BIN)/python -m benchmarks.mcsa --out $(RESULTS)/mcsa.json
	$(BIN)/python -m benchmarks.hypernetwork --out $(RESULTS)/hypernetwork.json
	$(BIN)/python -m benchmarks.growth --out $(RESULTS)/growth.json
	$(BIN)/python -m benchmarks.published_size --out $(RESULTS)/published_size.json
	$(if $(FLOWER),$(BIN)/python -m benchmarks.against_flower --python $(FLOWER) --out $(RESULTS)/against_flower.json)

# The aggregators on this machine's GPU and on its processor; where there is none, it says so.
gpu: develop
	$(BIN)/python -m benchmarks.gpu --out $(RESULTS)/gpu.json

# Under two minutes on a quiet machine: some of these figures against the committed ones, as ratios. Fails nothing.
bench-quick: develop
	$(BIN)/python -m benchmarks.quick

# Federations over narrow, long links: some six minutes.
bench-links: develop
	$(BIN)/python -m benchmarks.links --out benchmarks/results/links.json

# The tables in the documents that are made from the code and from the result files.
docs: develop
	PYTHONPATH=.package:. $(BIN)/python -m docs.generate

# The documentation as a site in build/site; a link that leads nowhere is an error.
site: .venv/documenting
	rm -rf build/pages build/site
	mkdir -p build/pages
	git ls-files -z --cached --others --exclude-standard | grep -zv '^tests/\|^\.' | xargs -0 cp --parents -t build/pages
	$(BIN)/mkdocs build --strict

.venv/documenting: .venv/installed
	$(BIN)/$(PIP_INSTALL) --constraint constraints.txt --editable '.[docs]'
	touch $@

# FedTP's Table II in full, on an accelerator, in order of weight; goes on where it was interrupted. Says so if there is none.
CIFAR10 ?= cifar10.npz
CIFAR100 ?= cifar100.npz
paper-gpu: develop
	$(BIN)/python -m benchmarks.paper fedtp-2-full --data cifar10=$(CIFAR10) --data cifar100=$(CIFAR100) --scratch paper-gpu-out

clean:
	rm -rf .venv .venv-py* .venv-lowest .venv-proto .venv-ray .venv-flower demo-out paper-gpu-out build *.egg-info
