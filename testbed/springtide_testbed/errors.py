"""What can go wrong with a test bed; each error says what to do about it."""


class TestbedError(Exception):
    """Base of all test-bed errors. The text is meant for the person at the terminal."""

    __test__ = False  # the name starts like a test class; pytest must not collect it


class PartUnavailableError(TestbedError):
    """The server's programs are not on this machine and could not be installed.

    Tests that need the part are skipped with this text (or fail where real parts are required).
    """


class PartFailedError(TestbedError):
    """The programs are here, but the server did not start, or did not stop, in time."""


class PortTakenError(PartFailedError):
    """Another process listens on a port this part needs; other ports may work."""
