"""Node groups made of this machine, for who names none."""

from __future__ import annotations

import psutil

from springtide_lab.local.model import LocalGroup
from springtide_shared.units import GiB


def default_groups(cores: int, oversubscription: float) -> tuple[LocalGroup, ...]:
    """Two kinds of node that together cover the machine, with prices like a cloud's."""
    memory = psutil.virtual_memory().total
    whole = max(1, int(cores * oversubscription))

    def group(name: str, size: int, price: float) -> LocalGroup:
        return LocalGroup(
            name=name,
            instance_type=f"local.{size}",
            cpu_millis=size * 1000,
            memory_bytes=max(GiB // 2, int(memory * 0.8 * size / whole)),
            price_per_hour=price,
            boot_seconds=1.0,
            max_size=max(1, whole // size),
        )

    large = max(2, whole // 2)
    if whole < 2:
        return (group("small", 1, 0.05),)
    # A core of the small one is an eighth dearer, as sizes are priced on the large clouds.
    return (group("large", large, 0.04 * large), group("small", 1, 0.045))
