"""One task of federated averaging for several simulators; see benchmarks/side_by_side.py."""
