"""The method pFedGP: Gaussian-process classification on the features of a shared network."""
