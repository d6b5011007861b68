"""How much memory a stretch of a process's life takes, above what it held before."""

from __future__ import annotations

import ctypes
import threading
from contextlib import suppress
from pathlib import Path

import torch

GIB = 2**30
SAMPLE_S = 0.005
_PAGE = 4096
_gpu_before = (0, 0)  # torch keeps one peak: what it was before a stretch reset it
_host_before = 0  # likewise the kernel


def resident_bytes() -> int:
    """Host memory that this process has resident, shared pages included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def gpu_peak_bytes() -> tuple[int, int]:
    """The most GPU memory that torch had allocated, and reserved, in this process so far; 0 where it uses none."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return 0, 0
    now = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return max(_gpu_before[0], now[0]), max(_gpu_before[1], now[1])


def _high_water() -> int:
    """The most that this process had resident since its start or the last reset of the kernel's mark."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resident_bytes()


def host_peak_bytes() -> int:
    """The most host memory that this process had resident so far."""
    return max(_host_before, _high_water())


def phase_peak_bytes() -> tuple[int, int]:
    """The most (host, GPU) memory since the last call; the marks of the process's whole life live on beside these."""
    global _host_before, _gpu_before
    host, gpu = _high_water(), 0
    _host_before = max(_host_before, host)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        gpu = torch.cuda.max_memory_allocated()
        _gpu_before = gpu_peak_bytes()
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):  # a kernel without the switch: the mark then is that of all phases so far
        Path("/proc/self/clear_refs").write_text("5")
    return host, gpu


def give_back() -> None:
    """Have the C library return freed memory to the system: it keeps blocks below 32 MiB, whole saves of them."""
    with suppress(AttributeError, OSError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


class Peak:
    """The peaks from its creation to `stop`: `host` and `gpu`, in bytes above what was in use at the start.

    The host's is sampled every few milliseconds, because the kernel keeps one mark for the whole life of a process.
    """

    def __init__(self) -> None:
        global _gpu_before
        self._gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        if self._gpu:
            _gpu_before = gpu_peak_bytes()
            torch.cuda.reset_peak_memory_stats()
            self._gpu_start = torch.cuda.memory_allocated()
        self._host_start = self._host_most = resident_bytes()
        self._over = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self._host_most = max(self._host_most, resident_bytes())

    def stop(self) -> Peak:
        """End the stretch; further calls change nothing."""
        if not self._over.is_set():
            self._over.set()
            self._sampler.join()
            self.host = max(self._host_most, resident_bytes()) - self._host_start
            self.gpu = torch.cuda.max_memory_allocated() - self._gpu_start if self._gpu else 0
        return self
