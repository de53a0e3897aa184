# The commands of this repository. `make demo` and `make test` also work on a fresh machine.
PYTHON ?= python3
BIN := .venv/bin
LOWEST := .venv-lowest/bin
PIP_INSTALL := pip install --quiet --disable-pip-version-check
# With output, because users wait for gigabytes.
PIP_SHOWN := pip install --disable-pip-version-check
# cpu or cuda. PyPI has the builds for NVIDIA cards, with gigabytes of their libraries.
TORCH ?= cpu
TORCH_INDEX := $(if $(filter cuda,$(TORCH)),,--extra-index-url https://download.pytorch.org/whl/cpu)
DATA ?= digits
DEMO ?= demo-out
# Container images often set it. Then every process compiles every module again, and pytest all tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install develop test test-slow walk engines test-benchmarks docs wheel site conformance attacks stalling fuzz lowest same-bits homes without chaos chaos-scale chaos-quick check measure demo images proto ray flower bench beside bench-quick bench-links gpu paper-gpu python clean

# The commands in .venv/bin for users, without the tools for tests.
install: .venv/installed

# torch first: --no-deps takes nothing else from its index. "2.13.0+cpu" counts as newer than "2.13.0".
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/$(PIP_SHOWN) --no-deps $(TORCH_INDEX) $$(grep '^torch==' constraints.txt)
	$(BIN)/$(PIP_SHOWN) --constraint constraints.txt --editable '.[data,server]'
	touch $@

# Also the tools for tests and benchmarks.
develop: .venv/developed

.venv/developed: .venv/installed
	$(BIN)/$(PIP_INSTALL) --constraint constraints.txt --editable '.[dev]'
	touch $@

check: develop .venv/oldest
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Finds features that Python 3.10 lacks, in files that have changed since: all of them take half a minute. `str.decode` and `long` are
# names of this project and of torch, not Python's.
OLDEST := --quiet --no-tips --violations --target=3.10- --exclude str.decode --exclude long
SOURCES := $(shell find __init__.py plugin.py seams.py common features fedserver fedclient simulation contrib tests benchmarks examples docs -name '*.py' -not -path '*/pb/*')
.venv/oldest: $(SOURCES) | .venv/developed
	$(BIN)/vermin $(OLDEST) $?
	touch $@

# The size and readability of code and documents: fails above the limits of benchmarks/limits.toml. MEASURE=--files also names files,
# MEASURE=--lower writes lower limits.
measure: develop
	$(BIN)/python -m benchmarks.measure $(MEASURE)

# A process for each core; all tests of a file run in one process. If a process dies the run fails, because xdist may wait forever after
# it has started another one.
PARALLEL := -n auto --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# Suites with targets of their own, which CI runs, too; so the time of `make test` stays within its limit.
LEFT_OUT := attacks benchmarks chaos conformance walk

test: check
	$(BIN)/pytest $(PARALLEL) -m 'not engines and not slow' $(LEFT_OUT:%=--ignore=tests/%)

# The test functions of tests/slow.txt, which need most of the processor time of the suite. Each process collects their files alone.
SLOW = $(shell sed 's/::.*//' tests/slow.txt | sort -u)
test-slow: develop
	$(BIN)/pytest $(PARALLEL) -m 'slow and not engines' $(filter-out $(LEFT_OUT:%=tests/%/%),$(SLOW))

# Tests with other programs: PostgreSQL, SeaweedFS, Chromium, Envoy, nginx, and pip, which installs the wheel.
ENGINES = $(shell grep -rl 'mark\.engines' tests --include='test_*.py')
engines: develop
	$(BIN)/pytest $(PARALLEL) -m engines $(filter-out $(LEFT_OUT:%=tests/%/%),$(ENGINES))

# Tests the programs in benchmarks/.
test-benchmarks: develop
	$(BIN)/pytest $(PARALLEL) tests/benchmarks

# Runs the commands of README and tutorial, the examples, the notebooks, and the demo in small. WALK=--real also installs into a new
# environment, and runs the whole demo.
walk: develop
	$(BIN)/pytest $(PARALLEL) tests/walk $(WALK)

# Runs every method over gRPC and mutual TLS, and simulated: a minute or two. The tests are in one file, so in one process.
conformance: develop
	$(BIN)/pytest tests/conformance

# Compares all bits with those of another revision: every method in simulation, six over the network.
REV ?= 7614c745
same-bits: develop
	$(BIN)/python -m tests.same_bits --rev $(REV)

# Makes the homes that later versions must continue, by another revision; commit tests/homes.
homes: develop
	$(BIN)/python -m tests.homes.make --rev $(REV)

# Deletes each feature from a copy of the package, which must work without it; then all of them: two minutes.
without: develop
	$(BIN)/python -m tests.without

# Runs the attacks of a hostile peer, and shows each answer.
attacks: develop
	$(BIN)/pytest $(PARALLEL) tests/attacks -v

# Measures what devices that stall cost an honest fleet, with real servers (about six minutes).
stalling: develop
	$(BIN)/python -m tests.attacks.stalling benchmarks/results/stalling.json

# Fuzzes, ten minutes for each target. Findings are kept in tests/fuzz/found, which `make test` reads.
FUZZ_SECONDS ?= 600
fuzz: develop
	$(BIN)/$(PIP_INSTALL) atheris==3.0.0
	$(BIN)/python -m tests.fuzz.run --seconds $(FUZZ_SECONDS) --out benchmarks/results/fuzz.json

# Tests with the lowest versions that pyproject.toml allows: bytes, identity, server, and the wheel with a federation. Without
# warnings, because old libraries use what newer ones deprecate.
lowest: .venv-lowest/installed
	$(LOWEST)/pytest $(PARALLEL) --disable-warnings tests/common/wire tests/common/identity tests/fedclient/work/portfolio tests/features tests/fedserver tests/packaging

.venv-lowest/installed: pyproject.toml constraints.txt constraints-lowest.txt
	$(PYTHON) -m venv .venv-lowest
	$(LOWEST)/$(PIP_INSTALL) --constraint constraints-lowest.txt --editable '.[data,knn,server]' grpcio-tools setuptools
	$(LOWEST)/$(PIP_INSTALL) --constraint constraints.txt hypothesis packaging pytest pytest-timeout pytest-xdist pyyaml safetensors
	touch $@

# Runs federations under faults, from seeds: no loss, no hang, the same bits. CHAOS_RUNS, CHAOS_SEED, CHAOS_LONGEST_S (of a silence).
# Results are appended to chaos.jsonl. Before that: every kind of damaged file, wrong clocks, and a lost write-ahead log.
CHAOS := PYTHONPATH=.package:. $(BIN)/python -m tests.chaos
chaos: develop
	$(BIN)/pytest tests/chaos tests/e2e/test_power_cut.py
	$(CHAOS)

# Two servers over PostgreSQL and SeaweedFS, all of which are killed and stopped: seeded runs, of which done ones are not repeated.
chaos-scale: develop
	$(BIN)/python -m tests.chaos.scale

# For CI: every kind of fault twice. The machine may be busy, so a seed is red only if it fails twice.
chaos-quick: develop
	$(CHAOS) --runs 40 --longest 4 --tries 2

# Runs the suite on another Python: make python VERSION=3.10
python: .venv-py$(VERSION)/installed
	.venv-py$(VERSION)/bin/pytest $(PARALLEL) --ignore=tests/conformance --ignore=tests/chaos --ignore=tests/benchmarks

.venv-py%/installed: pyproject.toml constraints.txt
	python$* -m venv .venv-py$*
	.venv-py$*/bin/$(PIP_SHOWN) --no-deps $(TORCH_INDEX) $$(grep '^torch==' constraints.txt)
	.venv-py$*/bin/$(PIP_INSTALL) --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: install
	$(BIN)/python -m examples.demo --data $(DATA) --out $(DEMO)

# Tests executor "ray" in a cluster on this machine, with an own environment.
ray: .venv-ray/installed
	.venv-ray/bin/pytest tests/simulation/test_ray.py

.venv-ray/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/$(PIP_SHOWN) --no-deps $(TORCH_INDEX) $$(grep '^torch==' constraints.txt)
	.venv-ray/bin/$(PIP_INSTALL) --constraint constraints.txt --editable '.[data,ray,server]' hypothesis pytest pytest-timeout pytest-xdist
	touch $@

# Tests Flower's clients as a device's training, with an own environment, because flwr needs an older protobuf.
flower: .venv-flower/installed
	.venv-flower/bin/pytest tests/contrib/test_flower.py

.venv-flower/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-flower
	.venv-flower/bin/$(PIP_SHOWN) --no-deps $(TORCH_INDEX) $$(grep '^torch==' constraints.txt)
	.venv-flower/bin/$(PIP_INSTALL) --editable '.[data,server]' flwr==1.42.0 hypothesis pytest pytest-timeout pytest-xdist
	touch $@

# Builds both images by buildah and mmdebstrap (Debian's packages) and runs a federation in them, as root; deploy/README.md.
images:
	sh deploy/images.sh

# The generator is the oldest one that fits the lowest grpcio and protobuf; its code runs on later versions too.
proto: .venv-proto/installed
	.venv-proto/bin/python -m grpc_tools.protoc -Iattune/common/pb=proto/attune/v1 -Iattune/fedserver/pb=proto/attune/v1 \
		--python_out=.package --pyi_out=.package --grpc_python_out=.package \
		attune/common/pb/federation.proto attune/fedserver/pb/admin.proto

.venv-proto/installed: constraints-lowest.txt
	$(PYTHON) -m venv .venv-proto
	.venv-proto/bin/$(PIP_INSTALL) --constraint constraints-lowest.txt grpcio-tools
	touch $@

# Measures what docs/performance.md shows, each figure with its roof of the same run: an hour on a quiet machine.
RESULTS := benchmarks/results
bench: develop
	$(BIN)/python -m benchmarks.table --out $(RESULTS)
	$(BIN)/python -m benchmarks.floor --out $(RESULTS)/floor.json
	$(BIN)/python -m benchmarks.mcsa --out $(RESULTS)/mcsa.json
	$(BIN)/python -m benchmarks.hypernetwork --out $(RESULTS)/hypernetwork.json
	$(BIN)/python -m benchmarks.growth --out $(RESULTS)/growth.json
	$(BIN)/python -m benchmarks.published_size --out $(RESULTS)/published_size.json

# Runs the same tasks with Flower, FedJAX and pfl-research, each in an environment of its own: simulated, and Flower's over the
# network too. An hour and a half on a busy machine.
CONTENDERS := flower fedjax pfl
beside: develop $(CONTENDERS:%=.venv-beside/%/installed)
	$(BIN)/python -m benchmarks.side_by_side $(foreach name,$(CONTENDERS),--env $(name)=.venv-beside/$(name)/bin/python)
	$(BIN)/python -m benchmarks.against_flower --python .venv-beside/flower/bin/python --out $(RESULTS)/against_flower.json

# torch without its index: the other packages need no build of it but this one. setuptools is torch's.
.venv-beside/%/installed: benchmarks/contenders/%.txt constraints.txt
	$(PYTHON) -m venv .venv-beside/$*
	.venv-beside/$*/bin/$(PIP_SHOWN) --no-deps $(TORCH_INDEX) $$(grep '^torch==' constraints.txt)
	.venv-beside/$*/bin/$(PIP_INSTALL) --requirement $< $$(grep '^torch==' constraints.txt)
	touch $@

# Measures the aggregators on this machine's GPU and on its processor. Without a GPU it says so.
gpu: develop
	$(BIN)/python -m benchmarks.gpu --out $(RESULTS)/gpu.json

# Compares some of these figures with the committed ones, in two minutes on a quiet machine. It never fails.
bench-quick: develop
	$(BIN)/python -m benchmarks.quick

# Measures federations over narrow links with a long delay: some six minutes.
bench-links: develop
	$(BIN)/python -m benchmarks.links --out benchmarks/results/links.json

# Writes the generated tables of the documents, from the code and from the result files.
docs: develop
	PYTHONPATH=.package:. $(BIN)/python -m docs.generate

# Builds the wheel of the newest commit in build/wheel. The same commit and the same setuptools give the same bytes.
wheel: develop
	rm -rf build/wheel build/committed
	mkdir -p build/wheel build/committed
	umask 022 && git archive HEAD | tar x -C build/committed
	cd build/committed && SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(abspath $(BIN))/python -c "from setuptools import build_meta; build_meta.build_wheel('../wheel')"
	sha256sum build/wheel/*.whl

# Builds the documentation as a site in build/site, with the bill of materials. A broken link is an error.
site: .venv/documenting
	rm -rf build/pages build/site
	mkdir -p build/pages
	git ls-files -z --cached --others --exclude-standard | grep -zv '^tests/\|^\.' | xargs -0 cp --parents -t build/pages
	$(BIN)/mkdocs build --strict
	PYTHONPATH=.package:. $(BIN)/python -m docs.components build/site/components.cdx.json

.venv/documenting: .venv/installed
	$(BIN)/$(PIP_INSTALL) --constraint constraints.txt --editable '.[docs]'
	touch $@

# Runs FedTP's Table II in full on an accelerator, and continues after an interruption. Without an accelerator it says so.
CIFAR10 ?= cifar10.npz
CIFAR100 ?= cifar100.npz
paper-gpu: develop
	$(BIN)/python -m benchmarks.paper fedtp-2-full --data cifar10=$(CIFAR10) --data cifar100=$(CIFAR100) --scratch paper-gpu-out

clean:
	rm -rf .venv .venv-py* .venv-lowest .venv-proto .venv-ray .venv-flower .venv-beside demo-out paper-gpu-out build *.egg-info
