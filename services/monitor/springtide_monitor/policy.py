"""What a reading means: pure functions from raw counters to samples, usage and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from springtide_monitor.model import Track
from springtide_shared.messages.attempts import AttemptFigures
from springtide_shared.messages.cluster import ArrayUsage, NodeUsage
from springtide_shared.ports.cluster import NodeView, PodPhase, PodView
from springtide_shared.ports.metrics import PodReading, Sample


def take_reading(
    track: Track, reading: PodReading, cluster: str, gap_seconds: float
) -> tuple[Track, Sample | None]:
    """Add one reading.

    The first one has no rate yet, but its counter counts: it is what the pod used since it began.
    A reading that is not newer than the last is a duplicate. A counter that fell was reset by a
    restarted process: what it shows now was all used since. After a gap the counter counts, but no
    rate is claimed for time that nobody watched.
    """
    if track.last_at is not None and reading.at <= track.last_at:
        return track, None
    raw = max(0.0, reading.cpu_seconds)
    used = raw if track.last_raw is None or raw < track.last_raw else raw - track.last_raw
    interval = None if track.last_at is None else reading.at - track.last_at
    watched = interval is not None and interval <= gap_seconds
    cores = used / interval if interval is not None and watched else None
    memory = max(0, reading.memory_bytes)
    updated = Track(
        pod=track.pod,
        cpu_seconds=track.cpu_seconds + used,
        last_raw=raw,
        last_at=reading.at,
        first_at=reading.at if track.first_at is None else track.first_at,
        cores=cores,
        memory_bytes=memory,
        peak_memory_bytes=max(track.peak_memory_bytes, memory),
        samples=track.samples + 1,
    )
    attempt = track.pod.attempt
    if cores is None or interval is None or attempt is None:
        return updated, None
    return updated, Sample(
        at=reading.at,
        interval_seconds=interval,
        cluster=cluster,
        node=track.pod.node,
        pod_uid=track.pod.uid,
        job_id=attempt.job_id,
        index=attempt.index,
        attempt=attempt.attempt,
        cpu_cores=cores,
        memory_bytes=memory,
    )


def figures(track: Track, ended: PodView) -> AttemptFigures | None:
    """The summary of an ended pod; None for a pod that is not ours or never ran.

    A pod too short to be seen has no samples and says so, instead of claiming zero use.
    """
    attempt = ended.attempt
    if attempt is None or ended.started_at is None:
        return None
    end = ended.ended_at if ended.ended_at is not None else (track.last_at or ended.started_at)
    wall = max(0.0, end - ended.started_at)
    cores = ended.requests.cpu_millis / 1000
    return AttemptFigures(
        job_id=attempt.job_id,
        index=attempt.index,
        attempt=attempt.attempt,
        pod_uid=ended.uid,
        cpu_seconds=track.cpu_seconds,
        wall_seconds=wall,
        efficiency=track.cpu_seconds / (cores * wall) if cores * wall > 0 else 0.0,
        peak_memory_bytes=track.peak_memory_bytes,
        samples=track.samples,
    )


def usage_of_nodes(
    nodes: Sequence[NodeView],
    pods: Sequence[PodView],
    tracks: Mapping[str, Track],
    now: float,
    fresh_seconds: float,
) -> list[NodeUsage]:
    """Requested and used ratios per node.

    A node's `used_ratio` is given only if every running pod on it has a fresh rate: a sum with
    holes would read as idleness.
    """
    by_node: dict[str, list[PodView]] = {}
    for pod in pods:
        if pod.node and not pod.phase.is_terminated:
            by_node.setdefault(pod.node, []).append(pod)
    found = []
    for node in nodes:
        here = by_node.get(node.name, [])
        room = node.allocatable.cpu_millis
        requested = sum(pod.requests.cpu_millis for pod in here)
        used: float | None = 0.0
        for pod in here:
            track = tracks.get(pod.uid)
            if track is None or track.cores is None or now - (track.last_at or 0) > fresh_seconds:
                used = None
                break
            used = (used or 0.0) + track.cores
        found.append(
            NodeUsage(
                node=node.name,
                cpu_millis=room,
                memory_bytes=node.allocatable.memory_bytes,
                requested_ratio=requested / room if room else 0.0,
                used_ratio=1000 * used / room if used is not None and room else None,
                pods=len(here),
            )
        )
    return found


def usage_of_arrays(
    pods: Sequence[PodView], tracks: Mapping[str, Track], now: float, fresh_seconds: float
) -> list[ArrayUsage]:
    """Requested and used CPU of the running pods of each array, in job id order."""
    sums: dict[str, tuple[int, int, int, bool]] = {}
    for pod in pods:
        if pod.attempt is None or pod.phase is not PodPhase.RUNNING:
            continue
        count, requested, used, whole = sums.get(pod.attempt.job_id, (0, 0, 0, True))
        track = tracks.get(pod.uid)
        known = (
            track is not None
            and track.cores is not None
            and now - (track.last_at or 0) <= fresh_seconds
        )
        cores = track.cores if track is not None and track.cores is not None and known else 0.0
        sums[pod.attempt.job_id] = (
            count + 1,
            requested + pod.requests.cpu_millis,
            used + round(1000 * cores),
            whole and known,
        )
    return [
        ArrayUsage(
            job_id=job_id,
            pods=count,
            requested_cpu_millis=requested,
            used_cpu_millis=used if whole else None,
        )
        for job_id, (count, requested, used, whole) in sorted(sums.items())
    ]
