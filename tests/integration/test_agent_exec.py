"""The agent as a real process around small real programs, with the store in a directory."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from springtide_shared.messages.pod import PodDocument
from springtide_shared.messages.records import (
    ANNOTATION_CHECKPOINT,
    EXIT_CANNOT_START,
    EXIT_OUTPUT_MISSING,
    EXIT_REFUSED_RECORD_EXISTS,
    EXIT_RUN_TIME,
    EXIT_STORE_UNAVAILABLE,
    CheckpointOrder,
    CompletionRecord,
    Manifest,
    Termination,
    log_key,
    manifests_prefix,
    output_key,
    part_key,
    record_key,
)
from springtide_shared.messages.shape import Shape
from springtide_shared.messages.task import Ask, AttemptKey, CheckpointSpec, Saved, TaskTemplate

JOB = "job-1"
LIMIT = 60.0
ATOMIC = CheckpointSpec(saved=Saved.ATOMIC, every_seconds=3600, expected_save_seconds=0.5)

COUNTER = """
import hashlib, json, os, signal, sys, time
here = os.environ["SPRINGTIDE_CHECKPOINT_DIR"]
state = os.path.join(here, "state.json")
done, value = 0, "seed"
if os.path.exists(state):
    done, value = json.load(open(state))
print("from", done, flush=True)
last, pause = int(sys.argv[1]), float(sys.argv[2])
while done < last:
    value = hashlib.sha256(value.encode()).hexdigest()
    done += 1
    with open(state + ".tmp", "w") as file:
        json.dump([done, value], file)
    os.replace(state + ".tmp", state)
    time.sleep(pause)
with open(os.path.join(os.environ["SPRINGTIDE_OUTPUT_DIR"], "value.txt"), "w") as file:
    file.write(value)
