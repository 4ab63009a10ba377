"""megafp8: pretraining of large language models in FP8, on GPUs and, bit for bit emulated, on CPUs."""

__version__ = "0.1.0"
