"""What the pages say that a tool can check: links, commands, targets, reasons, topics, settings."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from springtide.cli import app
from springtide.jobfile import parse_job_file
from springtide_lab.demo import DemoSummary
from springtide_shared.errors import Reason, RetryClass
from springtide_shared.messages import registered

ROOT = Path(__file__).parents[2]
OURS = sorted(
    {
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs" / "decisions").glob("*.md"),
    }
    - {ROOT / "docs" / "messages.md"}  # generated, and checked where it is made
)
ALL = sorted({*OURS, *ROOT.glob("*/README.md"), *ROOT.glob("*/*/README.md")})
RUNBOOK = ROOT / "docs" / "operations.md"


def page_ids(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def text_of(page: Path) -> str:
    """The page as readers see it: without comments."""
    return re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def prose_of(page: Path) -> str:
    """Without blocks of code as well."""
    return re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE)


def code_in(page: Path) -> list[str]:
    """All spans and blocks of code."""
    text = text_of(page)
    return re.findall(r"`([^`\n]+)`", prose_of(page)) + re.findall(
        r"^```\w*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE
    )


@cache
def sources() -> str:
    """The product's own code, one text."""
    folders = ("shared", "services", "client", "lab", "testbed")
    files = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


@cache
def settings() -> frozenset[str]:
    """Names of annotated fields in the code: of settings, messages, jobs and summaries."""
    return frozenset(re.findall(r"^    (\w+): ", sources(), flags=re.MULTILINE))


# ---- links ----------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Anchors of headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", prose_of(page), flags=re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", head).lower() for head in heads]
    return {re.sub(r"[^\w\- ]", "", head).replace(" ", "-") for head in plain}


@pytest.mark.parametrize("page", ALL, ids=page_ids)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        is_there = found.exists() and found.is_relative_to(ROOT)
        if is_there and anchor and found.suffix == ".md":
            is_there = anchor in anchors(found)
        if not is_there:
            wrong.append(target)
    assert not wrong, f"{page_ids(page)} links to what is not there"


def test_the_readme_leads_to_every_page() -> None:
    linked = {
        (ROOT / target.partition("#")[0]).resolve()
        for target in re.findall(r"\]\(([^)\s:]+)\)", prose_of(ROOT / "README.md"))
    }
    assert set((ROOT / "docs").glob("*.md")) <= linked


# ---- commands -------------------------------------------------------------------------------


def make_targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))


@pytest.mark.parametrize("page", OURS, ids=page_ids)
def test_every_make_target_named_is_one_with_help(page: Path) -> None:
    named = {
        word for code in code_in(page) for word in re.findall(r"(?:^|\$ )make ([a-z-]+)", code)
    }
    assert named <= make_targets()


