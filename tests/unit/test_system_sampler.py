"""What MLflow shows of the driver's machine."""

import psutil
from dmuon_platform import system_sampler
from dmuon_platform.system_sampler import MEGABYTE, SystemSampler


def test_traffic_is_counted_from_the_beginning_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(system_sampler, "EVERY_S", 0.0)
    before = psutil.net_io_counters()
    sampler = SystemSampler(tmp_path)
    sampler.sample()
    after = psutil.net_io_counters()
    [record] = sampler.spool.read_from(0)[0]
    received = record.metrics["system/network_receive_megabytes"] * MEGABYTE
    sent = record.metrics["system/network_transmit_megabytes"] * MEGABYTE
    assert 0 <= received <= after.bytes_recv - before.bytes_recv + 1
    assert 0 <= sent <= after.bytes_sent - before.bytes_sent + 1
    assert 0 <= record.metrics["system/disk_usage_percentage"] <= 100
