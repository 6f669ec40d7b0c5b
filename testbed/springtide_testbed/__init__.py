"""Real servers for tests and for people: private, on loopback, gone when you are done.

    from springtide_testbed import Testbed, default_parts

    with Testbed(home, default_parts()) as bed:
        bed.env()["AMQP_URL"]

On the command line: ``python -m springtide_testbed up | env | status | down``.
"""

from springtide_testbed.bed import Testbed, default_parts, end_abandoned_beds
from springtide_testbed.errors import PartFailedError, PartUnavailableError, TestbedError
from springtide_testbed.part import Part, Running

__all__ = [
    "Part",
    "PartFailedError",
    "PartUnavailableError",
    "Running",
    "Testbed",
    "TestbedError",
    "default_parts",
    "end_abandoned_beds",
]