def option_names(command: str) -> set[str]:
    """The options of a `springtide` command, from its signature's source."""
    tree = ast.parse((ROOT / "client" / "springtide" / "cli.py").read_text(encoding="utf-8"))
    shared = {
        node.targets[0].id: ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    (function,) = (
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == command
    )
    names = {"--help"}
    for argument in function.args.args:
        assert argument.annotation is not None
        written = ast.unparse(argument.annotation)
        written = shared.get(written, written)
        explicit = re.findall(r"'(--[a-z-]+)'", written)
        names |= set(explicit) or {"--" + argument.arg.rstrip("_").replace("_", "-")}
    return names


@pytest.mark.parametrize("page", OURS, ids=page_ids)
def test_every_springtide_command_and_option_named_exists(page: Path) -> None:
    known = {
        command.name or getattr(command.callback, "__name__", "")
        for command in app.registered_commands
    }
    for code in code_in(page):
        for command, rest in re.findall(
            r"(?:^|\$ (?:\.venv/bin/)?)springtide ([a-z]+)(?=\s|$)([^\n#]*)", code
        ):
            assert command in known, code
            given = set(re.findall(r"(?<!\S)(--[a-z-]+)", rest))
            assert given <= option_names(command), code


def test_every_console_command_named_is_installed() -> None:
    scripts = set()
    for project in [*ROOT.glob("*/pyproject.toml"), *ROOT.glob("services/*/pyproject.toml")]:
        with project.open("rb") as file:
            scripts |= set(tomllib.load(file)["project"].get("scripts", {}))
    named = {
        word
        for page in OURS
        for code in code_in(page)
        for word in re.findall(r"^(springtide-[a-z]+)(?:\s|$)", code)
    }
    known = scripts | {path.parent.name for path in ROOT.glob("*/pyproject.toml")}
    assert named <= known | {"springtide-shared"}


@pytest.mark.parametrize("page", OURS, ids=page_ids)
def test_every_module_run_by_name_exists(page: Path) -> None:
    for code in code_in(page):
        for module in re.findall(r"python -m (springtide\w*(?:\.\w+)*)", code):
            folders = [ROOT / "shared", ROOT / "lab", ROOT / "client", ROOT / "testbed"]
            path = module.replace(".", "/")
            there = [
                folder
                for folder in [*folders, *(ROOT / "services").iterdir()]
                if (folder / f"{path}.py").is_file() or (folder / path / "__main__.py").is_file()
            ]
            assert there, f"{page_ids(page)}: python -m {module}"


def test_the_simulators_options_named_exist() -> None:
    told = (ROOT / "lab/springtide_lab/simulated/__main__.py").read_text(encoding="utf-8")
    known = set(re.findall(r'add_argument\("(--[a-z-]+)"', told))
    for page in OURS:
        for code in code_in(page):
            for rest in re.findall(r"springtide_lab\.simulated([^\n]*)", code):
                assert set(re.findall(r"(--[a-z-]+)", rest)) <= known, page_ids(page)


@pytest.mark.parametrize("page", OURS, ids=page_ids)
def test_every_path_of_the_repository_named_exists(page: Path) -> None:
    """Spans such as `springtide_shared/messages/` or `tests/contract/`."""
    missing = []
    for code in re.findall(r"`([\w./-]+/[\w./-]*|[\w-]+\.py)`", prose_of(page)):
        if code.startswith(("/", "out/", "application/")) or code.endswith("adapters/"):
            continue
        hits = [ROOT / code, *(ROOT.glob(f"*/{code}")), *(ROOT.glob(f"services/*/{code}"))]
        hits += ROOT.glob(f"*/*/{code}") if "/" not in code else ROOT.glob(f"*/springtide*/{code}")
        hits += ROOT.glob(f"services/*/*/{code}")
        hits += ROOT.glob(f"lab/springtide_lab/*/{code}")
        if not any(hit.exists() for hit in hits):
            missing.append(code)
    assert not missing


# ---- words of the code ----------------------------------------------------------------------


def first_cells(page: Path) -> list[tuple[str, str]]:
    """(heading, first cell) of every row of a table."""
    cells = []
    heading = ""
    for line in prose_of(page).splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("| ") and not line.startswith(("| you see", "| reason", "|---")):
            cells.append((heading, line.split("|")[1]))
    return cells


def test_every_reason_in_the_runbook_exists() -> None:
    reasons = {reason.value for reason in Reason}
    told = {
        word
        for heading, cell in first_cells(RUNBOOK)
        if heading in ("A task fails", "A job or a message is refused")
        for word in re.findall(r"`([^`]+)`", cell)
    }
    assert told, "the tables have moved: this test looks at nothing"
    assert told <= reasons


def test_every_reason_that_a_task_can_fail_for_is_in_the_runbook() -> None:
    from springtide_shared.errors import RETRY_CLASS

    told = set(re.findall(r"`([a-z-]+)`", RUNBOOK.read_text(encoding="utf-8")))
    ends = {reason.value for reason, kind in RETRY_CLASS.items() if kind is not RetryClass.FREE}
    assert ends - {Reason.CANCELLED.value} <= told


@pytest.mark.parametrize("page", OURS, ids=page_ids)
def test_every_word_that_looks_like_a_reason_is_one_of_the_code(page: Path) -> None:
    """Hyphenated words in code spans are values that the code knows."""
    known = {reason.value for reason in Reason} | {kind.value for kind in RetryClass}
    for word in re.findall(r"`([a-z]+(?:-[a-z]+)+)`", prose_of(page)):
        is_command = word.startswith("springtide-")
        assert word in known or is_command or f'"{word}"' in sources(), word


@pytest.mark.parametrize("page", OURS, ids=page_ids)
def test_every_topic_named_exists(page: Path) -> None:
    """Dotted words in code spans: topics; else log events, fields, modules or files of ours."""
    topics = {cls.topic for cls in registered()}
    shared = ROOT / "shared" / "springtide_shared"
    for word in re.findall(r"`([a-z]+\.[a-z_]+)`", prose_of(page)):
        head, tail = word.split(".")
        assert (
            word in topics
            or f'"{word}"' in sources()
            or {head, tail} <= settings()
            or (shared / head / f"{tail}.py").is_file()
            or (ROOT / word).exists()
            or word.endswith(".py")  # looked for by the test of paths
            or word in ("uv.lock", "asyncio.sleep")
        ), word


def test_every_message_of_the_picture_goes_where_the_arrow_points() -> None:
    """Labels are topics; an arrow leads from their producer to one of their consumers."""
    picture = text_of(ROOT / "docs/architecture.md").partition("```mermaid")[2].partition("```")[0]
    topics = {cls.topic: cls for cls in registered()}
    shown = set()
    arrow = re.compile(r'^\s*(\w+).*? (<?)-->\|"?([a-z., ]+)"?\| (\w+)', re.MULTILINE)
    for source, both, labels, target in arrow.findall(picture):
        for topic in set(labels.split(", ")) & set(topics):
            shown.add(topic)
            cls = topics[topic]
            consumers = {
                {"anyone": "gateway", "the publisher": "gateway"}.get(c, c) for c in cls.consumers
            }
            ways = [(source, target), (target, source)] if both else [(source, target)]
            assert any(cls.producer in (a, "anyone") and b in consumers for a, b in ways), (
                f"{topic}: {source} to {target}"
            )
    assert set(topics) == shown, "each message is in the picture"


@pytest.mark.parametrize("page", OURS, ids=page_ids)
def test_every_setting_named_exists(page: Path) -> None:
    """Words in code spans with an underscore are fields somewhere in the code."""
    for word in re.findall(r"`([a-z]+(?:_[a-z]+)+)`", prose_of(page)):
        assert word in settings() or re.search(rf"\b{word}\b", sources()), word


def test_variables_named_are_read_somewhere() -> None:
    services = {path.name.upper() for path in (ROOT / "services").iterdir() if path.is_dir()}
    for page in OURS:
        for word in re.findall(r"\bSPRINGTIDE_[A-Z_]+\b", text_of(page)):
            service, _, field = word.removeprefix("SPRINGTIDE_").partition("_")
            is_setting = service in services and (not field or field.lower() in settings())
            assert is_setting or word in sources(), f"{page_ids(page)}: {word}"


# ---- README ---------------------------------------------------------------------------------


def test_the_job_of_the_readme_is_a_job() -> None:
    (block,) = re.findall(r"```yaml\n(.+?)```", text_of(ROOT / "README.md"), re.DOTALL)
    plain = parse_job_file("id: x\n" + block, "README.md").check()
    assert plain.size == 100
    assert plain.template.checkpoint is None
    line = re.search(r"^# (checkpoint: \{.*?\})", block, re.MULTILINE)
    assert line is not None
    moving = parse_job_file(f"id: x\n{block}{line[1]}\n", "README.md").check()
    assert moving.template.checkpoint is not None


def test_the_python_of_the_readme_is_python() -> None:
    (block,) = re.findall(r"```python\n(.+?)```", text_of(ROOT / "README.md"), re.DOTALL)
    from springtide.client import Job

    called = {
        node.func.attr
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "job"
    }
    assert called
    assert called <= set(dir(Job))


def test_the_figures_of_the_readme_are_fields_of_the_summary() -> None:
    rows = text_of(ROOT / "README.md").partition("summary.json` |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(\w+)`", rows))
    assert len(named) >= 6
    assert named <= set(DemoSummary.__struct_fields__)


