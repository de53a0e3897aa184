"""Portfolio of a device: ordinary models of scikit-learn, which it fits on its own samples and uses like networks."""