"""


def expected_value(steps: int) -> str:
    value = "seed"
    for _ in range(steps):
        value = hashlib.sha256(value.encode()).hexdigest()
    return value


class Pod:
    """One pod directory and the agent in it."""

    def __init__(self, root: Path, attempt: int, template: TaskTemplate, **changes: Any) -> None:
        self.root = root
        self.attempt = attempt
        self.dir = root / f"pod-{attempt}-{time.monotonic_ns()}"
        (self.dir / "work").mkdir(parents=True)
        fields: dict[str, Any] = {
            "pod_uid": f"uid-{attempt}",
            "attempt": AttemptKey(JOB, 7, attempt),
            "tenant": "t",
            "template": template,
            "store_url": (root / "store").as_uri(),
            "work_dir": str(self.dir / "work"),
            "log_dir": str(self.dir / "logs"),
            "annotations_file": str(self.dir / "annotations.json"),
            "termination_file": str(self.dir / "termination"),
            "poll_seconds": 0.03,
        }
        self.document = PodDocument(**(fields | changes))
        self.file = self.dir / "pod.json"
        self.file.write_bytes(msgspec.json.encode(self.document))
        self.agent: subprocess.Popen[bytes] | None = None

    def start(self) -> Pod:
        with (self.dir / "agent.log").open("wb") as log:
            self.agent = subprocess.Popen(
                [sys.executable, "-m", "springtide_agent", "exec", "--pod", str(self.file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self

    def wait(self) -> int:
        assert self.agent is not None
        return self.agent.wait(LIMIT)

    def run(self) -> int:
        return self.start().wait()

    def term(self) -> None:
        assert self.agent is not None
        self.agent.terminate()

    @property
    def checkpoint(self) -> Path:
        return self.dir / "work" / "checkpoint"

    def stdout(self) -> str:
        file = self.dir / "logs" / "stdout.log"
        return file.read_text() if file.exists() else ""

    def log(self) -> str:
        return (self.dir / "agent.log").read_text()

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.log().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == name]

    def termination(self) -> Termination:
        return msgspec.json.decode((self.dir / "termination").read_bytes(), type=Termination)

    def object(self, key: str) -> Path:
        return self.root / "store" / "objects" / key

    def record(self) -> CompletionRecord:
        body = self.object(record_key(JOB, 7, self.attempt)).read_bytes()
        return msgspec.json.decode(body, type=CompletionRecord)

    def manifests(self) -> list[Manifest]:
        folder = self.object(manifests_prefix(JOB, 7))
        files = sorted(folder.iterdir()) if folder.is_dir() else []
        return [msgspec.json.decode(file.read_bytes(), type=Manifest) for file in files]

    def annotate(self, order: CheckpointOrder | None) -> None:
        text = msgspec.json.encode(order).decode() if order is not None else ""
        part = self.dir / "annotations.part"
        part.write_text(json.dumps({ANNOTATION_CHECKPOINT: text, "other": "x"}))
        part.replace(self.document.annotations_file)


def until(what: Callable[[], object], why: str) -> None:
    end = time.monotonic() + LIMIT
    while not what():
        assert time.monotonic() < end, f"never happened: {why}"
        time.sleep(0.02)


MakePod = Callable[..., Pod]


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[MakePod]:
    pods: list[Pod] = []

    def make(attempt: int = 1, **changes: Any) -> Pod:
        template = {
            "command": [sys.executable, "-S", "-c", COUNTER, "5", "0.01"],
            "shape": Shape(cpu_millis=1000, memory_bytes=1),
            "outputs": ["value.txt"],
            "grace_seconds": 5.0,
        }
        document = {n: changes.pop(n) for n in list(changes) if n in PodDocument.__struct_fields__}
        pods.append(Pod(tmp_path, attempt, TaskTemplate(**(template | changes)), **document))
        return pods[-1]

    yield make
    for one in pods:
        if one.agent is not None and one.agent.poll() is None:
            one.agent.kill()
            one.agent.wait(LIMIT)


def counting(steps: int, pause: float = 0.02) -> list[str]:
    return [sys.executable, "-S", "-c", COUNTER, str(steps), str(pause)]


def steps_done(pod: Pod) -> int:
    file = pod.checkpoint / "state.json"
    return int(json.loads(file.read_text())[0]) if file.exists() else 0


def program_state(pod: Pod) -> str:
    """Letter of /proc/PID/stat of the program."""
    pid = pod.events("program.started")[0]["pid"]
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


def test_success_leaves_outputs_logs_and_a_record_that_the_termination_names(pod: MakePod) -> None:
    one = pod()
    assert one.run() == 0
    record = one.record()
    assert (record.attempt, record.pod_uid, record.exit_code) == (1, "uid-1", 0)
    (output,) = record.outputs
    body = one.object(output_key(JOB, 7, 1, "value.txt")).read_bytes()
    assert body.decode() == expected_value(5)
    assert (output.size, output.sha256) == (len(body), hashlib.sha256(body).hexdigest())
    assert one.object(log_key(JOB, 7, 1, "stdout")).read_text() == "from 0\n"
    raw = one.object(record_key(JOB, 7, 1)).read_bytes()
    assert one.termination() == Termination(digest=hashlib.sha256(raw).hexdigest())


def test_second_attempt_refuses_when_a_record_exists(pod: MakePod) -> None:
    assert pod().run() == 0
    second = pod(2)
    assert second.run() == EXIT_REFUSED_RECORD_EXISTS
    raw = second.object(record_key(JOB, 7, 1)).read_bytes()
    told = second.termination()
    assert (told.record_attempt, told.digest) == (1, hashlib.sha256(raw).hexdigest())
    assert not second.stdout()


def test_garbled_or_foreign_record_does_not_count(pod: MakePod) -> None:
    two = pod(2)
    key = two.object(record_key(JOB, 7, 1))
    key.parent.mkdir(parents=True)
    key.write_text('{"job_id": "another", "exit_code": 0}')
    assert two.run() == 0


def test_missing_output_is_no_success(pod: MakePod) -> None:
    one = pod(outputs=["value.txt", "other/none.bin"])
    assert one.run() == EXIT_OUTPUT_MISSING
    assert "other/none.bin" in one.termination().detail
    assert not one.object(record_key(JOB, 7, 1)).exists()
    assert one.object(log_key(JOB, 7, 1, "stdout")).exists()


def test_output_that_links_out_of_its_directory_is_refused(pod: MakePod) -> None:
    code = (
        "import os; os.symlink('/etc/hostname', os.environ['SPRINGTIDE_OUTPUT_DIR'] + '/value.txt')"
    )
    one = pod(command=[sys.executable, "-S", "-c", code])
    assert one.run() == EXIT_OUTPUT_MISSING


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 4)", 132)],
)
def test_the_program_s_exit_code_is_the_agent_s(pod: MakePod, code: str, exit_code: int) -> None:
    one = pod(command=[sys.executable, "-S", "-c", code])
    assert one.run() == exit_code
    assert not one.object(record_key(JOB, 7, 1)).exists()


def test_command_that_cannot_be_executed_is_named(pod: MakePod) -> None:
    one = pod(command=["no-such-program-of-ours", "x"])
    assert one.run() == EXIT_CANNOT_START
    assert "no-such-program-of-ours" in one.termination().detail


def test_run_time_limit_ends_program_and_its_children(pod: MakePod) -> None:
    code = "sleep 60 & echo $! > child; wait"
    one = pod(command=["sh", "-c", code], run_time_seconds=0.3)
    assert one.run() == EXIT_RUN_TIME
    child = int((one.dir / "work" / "child").read_text())
    until(lambda: not Path(f"/proc/{child}").exists() or _state(child) == "Z", "child is gone")


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


def test_a_program_that_ignores_sigterm_is_killed_after_its_grace(pod: MakePod) -> None:
    code = "trap '' TERM; echo up; while :; do sleep 0.05; done"
    one = pod(command=["sh", "-c", code], grace_seconds=0.3).start()
    until(one.stdout, "the program is up")
    one.term()
    assert one.wait() == 128 + signal.SIGTERM
    until(lambda: program_state(one) in ("gone", "Z"), "the program is gone")


def test_resumes_to_the_bit_after_a_kill_of_everything(pod: MakePod) -> None:
    spec = msgspec.structs.replace(ATOMIC, every_seconds=0.1)
    first = pod(command=counting(60), checkpoint=spec).start()
    until(lambda: len(first.manifests()) > 0 and steps_done(first) > 20, "a checkpoint is stored")
    assert first.agent is not None
    first.agent.kill()
    first.wait()
    until(lambda: program_state(first) in ("gone", "Z"), "the program died with its agent")
    second = pod(2, command=counting(60), checkpoint=spec)
    assert second.run() == 0
    resumed = int(second.stdout().split()[1])
    assert resumed > 0
    body = second.object(output_key(JOB, 7, 2, "value.txt")).read_text()
    assert body == expected_value(60)
    record = second.record()
    assert record.restored_from.startswith(manifests_prefix(JOB, 7))
    assert 0 < record.restored_progress_seconds < record.progress_seconds


def test_sigterm_saves_what_changed_and_the_next_attempt_loses_nothing(pod: MakePod) -> None:
    first = pod(command=counting(100), checkpoint=ATOMIC).start()
    until(lambda: steps_done(first) > 3, "some steps are done")
    first.term()
    assert first.wait() == 143
    done = steps_done(first)
    second = pod(2, command=counting(done + 2), checkpoint=ATOMIC)
    assert second.run() == 0
    assert second.stdout() == f"from {done}\n"


def test_old_checkpoints_are_pruned_with_their_parts(pod: MakePod) -> None:
    spec = msgspec.structs.replace(ATOMIC, every_seconds=0.05)
    one = pod(command=counting(80), checkpoint=spec)
    assert one.run() == 0
    kept = one.manifests()
    assert 1 <= len(kept) <= 2
    assert kept[-1].seq > 3
    parts = {path.name for path in one.object(part_key(JOB, 7, "x")).parent.iterdir()}
    assert parts == {file.sha256 for manifest in kept for file in manifest.files}


def test_unchanged_files_make_no_new_manifest(pod: MakePod) -> None:
    code = (
        "import os, time; open(os.environ['SPRINGTIDE_CHECKPOINT_DIR'] + '/s', 'w').write('x');"
        "time.sleep(0.8); open(os.environ['SPRINGTIDE_OUTPUT_DIR'] + '/value.txt', 'w')"
    )
    spec = msgspec.structs.replace(ATOMIC, every_seconds=0.05)
    one = pod(command=[sys.executable, "-S", "-c", code], checkpoint=spec)
    assert one.run() == 0
    assert [manifest.seq for manifest in one.manifests()] == [1]


def two_checkpoints(pod: MakePod) -> tuple[Pod, list[Manifest]]:
    spec = msgspec.structs.replace(ATOMIC, every_seconds=0.1)
    one = pod(command=counting(200), checkpoint=spec).start()
    until(lambda: len(one.manifests()) == 2, "two checkpoints")
    assert one.agent is not None
    one.agent.kill()
    one.wait()
    manifests = one.manifests()
    assert len(manifests) >= 2
    return one, manifests


def steps_in(one: Pod, manifest: Manifest) -> int:
    """Steps that the state file of a manifest holds."""
    (file,) = [file for file in manifest.files if file.path == "state.json"]
    return int(json.loads(one.object(file.key).read_text())[0])


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_part_falls_back_to_the_checkpoint_before(pod: MakePod, damage: str) -> None:
    one, manifests = two_checkpoints(pod)
    before, newest = manifests[-2:]
    steps = steps_in(one, before)
    assert steps < steps_in(one, newest)
    part = one.object(newest.files[0].key)
    body = part.read_bytes()
    if damage == "remove":
        part.unlink()
    else:
        part.write_bytes(body[:-1] + b"#" if damage == "flip" else body[:-1])
    two = pod(2, command=counting(steps + 1), checkpoint=ATOMIC)
    assert two.run() == 0
    assert two.stdout() == f"from {steps}\n"
    assert two.events("manifest.damaged")


def test_garbled_and_foreign_manifests_are_passed_over(pod: MakePod) -> None:
    one, manifests = two_checkpoints(pod)
    folder = one.object(manifests_prefix(JOB, 7))
    (folder / "00001-900000.json").write_text("{half a")
    foreign = msgspec.structs.replace(manifests[-1], job_id="another", seq=900001)
    (folder / "00001-900001.json").write_bytes(msgspec.json.encode(foreign))
    evil = msgspec.structs.replace(manifests[-1].files[0], path="../../escaped")
    evil_manifest = msgspec.structs.replace(manifests[-1], seq=900002, files=[evil])
    (folder / "00001-900002.json").write_bytes(msgspec.json.encode(evil_manifest))
    steps = steps_in(one, manifests[-1])
    two = pod(2, command=counting(steps + 1), checkpoint=ATOMIC)
    assert two.run() == 0
    assert two.stdout() == f"from {steps}\n"
    assert not list(two.dir.rglob("escaped"))


def order(pod: Pod, migration_id: str = "m-1", seconds: float = 60.0) -> CheckpointOrder:
    return CheckpointOrder(migration_id=migration_id, valid_until=time.time() + seconds)


def frozen(one: Pod, migration_id: str) -> bool:
    stored = any(manifest.migration_id == migration_id for manifest in one.manifests())
    return stored and program_state(one) == "T"


def test_migration_freezes_and_the_next_attempt_goes_on_where_it_stood(pod: MakePod) -> None:
    first = pod(command=counting(60), checkpoint=ATOMIC, grace_seconds=30.0).start()
    until(lambda: steps_done(first) > 5, "some steps")
    first.annotate(order(first))
    until(lambda: frozen(first, "m-1"), "frozen with a manifest")
    stood = steps_done(first)
    assert first.manifests()[-1].progress_seconds > 0
    time.sleep(0.2)
    assert steps_done(first) == stood
    assert first.object(log_key(JOB, 7, 1, "stdout")).exists()
    began = time.monotonic()
    first.term()
    assert first.wait() == 143
    assert time.monotonic() - began < 15, "it waited for its grace period"
    assert program_state(first) in ("gone", "Z")
    second = pod(2, command=counting(60), checkpoint=ATOMIC)
    assert second.run() == 0
    assert second.stdout() == f"from {stood}\n"
    assert second.object(output_key(JOB, 7, 2, "value.txt")).read_text() == expected_value(60)


@pytest.mark.parametrize("how", ["withdrawn", "expired", "file removed"])
def test_a_fallen_order_thaws_and_the_program_ends_normally(pod: MakePod, how: str) -> None:
    one = pod(command=counting(30), checkpoint=ATOMIC).start()
    until(lambda: steps_done(one) > 2, "some steps")
    one.annotate(order(one, seconds=5.0 if how == "expired" else 60.0))
    until(lambda: frozen(one, "m-1"), "frozen")
    if how == "withdrawn":
        one.annotate(None)
    elif how == "file removed":
        Path(one.document.annotations_file).unlink()
    assert one.wait() == 0
    assert one.stdout() == "from 0\n"
    assert one.record().progress_seconds < 20


def test_frozen_time_is_no_progress_and_no_run_time(pod: MakePod) -> None:
    one = pod(command=counting(15, 0.05), checkpoint=ATOMIC, run_time_seconds=4.0).start()
    until(lambda: steps_done(one) > 2, "some steps")
    one.annotate(order(one))
    until(lambda: frozen(one, "m-1"), "frozen")
    time.sleep(4.2)
    one.annotate(None)
    assert one.wait() == 0
    assert one.record().progress_seconds < 4.0


def test_second_order_makes_a_new_manifest_though_nothing_changed(pod: MakePod) -> None:
    code = (
        "import os, time; open(os.environ['SPRINGTIDE_CHECKPOINT_DIR'] + '/s', 'w').write('x');"
        "print('saved', flush=True); time.sleep(30)"
    )
    one = pod(command=[sys.executable, "-S", "-c", code], checkpoint=ATOMIC).start()
    until(one.stdout, "saved")
    one.annotate(order(one, "m-1"))
    until(lambda: frozen(one, "m-1"), "frozen")
    one.annotate(order(one, "m-2"))
    until(lambda: frozen(one, "m-2"), "frozen again")
    assert [m.migration_id for m in one.manifests()] == ["m-1", "m-2"]


def test_nothing_saved_yet_means_no_manifest_and_the_program_goes_on(pod: MakePod) -> None:
    code = (
        "import os, time; print('up', flush=True); time.sleep(1);"
        "open(os.environ['SPRINGTIDE_OUTPUT_DIR'] + '/value.txt', 'w')"
    )
    one = pod(command=[sys.executable, "-S", "-c", code], checkpoint=ATOMIC).start()
    until(one.stdout, "up")
    one.annotate(order(one))
    assert one.wait() == 0
    assert not one.manifests()
    assert one.events("migration.failed")


SLOW_SAVER = """
import os, signal, sys, time
here = os.environ["SPRINGTIDE_CHECKPOINT_DIR"]
asked = False
def ask(*_):
    global asked
    asked = True
