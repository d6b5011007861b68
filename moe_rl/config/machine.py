"""What a machine can do, for the planner."""

from __future__ import annotations

from dataclasses import dataclass

from .key import key

OPTIMIZERS, REFERENCE = "measured, benchmarks/results/optimizers_h200.json", "inferred from verl PR #8383"
RATES = {  # with the value that a source gives, and the source
    "tflops": (),
    "utilisation": (0.024, REFERENCE),
    "hbm_gbps": (),
    "pcie_gbps": (55.0, OPTIMIZERS),
    "host_gbps": (67.0, OPTIMIZERS),
    "nic_gbps": (),
    "link_efficiency": (0.7, "assumed"),
    "nvlink_gbps": (),
    "disk_gbps": (1.0, "assumed"),
    "decode_layer_ms": (1.06, REFERENCE),
}


@dataclass
class MachineConfig:
    """What a node can do, for `moe-rl plan`; a profile fills it in, and rates that a run measured replace these."""

    gpu_memory_gib: float = key(79.6, "Memory of one GPU; the default is an H100 SXM's (80 GB).", unit="GiB", above=0)
    host_memory_gib: float = key(2048.0, "Memory of a node.", unit="GiB", above=0)
    shm_gib: float = key(0.0, "Size of /dev/shm; 0: half of the node's memory, Linux's default.", unit="GiB", low=0)
    tflops: float = key(989.0, "Dense bf16 peak of a GPU; the default is an H100 SXM's.", unit="TFLOP/s", above=0)
    utilisation: float = key(
        0.024,
        "Share of that peak which forward and backward passes reach; the default is inferred from the reference run (verl PR"
        " #8383: 692 s less 280 s of generation, 235 s of weight update and 2 s of the optimizer as planned here).",
        above=0,
        high=1,
    )
    hbm_gbps: float = key(3350.0, "Bandwidth of a GPU's memory; the default is an H100 SXM's.", unit="GB/s", above=0)
    pcie_gbps: float = key(
        55.0,
        "Copies between pinned host memory and a GPU, each way; the default was measured on an H200.",
        unit="GB/s",
        above=0,
    )
    host_gbps: float = key(
        67.0,
        "Bytes that Adam on a node's CPUs goes through; the default was measured on 16 cores.",
        unit="GB/s",
        above=0,
    )
    nic_gbps: float = key(50.0, "Network of one GPU, each way; the default is one 400 Gb/s port.", unit="GB/s", above=0)
    link_efficiency: float = key(
        0.7, "Share of a link's rate that a weight update reaches; assumed, not measured.", above=0, high=1
    )
    nvlink_gbps: float = key(
        450.0, "GPU to GPU inside a node, each way; the default is an H100 SXM's.", unit="GB/s", above=0
    )
    disk_gbps: float = key(1.0, "Writing to the checkpoints' storage, a node.", unit="GB/s", above=0)
    decode_layer_ms: float = key(
        1.06,
        "Time of a decoding step a layer, latency of kernels and networks included; the default is the reference run's"
        " (verl PR #8383: 280 s for 4096 and 500 s for 8192 tokens over 61 layers).",
        unit="ms",
        above=0,
    )
