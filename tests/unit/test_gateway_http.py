"""The gateway over real HTTP on loopback, with a coordinator by script."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from springtide_gateway.config import GatewayConfig
from springtide_gateway.service import Gateway
from springtide_gateway.testing import Rig, rig
from springtide_shared.adapters.clock import SystemClock, SystemIds
from springtide_shared.adapters.memory_bus import InMemoryBus, MemoryBroker
from springtide_shared.adapters.memory_ledger import InMemoryLedger
from springtide_shared.adapters.memory_store import InMemoryStore
from springtide_shared.errors import InvalidFieldError, Reason
from springtide_shared.ledger.records import Phase, TaskRecord
from springtide_shared.messages.cluster import (
    Capacity,
    CapacityNode,
    Credit,
    GroupCapacity,
    NodeUsage,
    ShapeCredit,
    Usage,
)
from springtide_shared.messages.job import JobAnswer, JobCancel, JobState, Waiting
from springtide_shared.messages.records import record_key

Check = Callable[[Rig, httpx.AsyncClient], Awaitable[None]]
PROBLEM_KEYS = {"reason", "detail", "field", "value", "remedy"}


def run(folder: Path, check: Check, **settings: Any) -> None:
    """Run `check` against a gateway with tenants ann and bob; the HTTP client is ann's."""

    async def main() -> None:
        settings.setdefault("tenants", ("ann", "bob"))
        async with rig(folder, **settings) as made, http(made, settings["tenants"][0]) as client:
            await check(made, client)

    asyncio.run(main())


def http(made: Rig, tenant: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=made.url,
        headers={"authorization": f"Bearer {made.token(tenant)}"},
        timeout=20,
        trust_env=False,
    )


def a_job(job_id: str = "job-1", size: int = 3, **fields: Any) -> dict[str, Any]:
    return {"id": job_id, "name": "n", "command": ["true"], "array": {"size": size}, **fields}


