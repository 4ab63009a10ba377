"""An independent quantizer in numpy, by search in the table of representable values; slow and obvious."""

import numpy as np

from megafp8.fp8.formats import Format, table


def positive_values(fmt: Format) -> np.ndarray:
    """Finite values from 0 up, float64, indexed by code."""
    half = table(fmt)[: 2 ** (fmt.bits - 1)].double().numpy()
    return half[np.isfinite(half)]


def round_by_search(v: np.ndarray, fmt: Format) -> np.ndarray:
    """float64 `v` to the nearest value of `fmt`, a tie to the even code, saturated."""
    values = positive_values(fmt)
    magnitude = np.minimum(np.abs(v), values[-1])
    above = np.clip(np.searchsorted(values, magnitude), 1, len(values) - 1)
    below = above - 1
    to_above, to_below = values[above] - magnitude, magnitude - values[below]
    code = np.where(to_above < to_below, above, below)
    code = np.where(to_above == to_below, np.where(above % 2 == 0, above, below), code)
    return np.copysign(values[code], v)


def fake_quantize(x: np.ndarray, scale: np.float32, fmt: Format) -> np.ndarray:
    """What fp32 `x` stands for after quantization with `scale`, float64: the product and 1/scale are fp32."""
    codes = round_by_search((x.astype(np.float32) * scale).astype(np.float64), fmt)
    return codes * np.float64(np.float32(1.0) / scale)


def scale_for(x: np.ndarray, fmt: Format) -> np.float32:
    """Current scaling's scale of a tensor that is not all zero."""
    return np.float32(fmt.max) / np.float32(np.abs(x).max())