time.sleep(float(sys.argv[1]))
signal.signal(signal.SIGUSR1, ask)
print("up", flush=True)
n = 0
while True:
    time.sleep(0.02); n += 1
    if asked:
        asked = False
        time.sleep(0.3)
        with open(here + "/big", "wb") as file:
            for part in range(8):
                file.write(b"%09d" % n * 1000); file.flush(); time.sleep(0.05)
        print("saved", n, flush=True)
"""


def test_quiet_program_is_frozen_only_after_its_slow_save(pod: MakePod) -> None:
    spec = CheckpointSpec(
        ask=Ask.SIGNAL, saved=Saved.QUIET, every_seconds=3600, expected_save_seconds=5
    )
    command = [sys.executable, "-S", "-c", SLOW_SAVER, "0"]
    one = pod(command=command, checkpoint=spec, time_scale=10.0).start()
    until(one.stdout, "up")
    one.annotate(order(one))
    until(lambda: frozen(one, "m-1"), "frozen")
    (manifest,) = one.manifests()
    (file,) = manifest.files
    body = one.object(file.key).read_bytes()
    assert len(body) == 72_000
    assert len({body[i : i + 9] for i in range(0, len(body), 9)}) == 1, "a torn save was stored"
    assert manifest.save_seconds > 0.5


def test_signal_waits_for_a_program_that_is_not_listening_yet(pod: MakePod) -> None:
    spec = CheckpointSpec(
        ask=Ask.SIGNAL, saved=Saved.QUIET, every_seconds=3600, expected_save_seconds=5
    )
    command = [sys.executable, "-S", "-c", SLOW_SAVER, "0.5"]
    one = pod(command=command, checkpoint=spec, time_scale=10.0).start()
    until(lambda: one.events("program.started"), "started")
    one.annotate(order(one))
    until(lambda: frozen(one, "m-1"), "frozen, not killed by the signal")


@pytest.mark.parametrize("ask", [Ask.COMMAND, Ask.FILE])
def test_other_ways_of_asking(pod: MakePod, ask: Ask) -> None:
    code = """
