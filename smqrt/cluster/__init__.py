"""Clustering of hubs: nodes, links and channels, without I/O.

The connections are in `smqrt.cluster.engines`.
"""
