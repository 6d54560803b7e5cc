"""The findings as one page of text."""

from collections.abc import Iterator

from hf_memopt.report.doctor.devices import Device, LinkSpeed
from hf_memopt.report.doctor.host import HostLimits
from hf_memopt.report.doctor.this_machine import Machine
from hf_memopt.text_table import align

_EXTRAS = {"lerobot": "lerobot", "matplotlib": "report"}


def page(machine: Machine) -> str:
    """Return everything, in sections."""
    sections = {
        "Devices": [line for device in machine.devices for line in _device_lines(device)],
        "Host": _host_lines(machine.host),
        "Versions": align((name, _version(name, found)) for name, found in machine.versions.items()),
        f"Features on {machine.devices[0].name}": align(
            (feature.status, feature.name, feature.reason) for feature in machine.features
        ),
        "Problems": machine.problems or ["none found"],
    }
    return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections.items())


def _device_lines(device: Device) -> Iterator[str]:
    yield f"{device.name}: {device.model}"
    if device.total_gib is not None and device.free_gib is not None:
        yield f"  memory: {device.free_gib:.2f} GiB free of {device.total_gib:.2f} GiB"
    for title, link in (("pinned", device.pinned), ("pageable", device.pageable)):
        if link is not None:
            yield f"  link, {title} host memory: {_speed(link)}"
    if device.obstacle is not None:
        yield f"  {device.obstacle}"


def _speed(link: LinkSpeed) -> str:
    return f"{link.to_host_gb_per_s:.1f} GB/s to the host, {link.to_device_gb_per_s:.1f} GB/s to the device"


def _host_lines(host: HostLimits) -> list[str]:
    cgroup, locked_gib = host.cgroup_limit_gib, host.locked_limit_gib
    return align(
        [
            ("memory", f"{host.available_gib:.2f} GiB available of {host.total_gib:.2f} GiB"),
            ("limit of the control group", "none" if cgroup is None else f"{cgroup:.2f} GiB"),
            ("locked-memory limit (ulimit -l)", "none" if locked_gib is None else f"{1024 * locked_gib:,.0f} MiB"),
            ("CPUs of this process", str(host.num_cpus)),
        ]
    )


def _version(name: str, found: str | None) -> str:
    if found is not None:
        return found
    return f"not installed: pip install '.[{_EXTRAS[name]}]' in hf_memopt's repository" if name in _EXTRAS else "none"
