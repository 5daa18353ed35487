"""Hubs of several processes as one: nodes, links and channels, without input and output.

`smqrt.cluster.engines` has the connections.
"""
