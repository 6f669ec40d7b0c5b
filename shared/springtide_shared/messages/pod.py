"""What a cluster hands to the agent in a pod, as one JSON file.

In the local cluster the file is `pod.json` in the pod's directory; in Kubernetes a projected volume
holds the same.
"""

from __future__ import annotations

import msgspec

from springtide_shared.messages.task import AttemptKey, TaskTemplate


class PodDocument(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One attempt and where its files are. All paths absolute.

    Below `work_dir` the agent makes `input/`, `output/` and `checkpoint/`; the program runs in
    `work_dir` (or `template.working_dir` below it), its streams go to `stdout.log` and `stderr.log`
    in `log_dir`.
    """

    pod_uid: str
    attempt: AttemptKey
    tenant: str
    template: TaskTemplate
    item: str | None = None
    store_url: str
    """`file:///…` for a directory."""
    work_dir: str
    log_dir: str
    annotations_file: str
    """JSON object of the pod's annotations, replaced by rename at each change; may be absent."""
    termination_file: str
    """Where the agent leaves its `Termination` message."""
    poll_seconds: float = 0.25
    """How often the annotations and the program's files are looked at."""
    time_scale: float = 1.0
    """Divides the agent's own time constants (demonstrations)."""
