"""An asyncio event loop in virtual time: hours pass in seconds, and the same run twice is the same.

When every task waits, the clock jumps to the next timer. Nothing may wait for the real world: a
thread or a socket would make the run depend on the machine, so both are refused, unless wrapped in
`real_io()`, which holds the clock still meanwhile (a database under a simulated cluster).
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import traceback
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final, TypeVar

T = TypeVar("T")

EPOCH: Final = 1_790_000_000.0
"""What `VirtualClock.now()` says at loop time 0 (September 2026)."""


RESOLUTION: Final = 1e-9
"""Smallest step of virtual time, in seconds."""

MAX_TURNS: Final = 200_000
"""Turns of the loop at one moment; a busy moment of 100,000 tasks needs a few thousand."""


class VirtualTimeError(Exception):
    """The run broke a rule of virtual time; the text names the place."""


class DeadlockError(VirtualTimeError):
    """Every task waits and no timer is set: nothing can ever happen again."""


class _OrderedTask(asyncio.Task[Any]):
    """A task whose hash is its number, so that sets of tasks iterate alike in every process."""

    _number = 0

    def __hash__(self) -> int:
        return self._number


class _VirtualSelector(selectors.DefaultSelector):
    """Advances the loop's clock instead of waiting."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        if timeout == 0:
            self.loop.count_turn()
        if self.loop.real_operations:
            return super().select(0.05 if timeout is None or timeout > 0 else 0)
        if timeout is None:
            raise DeadlockError(
                "nothing is ready and no timer is set; waiting:\n" + self.loop.story()
            )
        if timeout > 0:
            self.loop.advance(timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module. `limit`: virtual seconds after which the run fails."""

    def __init__(self, limit: float = 400 * 86400.0) -> None:
        self._now = 0.0
        self._limit = limit
        self._turns = 0
        self.real_operations = 0
        self._tasks_made = 0
        selector = _VirtualSelector()
        selector.loop = self
        super().__init__(selector)
        self._clock_resolution = RESOLUTION
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]
        self.failures: list[str] = []
        self.set_exception_handler(self._on_exception)

    def time(self) -> float:
        """Virtual seconds since the loop began."""
        return self._now

    def count_turn(self) -> None:
        """One turn of the loop in which no time passed; too many in a row are a livelock."""
        self._turns += 1
        if self._turns > MAX_TURNS:
            self._turns = 0
            raise VirtualTimeError(
                f"{MAX_TURNS} turns of the loop at {self._now:.3f} s and no time passes; tasks:\n"
                + self.story()
            )

    def advance(self, seconds: float) -> None:
        """Let time pass; only the selector calls this."""
        if seconds > RESOLUTION:
            self._turns = 0
        # A step below the float's own resolution would leave the clock where it is, for ever.
        self._now += max(seconds, RESOLUTION)
        if self._now > self._limit:
            raise VirtualTimeError(
                f"{self._limit:.0f} virtual seconds have passed; waiting:\n{self.story()}"
            )

    @contextlib.contextmanager
    def real_io(self) -> Iterator[None]:
        """Hold the clock while something outside the loop works."""
        self.real_operations += 1
        try:
            yield
        finally:
            self.real_operations -= 1

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> Any:
        """Refused outside `real_io()`: a thread's time is not the loop's."""
        if not self.real_operations:
            raise VirtualTimeError(f"a thread was asked for in virtual time: {func!r}")
        return super().run_in_executor(executor, func, *args)

    def story(self) -> str:
        """Who waits where, one task a paragraph."""
        lines = []
        for task in sorted(asyncio.all_tasks(self), key=hash):
            frames = task.get_stack(limit=3)
            where = "".join(f"    {f.f_code.co_filename}:{f.f_lineno}\n" for f in frames)
            lines.append(f"  {task.get_name()}\n{where}")
        return "".join(lines)

    def _make_task(
        self, _loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **kwargs: Any
    ) -> _OrderedTask:
        task = _OrderedTask(coro, loop=self, **kwargs)
        self._tasks_made += 1
        task._number = self._tasks_made
        return task

    def _on_exception(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        text = "".join(traceback.format_exception(error)) if error else ""
        self.failures.append(f"{context.get('message')}\n{text}")


class VirtualClock:
    """The `Clock` port on the running loop's time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, epoch: float = EPOCH) -> None:
        self._loop = loop
        self._epoch = epoch

    def now(self) -> float:
        """Seconds since 1970, as the simulation has it."""
        return self._epoch + self._loop.time()

    def monotonic(self) -> float:
        """The loop's own time."""
        return self._loop.time()


def run_virtual(main: Coroutine[Any, Any, T], *, limit: float = 400 * 86400.0) -> T:
    """Run `main` to its end in virtual time.

    Raises:
        VirtualTimeError: a thread was used, the limit passed, a task was left behind or failed
            with nobody to see it.
    """
    loop = VirtualLoop(limit)
    asyncio.set_event_loop(loop)
    try:
        result = loop.run_until_complete(main)
        left = [task for task in sorted(asyncio.all_tasks(loop), key=hash) if not task.done()]
        names = [task.get_name() for task in left]
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            raise VirtualTimeError(f"tasks were left behind: {', '.join(names)}")
        loop.run_until_complete(loop.shutdown_asyncgens())
        if loop.failures:
            raise VirtualTimeError("a failure nobody saw:\n" + "\n".join(loop.failures))
        return result
    finally:
        asyncio.set_event_loop(None)
        loop.close()
