"""The agent's shell: restore, start, watch, checkpoint, prove, end.

One task of the event loop does everything in order; what may disturb it (the program's end, a
request to end the pod) sets an event that every pause listens to.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import IO, Final, TypeVar

import msgspec

from springtide_agent.config import AgentConfig
from springtide_agent.depot import Depot, FoundManifest, FoundRecord
from springtide_agent.files import LocalFile, digest, is_safe_path, look, write_whole
from springtide_agent.journal import Journal
from springtide_agent.orders import Orders
from springtide_agent.policy import (
    SeenFile,
    interval_seconds,
    order_holds,
    pause_seconds,
    progress_seconds,
)
from springtide_agent.program import Program
from springtide_shared.errors import (
    InvalidFieldError,
    PermanentError,
    Reason,
    SpringtideError,
    TransientError,
)
from springtide_shared.messages.pod import PodDocument
from springtide_shared.messages.records import (
    EXIT_CANNOT_START,
    EXIT_OUTPUT_MISSING,
    EXIT_REFUSED_RECORD_EXISTS,
    EXIT_RUN_TIME,
    EXIT_STORE_UNAVAILABLE,
    CheckpointOrder,
    CompletionRecord,
    Manifest,
    StoredFile,
    Termination,
)
from springtide_shared.messages.task import Ask, Saved
from springtide_shared.ports.clock import Clock, Ids
from springtide_shared.ports.store import ObjectStore
from springtide_shared.runtime.config import scaled
from springtide_shared.units import SIGNAL_EXIT_BASE

T = TypeVar("T")

EXIT_TERMINATED: Final = SIGNAL_EXIT_BASE + signal.SIGTERM
_CAPTURE_TRIES: Final = 5
_SETTLE_LOOKS: Final = 2
"""Looks at the files after the first change, while an atomic program may still be renaming."""


class _EndedError(Exception):
    """The pod is to end: leave what is being done."""


class Agent:
    """Runs one attempt; see the package's README for the order of things.

    Args:
        open_store: opens the object store; may raise while it is away and is then called again.
        config: constants as they are for real work; the pod's time scale is applied here.
    """

    def __init__(
        self,
        *,
        document: PodDocument,
        open_store: Callable[[], ObjectStore],
        clock: Clock,
        ids: Ids,
        config: AgentConfig,
        journal: Journal,
    ) -> None:
        self._doc = document
        self._template = document.template
        self._spec = document.template.checkpoint
        self._open_store = open_store
        self._clock = clock
        self._ids = ids
        self._rules = config
        self._config = scaled(config, document.time_scale)
        self._journal = journal
        self._poll = document.poll_seconds
        work = Path(document.work_dir)
        self._input_dir = work / "input"
        self._output_dir = work / "output"
        self._checkpoint_dir = work / "checkpoint"
        self._request = self._checkpoint_dir / "request"
        self._scratch = work / ".springtide"
        self._cwd = work / document.template.working_dir
        self._logs = {
            stream: Path(document.log_dir) / f"{stream}.log" for stream in ("stdout", "stderr")
        }
        self._orders = Orders(Path(document.annotations_file))
        self._term = asyncio.Event()
        self._disturbed = asyncio.Event()
        """Set for good by the program's end or a request to end."""
        self._started_at = 0.0
        self._restored_key = ""
        self._restored_progress = 0.0
        self._last_files: list[StoredFile] | None = None
        """What the newest manifest that this agent knows of holds."""
        self._last_look: list[SeenFile] | None = None
        self._save_seconds: float | None = None
        self._failures = 0
        self._answered = ""
        """The migration that was served last, well or not: none is tried twice."""
        self._handed_over = False
        """The program is frozen and its migration's manifest is in the store."""

    # ------------------------------------------------------------ life
    async def run(self) -> int:
        """The whole life of the pod; returns its exit code."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.end)
        try:
            return await self._run()
        except _EndedError:
            self._leave(Termination(detail="ended before the program was started"))
            return EXIT_TERMINATED
        finally:
            loop.remove_signal_handler(signal.SIGTERM)

    def end(self) -> None:
        """Ask the agent to end; as SIGTERM does."""
        self._term.set()
        self._disturbed.set()

    async def _run(self) -> int:
        try:
            self._make_folders()
        except (OSError, PermanentError) as error:
            return self._refuse(EXIT_CANNOT_START, f"cannot prepare the task: {error}")
        key = self._doc.attempt
        try:
            store = await self._patiently("open", self._opened)
            self._depot = Depot(store, key, self._doc.pod_uid)
            record = await self._patiently("record", self._depot.success_record)
            if record is not None:
                return self._refuse_for(record)
            if self._spec is not None:
                await self._restore()
        except (SpringtideError, OSError) as error:  # TimeoutError is an OSError
            return self._refuse(EXIT_STORE_UNAVAILABLE, str(error) or "no answer within the limit")
        with ExitStack() as streams:
            try:
                program = self._start(streams)
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                command = self._template.command
                detail = f"cannot execute {command[0] if command else '(no command)'!r}: {error}"
                return self._refuse(EXIT_CANNOT_START, detail)
            try:
                return await self._attend(program)
            finally:
                program.close()

    async def _opened(self) -> ObjectStore:
        return self._open_store()

    def _make_folders(self) -> None:
        below = self._template.working_dir
        if below and not is_safe_path(below):
            raise PermanentError(Reason.INVALID_SPEC, "working_dir leaves the task's directory")
        if self._spec is not None and self._spec.signal not in signal.Signals.__members__:
            raise InvalidFieldError("checkpoint.signal", self._spec.signal, "name one as SIGUSR1")
        for folder in (
            self._input_dir,
            self._output_dir,
            self._checkpoint_dir,
            self._scratch,
            self._cwd,
            Path(self._doc.log_dir),
        ):
            folder.mkdir(parents=True, exist_ok=True)

    async def _restore(self) -> None:
        scratch = self._scratch / "restore"
        restored = await self._patiently(
            "restore", lambda: self._depot.restore(self._checkpoint_dir, scratch)
        )
        for key in restored.passed_over:
            self._journal.say("manifest.damaged", key=key)
        if restored.found is not None:
            manifest = restored.found.manifest
            self._restored_key = restored.found.key
            self._restored_progress = manifest.progress_seconds
            self._last_files = manifest.files
            self._journal.say(
                "checkpoint.restored",
                key=restored.found.key,
                progress_seconds=manifest.progress_seconds,
                files=len(manifest.files),
            )

    def _start(self, streams: ExitStack) -> Program:
        def opened(stream: str) -> IO[bytes]:
            return streams.enter_context(self._logs[stream].open("ab"))

        program = Program.start(
            self._template.command,
            env=self._environment(),
            cwd=self._cwd,
            stdout=opened("stdout"),
            stderr=opened("stderr"),
            clock=self._clock,
        )
        program.on_end = self._disturbed.set
        self._started_at = self._clock.now()
        self._journal.say("program.started", pid=program.pid)
        return program

    def _environment(self) -> dict[str, str]:
        """The agent's own environment without what is springtide's, the job's, then the task's."""
        key = self._doc.attempt
        mine = "SPRINGTIDE_"
        env = {name: value for name, value in os.environ.items() if not name.startswith(mine)}
        env |= {n: v for n, v in self._template.env.items() if not n.startswith(mine)}
        env |= {
            "SPRINGTIDE_JOB_ID": key.job_id,
            "SPRINGTIDE_TASK_INDEX": str(key.index),
            "SPRINGTIDE_ATTEMPT": str(key.attempt),
            # The mark by which a cluster finds what left the pod's session.
            "SPRINGTIDE_POD_UID": self._doc.pod_uid,
            "SPRINGTIDE_INPUT_DIR": str(self._input_dir),
            "SPRINGTIDE_OUTPUT_DIR": str(self._output_dir),
            "SPRINGTIDE_CHECKPOINT_DIR": str(self._checkpoint_dir),
        }
        if self._doc.item is not None:
            env["SPRINGTIDE_ITEM"] = self._doc.item
        return env

    async def _attend(self, program: Program) -> int:
        """Watch the program until it or the pod ends."""
        limit = self._template.run_time_seconds
        due = self._clock.monotonic() + self._interval()
        while True:
            await self._pause(self._poll)
            if program.has_ended:
                return await self._after_end(program)
            if self._term.is_set():
                return await self._end_politely(program, EXIT_TERMINATED)
            if limit is not None and program.run_seconds() >= limit:
                self._journal.say("run_time.reached", limit_seconds=limit)
                return await self._end_politely(program, EXIT_RUN_TIME)
            if self._spec is None:
                continue
            order = self._orders.current()
            if self._is_news(order):
                assert order is not None
                await self._migrate(program, order)
                due = self._clock.monotonic() + self._interval()
            elif self._clock.monotonic() >= due:
                await self._checkpoint(program)
                due = self._clock.monotonic() + self._interval()

    # ------------------------------------------------------------ ends
    async def _after_end(self, program: Program) -> int:
        program.close()  # what the leader left behind ends with it, as in a container
        code = program.exit_code
        self._journal.say("program.ended", exit_code=code, run_seconds=program.run_seconds())
        if code == 0:
            return await self._succeed(program)
        if self._spec is not None and self._spec.saved is Saved.ATOMIC:
            # What it saved since the last upload is whole, and the next attempt's head start.
            await self._final_checkpoint(program)
        await self._put_logs()
        cause = f"signal {code - SIGNAL_EXIT_BASE}" if code > SIGNAL_EXIT_BASE else f"code {code}"
        return self._refuse(code, f"the program ended with {cause}")

    async def _succeed(self, program: Program) -> int:
        try:
            files = await self._declared_outputs()
        except (OSError, ValueError, InvalidFieldError) as error:
            await self._put_logs()
            return self._refuse(EXIT_OUTPUT_MISSING, str(error))
        key = self._doc.attempt
        try:
            outputs = [await self._stored_output(file) for file in files]
            for stream, path in self._logs.items():
                await self._patiently(
                    "logs", partial(self._depot.put_log, stream, path), ending=True
                )
            record = CompletionRecord(
                job_id=key.job_id,
                index=key.index,
                attempt=key.attempt,
                pod_uid=self._doc.pod_uid,
                exit_code=0,
                started_at=self._started_at,
                ended_at=self._clock.now(),
                progress_seconds=self._restored_progress + program.run_seconds(),
                restored_from=self._restored_key,
                restored_progress_seconds=self._restored_progress,
                outputs=outputs,
            )
            other = await self._patiently(
                "record", lambda: self._depot.complete(record), ending=True
            )
        except InvalidFieldError as error:  # a file name that no store takes
            await self._put_logs()
            return self._refuse(EXIT_OUTPUT_MISSING, str(error))
        except (SpringtideError, OSError) as error:
            return self._refuse(EXIT_STORE_UNAVAILABLE, str(error) or "no answer within the limit")
        if other is not None:
            return self._refuse_for(other)
        self._leave(Termination(digest=Depot.digest_of(record)))
        return 0

    async def _stored_output(self, file: LocalFile) -> StoredFile:
        return await self._patiently("outputs", lambda: self._depot.put_output(file), ending=True)

    async def _declared_outputs(self) -> list[LocalFile]:
        """Every declared output, hashed; a declared directory stands for all files below it.

        Raises:
            ValueError: one is missing, empty as a directory, or leaves the output directory.
        """
        found: dict[str, LocalFile] = {}
        for declared in self._template.outputs:
            if not is_safe_path(declared):
                raise ValueError(f"the declared output {declared!r} leaves the output directory")
            seen = look(self._output_dir, declared)
            if not seen:
                raise ValueError(f"the declared output {declared!r} is not there")
            for file in seen:
                local = self._output_dir / file.path
                if not local.resolve().is_relative_to(self._output_dir.resolve()):
                    raise ValueError(f"the declared output {declared!r} is a link to elsewhere")
                _require_text(file.path)
                size, sha256 = await digest(local)
                found[file.path] = LocalFile(path=file.path, local=local, size=size, sha256=sha256)
        return [found[path] for path in sorted(found)]

    async def _end_politely(self, program: Program, code: int) -> int:
        """SIGTERM, grace, SIGKILL; then save what the program saved last."""
        if self._handed_over:
            program.close()  # another attempt goes on from the manifest: nothing is lost
            return self._refuse(code, "ended for its migration")
        program.signal_group(signal.SIGTERM)
        program.thaw()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._template.grace_seconds):
                await program.ended.wait()
        program.close()
        if code != EXIT_RUN_TIME and self._spec is not None:
            await self._final_checkpoint(program)
        await self._put_logs()
        ran = program.run_seconds()
        if code == EXIT_RUN_TIME:
            return self._refuse(code, f"the run time limit was reached after {ran:.0f} s")
        return self._refuse(code, f"asked to end after {ran:.0f} s")

    async def _put_logs(self) -> None:
        """Best effort: nothing depends on them."""
        try:
            async with asyncio.timeout(self._config.logs_limit_seconds):
                for stream, path in self._logs.items():
                    await self._depot.put_log(stream, path)
        except (SpringtideError, OSError) as error:
            self._journal.say("logs.lost", error=str(error))

    def _refuse_for(self, record: FoundRecord) -> int:
        self._journal.say("record.found", attempt=record.attempt)
        self._leave(
            Termination(
                digest=record.digest,
                record_attempt=record.attempt,
                detail=f"attempt {record.attempt} has succeeded already",
            )
        )
        return EXIT_REFUSED_RECORD_EXISTS

    def _refuse(self, code: int, detail: str) -> int:
        self._journal.say("attempt.failed", exit_code=code, detail=detail)
        self._leave(Termination(detail=detail))
        return code

    def _leave(self, termination: Termination) -> None:
        """The termination message, at most the 4 KiB that a kubelet takes."""
        short = msgspec.structs.replace(termination, detail=termination.detail[:1_000])
        try:
            write_whole(Path(self._doc.termination_file), msgspec.json.encode(short))
        except OSError as error:
            self._journal.say("termination.lost", error=str(error))

    # ------------------------------------------------------------ checkpoints
    def _interval(self) -> float:
        if self._spec is None:
            return float("inf")
        usual = interval_seconds(self._spec, self._save_seconds, self._rules)
        if self._spec.every_seconds is None:
            usual /= self._doc.time_scale
        if self._failures:
            pause = pause_seconds(self._failures, self._config.retry_checkpoint_seconds, usual)
            return min(usual, pause)
        return usual

    async def _checkpoint(self, program: Program) -> None:
        """The periodic one: ask, wait, copy, upload; nothing if nothing has changed."""
        began = self._clock.monotonic()
        if not await self._saved(program, None):
            return
        try:
            files = await self._captured(program)
            if files is None:
                return
            await self._upload(program, files, began, self._config.upload_limit_seconds)
        except _EndedError:
            return  # the caller sees the request to end
        except (SpringtideError, OSError) as error:
            self._failed("checkpoint.failed", error)

    async def _final_checkpoint(self, program: Program) -> None:
        """After the program's end: best effort, whoever waits for this pod has a limit."""
        try:
            files = await self._captured(program)
            if files is not None:
                limit = self._config.final_save_limit_seconds
                await self._upload(program, files, self._clock.monotonic(), limit, ending=True)
        except (SpringtideError, OSError) as error:
            self._failed("checkpoint.failed", error)

    async def _migrate(self, program: Program, order: CheckpointOrder) -> None:
        """Save, freeze, upload from the frozen state; stay frozen while the order stands."""
        self._answered = order.migration_id
        began = self._clock.monotonic()
        self._journal.say("migration.asked", migration_id=order.migration_id)
        if not await self._saved(program, order) or not await self._frozen(program, order):
            program.thaw()
            return
        try:
            files = await self._captured(program, even_if_unchanged=True)
            if not files:
                raise PermanentError(Reason.CHECKPOINT_FAILED, "the program has saved nothing yet")
            limit = min(self._config.upload_limit_seconds, order.valid_until - self._clock.now())
            await self._upload(program, files, began, limit, migration_id=order.migration_id)
        except (SpringtideError, OSError) as error:
            program.thaw()
            self._failed("migration.failed", error)
            return
        except _EndedError:
            return  # the caller sees the request to end
        self._handed_over = True
        await self._put_logs()  # now, so that the end need not wait for them
        while not self._disturbed.is_set() and self._stands(order):
            await self._pause(self._poll)
        if not self._disturbed.is_set():
            self._handed_over = False
            program.thaw()
            self._journal.say("migration.withdrawn", migration_id=order.migration_id)

    def _failed(self, event: str, error: Exception) -> None:
        self._failures += 1
        self._journal.say(event, error=str(error) or type(error).__name__)

    def _is_news(self, order: CheckpointOrder | None) -> bool:
        return (
            order is not None
            and order.migration_id != self._answered
            and self._clock.now() < order.valid_until
        )

    def _stands(self, order: CheckpointOrder) -> bool:
        return order_holds(order, self._orders.current(), self._clock.now())

    def _look(self) -> list[SeenFile]:
        spec = self._spec
        assert spec is not None
        skip = frozenset({self._request.name}) if spec.ask is Ask.FILE else frozenset[str]()
        return look(self._checkpoint_dir, spec.path, skip=skip)

    async def _saved(self, program: Program, order: CheckpointOrder | None) -> bool:
        """Ask the program to save and wait until its files are whole.

        False: it ended meanwhile, the pod is to end, the order fell, or the files never rested.
        """
        spec = self._spec
        assert spec is not None

        def goes_on() -> bool:
            return not self._disturbed.is_set() and (order is None or self._stands(order))

        before = self._look()
        if spec.ask is not Ask.NONE:
            deadline = self._clock.monotonic() + spec.expected_save_seconds
            asked = await self._asked(program, deadline)
            while asked and goes_on() and self._look() == before:
                if self._clock.monotonic() >= deadline:
                    break  # it had its time: what is there is what there is
                await self._pause(self._poll)
            if spec.ask is Ask.FILE:
                with suppress(OSError):
                    self._request.unlink(missing_ok=True)
        if spec.saved is Saved.ATOMIC:
            for _ in range(_SETTLE_LOOKS if spec.ask is not Ask.NONE else 0):
                now = self._look()
                await self._pause(self._poll)
                if now == self._look():
                    break
            return goes_on()
        return await self._rested(goes_on)

    async def _rested(self, goes_on: Callable[[], bool]) -> bool:
        """Wait until no file has changed for the quiet time."""
        began = since = self._clock.monotonic()
        seen = self._look()
        while goes_on():
            now = self._clock.monotonic()
            if now - since >= self._quiet:
                return True
            if now - began >= self._config.quiet_limit_seconds:
                self._failed("checkpoint.restless", TimeoutError("the files never rested"))
                return False
            await self._pause(min(self._poll, self._quiet))
            if (current := self._look()) != seen:
                seen, since = current, self._clock.monotonic()
        return False

    async def _asked(self, program: Program, deadline: float) -> bool:
        """Whether the request reached the program."""
        spec = self._spec
        assert spec is not None
        match spec.ask:
            case Ask.SIGNAL:
                number = signal.Signals[spec.signal]
                while program.would_die_of(number):  # it has not installed its handler yet
                    if self._disturbed.is_set() or self._clock.monotonic() >= deadline:
                        self._journal.say("signal.withheld", signal=spec.signal)
                        return False
                    await self._pause(self._poll)
                program.signal_leader(number)
            case Ask.COMMAND:
                return await self._commanded(spec.command, deadline)
            case Ask.FILE:
                write_whole(self._request, b"")
            case Ask.NONE:
                return False
        return True

    async def _commanded(self, command: list[str], deadline: float) -> bool:
        """Run the job's own checkpoint command beside the program; True if it ended with 0."""
        try:
            with self._logs["stdout"].open("ab") as out, self._logs["stderr"].open("ab") as err:
                helper = Program.start(
                    command,
                    env=self._environment(),
                    cwd=self._cwd,
                    stdout=out,
                    stderr=err,
                    clock=self._clock,
                )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._failed("checkpoint.failed", error)
            return False
        try:
            async with asyncio.timeout(max(0.0, deadline - self._clock.monotonic())):
                await helper.ended.wait()
        except TimeoutError:
            self._journal.say("command.cut", command=command[0])
            return False
        finally:
            helper.close()
        return helper.exit_code == 0

    async def _frozen(self, program: Program, order: CheckpointOrder) -> bool:
        """Stop the program at a moment at which its files are whole."""
        spec = self._spec
        assert spec is not None
        limit = self._clock.monotonic() + self._config.quiet_limit_seconds
        while not self._disturbed.is_set() and self._stands(order):
            program.freeze()
            while not program.all_stopped() and self._clock.monotonic() < limit:  # noqa: ASYNC110
                await asyncio.sleep(min(0.01, self._poll))
            if spec.saved is Saved.ATOMIC or self._is_quiet_now():
                return not self._disturbed.is_set()
            program.thaw()
            if self._clock.monotonic() >= limit:
                self._failed("migration.restless", TimeoutError("the files never rested"))
                return False
            await self._rested(lambda: not self._disturbed.is_set() and self._stands(order))
        return False

    def _is_quiet_now(self) -> bool:
        newest = _newest_mtime(self._look())
        return newest is None or self._clock.now() - newest >= self._quiet

    async def _captured(
        self, program: Program, *, even_if_unchanged: bool = False
    ) -> list[LocalFile] | None:
        """The files as they are, hashed; None if nothing is there or nothing has changed.

        A running program's files are copied first: what is hashed is what is uploaded.
        """
        still = program.is_frozen or program.has_ended
        folder = self._scratch / "capture"
        for _ in range(_CAPTURE_TRIES):
            seen = self._look()
            if not seen or (seen == self._last_look and not even_if_unchanged):
                return None
            for old in folder.glob("*") if folder.is_dir() else ():
                old.unlink()
            folder.mkdir(exist_ok=True)
            try:
                files = [
                    await self._capture_one(file, None if still else folder / str(number))
                    for number, file in enumerate(seen)
                ]
            except FileNotFoundError:
                continue  # replaced while we looked: look again
            torn = self._spec is not None and self._spec.saved is Saved.QUIET
            if torn and self._look() != seen:
                continue
            self._last_look = seen
            if not even_if_unchanged and self._last_files is not None:
                known = [(file.path, file.sha256) for file in self._last_files]
                if known == [(file.path, file.sha256) for file in files]:
                    return None
            return files
        raise TransientError(Reason.CHECKPOINT_FAILED, "the files changed while they were copied")

    async def _capture_one(self, file: SeenFile, copy_to: Path | None) -> LocalFile:
        _require_text(file.path)
        source = self._checkpoint_dir / file.path
        size, sha256 = await digest(source, copy_to)
        return LocalFile(path=file.path, local=copy_to or source, size=size, sha256=sha256)

    async def _upload(
        self,
        program: Program,
        files: list[LocalFile],
        began: float,
        limit: float,
        *,
        migration_id: str = "",
        ending: bool = False,
    ) -> None:
        now = self._clock.now()
        key = self._doc.attempt
        newest = _newest_mtime(self._last_look or [])

        async def save() -> FoundManifest:
            draft = Manifest(
                job_id=key.job_id,
                index=key.index,
                attempt=key.attempt,
                pod_uid=self._doc.pod_uid,
                seq=0,
                created_at=now,
                progress_seconds=progress,
                save_seconds=self._clock.monotonic() - began,
                migration_id=migration_id,
            )
            return await self._depot.save(files, draft)

        progress = progress_seconds(self._restored_progress, program.run_seconds(), newest, now)
        try:
            found = await self._patiently(
                "checkpoint",
                save,
                limit=limit,
                patience=self._config.frozen_patience_seconds if program.is_frozen else limit,
                ending=ending,
            )
        except BaseException:
            self._last_look = None  # the next look must not take these files for stored
            raise
        self._last_files = found.manifest.files
        self._save_seconds = self._clock.monotonic() - began
        self._failures = 0
        self._journal.say(
            "checkpoint.stored",
            key=found.key,
            files=len(files),
            progress_seconds=progress,
            save_seconds=self._save_seconds,
            migration_id=migration_id,
        )
        if not migration_id:  # nobody waits for a tidy store while a program stands frozen
            with suppress(SpringtideError):
                await self._depot.prune(found, self._config.keep_manifests)

    # ------------------------------------------------------------ waiting
    async def _pause(self, seconds: float) -> None:
        """Until the time has passed, the program has ended or the pod is to end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._disturbed.wait()

    async def _patiently(
        self,
        what: str,
        call: Callable[[], Awaitable[T]],
        *,
        limit: float | None = None,
        patience: float = float("inf"),
        ending: bool = False,
    ) -> T:
        """Call until the store answers, with growing pauses, for at most `limit` seconds.

        Args:
            patience: seconds from the first fault on after which no further try is made.
            ending: go on although the pod is to end (its program has ended, the rest is worth it).

        Raises:
            _EndedError: the pod is to end, and `ending` is not set.
            SpringtideError: a permanent fault, or the last transient one.
            TimeoutError: the store neither answered nor failed.
        """
        limit = self._config.store_limit_seconds if limit is None else limit
        deadline = self._clock.monotonic() + limit
        give_up = deadline
        failures = 0
        while True:
            try:
                async with asyncio.timeout(max(0.0, deadline - self._clock.monotonic())):
                    return await self._unless_ended(call(), ending=ending)
            except TransientError as error:
                failures += 1
                if failures == 1:
                    give_up = min(deadline, self._clock.monotonic() + patience)
                most = pause_seconds(
                    failures, self._config.pause_seconds, self._config.most_pause_seconds
                )
                pause = error.retry_after or self._ids.uniform(most / 2, most)
                self._journal.say("store.away", what=what, error=str(error), failures=failures)
                if self._clock.monotonic() + pause >= give_up:
                    raise
                await self._unless_ended(asyncio.sleep(pause), ending=ending)

    async def _unless_ended(self, work: Awaitable[T], *, ending: bool) -> T:
        """`work`, left at once when the pod is to end."""
        if ending:
            return await work
        task: asyncio.Task[T] = asyncio.ensure_future(_as_coroutine(work))
        term = asyncio.ensure_future(self._term.wait())
        try:
            await asyncio.wait((task, term), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise _EndedError
        finally:
            for one in (task, term):
                one.cancel()
            await asyncio.gather(task, term, return_exceptions=True)

    @property
    def _quiet(self) -> float:
        """Never shorter than a look at the files: with a big time scale it would be no time."""
        return max(self._config.quiet_seconds, self._poll)


def _newest_mtime(seen: list[SeenFile]) -> float | None:
    return max(file.mtime_ns for file in seen) / 1e9 if seen else None


def _require_text(path: str) -> None:
    """Raise InvalidFieldError for a file name that is no valid text: no store could hold it."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise InvalidFieldError("file name", ascii(path), "name files in valid UTF-8") from None


async def _as_coroutine(work: Awaitable[T]) -> T:
    return await work