while :; do
  if [ -e "$SPRINGTIDE_CHECKPOINT_DIR/request" ] || [ -e please ]; then
    rm -f please; echo saved > "$SPRINGTIDE_CHECKPOINT_DIR/part"
    mv "$SPRINGTIDE_CHECKPOINT_DIR/part" "$SPRINGTIDE_CHECKPOINT_DIR/s"
  fi
  echo turn; sleep 0.05
done
"""
    spec = CheckpointSpec(
        ask=ask,
        command=["sh", "-c", ": > please"],
        saved=Saved.ATOMIC,
        every_seconds=3600,
        expected_save_seconds=3,
    )
    one = pod(command=["sh", "-c", code], checkpoint=spec).start()
    until(one.stdout, "up")
    one.annotate(order(one))
    until(lambda: frozen(one, "m-1"), "frozen")
    (manifest,) = one.manifests()
    assert [file.path for file in manifest.files] == ["s"]


def test_kill_of_the_agent_in_the_middle_of_an_upload_leaves_the_old_restorable(
    pod: MakePod,
) -> None:
    code = """
import os, sys, time
here = os.environ["SPRINGTIDE_CHECKPOINT_DIR"]
n = 0
if os.path.exists(here + "/n"): n = int(open(here + "/n").read())
print("from", n, flush=True)
while n < int(sys.argv[1]):
    n += 1
    for name in ["big%d" % k for k in range(20)]:
        with open(here + "/.tmp", "wb") as file: file.write(os.urandom(400_000))
        os.replace(here + "/.tmp", here + "/" + name)
    with open(here + "/.tmp", "w") as file: file.write(str(n))
    os.replace(here + "/.tmp", here + "/n")
    time.sleep(0.05)
