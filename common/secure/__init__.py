"""Secure aggregation: the server learns the sum of a cohort's updates, and nothing else of them. No I/O here.

Bonawitz et al., 'Practical Secure Aggregation for Privacy-Preserving Machine Learning', CCS 2017, with a complete graph.
"""
