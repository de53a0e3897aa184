"""Gaussian-process classification with Polya-Gamma variables on a binary tree of classes."""
