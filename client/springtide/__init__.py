"""springtide: submit huge arrays of long tasks, wait for them, fetch their results.

>>> import springtide
>>> job = springtide.submit(name="squares", command=["square"], array={"size": 1000})
>>> job.wait(progress=True).state
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from springtide.client import Client, Job
    from springtide.errors import (
        DuplicateIdError,
        ExpiredError,
        JobFailedError,
        JobFileError,
        LocalError,
        NotFoundError,
        RefusedError,
        SpringtideClientError,
        UnauthorisedError,
        UnreachableError,
        UsageError,
    )

__all__ = [
    "Client",
    "DuplicateIdError",
    "ExpiredError",
    "Job",
    "JobFailedError",
    "JobFileError",
    "LocalError",
    "NotFoundError",
    "RefusedError",
    "SpringtideClientError",
    "UnauthorisedError",
    "UnreachableError",
    "UsageError",
    "submit",
]


def submit(
    job: Mapping[str, Any] | Path | str | None = None,
    *,
    client: Client | None = None,
    **fields: Any,
) -> Job:
    """Submit a job and return it at once.

    Args:
        job: the job as a mapping, or the path of a YAML or JSON job file.
        client: where to; without it the springtide of this machine or of the environment.
        fields: fields of the job (`name`, `command`, `array`, …), over those of `job`.

    Raises:
        RefusedError: the job is wrong; names field, value and remedy (a file's line, too).
        UnreachableError, UnauthorisedError: springtide cannot be used now.
    """
    from springtide.client import Client, Job, as_job_file, prepared

    file = prepared(as_job_file(job, fields))
    client = client or Client()
    return Job(client, client.submit(file).id)


def __getattr__(name: str) -> Any:
    # Lazily: the HTTP library alone takes longer to import than `springtide --help` may.
    if name in ("Client", "Job"):
        from springtide import client

        return getattr(client, name)
    if name in __all__:
        from springtide import errors

        return getattr(errors, name)
    raise AttributeError(f"module 'springtide' has no attribute {name!r}")
