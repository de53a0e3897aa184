"""One task of federated averaging, carried out by several simulators: see benchmarks/side_by_side.py."""
