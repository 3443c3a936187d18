"""How busy the driver's machine is, sampled into a metrics file of its own."""

import time
from pathlib import Path

import psutil

from dmuon_platform.spool import MetricsSpool

SYSTEM_FILE = "system.jsonl"
EVERY_S = 10.0
MEGABYTE = 1e6


class SystemSampler:
    """Appends a sample now and then; the names are those of MLflow's system metrics page."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.spool = MetricsSpool(folder, SYSTEM_FILE)
        records, _ = self.spool.read_from(0)
        self._index = max((record.step for record in records), default=-1) + 1
        self._due = time.monotonic() + EVERY_S
        self._before = self._network_megabytes()
        psutil.cpu_percent()  # the next call says how busy it was since this one

    def sample(self) -> None:
        """Append a sample if one is due."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + EVERY_S
        memory = psutil.virtual_memory()
        received, sent = self._network_megabytes()
        metrics = {
            "system/cpu_utilization_percentage": psutil.cpu_percent(),
            "system/system_memory_usage_megabytes": memory.used / MEGABYTE,
            "system/system_memory_usage_percentage": memory.percent,
            "system/disk_usage_percentage": psutil.disk_usage(str(self._folder)).percent,
            "system/network_receive_megabytes": received - self._before[0],
            "system/network_transmit_megabytes": sent - self._before[1],
        }
        self.spool.append(self._index, metrics, time.time())
        self._index += 1

    @staticmethod
    def _network_megabytes() -> tuple[float, float]:
        """Return what came and went since the machine was started."""
        network = psutil.net_io_counters()
        return network.bytes_recv / MEGABYTE, network.bytes_sent / MEGABYTE
