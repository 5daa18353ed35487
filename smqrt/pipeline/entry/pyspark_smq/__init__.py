"""Entry point of the data source `smq`, found by Spark by itself; everything is in `smqrt.pipeline.smq_source`."""

from smqrt.pipeline.smq_source import DefaultSource

__all__ = ["DefaultSource"]
