"""The waypoint commands: the documents' arguments are taken, and what is wrong is one line and status 2."""

import json

import pytest

from deft.cli import main


def test_the_documents_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("deft.training.waypoints.ppo._plots", lambda *given: [])
    kwargs = ["--env-kwargs", "camera_size=16"]
    assert main(["collect", "waypoints", "--env", "toy", "--episodes", "20", "--out", "out/toy.npz", *kwargs]) == 0
    assert main(["train", "waypoint-sft", "--dataset", "out/toy.npz", "--num-epochs", "1"]) == 0
    arguments = "--sft-checkpoint out/sft_waypoint_bc_torch_v0/model.pt --out-dir out/rl_delta_ppo_v0 --env toy"
    arguments += " --num-iterations 2 --batch-size 16 --lr 3e-4 --clip-epsilon 0.2 --value-coef 0.5 --entropy-coef 0.01"
    arguments += " --gamma 0.99 --gae-lambda 0.95 --num-envs 4 --rollout-steps 8 --eval-episodes 4"
    assert main(["train", "waypoint-ppo", *arguments.split(), *kwargs]) == 0
    capsys.readouterr()
    compare = "--sft-checkpoint out/sft_waypoint_bc_torch_v0/model.pt --rl-checkpoint out/rl_delta_ppo_v0/final.pt"
    assert main(["compare", *compare.split(), "--episodes", "4", "--json"]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert results["supervised"]["episodes"] == results["with PPO"]["episodes"] == 4
    assert main(["compare", "waypoints", *compare.split(), "--episodes", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == results  # the same command by its full name
    assert main(["compare", "out/sft_waypoint_bc_torch_v0", "out/rl_delta_ppo_v0", "--episodes", "4"]) == 0
    assert "ade" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train waypoint-ppo --env toy", "--sft-checkpoint: missing; it must be given"),
        ("train waypoint-ppo --sft-checkpoint no.pt", "no.pt: does not exist; `deft train waypoint-sft` makes one"),
        ("train waypoint-ppo --sft-checkpoint no.pt --env tooy", "--env: 'tooy' is no waypoint environment"),
        ("train waypoint-ppo --sft-checkpoint no.pt --lr x", "--lr: 'x' is not a number"),
        ("train waypoint-sft --dataset no.npz", "dataset: no.npz does not exist; `deft collect waypoints"),
        ("collect waypoints --out file.csv", "--out file.csv: a waypoint recording is a .npz file"),
        ("compare --sft-checkpoint a.pt --rl-checkpoint b.pt", "a.pt: does not exist"),
        ("compare waypoints --sft-checkpoint a.pt --rl-checkpoint b.pt", "a.pt: does not exist"),
        ("train waypoint", "train waypoint: no such algorithm"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"deft: {message}"), error
    assert error.count("\n") == 1
