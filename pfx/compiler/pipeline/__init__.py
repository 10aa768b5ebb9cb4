"""Pipelines in a graph: how they are recognized, and where their values are."""
