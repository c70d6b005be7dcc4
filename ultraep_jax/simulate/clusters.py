"""Machines: how many devices share fast links, and what their data sheets say."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
  """Equal domains of devices; links are fast inside one and slower between them.

  Attributes:
    name: for tables.
    domain_size: devices joined by scale-up links (NVLink).
    peak: dense bf16 FLOP/s of a device.
    link: bytes/s that a device can send over scale-up links, one direction.
    network: bytes/s that a device can send to other domains, one direction.
    source: of these numbers.
  """

  name: str
  domain_size: int
  peak: float
  link: float
  network: float
  source: str


_HOPPER = (
  "NVIDIA data sheets: 989 TFLOP/s bf16 without sparsity, NVLink4 2 × 450 GB/s, 400 Gb/s NIC"
)
_GB200 = (
  "NVIDIA data sheets: 360 PFLOP/s sparse bf16 a rack of 72, NVLink5 2 × 900 GB/s, 400 Gb/s NIC"
)
_GB300 = (
  "NVIDIA data sheets: 360 PFLOP/s sparse bf16 a rack of 72, NVLink5 2 × 900 GB/s, 800 Gb/s NIC"
)

CLUSTERS = {
  cluster.name: cluster
  for cluster in (
    Cluster(name="h100", domain_size=8, peak=989e12, link=450e9, network=50e9, source=_HOPPER),
    Cluster(name="h200", domain_size=8, peak=989e12, link=450e9, network=50e9, source=_HOPPER),
    Cluster(name="gb200", domain_size=72, peak=2500e12, link=900e9, network=50e9, source=_GB200),
    Cluster(name="gb300", domain_size=72, peak=2500e12, link=900e9, network=100e9, source=_GB300),
    Cluster(
      name="nvl64",
      domain_size=64,
      peak=2500e12,
      link=900e9,
      network=50e9,
      source="the paper's racks of 64; the device is not named, its rates are of GB200's class",
    ),
  )
}
