"""`deft` commands run in the process of the test; the fixtures `deft` and `deft_or_error` call these."""

import json
from typing import Any

import pytest

from deft import cli


def attempt(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any] | str:
    """Run `deft ARGUMENTS`, which include --json; return its results, or the last line of its error."""
    capsys.readouterr()
    status = cli.main([str(argument) for argument in arguments])
    output = capsys.readouterr()
    return output.err.splitlines()[-1] if status else json.loads(output.out.splitlines()[-1])


def succeed(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """Run `deft ARGUMENTS`, which include --json and must succeed; return its results."""
    results = attempt(capsys, *arguments)
    assert not isinstance(results, str), results
    return results
