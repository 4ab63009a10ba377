"""Floor 2: numbers. Formats, recipes (what is quantized), backends (how), and the FP8 linear layer's GEMMs."""

from megafp8.fp8.backend import Backend as Backend
from megafp8.fp8.backend import backend as backend
from megafp8.fp8.linear import LinearState as LinearState
from megafp8.fp8.linear import begin_step as begin_step
from megafp8.fp8.linear import quantized_linear as quantized_linear
from megafp8.fp8.linear import update_states as update_states
from megafp8.fp8.quantized import QuantizedTensor as QuantizedTensor
from megafp8.fp8.quantized import quantize as quantize
from megafp8.fp8.recipe import Recipe as Recipe
from megafp8.fp8.recipe import TensorSpec as TensorSpec
from megafp8.fp8.recipe import recipe as recipe
