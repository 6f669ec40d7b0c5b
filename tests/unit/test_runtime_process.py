"""Services as processes of their own: what each refuses before it opens anything."""

from __future__ import annotations

import asyncio
import importlib
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from springtide_shared.errors import InvalidFieldError, PermanentError, Reason
from springtide_shared.ports.clock import Clock
from springtide_shared.runtime import clusters, logs, process

SERVICES = ("coordinator", "gateway", "monitor", "rescheduler", "scaler", "submitter")
OF_A_CLUSTER = ("monitor", "scaler", "submitter")


def settings_of(service: str, **values: Any) -> Any:
    """Settings of the process, with what has no default."""
    config = importlib.import_module(f"springtide_{service}.config")
    needed = {"token_file": Path("token")} if service == "gateway" else {}
    return config.ProcessConfig(**needed, **values)


def run(service: str, settings: Any) -> None:
    """What the command runs after its settings are read."""
    asyncio.run(importlib.import_module(f"springtide_{service}.wiring").run(settings))


def nobody_opens(url: str, clock: Clock) -> AbstractAsyncContextManager[clusters.ClusterAdapters]:
    """An opener for clusters that must not be reached for."""
    raise AssertionError("nothing is opened before the settings are whole")


@pytest.fixture(autouse=True)
def logs_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command sets up logging for its whole process, which here is the tests'."""
    monkeypatch.setattr(logs, "setup", lambda: None)


@pytest.fixture(autouse=True)
def known_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kind of cluster, for the time of a test."""
    monkeypatch.setattr(clusters, "_CLUSTERS", {})
    clusters.register_cluster("test", nobody_opens)


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_names_the_variable_of_a_missing_address(service: str) -> None:
    cluster = {"cluster_url": "test://x"} if service in OF_A_CLUSTER else {}
    if service in (*OF_A_CLUSTER, "rescheduler"):
        cluster["cluster"] = "east"
    with pytest.raises(InvalidFieldError, match=f"SPRINGTIDE_{service.upper()}_AMQP_URL"):
        run(service, settings_of(service, **cluster))


@pytest.mark.parametrize("service", OF_A_CLUSTER)
def test_a_kind_of_cluster_without_an_adapter_is_refused_by_name(service: str) -> None:
    with pytest.raises(InvalidFieldError, match="cluster_url") as refused:
        run(service, settings_of(service, cluster_url="moon://base"))
    assert refused.value.reason is Reason.NOT_SUPPORTED
    assert "moon://base" in str(refused.value)
    assert "test://" in str(refused.value), "what there is instead"


def test_a_process_of_its_own_hands_the_service_its_settings_unchanged() -> None:
    for service in SERVICES:
        settings = settings_of(service)
        policy = settings.policy()
        assert type(policy).__name__ == f"{service.title()}Config"
        assert all(
            getattr(policy, name) == getattr(settings, name) for name in type(policy).__slots__
        )


@pytest.mark.parametrize("service", SERVICES)
def test_the_command_reads_its_file_and_ends_with_1_on_a_refusal(
    service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("no_such_setting: 1\n")
    monkeypatch.setattr(sys, "argv", [f"springtide-{service}", str(file)])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"springtide_{service}.__main__").main()
    assert ended.value.code == 1


@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "in a group"])
def test_the_command_ends_with_1_on_a_fault_that_has_a_reason(
    monkeypatch: pytest.MonkeyPatch, wrapped: bool
) -> None:
    async def failing(_settings: object) -> None:
        stale = PermanentError(Reason.STALE, "another one has taken over")
        raise ExceptionGroup("services", [stale]) if wrapped else stale

    monkeypatch.setattr(sys, "argv", ["springtide-submitter"])
    with pytest.raises(SystemExit) as ended:
        process.main("submitter", type(settings_of("submitter")), failing)
    assert ended.value.code == 1


def test_the_command_shows_a_fault_of_the_program_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(_settings: object) -> None:
        raise ExceptionGroup("services", [PermanentError(Reason.STALE, "taken over"), KeyError()])

    monkeypatch.setattr(sys, "argv", ["springtide-submitter"])
    with pytest.raises(ExceptionGroup):
        process.main("submitter", type(settings_of("submitter")), failing)
