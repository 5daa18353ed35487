"""Entry point of the data source `smq`. Spark imports packages with this prefix; see `smqrt.pipeline.smq_source`."""

from smqrt.pipeline.smq_source import DefaultSource

__all__ = ["DefaultSource"]
