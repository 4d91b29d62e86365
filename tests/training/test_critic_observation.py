"""`critic_observation` in runs: training, resuming, handing over, and playing where the stream does not exist."""

import pytest
import torch
from tensordict import TensorDict
from worlds import SecretSign

from deft import cli, load_dataset, load_policy, schema
from deft.config.loading import resolve
from deft.evaluation.evaluate import evaluate_run, find_run, rebuild_policy
from deft.runs.policy_spaces import PolicySpaces
from deft.training.run import build_trainer

ENV = "worlds:deft-tests/SecretSign-v0"
QUIET = {"console_level": "CRITICAL", "tensorboard": False}
PUBLIC = {"hidden_sizes": [16], "encoder_dim": 8}
SMALL = {**PUBLIC, "hidden_dim": 16}  # hidden_dim: of the value of privileged streams
COMMON = ["--threads", 1, "--device", "cpu", "--eval-freq", 0, "--json"]
PPO = ["--env", ENV, "--rollout-steps", 8, "--batch-size", 8, "--n-epochs", 1, *COMMON]
SHORT = ["--hidden-sizes", 8, "--hidden-dim", 8, "--encoder-dim", 8, "--total-timesteps", 16]

pytestmark = pytest.mark.usefixtures("no_plots")


def trainer(folder, names=("secret",), **changes):
    config = {
        "algorithm": {"name": "ppo", "cfg": {"batch_size": 64, "n_epochs": 4, "learning_rate": 3e-3, "gamma": 0.9}},
        "env": {"id": ENV, "num_envs": 4},
        "policy": {**(SMALL if names else PUBLIC), "critic_observation": list(names)},
        "trainer": {"rollout_steps": 64, "eval_freq": 0, "save_freq": 0, "log_freq": 1},
        "logging": QUIET,
        "output_dir": str(folder),
        "threads": 1,
        "device": "cpu",
    }
    return build_trainer(resolve({**config, **changes}))


def explained_variance(folder, names, **env):
    made = trainer(folder, names, env={"id": ENV, "num_envs": 4, "kwargs": env})
    made.train(2048)
    made.close()
    return float(made.run.last_metrics["explained_variance"])


def test_only_the_privileged_stream_predicts_the_return(tmp_path):
    # The return is ± Σ γ^k: its sign is in `secret` alone, so that without it no V is better than a constant (0).
    seeing = explained_variance(tmp_path / "seeing", ["secret"])
    blind = explained_variance(tmp_path / "blind", [], offers_secret=False)
    assert seeing > 0.8
    assert blind < 0.3


@pytest.mark.parametrize("memory", [0, 4])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, memory):
    policy = {**SMALL, "critic_observation": ["secret"], "memory_hidden": memory}
    whole = trainer(tmp_path / "whole", policy=policy)
    whole.train(768)
    half = trainer(tmp_path / "half", policy=policy)
    half.train(256)
    half.close()
    resumed = trainer(tmp_path / "half", policy=policy, resume=str(tmp_path / "half"))
    resumed.train(768)
    assert whole.global_step == resumed.global_step == 768
    expected = whole.policy.state_dict()
    assert any(name.startswith("critic.") for name in expected)
    for name, value in resumed.policy.state_dict().items():
        assert torch.equal(value, expected[name]), name
    for made in (whole, resumed):
        made.close()


def test_a_run_is_played_recorded_and_loaded_without_the_stream(deft, tmp_path):
    deft("train", "ppo", *PPO, *SHORT, "--critic_observation", "secret", "--output-dir", "run")
    folder = next((tmp_path / "run").glob("checkpoint-*"))
    assert list(PolicySpaces.read(folder).observation) == ["image", "state"]
    seeing = deft("evaluate", "run", "--episodes", 2, "--device", "cpu", "--json")
    blind = deft("evaluate", "run", "--episodes", 2, "--env-kwargs", "offers_secret=false", "--device", "cpu", "--json")
    assert seeing["episodes"] == blind["episodes"] == 2
    record = ["--policy", "run", "--env-kwargs", "offers_secret=false", "--episodes", 2, "--out", "data/secret/own-v0"]
    deft("collect", *record, "--device", "cpu", "--json")
    assert list(load_dataset("data/secret/own-v0").observation_space) == ["image", "state"]
    policy = load_policy("run", device="cpu", trust_remote_code=True)
    env = SecretSign(offers_secret=False)
    observation, _ = env.reset(seed=0)
    assert policy.streams == ["image", "state"]
    assert env.action_space.contains(policy.get_action(observation))
    assert evaluate_run("run", episodes=1, device="cpu", trust_remote_code=True)["episodes"] == 1