# ---- decisions and glossary -----------------------------------------------------------------


def test_decisions_are_numbered_without_gaps_and_short() -> None:
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    for number, page in enumerate(pages, start=1):
        text = page.read_text(encoding="utf-8")
        assert page.name.startswith(f"{number:04d}-")
        assert text.startswith(f"# {number:04d}: ")
        assert len(text.splitlines()) <= 40, f"{page.name} is too long to be read"
        for part in ("Context", "Choice", "Refused", "Consequences"):
            assert f"**{part}.**" in text, f"{page.name} has no {part}"


def glossary() -> list[str]:
    rows = re.findall(r"^\| \*\*(.+?)\*\* \|", text_of(ROOT / "docs" / "glossary.md"), re.MULTILINE)
    return [word.lower() for row in rows for word in row.split(", ")]


def test_no_word_of_the_glossary_is_explained_twice() -> None:
    words = glossary()
    assert sorted(set(words)) == sorted(words)


def test_the_glossary_has_the_design_s_words_and_those_of_the_headings() -> None:
    words = set(glossary())
    assert {"shape", "place", "slot", "slice", "credit"} <= words
    heads = {
        head.lower()
        for page in OURS
        for head in re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE)
    }
    kinds = {kind for cls in registered() for kind in [cls.kind.value]}
    assert kinds <= words, "each kind of message is explained"
    spoken = {
        "job", "task", "attempt", "saga", "lease", "epoch", "node", "virtual time",
        "poison", "account", "array", "migration", "ledger",
    }  # fmt: skip
    used = {word for word in spoken if any(re.search(rf"\b{word}s?\b", head) for head in heads)}
    assert used - words == set(), "headings use words that the glossary lacks"