open(os.environ["SPRINGTIDE_OUTPUT_DIR"] + "/value.txt", "w")
"""
    spec = msgspec.structs.replace(ATOMIC, every_seconds=0.05)
    one = pod(command=[sys.executable, "-S", "-c", code, "1000"], checkpoint=spec).start()
    until(
        lambda: one.manifests() and "n" in [file.path for file in one.manifests()[0].files],
        "every checkpoint that is kept holds the number",
    )
    parts = one.object(part_key(JOB, 7, "x")).parent
    old = one.manifests()
    named = {file.sha256 for manifest in old for file in manifest.files}
    until(
        lambda: len({path.name for path in parts.iterdir()} - named) > 2, "an upload is on its way"
    )
    assert one.agent is not None
    one.agent.kill()
    one.wait()
    two = pod(2, command=[sys.executable, "-S", "-c", code, "0"], checkpoint=spec)
    assert two.run() == 0
    assert int(two.stdout().split()[1]) > 0
    assert not two.events("manifest.damaged")


def test_text_of_users_reaches_the_program_byte_for_byte_and_nothing_is_run(
    pod: MakePod, tmp_path: Path
) -> None:
    """B55."""
    canary = tmp_path / "canary"
    nasty = [
        f"; touch {canary}",
        f"$(touch {canary})",
        f"`touch {canary}`",
        f"' && touch {canary} && '",
        f'" ; touch {canary} ; "',
        f"line\ntouch {canary}\n",
        "| & > < * ? [a-z] ~ # ! \\ \t",
        "ünïcödé ☃ \u202e",
        "",
    ]
    code = (
        "import json, os, sys; json.dump([sys.argv[1:], os.environ['NASTY'],"
        "os.environ['SPRINGTIDE_ITEM'], os.environ['SPRINGTIDE_TASK_INDEX'],"
        "os.environ['SPRINGTIDE_ATTEMPT'], os.environ['SPRINGTIDE_JOB_ID']],"
        "open(os.environ['SPRINGTIDE_OUTPUT_DIR'] + '/value.txt', 'w'))"
    )
    everything = "".join(nasty)
    one = pod(
        command=[sys.executable, "-S", "-c", code, *nasty],
        env={"NASTY": everything, "SPRINGTIDE_ATTEMPT": "99"},
        item=everything,
    )
    assert one.run() == 0
    got = json.loads(one.object(output_key(JOB, 7, 1, "value.txt")).read_text())
    assert got == [nasty, everything, everything, "7", "1", JOB]
    assert not canary.exists()


def test_item_that_no_environment_holds_is_refused_with_the_command_named(pod: MakePod) -> None:
    one = pod(item="x" * 300_000)
    assert one.run() == EXIT_CANNOT_START
    assert "cannot execute" in one.termination().detail


def test_store_that_cannot_be_written_gives_up_after_its_limit(
    pod: MakePod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPRINGTIDE_AGENT_STORE_LIMIT_SECONDS", "1")
    (tmp_path / "file").write_text("in the way")
    one = pod(store_url=(tmp_path / "file" / "store").as_uri(), time_scale=2_000.0)
    assert one.run() == EXIT_STORE_UNAVAILABLE
    assert "store-unavailable" in one.termination().detail
    assert not one.stdout()


def test_store_that_goes_away_meanwhile_gives_no_success(
    pod: MakePod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPRINGTIDE_AGENT_STORE_LIMIT_SECONDS", "1")
    one = pod(command=counting(20), time_scale=2_000.0).start()
    until(one.stdout, "the program runs")
    store = tmp_path / "store"
    store.rename(tmp_path / "gone")
    store.write_text("in the way")
    assert one.wait() == EXIT_STORE_UNAVAILABLE


def test_bad_pod_document_names_the_field(tmp_path: Path) -> None:
    file = tmp_path / "pod.json"
    file.write_text('{"pod_uid": 5}')
    done = subprocess.run(
        [sys.executable, "-m", "springtide_agent", "exec", "--pod", str(file)],
        capture_output=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 64
    assert b"pod_uid" in done.stderr


def test_secrets_of_springtide_do_not_reach_the_program(
    pod: MakePod, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPRINGTIDE_STORE_PASSWORD", "hush")
    code = (
        "import os; open(os.environ['SPRINGTIDE_OUTPUT_DIR'] + '/value.txt', 'w')"
        ".write(str(sorted(os.environ)))"
    )
    one = pod(command=[sys.executable, "-S", "-c", code])
    assert one.run() == 0
    names = one.object(output_key(JOB, 7, 1, "value.txt")).read_text()
    assert "SPRINGTIDE_STORE_PASSWORD" not in names
    assert "SPRINGTIDE_POD_UID" in names, "clusters find stray processes by it"
    assert "PATH" in names