@pytest.mark.parametrize(
    "model", [[], ["--model", "vla-tiny", "--vla-model-config", "image_size=32", "width=32", "cell=4"]]
)
def test_supervised_then_ppo_then_grpo(deft, tmp_path, model):
    """A policy cloned where the stream does not exist keeps its actions, and gets a value that reads the stream."""
    blind = ["--env", ENV, "--env-kwargs", "offers_secret=false"]
    deft("collect", *blind, "--policy", "random", "--episodes", 2, "--out", "data/secret/random-v0", "--json")
    sft = ["--num-epochs", 1, "--updates-per-epoch", 1, "--batch-size", 4, "--val-fraction", 0, *COMMON]
    size = model or ["--hidden-dim", 8, "--encoder-dim", 8]
    deft("train", "sft", "--dataset", "data/secret/random-v0", *size, *sft, "--output-dir", "sft")
    more = ["--critic_observation", "secret", "--env-kwargs", "offers_secret=true"]
    still = ["--learning-rate", 1e-30, "--total-timesteps", 16, "--trust-remote-code"]
    deft("train", "ppo", *PPO, *still, "--model-path", "sft", *more, "--output-dir", "ppo")
    before, after = (load_policy(name, device="cpu", trust_remote_code=True) for name in ("sft", "ppo"))
    observation, _ = SecretSign(offers_secret=False).reset(seed=0)
    assert before.get_action(observation) == pytest.approx(after.get_action(observation))
    weights = torch.load(next((tmp_path / "ppo").glob("checkpoint-*")) / "model.pt", weights_only=True)
    assert any(name.startswith("critic.") for name in weights)
    grpo = ["--env", ENV, "--group-size", 2, "--batch-size", 8, "--n-epochs", 1, "--num-iterations", 1, *COMMON]
    deft("train", "grpo", *grpo, "--model-path", "ppo", "--trust-remote-code", "--output-dir", "grpo")
    grpo += ["--action_critic_coef", 1, "--trust-remote-code"]  # with the streams of the run that it starts from
    deft("train", "grpo", *grpo, "--model-path", "ppo", "--output-dir", "with-critic")


OFFLINE = ["--num-epochs", 1, "--updates-per-epoch", 2, "--batch-size", 8, "--hidden-dim", 8, "--encoder-dim", 8]
OFF_POLICY = ["--env", ENV, "--hidden-dim", 8, "--encoder-dim", 8, "--batch-size", 8, "--total-timesteps", 16]
OFF_POLICY += ["--learning-starts", 8, "--random-steps", 4, *COMMON]


@pytest.mark.parametrize("algorithm", ["iql", "cql", "td3-bc"])
def test_offline_critics_read_the_stream_of_a_dataset(deft, tmp_path, algorithm):
    data, train = "data/secret/random-v0", ["train", algorithm, "--dataset", "data/secret/random-v0", *OFFLINE, *COMMON]
    deft("collect", "--env", ENV, "--policy", "random", "--episodes", 4, "--out", data, "--json")
    blind = ["--env", ENV, "--env-kwargs", "offers_secret=false"]
    deft(*train, *blind, "--critic_observation", "secret", "--num-seeds", 1, "--output-dir", "run")
    folder = next((tmp_path / "run").glob("checkpoint-*"))
    assert list(PolicySpaces.read(folder).observation) == ["image", "state"]
    weights = torch.load(folder / "model.pt", weights_only=True)
    assert weights["critic.encoder.streams.secret.normalizer.count"] == 16  # 4 episodes of 4 steps
    assert deft("evaluate", "run", "--episodes", 2, "--device", "cpu", "--json")["episodes"] == 2
    assert cli.main(["train", "sft", "--dataset", data, "--critic_observation", "secret", "--device", "cpu"]) == 2
    # the policy starts from one that was cloned without the stream; SAC continues with its critics
    deft("train", "sft", "--dataset", data, *OFFLINE, *COMMON, "--val-fraction", 0, "--output-dir", "sft")
    deft(*train, "--model-path", "run", "--trust-remote-code", "--output-dir", "more")
    sac = ["train", "sac", *OFF_POLICY, "--env-kwargs", "offers_secret=true", "--trust-remote-code"]
    deft(*sac, "--model-path", "run", "--output-dir", "sac")


