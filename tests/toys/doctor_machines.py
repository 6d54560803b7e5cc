"""Devices and hosts as the doctor describes them."""

from hf_memopt.report.doctor import Device, HostLimits, LinkSpeed

GPU = Device(
    "cuda:0",
    "cuda",
    "Some GPU",
    free_gib=70.0,
    total_gib=80.0,
    pinned=LinkSpeed(24.0, 25.0),
    pageable=LinkSpeed(5.0, 6.0),
    can_pin=True,
    has_counters=True,
)


HOST = HostLimits(total_gib=64, available_gib=60, cgroup_limit_gib=None, locked_limit_gib=8 / 1024, num_cpus=8)


CPU = Device("cpu", "cpu", "x86_64", obstacle="no link")
