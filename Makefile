# Everything that a person runs. `make demo` and `make test` are all that a fresh machine needs.
PYTHON ?= python3
BIN := .venv/bin
DATA ?= digits
DEMO ?= demo-out

.PHONY: install test conformance check demo proto benchmark clean

install: .venv/installed

# torch first and pinned: an unpinned one may pull gigabytes that nobody asked for.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check
	$(BIN)/pytest --ignore=tests/conformance

# Every method over the real network: some minutes.
conformance: install
	$(BIN)/pytest tests/conformance

demo: install
	$(BIN)/python -m examples.demo --data $(DATA) --out $(DEMO)

proto: install
	$(BIN)/python -m grpc_tools.protoc -Iattune/common/pb=proto/attune/v1 -Iattune/fedserver/pb=proto/attune/v1 \
		--python_out=.package --pyi_out=.package --grpc_python_out=.package \
		attune/common/pb/federation.proto attune/fedserver/pb/admin.proto

benchmark: install
	$(BIN)/python -m benchmarks.table --out benchmarks/results

clean:
	rm -rf .venv demo-out build *.egg-info