def test_a_vla_model_from_iql_to_ppo(deft, tmp_path):
    data, common = "data/secret/random-v0", [*COMMON, "--trust-remote-code"]
    deft("collect", "--env", ENV, "--policy", "random", "--episodes", 4, "--out", data, "--json")
    model = ["--model", "vla-tiny", "--vla-model-config", "image_size=32", "width=32", "cell=4"]
    train = ["train", "iql", "--dataset", data, *model, *OFFLINE[:6], *common]
    deft(*train, "--critic_observation", "secret", "--output-dir", "iql")
    deft(
        "train",
        "ppo",
        *PPO,
        "--total-timesteps",
        16,
        "--trust-remote-code",
        "--model-path",
        "iql",
        "--output-dir",
        "ppo",
    )
    for name in ("iql", "ppo"):  # PPO continues with the value of IQL
        weights = torch.load(next((tmp_path / name).glob("checkpoint-*")) / "model.pt", weights_only=True)
        assert any(key.startswith("critic.network.") for key in weights)


def sac(folder, **changes):
    algorithm = {"batch_size": 8, "learning_starts": 16, "random_steps": 8, "buffer_size": 200}
    env, policy = {"id": ENV}, {"hidden_dim": 8, "encoder_dim": 8, "critic_observation": ["secret"]}
    loop = {"eval_freq": 0, "save_freq": 0, "log_freq": 1}
    sections = {"algorithm": {"name": "sac", "cfg": algorithm}, "env": env, "policy": policy, "trainer": loop}
    return trainer(folder, **{**sections, **changes})


def test_sac_resumes_exactly_and_its_actor_never_reads_the_stream(tmp_path):
    whole, half = sac(tmp_path / "whole"), sac(tmp_path / "half")
    whole.train(48)
    half.train(32)
    half.close()
    resumed = sac(tmp_path / "half", resume=str(tmp_path / "half"))
    resumed.train(48)
    expected, policy, critics = whole.policy.state_dict(), whole.policy, whole.algorithm.critics
    for name, value in resumed.policy.state_dict().items():
        assert torch.equal(value, expected[name]), name
    for name, value in resumed.algorithm.critics.state_dict().items():
        assert torch.equal(value, critics.state_dict()[name]), name
    one = {"state": torch.zeros(2, 3), "image": torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "secret": torch.zeros(2, 2)}
    other = {**one, "secret": torch.ones(2, 2)}
    states = [policy.encode(observation) for observation in (one, other)]
    assert torch.equal(policy.mean(states[0]), policy.mean(states[1]))
    action = torch.zeros(1, 2, 2)
    assert not torch.equal(*(critics(state.for_critics, action) for state in states))
    # the gradient of the policy's loss does not reach the statistics' stream, nor the critics
    policy.mean(states[0]).sum().backward()
    assert all(value.grad is None or not value.grad.any() for value in policy.critic.parameters())
    for made in (whole, resumed):
        made.close()


