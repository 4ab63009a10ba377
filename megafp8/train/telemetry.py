"""What the machine says: GPU readings through NVML, peak memory, the peak rate that MFU is counted against."""

from __future__ import annotations

import platform
import resource
import sys
import time
from typing import Any

import torch

from megafp8.core.log import event, get_logger

logger = get_logger(__name__)

# Dense BF16 peaks in FLOP/s, NVIDIA's data sheets. MFU is counted against them in BF16 and in FP8 alike.
BF16_PEAKS: dict[str, float] = {
    "GB300": 2500e12, "GB200": 2500e12, "B300": 2250e12, "B200": 2250e12, "H200": 989.4e12, "H100": 989.4e12,
    "H800": 989.4e12, "A100": 312e12, "L40S": 362e12,
}  # fmt: skip
_THROTTLE = {  # NVML's clocks event reasons
    0x2: "clocks-setting", 0x4: "power-cap", 0x8: "hw-slowdown", 0x20: "sw-thermal", 0x40: "hw-thermal",
    0x80: "power-brake",
}  # fmt: skip


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """BF16 peak of one rank in FLOP/s, and where the figure comes from (a data sheet, or measured here on a CPU)."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for key, peak in BF16_PEAKS.items():
            if key in name:
                return peak, f"data sheet, dense BF16, {key}"
    measured_dtype = torch.float32 if dtype == torch.float64 else torch.bfloat16
    return _measure_gemm(device, measured_dtype), (
        f"measured here: best 1024^3 {str(measured_dtype)[6:]} product, {torch.get_num_threads()} thread(s) a rank"
    )


def _measure_gemm(device: torch.device, dtype: torch.dtype, n: int = 1024, seconds: float = 0.4) -> float:
    a = torch.randn(n, n, device=device, dtype=dtype)
    b = torch.randn(n, n, device=device, dtype=dtype)
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best


def memory_bytes(device: torch.device) -> int:
    """Peak memory of this process: allocated on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def cpu_name() -> str:
    """The processor's name as the operating system gives it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


class GpuReadings:
    """NVML readings of this rank's GPU; says once that there is none on a CPU run."""

    def __init__(self, device: torch.device) -> None:
        self._handle: Any = None
        self._nvml: Any = None
        if device.type != "cuda":
            event(logger, "no GPU: utilisation, power, clocks and temperature are not recorded", device=device.type)
            return
        import pynvml  # optional at run time: a container may lack the driver's library

        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(device.index or 0)
            self._nvml = pynvml
        except pynvml.NVMLError as error:
            event(logger, "NVML is not usable, GPU readings are not recorded", reason=str(error))

    def read(self) -> dict[str, Any]:
        """Utilisation %, memory bytes, power W, clocks MHz, temperature C, throttle reasons; empty without a GPU."""
        if self._nvml is None:
            return {}
        n, h = self._nvml, self._handle
        try:
            reasons = n.nvmlDeviceGetCurrentClocksEventReasons(h)
            return {
                "utilization_percent": n.nvmlDeviceGetUtilizationRates(h).gpu,
                "memory_bytes": n.nvmlDeviceGetMemoryInfo(h).used,
                "power_watts": n.nvmlDeviceGetPowerUsage(h) / 1000,
                "sm_clock_mhz": n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM),
                "memory_clock_mhz": n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_MEM),
                "temperature_celsius": n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU),
                "throttle_reasons": [name for bit, name in _THROTTLE.items() if reasons & bit],
            }
        except n.NVMLError as error:
            event(logger, "GPU readings stopped", reason=str(error))
            self._nvml = None
            return {}