def problem(response: httpx.Response, status: int, reason: str) -> dict[str, str]:
    """The body of a refusal, once its status, its shape and its reason are as they must be."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body: dict[str, str] = response.json()
    assert set(body) == PROBLEM_KEYS
    assert body["reason"] == reason
    return body


# ---------------------------------------------------------------- submit


def test_a_job_is_taken_once_and_publishing_it_again_is_harmless(tmp_path: Path) -> None:
    async def check(made: Rig, client: httpx.AsyncClient) -> None:
        first = await client.post("/api/v1/jobs", json=a_job())
        assert first.status_code == 201
        assert first.json() == {"id": "job-1", "created": True, "url": "/api/v1/jobs/job-1"}
        again = await client.post("/api/v1/jobs", json=a_job())
        assert (again.status_code, again.json()["created"]) == (200, False)
        other = await client.post("/api/v1/jobs", json=a_job(size=4))
        assert problem(other, 409, "duplicate-id")["field"] == "id"
        assert [tenant for tenant, _ in made.seen] == ["ann"] * 3
        assert await made.size_of("job-1") == 3

    run(tmp_path, check)


BAD_JOBS = [
    (b"", 400, "malformed", "body"),
    (b"not json", 400, "malformed", "body"),
    (b"[1]", 400, "malformed", "body"),
    (b'{"id": "x"', 400, "malformed", "body"),
    (b"\xff\xfe", 400, "malformed", "body"),
    (b"[" * 100_000, 400, "malformed", "body"),
    (json.dumps({"id": "x", "name": "n"}).encode(), 400, "malformed", "command"),
    (json.dumps(a_job(size=0)).encode(), 422, "invalid-spec", "array.size"),
    (json.dumps(a_job(size=10**9)).encode(), 422, "invalid-spec", "array.size"),
    (json.dumps(a_job(oops=1)).encode(), 422, "invalid-spec", "oops"),
    (json.dumps(a_job(steps=[])).encode(), 422, "not-supported", "steps"),
    (json.dumps(a_job(resources={"cpu": -1})).encode(), 422, "invalid-spec", "resources.cpu"),
    (json.dumps(a_job(outputs=["../x"])).encode(), 422, "invalid-spec", "outputs[0]"),
    (json.dumps(a_job(tenant="bob")).encode(), 422, "invalid-spec", "tenant"),
    (json.dumps(a_job(command=["x" * 70_000])).encode(), 422, "too-large", "command"),
]


def test_a_bad_job_is_refused_by_field_and_never_published(tmp_path: Path) -> None:
    async def check(made: Rig, client: httpx.AsyncClient) -> None:
        for body, status, reason, field in BAD_JOBS:
            told = problem(await client.post("/api/v1/jobs", content=body), status, reason)
            assert told["field"] == field, body[:80]
            assert told["remedy"], body[:80]
        assert made.seen == []
        assert (await client.post("/api/v1/jobs", json=a_job())).status_code == 201

    run(tmp_path, check)


def test_a_body_of_40_mib_is_told_so_and_neighbours_proceed(tmp_path: Path) -> None:
    async def check(made: Rig, client: httpx.AsyncClient) -> None:
        async def pieces() -> Any:
            for _ in range(40):
                yield b"x" * 1024 * 1024

        known, streamed, small = await asyncio.gather(
            client.post("/api/v1/jobs", content=b"x" * (40 * 1024 * 1024)),
            client.post("/api/v1/jobs", content=pieces()),
            client.post("/api/v1/jobs", json=a_job()),
        )
        problem(known, 413, "too-large")
        problem(streamed, 413, "too-large")
        assert small.status_code == 201

    run(tmp_path, check)


def test_a_silent_coordinator_is_503_and_the_retry_is_called_harmless(tmp_path: Path) -> None:
    async def check(made: Rig, client: httpx.AsyncClient) -> None:
        made.is_silent = True
        response = await client.post("/api/v1/jobs", json=a_job())
        assert "harmless" in problem(response, 503, "expired")["detail"]
        assert int(response.headers["retry-after"]) >= 1
        made.is_silent = False
        assert (await client.post("/api/v1/jobs", json=a_job())).status_code == 201

    run(tmp_path, check, answer_limit_seconds=0.3)


def test_a_broker_that_is_away_is_503(tmp_path: Path) -> None:
    async def check(made: Rig, client: httpx.AsyncClient) -> None:
        made.broker.available = False
        response = await client.post("/api/v1/jobs", json=a_job())
        problem(response, 503, "bus-unavailable")
        assert "retry-after" in response.headers
        ready = await client.get("/readyz")
        assert (ready.status_code, ready.json()["ready"]) == (503, False)
        assert (await client.get("/healthz")).status_code == 200

    run(tmp_path, check)


def test_the_coordinators_refusal_reaches_the_caller(tmp_path: Path) -> None:
    async def check(made: Rig, client: httpx.AsyncClient) -> None:
        for reason, status in (
            (Reason.QUOTA, 429),
            (Reason.ADMISSION_DENIED, 403),
            (Reason.CANCELLED, 409),
            (Reason.UNSCHEDULABLE, 422),
            (None, 422),
        ):
            made.refusals["job-1"] = JobAnswer(
                job_id="job-1", accepted=False, reason=reason, field="name", detail="because"
            )
            response = await client.post("/api/v1/jobs", json=a_job())
            told = problem(response, status, reason.value if reason else "invalid-spec")
            assert (told["detail"], told["field"]) == ("because", "name")

    run(tmp_path, check)


def test_a_hundred_submits_at_once_each_get_their_own_answer(tmp_path: Path) -> None:
    async def check(made: Rig, client: httpx.AsyncClient) -> None:
        made.refusals["j50"] = JobAnswer(job_id="j50", accepted=False, reason=Reason.QUOTA)
        answers = await asyncio.gather(
            *(client.post("/api/v1/jobs", json=a_job(f"j{n}")) for n in range(100))
        )
        assert [answer.status_code for answer in answers] == [201] * 50 + [429] + [201] * 49
        assert [answer.json().get("id") for answer in answers[:3]] == ["j0", "j1", "j2"]

    run(tmp_path, check)


# ---------------------------------------------------------------- who may see what


def test_without_a_valid_token_nothing_is_told(tmp_path: Path) -> None:
    async def check(made: Rig, client: httpx.AsyncClient) -> None:
        async with httpx.AsyncClient(base_url=made.url, trust_env=False) as stranger:
            for header in (None, "", "Bearer", "Bearer wrong", "Basic YTpi", "Bearer é"):
                headers = {} if header is None else {"authorization": header.encode()}
                for method, path in (
                    ("GET", "/api/v1/jobs"),
                    ("POST", "/api/v1/jobs"),
                    ("GET", "/api/v1/jobs/job-1/events"),
                    ("GET", "/api/v1/capacity"),
                    ("GET", "/api/v1/whoami"),
                ):
                    response = await stranger.request(method, path, headers=headers)
                    problem(response, 401, "unauthorised")
                    assert response.headers["www-authenticate"] == "Bearer"
            assert (await stranger.get("/healthz")).json() == {"alive": True}
            assert (await stranger.get("/readyz")).json() == {"ready": True, "reasons": []}
            assert (await stranger.get("/schema")).json()["info"]["title"] == "springtide"

    run(tmp_path, check)


def test_another_tenants_job_does_not_exist_on_any_route(tmp_path: Path) -> None:
    async def check(made: Rig, client: httpx.AsyncClient) -> None:
        assert (await client.post("/api/v1/jobs", json=a_job())).status_code == 201
        await made.succeed("job-1", 0, {"a.txt": b"secret"}, stdout=b"secret")
        job = "/api/v1/jobs/job-1"
        async with http(made, "bob") as bob:
            for method, path in (
                ("GET", job),
                ("GET", f"{job}?spec=true"),
                ("GET", f"{job}/tasks"),
                ("GET", f"{job}/results"),
                ("GET", f"{job}/events"),
                ("GET", f"{job}/tasks/0/logs"),
                ("GET", f"{job}/tasks/0/outputs/a.txt"),
                ("POST", f"{job}/cancel"),
            ):
                foreign = await bob.request(method, path)
                unknown = await bob.request(method, path.replace("job-1", "job-2"))
                problem(foreign, 404, "unknown-job")
                assert foreign.content == unknown.content
            assert (await bob.get("/api/v1/jobs")).json() == {"jobs": [], "next": None}
            problem(await bob.post("/api/v1/jobs", json=a_job()), 409, "duplicate-id")
        assert (await client.get(job)).json()["state"] == "running"

    run(tmp_path, check)


def test_a_token_that_leaves_the_file_stops_working(tmp_path: Path) -> None:
    async def check(made: Rig, client: httpx.AsyncClient) -> None:
        assert (await client.get("/api/v1/whoami")).json()["tenant"] == "ann"
        lines = made.token_file.read_text().splitlines()
        made.token_file.write_text("half a line that is no token file at all\n")
        await asyncio.sleep(0.3)
        assert (await client.get("/api/v1/whoami")).status_code == 200
        made.token_file.write_text(lines[1] + "\n")
        await asyncio.sleep(0.3)
        problem(await client.get("/api/v1/whoami"), 401, "unauthorised")

    run(tmp_path, check, token_reload_seconds=0.1)


# ---------------------------------------------------------------- look


def test_jobs_are_listed_in_pages_and_without_their_items(tmp_path: Path) -> None:
    async def check(made: Rig, client: httpx.AsyncClient) -> None:
        for n in range(5):
            job = a_job(f"j{n}", labels={"n": str(n)})
            assert (await client.post("/api/v1/jobs", json=job)).status_code == 201
        first = (await client.get("/api/v1/jobs", params={"limit": 3})).json()
        assert [job["id"] for job in first["jobs"]] == ["j0", "j1", "j2"]
        assert first["next"] == "j2"
        rest = (await client.get("/api/v1/jobs", params={"limit": 3, "after": "j2"})).json()
        assert [job["id"] for job in rest["jobs"]] == ["j3", "j4"]
        assert rest["next"] is None
        job = first["jobs"][1]
        assert job["spec"] is None
        assert (job["tenant"], job["labels"], job["size"]) == ("ann", {"n": "1"}, 3)
        assert job["counts"] == {
            "queued": 3, "live": 0, "succeeded": 0, "failed": 0, "cancelled": 0,
        }  # fmt: skip
        full = (await client.get("/api/v1/jobs/j1", params={"spec": "true"})).json()
        assert full["spec"]["template"]["command"] == ["true"]

    run(tmp_path, check)


def test_tasks_are_listed_in_pages_and_by_state(tmp_path: Path) -> None:
    async def check(made: Rig, client: httpx.AsyncClient) -> None:
        await client.post("/api/v1/jobs", json=a_job(size=10))
        await made.succeed("job-1", 1)
        await made.fail("job-1", 4, exit_code=7)
        await made.set_task("job-1", 5, TaskRecord(phase=Phase.LIVE, attempt=2, cluster="east"))
        path = "/api/v1/jobs/job-1/tasks"
        page = (await client.get(path, params={"first": 2, "limit": 4})).json()
        assert [task["index"] for task in page["tasks"]] == [2, 3, 4, 5]
        assert page["next"] == 6
        assert page["tasks"][2]["exit_code"] == 7
        assert page["tasks"][2]["reason"] == "application-error"
        last = (await client.get(path, params={"first": 6, "limit": 4})).json()
        assert (len(last["tasks"]), last["next"]) == (4, None)
        some = (await client.get(path, params={"state": ["failed", "live"]})).json()
        assert [(task["index"], task["state"]) for task in some["tasks"]] == [
            (4, "failed"),
            (5, "live"),
        ]
        for bad in ("state=oops", "first=-1", "limit=0", "limit=99999", "first=x"):
            told = problem(await client.get(f"{path}?{bad}"), 400, "malformed")
            assert told["field"] in bad

    run(tmp_path, check)


def test_results_name_outputs_that_can_be_downloaded(tmp_path: Path) -> None:
    async def check(made: Rig, client: httpx.AsyncClient) -> None:
        big = os.urandom(3 * 1024 * 1024 + 17)
        await client.post("/api/v1/jobs", json=a_job(size=4))
        await made.succeed("job-1", 0, {"out/ö 1%.bin": big, "empty": b""}, attempt=3)
        await made.fail("job-1", 1)
        await made.succeed("job-1", 3, {"a": b"x"})
        page = (await client.get("/api/v1/jobs/job-1/results")).json()
        assert [result["index"] for result in page["results"]] == [0, 3]
        first = page["results"][0]
        assert (first["attempt"], first["exit_code"], first["problem"]) == (3, 0, "")
        output = first["outputs"][0]
        assert output["size"] == len(big)
        response = await client.get(output["url"])
        assert response.content == big
        assert hashlib.sha256(response.content).hexdigest() == output["sha256"]
        assert response.headers["etag"] == f'"{output["sha256"]}"'
        assert response.headers["content-disposition"] == "attachment"
        assert (await client.get(first["outputs"][1]["url"])).content == b""
        paged = (await client.get("/api/v1/jobs/job-1/results?limit=1")).json()
        assert (len(paged["results"]), paged["next"]) == (1, 1)
        problem(await client.get("/api/v1/jobs/job-1/tasks/1/outputs/a"), 404, "not-found")
        problem(await client.get("/api/v1/jobs/job-1/tasks/9/outputs/a"), 404, "not-found")

    run(tmp_path, check)


HOSTILE_PATHS = (
    "../stdout.log",
    "%2e%2e/stdout.log",
    "..%2fcompletion.json",
    "%2Fetc%2Fpasswd",
    "a/../a",
    "A",
    "a%00",
    "completion.json",
)


def test_only_what_the_record_names_is_served(tmp_path: Path) -> None:
    async def check(made: Rig, client: httpx.AsyncClient) -> None:
        await client.post("/api/v1/jobs", json=a_job())
        await made.succeed("job-1", 0, {"a": b"x"}, stdout=b"log")
        for path in HOSTILE_PATHS:
            # By hand: the HTTP library would take the dots out before it sends the path.
            port = int(made.url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                f"GET /api/v1/jobs/job-1/tasks/0/outputs/{path} HTTP/1.1\r\nHost: x\r\n"
                f"Authorization: Bearer {made.token('ann')}\r\nConnection: close\r\n\r\n".encode()
            )
            answer = await reader.read()
            writer.close()
            await writer.wait_closed()
            assert b" 404 " in answer.splitlines()[0], path
            assert b"log" not in answer.split(b"\r\n\r\n", 1)[1], path

    run(tmp_path, check)


def test_a_record_that_was_changed_or_lost_is_no_result(tmp_path: Path) -> None:
    async def check(made: Rig, client: httpx.AsyncClient) -> None:
        await client.post("/api/v1/jobs", json=a_job())
        record = await made.succeed("job-1", 0, {"a": b"x"})
        await made.succeed("job-1", 1, {"a": b"y"})
        forged = msgspec.structs.replace(record, exit_code=9)
        await made.store.put(record_key("job-1", 0, 1), msgspec.json.encode(forged))
        await made.store.delete(record_key("job-1", 1, 1))
        results = (await client.get("/api/v1/jobs/job-1/results")).json()["results"]
        assert results[0]["outputs"] == []
        assert "changed" in results[0]["problem"]
        assert "no such object" in results[1]["problem"]
        problem(await client.get("/api/v1/jobs/job-1/tasks/1/outputs/a"), 404, "not-found")
        assert (await client.get("/api/v1/jobs/job-1/tasks/0/outputs/a")).status_code == 500

    run(tmp_path, check)


def test_logs_are_those_of_the_attempt_that_counts(tmp_path: Path) -> None:
    async def check(made: Rig, client: httpx.AsyncClient) -> None:
        await client.post("/api/v1/jobs", json=a_job())
        await made.store.put("jobs/job-1/tasks/0000000/attempts/00001/stdout.log", b"first")
        await made.succeed("job-1", 0, attempt=2, stdout=b"second \xff", stderr=b"err")
        logs = "/api/v1/jobs/job-1/tasks/0/logs"
        response = await client.get(logs)
        assert (response.content, response.headers["x-springtide-attempt"]) == (b"second \xff", "2")
        assert response.headers["content-type"] == "text/plain; charset=utf-8"
        assert (await client.get(f"{logs}?stream=stderr")).content == b"err"
        assert (await client.get(f"{logs}?attempt=1")).content == b"first"
        assert (await client.get(f"{logs}?tail_bytes=2")).content == b" \xff"
        problem(await client.get(f"{logs}?stream=secrets"), 400, "malformed")
        problem(await client.get(f"{logs}?attempt=5"), 404, "not-found")
        problem(await client.get("/api/v1/jobs/job-1/tasks/1/logs"), 404, "not-found")
        problem(await client.get("/api/v1/jobs/job-1/tasks/3/logs"), 404, "not-found")

    run(tmp_path, check)


def test_a_store_that_is_away_is_503(tmp_path: Path) -> None:
    async def check(made: Rig, client: httpx.AsyncClient) -> None:
        await client.post("/api/v1/jobs", json=a_job())
        await made.succeed("job-1", 0, {"a": b"x"})
        made.store.faults.is_down = True
        for path in ("results", "tasks/0/logs", "tasks/0/outputs/a"):
            response = await client.get(f"/api/v1/jobs/job-1/{path}")
            problem(response, 503, "store-unavailable")
        assert (await client.get("/api/v1/jobs/job-1")).status_code == 200

    run(tmp_path, check)


def test_a_fault_of_our_own_tells_an_incident_and_nothing_else(tmp_path: Path) -> None:
    async def check(made: Rig, client: httpx.AsyncClient) -> None:
        async def broken(*_args: Any, **_named: Any) -> Any:
            raise ZeroDivisionError("the password is swordfish")

        made.ledger.jobs = broken  # type: ignore[method-assign]
        response = await client.get("/api/v1/jobs")
        told = problem(response, 500, "internal")
        assert "incident" in told["detail"]
        assert "swordfish" not in response.text
        assert (await client.get("/api/v1/whoami")).status_code == 200

    run(tmp_path, check)


def test_a_ledger_that_hangs_is_cut_off(tmp_path: Path) -> None:
    async def check(made: Rig, client: httpx.AsyncClient) -> None:
        async def hanging(*_args: Any, **_named: Any) -> Any:
            await asyncio.sleep(60)

        made.ledger.jobs = hanging  # type: ignore[method-assign]
        problem(await client.get("/api/v1/jobs"), 503, "expired")

    run(tmp_path, check, request_limit_seconds=0.3, answer_limit_seconds=0.2)


def test_unknown_paths_and_wrong_methods_have_the_same_shape(tmp_path: Path) -> None:
    async def check(made: Rig, client: httpx.AsyncClient) -> None:
        problem(await client.get("/api/v1/nothing"), 404, "not-found")
        problem(await client.get("/api/v1/jobs/a$b"), 404, "unknown-job")
        problem(await client.get("/api/v1/jobs/" + "x" * 65), 404, "unknown-job")
        problem(await client.delete("/api/v1/jobs"), 405, "malformed")
        problem(await client.get("/api/v1/jobs/job-1/tasks/x/logs"), 404, "not-found")

    run(tmp_path, check)


# ---------------------------------------------------------------- cancel


def test_cancel_is_sent_for_the_tenant_and_told_back(tmp_path: Path) -> None:
    async def check(made: Rig, client: httpx.AsyncClient) -> None:
        await client.post("/api/v1/jobs", json=a_job())
        response = await client.post("/api/v1/jobs/job-1/cancel")
        assert (response.status_code, response.json()) == (
            202,
            {"id": "job-1", "state": "accepted"},
        )
        assert made.seen[-1] == ("ann", JobCancel(id="job-1"))
        assert (await client.get("/api/v1/jobs/job-1")).json()["state"] == "cancelled"

    run(tmp_path, check)


def test_cancel_of_an_unknown_job_is_noted_for_its_arrival(tmp_path: Path) -> None:
    async def check(made: Rig, client: httpx.AsyncClient) -> None:
        problem(await client.post("/api/v1/jobs/late/cancel"), 404, "unknown-job")
        assert made.seen == [("ann", JobCancel(id="late"))]
        problem(await client.post("/api/v1/jobs/no$id/cancel"), 404, "unknown-job")
        assert len(made.seen) == 1

    run(tmp_path, check)


# ---------------------------------------------------------------- events


async def next_event(lines: Any) -> tuple[str, dict[str, Any]]:
    """The next event that is no sign of life."""
    name = ""
    async for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            return name, json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ended")


def test_a_stream_tells_the_state_then_each_change_and_ends(tmp_path: Path) -> None:
    async def check(made: Rig, client: httpx.AsyncClient) -> None:
        await client.post("/api/v1/jobs", json=a_job(size=2))
        async with client.stream("GET", "/api/v1/jobs/job-1/events") as response:
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            lines = response.aiter_lines()
            name, first = await next_event(lines)
            assert (name, first["state"], first["counts"]["queued"]) == ("progress", "accepted", 2)
            await made.succeed("job-1", 0)
            _, second = await next_event(lines)
            assert (second["state"], second["counts"]["succeeded"]) == ("running", 1)
            await made.succeed("job-1", 1)
            _, third = await next_event(lines)
            assert third["state"] == "succeeded"
            assert await next_event(lines) == ("end", {"reason": "final"})
            assert [line async for line in lines] == [""]

    run(tmp_path, check)


def test_why_tasks_wait_reaches_the_caller_by_every_way(tmp_path: Path) -> None:
    async def check(made: Rig, client: httpx.AsyncClient) -> None:
        await client.post("/api/v1/jobs", json=a_job(size=2))
        detail = "no node group can hold 1000 cores, 1Gi of memory"
        cause = Waiting(reason=Reason.UNSCHEDULABLE, count=2, detail=detail)
        told = {"reason": "unschedulable", "count": 2, "since": None, "detail": detail}
        async with client.stream("GET", "/api/v1/jobs/job-1/events") as response:
            lines = response.aiter_lines()
            assert (await next_event(lines))[1]["waiting"] == []
            await made.wait_for("job-1", cause)
            assert (await next_event(lines))[1]["waiting"] == [told], "it is news by itself"
            assert (await client.get("/api/v1/jobs/job-1")).json()["waiting"] == [told]
            assert (await client.get("/api/v1/jobs")).json()["jobs"][0]["waiting"] == [told]
            made.is_mute = True
            await made.wait_for("job-1")
            assert (await next_event(lines))[1]["waiting"] == [], "told by no broadcast"

    run(tmp_path, check, stream_heartbeat_seconds=0.05)


def test_a_stream_finds_what_no_broadcast_told(tmp_path: Path) -> None:
    async def check(made: Rig, client: httpx.AsyncClient) -> None:
        await client.post("/api/v1/jobs", json=a_job(size=1))

        made.is_mute = True
        async with client.stream("GET", "/api/v1/jobs/job-1/events") as response:
            lines = response.aiter_lines()
            await next_event(lines)
            alive = [line async for line in _until(lines, ": alive")]
            assert alive
            await made.succeed("job-1", 0)
            _, told = await next_event(lines)
            assert told["state"] == "succeeded"

    run(tmp_path, check, stream_heartbeat_seconds=0.05)


async def _until(lines: Any, wanted: str) -> Any:
    async for line in lines:
        yield line
        if line == wanted:
            return


def test_streams_are_limited_and_a_reader_that_leaves_frees_its_place(tmp_path: Path) -> None:
    async def check(made: Rig, client: httpx.AsyncClient) -> None:
        await client.post("/api/v1/jobs", json=a_job())
        path = "/api/v1/jobs/job-1/events"
        async with client.stream("GET", path) as one, client.stream("GET", path) as two:
            await next_event(one.aiter_lines())
            await next_event(two.aiter_lines())
            problem(await client.get(path), 429, "limit-reached")
        async with asyncio.timeout(5):
            while True:
                async with client.stream("GET", path) as third:
                    if third.status_code == 200:
                        break
                await asyncio.sleep(0.02)

    run(tmp_path, check, max_streams=2)


def test_a_stream_ends_after_its_limit(tmp_path: Path) -> None:
    async def check(made: Rig, client: httpx.AsyncClient) -> None:
        await client.post("/api/v1/jobs", json=a_job())
        async with client.stream("GET", "/api/v1/jobs/job-1/events") as response:
            lines = response.aiter_lines()
            await next_event(lines)
            assert await next_event(lines) == ("end", {"reason": "limit"})

    run(tmp_path, check, stream_limit_seconds=0.2)


def test_stopping_ends_streams_and_waiting_submits_in_time(tmp_path: Path) -> None:
    async def main() -> float:
        async with rig(tmp_path, tenants=("ann",)) as made, http(made, "ann") as client:
            await client.post("/api/v1/jobs", json=a_job())
            made.is_silent = True
            waiting = asyncio.create_task(client.post("/api/v1/jobs", json=a_job("j2")))
            async with (
                client.stream("GET", "/api/v1/jobs/job-1/events") as response,
                aclosing(response.aiter_lines()) as lines,
            ):
                await next_event(lines)
                while len(made.seen) < 2:
                    await asyncio.sleep(0.01)
                began = asyncio.get_running_loop().time()
                made.stop.set()
                assert await next_event(lines) == ("end", {"reason": "stopping"})
            problem(await waiting, 503, "expired")
        return asyncio.get_running_loop().time() - began

    assert asyncio.run(main()) < 4.0


# ---------------------------------------------------------------- capacity


def test_capacity_joins_what_is_fresh_of_each_cluster(tmp_path: Path) -> None:
    async def check(made: Rig, client: httpx.AsyncClient) -> None:
        now = made.clock.now()
        assert (await client.get("/api/v1/capacity")).json()["clusters"] == []

        def head(cluster: str, valid: float = 60.0) -> dict[str, Any]:
            return {"cluster": cluster, "epoch": 1, "seq": 1, "valid_until": now + valid}

        node = CapacityNode(
            node="n1", slot="s1", group="g", cpu_millis=4000, memory_bytes=8, price_per_hour=0.2
        )
        other = msgspec.structs.replace(node, node="n2", cordoned=True)
        group = GroupCapacity(
            group="g",
            instance_type="t",
            cpu_millis=4000,
            memory_bytes=8,
            price_per_hour=0.2,
            size=2,
            max_size=5,
            boot_seconds=1.0,
            unavailable_reason=Reason.CAPACITY,
        )
        await made.bus.publish(
            Capacity(**head("east"), groups=[group], nodes=[node, other], decisions=["x: y"])
        )
        await made.bus.publish(
            Usage(
                **head("east"),
                nodes=[NodeUsage(node="n1", cpu_millis=4000, memory_bytes=8, requested_ratio=0.75,
                                 used_ratio=0.5, pods=3)],
            )
        )  # fmt: skip
        await made.bus.publish(
            Credit(**head("west"), shapes=[ShapeCredit(shape="s", live=2, free=1)])
        )
        await made.bus.publish(Credit(**head("gone", valid=-1.0)))
        await asyncio.sleep(0.1)
        shown = (await client.get("/api/v1/capacity")).json()["clusters"]
        assert [cluster["cluster"] for cluster in shown] == ["east", "west"]
        east, west = shown
        assert east["groups"][0]["unavailable_reason"] == "capacity"
        assert east["nodes"][0]["requested_ratio"] == 0.75
        assert east["nodes"][0]["pods"] == 3
        assert (east["nodes"][1]["cordoned"], east["nodes"][1]["used_ratio"]) == (True, None)
        assert (east["shapes"], east["decisions"]) == (None, ["x: y"])
        assert (west["nodes"], west["shapes"]) == (None, [{"shape": "s", "live": 2, "free": 1}])

    run(tmp_path, check)


# ---------------------------------------------------------------- start


def a_gateway(token_file: Path, port: int) -> Gateway:
    clock = SystemClock()
    return Gateway(
        bus=InMemoryBus(MemoryBroker()),
        ledger=InMemoryLedger(),
        store=InMemoryStore(),
        clock=clock,
        ids=SystemIds(clock),
        config=GatewayConfig(token_file=token_file, port=port),
    )


def test_a_taken_port_is_named_with_a_remedy(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidFieldError) as caught:
            asyncio.run(a_gateway(tmp_path / "token", port).start())
    assert caught.value.field == "port"
    assert str(port) in caught.value.value
    assert "set port" in caught.value.remedy


def test_the_schema_describes_the_job_and_every_route(tmp_path: Path) -> None:
    async def check(made: Rig, client: httpx.AsyncClient) -> None:
        schema = (await client.get("/schema/openapi.json")).json()
        assert {
            "/api/v1/jobs",
            "/api/v1/jobs/{job_id}",
            "/api/v1/jobs/{job_id}/cancel",
            "/api/v1/jobs/{job_id}/events",
            "/api/v1/jobs/{job_id}/tasks",
            "/api/v1/jobs/{job_id}/results",
            "/api/v1/jobs/{job_id}/tasks/{index}/logs",
            "/api/v1/jobs/{job_id}/tasks/{index}/outputs/{path}",
            "/api/v1/capacity",
            "/healthz",
            "/readyz",
        } <= set(schema["paths"])
        submit = schema["paths"]["/api/v1/jobs"]["post"]
        assert "requestBody" in submit
        body = submit["requestBody"]["content"]["application/json"]["schema"]
        assert {"id", "name", "command", "array"} <= set(body["properties"])
        assert {"201", "200", "409", "413", "422", "503"} <= set(submit["responses"])

    run(tmp_path, check)


def test_a_final_job_ends_its_stream_at_once(tmp_path: Path) -> None:
    async def check(made: Rig, client: httpx.AsyncClient) -> None:
        await client.post("/api/v1/jobs", json=a_job(size=1))
        await made.fail("job-1", 0)
        text = (await client.get("/api/v1/jobs/job-1/events")).text
        assert text.count("event: progress") == 1
        assert f'"state":"{JobState.FAILED.value}"' in text
        assert text.endswith('event: end\ndata: {"reason":"final"}\n\n')

    run(tmp_path, check)
