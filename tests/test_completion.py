"""Shell completion: in Python, and by the Tab key of real shells."""

import argparse
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deft import cli, completion
from deft.config.algorithm_settings import ALGORITHM_SETTINGS
from deft.config.recipes import recipe_names

SCRIPT = f"#!/bin/sh\nexec {sys.executable} -c 'import sys; from deft.cli import main; sys.exit(main())' \"$@\"\n"


def choices(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return found[0] if found else {}


def values(parser: argparse.ArgumentParser, flag: str, prefix: str = "") -> list[str]:
    action = next(action for action in parser._actions if flag in (action.option_strings or [action.dest]))
    return action.completer(prefix=prefix)


def test_every_command_is_offered():
    parser = completion.build_parser([])
    assert set(choices(parser)) == {"train", *(name.partition(" ")[0] for name in cli.COMMANDS)}
    assert all(f"\n  {name} " in cli.HELP for name in choices(parser))
    training = choices(choices(completion.build_parser(["train"]))["train"])
    assert set(training) == {*ALGORITHM_SETTINGS, *cli.TRAINING}
    assert set(choices(choices(completion.build_parser(["collect"]))["collect"])) == {"waypoints"}


@pytest.mark.parametrize("command", ["train ppo", "train teacher", "train tokenizer", "collect waypoints", "play"])
def test_flags_are_those_of_the_help(command, capsys):
    parser = completion.build_parser(command.split())
    for word in command.split():
        parser = choices(parser)[word]
    offered = {flag for action in parser._actions for flag in action.option_strings}
    assert cli.main([*command.split(), "--help"]) == 0
    assert offered <= set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", capsys.readouterr().out))
    assert len(offered) >= 20


def test_values(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").touch()
    parser = choices(choices(completion.build_parser(["train", "ppo"]))["train"])["ppo"]
    assert values(parser, "--activation") == ["tanh", "relu", "elu", "gelu", "silu"]
    assert values(parser, "--total-timesteps") == []
    assert {"own.yaml", "rl_config"} <= set(values(parser, "--config"))
    assert values(parser, "--recipe") == recipe_names()
    shown = choices(choices(completion.build_parser(["recipes", "show"]))["recipes"])["show"]
    assert values(shown, "recipe") == recipe_names()
    assert values(parser, "--output-dir") == ["own.yaml"]
    assert values(choices(completion.build_parser(["completion"]))["completion"], "shell") == ["bash", "zsh", "fish"]
    training = choices(completion.build_parser(["train", "--resume", "nowhere"]))["train"]
    assert values(training, "--resume") == ["own.yaml"]


def test_the_flags_of_a_run_that_is_resumed(tmp_path):
    (tmp_path / "config.yaml").write_text("algorithm: {name: sac}\nenv: {id: Pendulum-v1}\n")
    parser = choices(completion.build_parser(["train", "--resume", str(tmp_path)]))["train"]
    assert "--learning-starts" in {flag for action in parser._actions for flag in action.option_strings}


def test_another_shell_is_an_error(capsys):
    assert cli.main(["completion", "tcsh"]) == 2
    assert "tcsh" in capsys.readouterr().err
    assert cli.main(["completion"]) == 2
    assert "give one shell: bash, zsh or fish" in capsys.readouterr().err


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A folder with the command `deft`, first on the path."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "deft").write_text(SCRIPT)
    (tmp_path / "bin" / "deft").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    monkeypatch.chdir(tmp_path)


def typed(command: list[str], lines: list[str], expected: list[str]) -> None:
    """Type lines into a shell in a terminal, and wait for what is expected after each."""
    terminal, other = pty.openpty()
    shell = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, start_new_session=True)
    os.close(other)
    try:
        for line, answer in zip(lines, expected, strict=True):
            os.write(terminal, line.encode())
            seen, end = b"", time.monotonic() + 60
            while answer.encode() not in seen:
                assert time.monotonic() < end, f"{line!r}: {seen.decode(errors='replace')}"
                if select.select([terminal], [], [], 1.0)[0]:
                    seen += os.read(terminal, 4096)
    finally:
        shell.kill()
        shell.wait()
        os.close(terminal)


def test_the_tab_key_in_bash(program):
    setup = 'eval "$(deft completion bash)"; echo rea""dy\n'
    lines, expected = [setup, "deft train p\t", "--total-ti\t"], ["ready", "ppo ", "total-timesteps "]
    typed(["bash", "--norc", "-i"], lines, expected)


def test_the_tab_key_in_zsh(program):
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    setup = 'autoload -Uz compinit; compinit -u; eval "$(deft completion zsh)"; echo rea""dy\n'
    typed(["zsh", "-f", "-i"], [setup, "deft train p\t", "--total-ti\t"], ["ready", "ppo", "mesteps"])


def test_fish(program):
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    code = 'deft completion fish | source; complete -C "deft train p"; complete -C "deft train ppo --total-ti"'
    done = subprocess.run(["fish", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["ppo", "--total-timesteps"]
