"""Floor 2: tokens on disk -> batches. Ranks are ints here; only `loader` imports torch."""

from megafp8.data.indexed import IndexedDataset
from megafp8.data.indexed_writer import IndexedDatasetWriter

__all__ = ["IndexedDataset", "IndexedDatasetWriter"]
