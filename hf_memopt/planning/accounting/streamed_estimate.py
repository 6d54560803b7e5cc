"""The bytes that weights with a home move in a step."""

from dataclasses import dataclass, replace

from hf_memopt.units import format_gib


@dataclass(frozen=True, slots=True)
class StreamedEstimate:
    """The visits of weights that stream (`StreamedWeights`), with gradients and optimizer state that have a home."""

    peak_bytes: int  # of device memory for weights, small ones that stay left out
    bytes_to_device: int = 0  # brought in a step, or an update
    bytes_read: int = 0  # of these, weights from files
    bytes_to_home: int = 0  # gradients, weights and state that go back
    # Parts of these that move outside of passes.
    update_bytes_to_device: int = 0
    update_bytes_read: int = 0
    update_bytes_to_home: int = 0
    bytes_to_add_to: int = 0  # gradients brought in all passes of an update but the first

    def __str__(self) -> str:
        files = ", read from files" if self.bytes_read else ""
        back = f", {format_gib(self.bytes_to_home)} written back" if self.bytes_to_home else ""
        return (
            f"{format_gib(self.peak_bytes)} of the device at most, {format_gib(self.bytes_to_device)} brought in a "
            f"step{files}{back}"
        )

    def with_passes(self, times: float) -> "StreamedEstimate":
        """Return it for an update of `times` as many passes; where that is more, two were simulated."""
        more, added = times - 1, self.bytes_to_add_to
        return replace(
            self,
            bytes_to_device=self.bytes_to_device
            + round(more * (self.bytes_to_device - self.update_bytes_to_device + added)),
            bytes_read=self.bytes_read + round(more * (self.bytes_read - self.update_bytes_read)),
            bytes_to_home=self.bytes_to_home + round(more * (self.bytes_to_home - self.update_bytes_to_home)),
            bytes_to_add_to=added + round(2 * more * added),
        )
