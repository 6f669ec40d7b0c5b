"""Faults of the client, each with the exit code that the command ends with."""

from __future__ import annotations

from typing import ClassVar, Final

OK: Final = 0
JOB_FAILED: Final = 1
USAGE: Final = 2
REFUSED: Final = 3
UNREACHABLE: Final = 4
UNAUTHORISED: Final = 5
EXPIRED: Final = 6
NOT_FOUND: Final = 7
LOCAL: Final = 8
INTERNAL: Final = 70
INTERRUPTED: Final = 130

EXIT_CODES: Final[dict[int, str]] = {
    OK: "done; with --wait: the job succeeded",
    JOB_FAILED: "the job failed or was cancelled; doctor: a check failed",
    USAGE: "the command line is wrong",
    REFUSED: "the job was refused or its file is wrong",
    UNREACHABLE: "springtide cannot be reached or cannot answer now",
    UNAUTHORISED: "the token is missing or not valid",
    EXPIRED: "a time limit was reached",
    NOT_FOUND: "no such job, task, log or output",
    LOCAL: "this machine: a file cannot be written, a port is taken, a part is not installed",
    INTERNAL: "a fault in springtide itself",
    INTERRUPTED: "interrupted by Ctrl-C; a job that was submitted goes on",
}


class SpringtideClientError(Exception):
    """Base of all faults that the client raises.

    `reason` is a stable code; `field`, `value` and `remedy` are set where one field is to blame.
    """

    exit_code: ClassVar[int] = INTERNAL

    def __init__(
        self,
        detail: str,
        *,
        reason: str = "",
        field: str = "",
        value: str = "",
        remedy: str = "",
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.reason = reason or self.default_reason
        self.field = field
        self.value = value
        self.remedy = remedy

    default_reason: ClassVar[str] = "internal"

    def as_dict(self) -> dict[str, object]:
        """For `--json`: the same keys for every fault."""
        return {
            "reason": self.reason,
            "detail": self.detail,
            "field": self.field,
            "value": self.value,
            "remedy": self.remedy,
        }

    def __str__(self) -> str:
        return self.detail


class RefusedError(SpringtideClientError):
    """The job is not acceptable as it is; the same again is refused again."""

    exit_code = REFUSED
    default_reason = "invalid-spec"


class JobFileError(RefusedError):
    """A job file that is wrong: `file`, `line` (from 1; 0: unknown) and the field are named."""

    def __init__(
        self,
        detail: str,
        *,
        file: str,
        line: int,
        reason: str = "",
        field: str = "",
        value: str = "",
        remedy: str = "",
    ) -> None:
        super().__init__(detail, reason=reason, field=field, value=value, remedy=remedy)
        self.file = file
        self.line = line

    def as_dict(self) -> dict[str, object]:
        """With the place in the file."""
        return {**super().as_dict(), "file": self.file, "line": self.line}

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.detail}"


class DuplicateIdError(RefusedError):
    """The job's id is taken by a different job."""

    default_reason = "duplicate-id"


class UnreachableError(SpringtideClientError):
    """No connection, or springtide cannot answer now. Submitting again is harmless."""

    exit_code = UNREACHABLE
    default_reason = "unreachable"


class UnauthorisedError(SpringtideClientError):
    """The token is missing or not valid."""

    exit_code = UNAUTHORISED
    default_reason = "unauthorised"


class ExpiredError(SpringtideClientError):
    """A time limit of the caller's was reached; the job goes on."""

    exit_code = EXPIRED
    default_reason = "expired"


class NotFoundError(SpringtideClientError):
    """No such job, task, log or output, or it belongs to somebody else."""

    exit_code = NOT_FOUND
    default_reason = "not-found"


class JobFailedError(SpringtideClientError):
    """Raised by `Job.result()`-like calls that need a success."""

    exit_code = JOB_FAILED
    default_reason = "job-failed"


class LocalError(SpringtideClientError):
    """Something on this machine: a file, a port, a part that is not installed."""

    exit_code = LOCAL
    default_reason = "local"


class UsageError(SpringtideClientError):
    """The command line or the call is wrong."""

    exit_code = USAGE
    default_reason = "usage"
