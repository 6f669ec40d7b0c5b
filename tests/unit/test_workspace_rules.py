"""The workspace's own rules, where a tool can check them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MEMBERS = sorted(
    project.parent
    for pattern in ("*/pyproject.toml", "services/*/pyproject.toml")
    for project in ROOT.glob(pattern)
)
SERVICES = [member for member in MEMBERS if member.parent.name == "services"]

# Import names that differ from the name of the distribution they come from.
DISTRIBUTIONS = {"yaml": "pyyaml", "aio_pika": "aio-pika", "opentelemetry": "opentelemetry-api"}


def member_ids(member: Path) -> str:
    return str(member.relative_to(ROOT))


def project_of(member: Path) -> dict[str, object]:
    with (member / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    assert isinstance(project, dict)
    return project


def package_of(member: Path) -> Path:
    packages = [init.parent for init in member.glob("*/__init__.py")]
    assert len(packages) == 1, f"{member} must hold exactly one package"
    return packages[0]


def sources(folder: Path) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(folder.rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"), str(path))


# ---- make -----------------------------------------------------------------------------------


def test_every_promised_make_target_has_a_line_of_help() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    helped = set(re.findall(r"^([a-z-]+):.*## \S", makefile, re.MULTILINE))
    promised = "help setup demo test check bench schemas lock testbed-up testbed-down clean"
    assert set(promised.split()) <= helped
    shown = subprocess.run(
        ["make", "--silent", "help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    for target in helped:
        assert re.search(rf"^  make {target}\b", shown.stdout, re.MULTILINE), target


# ---- what tracked files may say -------------------------------------------------------------

# Put together here so that this file does not name them either.
HOSTS = [
    ".".join(words)
    for words in (
        ("pypi", "org"),
        ("files", "python" + "hosted"),
        ("registry", "npmjs"),
        ("proxy", "golang"),
        ("repo", "maven"),
        ("repo1", "maven"),
        ("deb", "debian"),
        ("crates", "io"),
    )
]
MACHINE_PATHS = [f"{path}/" for path in (ROOT, Path.home()) if len(path.parts) > 1]


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, timeout=30, check=False
    )
    if listed.returncode != 0:
        pytest.skip("not a git clone")
    paths = [ROOT / name.decode() for name in listed.stdout.split(b"\0") if name]
    return [path for path in paths if path.is_file()]


def test_no_tracked_file_names_a_registry_host_or_a_path_of_one_machine() -> None:
    forbidden = re.compile("|".join(re.escape(text) for text in HOSTS + MACHINE_PATHS))
    found = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            if forbidden.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert not found, "\n".join(found)


def test_requirements_are_hashed_and_name_no_place() -> None:
    for name in ("requirements.txt", "requirements-boot.txt"):
        text = (ROOT / name).read_text(encoding="utf-8")
        entries = re.split(r"\n(?=\S)", text.strip())
        assert entries
        for entry in entries:
            first = entry.splitlines()[0]
            assert re.match(r"[a-z0-9][a-z0-9._-]*==\S+", first), f"{name}: {first}"
            assert "--hash=sha256:" in entry, f"{name}: {first}"
        assert "://" not in text


def test_requirements_hold_every_declared_dependency() -> None:
    """A dependency that was added without "make lock" is missing in every fresh environment."""
    locked = set(re.findall(r"^([a-z0-9._-]+)==", _text("requirements.txt"), re.MULTILINE))
    own = {str(project_of(member)["name"]) for member in MEMBERS}
    with (ROOT / "pyproject.toml").open("rb") as file:
        dev = tomllib.load(file)["dependency-groups"]["dev"]
    wanted = {re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower() for requirement in dev}
    for member in MEMBERS:
        wanted |= _declared(member, own_names=own)
    assert not wanted - own - locked, "run 'make lock'"


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_lock_file_that_names_the_registry_is_ignored() -> None:
    assert "uv.lock" in (ROOT / ".gitignore").read_text(encoding="utf-8").split()


# ---- members --------------------------------------------------------------------------------


@pytest.mark.parametrize("member", MEMBERS, ids=member_ids)
def test_a_member_declares_every_dependency_that_it_imports(member: Path) -> None:
    """The shared environment holds everybody's packages, so it hides a missing declaration."""
    own = {package_of(other).name: str(project_of(other)["name"]) for other in MEMBERS}
    declared = _declared(member, own_names=set(own.values()))
    missing = []
    for path, tree in sources(package_of(member)):
        for line, name in _imported(tree):
            if name in sys.stdlib_module_names or name == package_of(member).name:
                continue
            needed = own.get(name) or DISTRIBUTIONS.get(name, name.replace("_", "-"))
            if needed not in declared:
                missing.append(f"{path.relative_to(ROOT)}:{line} imports {name} ({needed})")
    assert not missing, "\n".join(missing)


def _declared(
    member: Path, *, own_names: set[str], extras: frozenset[str] = frozenset()
) -> set[str]:
    """Distributions a member may import: its own, and those of the members it depends on."""
    project = project_of(member)
    requirements = list(project.get("dependencies", []))  # type: ignore[call-overload]
    for extra, more in project.get("optional-dependencies", {}).items():  # type: ignore[attr-defined]
        # A library's extras are its own business to import; a user gets those it asks for.
        if not extras or extra in extras:
            requirements += more
    found: set[str] = set()
    for requirement in requirements:
        match = re.match(r"([A-Za-z0-9._-]+)(?:\[([^\]]*)\])?", requirement)
        assert match is not None
        name = match.group(1).lower()
        found.add(name)
        if name in own_names:
            wanted = frozenset((match.group(2) or "none").split(","))
            other = next(m for m in MEMBERS if project_of(m)["name"] == name)
            found |= _declared(other, own_names=own_names, extras=wanted)
    return found


def _imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module.partition(".")[0]


@pytest.mark.parametrize("member", MEMBERS, ids=member_ids)
def test_members_support_the_same_interpreters(member: Path) -> None:
    assert project_of(member)["requires-python"] == ">=3.11,<3.14"


CLOCK_READS = {
    ("time", "time"),
    ("time", "monotonic"),
    ("time", "perf_counter"),
    ("time", "sleep"),
    ("datetime", "now"),
    ("datetime", "utcnow"),
    ("datetime", "today"),
    ("date", "today"),
}
UNOWNED_TASKS = {("asyncio", "create_task"), ("asyncio", "ensure_future"), ("loop", "create_task")}


def _dotted(node: ast.AST) -> tuple[str, str] | None:
    """The last two parts of a dotted name: ("datetime", "now") for "datetime.datetime.now"."""
    if not isinstance(node, ast.Attribute):
        return None
    base = node.value
    return (base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", ""), node.attr)


@pytest.mark.parametrize("service", SERVICES, ids=member_ids)
def test_no_service_reads_a_real_clock_or_starts_an_unowned_task(service: Path) -> None:
    """Time comes from the Clock port or the loop; tasks belong to a TaskGroup or the runtime."""
    found = []
    for path, tree in sources(package_of(service)):
        for node in ast.walk(tree):
            # A task whose handle is dropped has no owner; one that is kept is judged by the tests.
            dropped = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
            called = _dotted(node.value.func) if dropped else None  # type: ignore[attr-defined]
            read = _dotted(node)
            if called in UNOWNED_TASKS or read in CLOCK_READS:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {called or read}")  # type: ignore[attr-defined]
    assert not found, "\n".join(found)
