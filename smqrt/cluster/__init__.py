"""A hub in a cluster: what it knows of the other nodes, and where messages go. Without input and output: `backplane`
has the links.
"""
