"""What the README says of the client is what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from springtide.errors import EXIT_CODES
from springtide.jobfile import parse_job_file

README = (Path(__file__).parents[2] / "client" / "README.md").read_text()


def test_the_exit_codes_are_those_of_the_code() -> None:
    told = {
        int(code): meaning.replace("`", "")
        for code, meaning in re.findall(r"^\| (\d+) \| (.+) \|$", README, re.MULTILINE)
    }
    assert told == EXIT_CODES


def test_the_job_file_shown_is_a_job() -> None:
    (block,) = re.findall(r"```yaml\n(.+?)```", README, re.DOTALL)
    job = parse_job_file("id: x\n" + block, "README.md").check()
    assert (job.size, job.template.shape.cpu_millis) == (2, 2000)
