"""Where Spark looks for the data source `smq` by itself; everything is in `smqrt.pipeline.smq_source`."""

from smqrt.pipeline.smq_source import DefaultSource

__all__ = ["DefaultSource"]
