"""What was recorded of one pass, turned into what others are like: faster ones, or larger ones."""

from dataclasses import replace

from hf_memopt.activations.profile import Profile
from hf_memopt.activations.recording import Recording


def scaled(recording: Recording, ratio: float) -> Recording:
    """The recording of a pass that takes `ratio` times as long."""
    profile = recording.profile
    storages = tuple(
        replace(
            storage,
            saved_at_s=ratio * storage.saved_at_s,
            uses_s=tuple(ratio * used_at for used_at in storage.uses_s),
            recompute_s=None if storage.recompute_s is None else ratio * storage.recompute_s,
            freed_s=None if storage.freed_s is None else ratio * storage.freed_s,
        )
        for storage in profile.storages
    )
    ends_s = tuple(ratio * end_s for end_s in profile.backward_ends_s)
    return replace(recording, profile=Profile(storages, ratio * profile.step_s, ends_s))


def grown(recording: Recording, sizes: list[int]) -> Recording:
    """The recording of a pass as large as the largest seen, its times in proportion.

    Args:
        recording: of the passes so far.
        sizes: bytes of the storages that another pass saved, as many as were recorded.
    """
    largest = tuple(max(new, old) for new, old in zip(sizes, recording.sizes, strict=True))
    ratio = sum(largest) / sum(recording.sizes)
    recording = scaled(recording, ratio)
    storages = tuple(
        replace(storage, num_bytes=largest[index] if index < len(largest) else round(ratio * storage.num_bytes))
        for index, storage in enumerate(recording.profile.storages)
    )
    return replace(recording, profile=replace(recording.profile, storages=storages), sizes=largest)
