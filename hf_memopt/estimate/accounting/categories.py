"""What the storages of a ledger are for."""

from collections import Counter

from hf_memopt.estimate.accounting.allocation_log import Ledger, StorageRecord
from hf_memopt.estimate.accounting.step_phases import FORWARD, SETUP

PARAMETER = "parameters"
FROZEN = "frozen parameters"
BUFFER = "buffers"
GRADIENT = "gradients"
OPTIMIZER_STATE = "optimizer state"
ACTIVATION = "activations"
TEMPORARY = "temporaries"
INPUT = "inputs"
TEACHER = "teacher"


def alive_at(ledger: Ledger, position: int) -> list[tuple[str, StorageRecord]]:
    """Device storages that are alive after a position of the log, with their kinds, largest first."""
    live = [
        record
        for record in ledger.records
        if not record.on_host and record.born <= position and (record.died is None or record.died > position)
    ]
    return sorted(((_kind(record, ledger), record) for record in live), key=lambda pair: -pair[1].num_bytes)


def of_storages(ledger: Ledger) -> tuple[str, ...]:
    """The kind of every storage, by number."""
    return tuple(_kind(record, ledger) for record in ledger.records)


def breakdown(live: list[tuple[str, StorageRecord]]) -> dict[str, int]:
    """Bytes of each kind, most first."""
    totals: Counter[str] = Counter()
    for kind, record in live:
        totals[kind] += record.num_bytes
    return dict(totals.most_common())


def _kind(record: StorageRecord, ledger: Ledger) -> str:
    """An activation is made in a forward pass and still alive when the next backward begins."""
    if record.kind:
        return record.kind
    if record.phase == SETUP:
        return INPUT
    backward = ledger.next_backward(record.born)
    outlives = backward is not None and (record.died is None or record.died > backward)
    return ACTIVATION if record.phase == FORWARD and outlives else TEMPORARY