@pytest.mark.parametrize(("algorithm", "further"), [("dsrl", []), ("dsrl", ["--critic", "action"]), ("fql-online", [])])
def test_critics_around_a_flow_policy_read_the_stream(deft, tmp_path, algorithm, further):
    """DSRL and FQL build a policy around another one: the critics are those of the outer policy."""
    data = "data/secret/random-v0"
    blind = ["--env-kwargs", "offers_secret=false"]
    deft("collect", "--env", ENV, *blind, "--policy", "random", "--episodes", 4, "--out", data, "--json")
    sft = ["--num-epochs", 1, "--updates-per-epoch", 2, "--batch-size", 8, "--val-fraction", 0]
    sft += ["--encoder-dim", 8, "--hidden-dim", 8, "--distribution", "flow"]
    deft("train", "sft", "--dataset", data, *sft, *COMMON, "--output-dir", "sft")
    seeing = ["--env-kwargs", "offers_secret=true", "--critic_observation", "secret"]
    train = ["train", algorithm, "--env", ENV, *seeing, *further, "--batch-size", 8, "--learning-starts", 8, *COMMON]
    train += ["--model-path", "sft", "--trust-remote-code", "--seed", 3]
    deft(*train, "--total-timesteps", 24, "--output-dir", "whole")
    deft(*train, "--total-timesteps", 16, "--output-dir", "half")
    deft("train", algorithm, "--resume", "half", "--total-timesteps", 24, "--trust-remote-code", "--json")
    saved = [next((tmp_path / name).glob("checkpoint-24")) for name in ("whole", "half")]
    whole, resumed = (torch.load(folder / "model.pt", weights_only=True) for folder in saved)
    assert list(whole) == list(resumed)
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
    assert whole["critic.encoder.streams.secret.normalizer.count"] == 8  # observed at `learning_starts`
    assert list(PolicySpaces.read(saved[0]).observation) == ["image", "state"]
    assert deft("evaluate", "whole", *blind, "--episodes", 2, "--device", "cpu", "--json")["episodes"] == 2


def test_iql_learns_a_value_of_the_stream(deft, tmp_path):
    data = "data/secret/random-v0"
    deft("collect", "--env", ENV, "--policy", "random", "--episodes", 64, "--out", data, "--json")
    train = ["train", "iql", "--dataset", data, "--hidden-dim", 32, "--encoder-dim", 8, "--batch-size", 64, *COMMON]
    train += [
        "--num-epochs",
        1,
        "--reward-scaling",
        "none",
        "--updates-per-epoch",
        150,
        "--learning-rate",
        3e-3,
        "--tau",
        0.2,
    ]
    deft(*train, "--critic_observation", "secret", "--output-dir", "run")
    folder, config = find_run(tmp_path / "run")
    env = SecretSign()
    policy = rebuild_policy(folder, config, env.observation_space, env.action_space, "cpu")
    rows = {"state": torch.zeros(2, 3), "secret": torch.tensor([[1.0, 0.0], [-1.0, 0.0]])}
    rows["image"] = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    value = policy.get_value(TensorDict({schema.OBSERVATION: TensorDict(rows, [2])}, [2]))
    # at an episode's first step V is ± (1 + γ + γ² + γ³) = ± 3.94; the expectile of noise-free targets is the mean
    assert value.tolist() == pytest.approx([3.94, -3.94], abs=0.6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ppo", "--critic_observation", "goal"], "has no stream 'goal'; it has image, secret, state"),
        (["ppo", "--critic_observation", "image"], "'image' is an image or a text"),
        (["ppo", "--critic_observation", "secret", "secret"], "named twice"),
        (
            ["grpo", "--critic_observation", "secret"],
            "grpo trains no value function that reads privileged streams; give action_critic_coef, or leave it out",
        ),
        (["grpo", "--action_critic_coef", "1"], "name them with critic_observation"),
        (["grpo", "--action_critic_coef", "1", "--ratio", "token"], "action_critic_coef: needs ratio step"),
        (
            ["fql-online", "--critic_observation", "secret", "--policy_extraction", "best_of_n"],
            "with policy_extraction best_of_n critics select the actions",
        ),
    ],
)
def test_bad_input(arguments, message, capsys, tmp_path):
    output = ["--output-dir", tmp_path / "run"]
    assert cli.main([str(one) for one in ["train", *arguments, "--env", ENV, *COMMON, *output]]) == 2
    assert message in capsys.readouterr().err
