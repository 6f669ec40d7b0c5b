"""Shapes: what a task needs from a node, canonical and hashed."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import msgspec

from springtide_shared.units import Resources


class Shape(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Requests and constraints of a task. Tasks of equal shape are interchangeable in a plan."""

    cpu_millis: int
    memory_bytes: int
    scratch_bytes: int = 0

    @property
    def key(self) -> str:
        """Short stable hash; the name of this shape in plans, credits and demands."""
        return _key(self.cpu_millis, self.memory_bytes, self.scratch_bytes)

    @property
    def resources(self) -> Resources:
        """The requests of one task, its place in the kubelet's pod list included."""
        return _resources(self.cpu_millis, self.memory_bytes, self.scratch_bytes)


@lru_cache(maxsize=4096)
def _key(cpu_millis: int, memory_bytes: int, scratch_bytes: int) -> str:
    text = f"{cpu_millis}/{memory_bytes}/{scratch_bytes}"
    return "s" + hashlib.sha256(text.encode()).hexdigest()[:12]


@lru_cache(maxsize=4096)
def _resources(cpu_millis: int, memory_bytes: int, scratch_bytes: int) -> Resources:
    return Resources(
        cpu_millis=cpu_millis, memory_bytes=memory_bytes, scratch_bytes=scratch_bytes, pods=1
    )
