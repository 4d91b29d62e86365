"""Files and mappings: the documents' examples load, wrong ones give one line, written ones read back equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from documents import VLA_EXAMPLE

from deft.config import loading
from deft.config.algorithm_settings import ALGORITHM_SETTINGS, PPOSettings
from deft.config.loading import load_config, read_mapping, replace, resolve, to_dict, write_config
from deft.config.settings import RunConfig, VLAConfig
from deft.config.validation import quoted
from deft.errors import InputError

QUICK_START = """{
  "trainer": {
    "buffer_size": 2048,
    "buffer_type": "standard",  // "standard" or "vla"
    "iterations": 500
  },
  "algorithm": {
    "name": "ppo",
    "cfg": {
      "learning_rate": 3e-4,
      "gamma": 0.99,
      "n_epochs": 10,
      "batch_size": 64
    }
  }
}
"""


def written(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def line_of(error: pytest.ExceptionInfo[InputError]) -> str:
    line = str(error.value)
    assert "\n" not in line
    return line


def test_the_quick_start_loads_as_printed(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, "my_config.json", QUICK_START))
    expected = RunConfig()
    expected.trainer.iterations = 500
    expected.algorithm.cfg = PPOSettings(n_epochs=10)
    assert config == expected


def test_the_vla_example_loads_without_its_dots(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, "vla.json", VLA_EXAMPLE))
    assert (config.trainer.buffer_type, config.policy.action_dim) == ("vla", 7)
    assert config.policy.vla_config == VLAConfig(
        model_path="checkpoints/pretrained_vla_model.pth",
        model_class="vla_models.GPTVLAModel",
        model_config={"vision_encoder": "resnet50", "language_model": "gpt2-medium", "freeze_vision_encoder": False},
    )
    assert config.algorithm.cfg == PPOSettings(learning_rate=1e-5)


def test_json_comments_and_trailing_commas_leave_strings_alone(tmp_path: Path) -> None:
    text = """{
  /* a comment
     of two lines, with a "quote" */
  "env": {"id": "deft/Reach-v0", "kwargs": {"url": "http://a//b", "glob": "/*,]*/", "quote": "\\"//,}"},},  // end
  "seed": 3, // "seed": 4
}
"""
    config = load_config(written(tmp_path, "c.json", text))
    assert config.env.kwargs == {"url": "http://a//b", "glob": "/*,]*/", "quote": '"//,}'}
    assert config.seed == 3


def test_yaml_reads_exponents_as_numbers_and_quotes_keep_text(tmp_path: Path) -> None:
    text = "algorithm: {cfg: {learning_rate: 3e-4, target_kl: 1E-2}}\nenv: {kwargs: {a: '1e-4', b: 1e-4, c: 1e}}\n"
    config = load_config(written(tmp_path, "c.yaml", text))
    assert config.algorithm.cfg == PPOSettings(learning_rate=3e-4, target_kl=1e-2)
    assert config.env.kwargs == {"a": "1e-4", "b": 1e-4, "c": "1e"}


def test_sections_may_be_a_plain_string() -> None:
    config = resolve({"env": "CartPole-v1", "algorithm": "ppo", "policy": "actor_critic"})
    assert config == replace(RunConfig(), **{"env.id": "CartPole-v1"})


ALIASED = [
    ("algorithm.cfg.ppo_epochs", 7, "algorithm.cfg.n_epochs"),
    ("algorithm.cfg.ppo_clip_range", 0.3, "algorithm.cfg.clip_range"),
    ("algorithm.cfg.clip_epsilon", 0.3, "algorithm.cfg.clip_range"),
    ("algorithm.cfg.ppo_gae_lambda", 0.9, "algorithm.cfg.gae_lambda"),
    ("algorithm.cfg.ppo_value_coef", 0.7, "algorithm.cfg.value_coef"),
    ("algorithm.cfg.ppo_entropy_coef", 0.2, "algorithm.cfg.entropy_coef"),
    ("algorithm.cfg.ppo_clip_range_vf", 0.2, "algorithm.cfg.clip_range_vf"),
    ("algorithm.cfg.discount_gamma", 0.9, "algorithm.cfg.gamma"),
    ("algorithm.cfg.lr", 0.1, "algorithm.cfg.learning_rate"),
    ("algorithm.cfg.rollout_steps", 32, "trainer.rollout_steps"),
    ("trainer.buffer_size", 32, "trainer.rollout_steps"),
    ("trainer.batch_size", 32, "algorithm.cfg.batch_size"),
]


@pytest.mark.parametrize(("place", "value", "target"), ALIASED)
def test_aliases_mean_their_setting_and_not_both(place: str, value: Any, target: str) -> None:
    mapping: dict[str, Any] = {}
    loading.set_path(mapping, place, value)
    assert resolve(mapping) == replace(RunConfig(), **{target: value}) == replace(RunConfig(), **{place: value})
    loading.set_path(mapping, target, value)
    with pytest.raises(InputError) as error:
        resolve(mapping)
    assert line_of(error) == f"{place}: the same setting as '{target}'; give one of them"


def test_an_error_names_the_alias_that_was_written() -> None:
    with pytest.raises(InputError) as error:
        resolve({"trainer": {"batch_size": 0}})
    assert line_of(error) == "trainer.batch_size: 0 is out of range; must be at least 1"


WRONG: list[tuple[Any, str]] = [
    ({"trainer": {"rolout_steps": 1}}, "trainer.rolout_steps: unknown setting; did you mean 'rollout_steps'?"),
    ({"trainr": {}}, "trainr: unknown setting; did you mean 'trainer'?"),
    ({"algorithm": {"cfg": {"gama": 1}}}, "algorithm.cfg.gama: unknown setting; did you mean 'gamma'?"),
    ({"total_timesteps": 5}, "total_timesteps: unknown setting; did you mean 'trainer.total_timesteps'?"),
    ({"trainer": {"gamma": 0.9}}, "trainer.gamma: unknown setting; did you mean 'algorithm.cfg.gamma'?"),
    (
        {"env": {"xyzzy": 1}},
        "env.xyzzy: unknown setting; one of 'id', 'num_envs', 'vector', 'num_workers', 'training_kwargs', 'timeout', "
        "'restart_workers', 'reward_weights', 'curriculum', 'kwargs', 'max_episode_steps', 'rename_streams', "
        "'suite_path'",
    ),
    ({"algorithm": {"cfg": {"gamma": 1.5}}}, "algorithm.cfg.gamma: 1.5 is out of range; must be at most 1"),
    ({"algorithm": {"cfg": {"gamma": -0.5}}}, "algorithm.cfg.gamma: -0.5 is out of range; must be at least 0"),
    (
        {"algorithm": {"cfg": {"learning_rate": 0}}},
        "algorithm.cfg.learning_rate: 0 is out of range; must be more than 0",
    ),
    ({"algorithm": {"cfg": {"learning_rate": "3e-4"}}}, "algorithm.cfg.learning_rate: '3e-4' is not a number"),
    ({"algorithm": {"cfg": {"gamma": float("nan")}}}, "algorithm.cfg.gamma: nan is not a finite number"),
    ({"algorithm": {"cfg": {"gamma": True}}}, "algorithm.cfg.gamma: True is not a number"),
    ({"algorithm": {"cfg": {"compile": 1}}}, "algorithm.cfg.compile: 1 is not true or false"),
    ({"algorithm": {"name": "a2c"}}, f"algorithm.name: 'a2c' is not allowed; one of {quoted(ALGORITHM_SETTINGS)}"),
    ({"algorithm": {"name": 3}}, "algorithm.name: 3 is not text"),
    ({"algorithm": {"cfg": [1]}}, "algorithm.cfg: [1] is not a mapping of settings"),
    ({"trainer": {"buffer_type": "ring"}}, "trainer.buffer_type: 'ring' is not allowed; one of 'standard', 'vla'"),
    ({"trainer": None}, "trainer: None is not a mapping of settings"),
    ({"trainer": {"iterations": 0}}, "trainer.iterations: 0 is out of range; must be at least 1"),
    ({"env": {"num_envs": "four"}}, "env.num_envs: 'four' is not a whole number"),
    ({"env": {"num_envs": "64"}}, "env.num_envs: '64' is not a whole number"),
    ({"env": {"num_envs": 64.5}}, "env.num_envs: 64.5 is not a whole number"),
    ({"env": {"num_envs": True}}, "env.num_envs: True is not a whole number"),
    ({"env": {"kwargs": [1]}}, "env.kwargs: [1] is not a mapping"),
    ({"env": 3}, "env: 3 is not a mapping of settings"),
    ({"policy": {"hidden_sizes": 64}}, "policy.hidden_sizes: 64 is not a list"),
    ({"policy": {"hidden_sizes": [64, 0]}}, "policy.hidden_sizes[1]: 0 is out of range; must be at least 1"),
    ({"policy": "vla"}, "policy: name 'vla' needs vla_config with at least model_class"),
    (
        {"policy": {"name": "vla", "vla_config": {"model_path": "a.pth"}}},
        "policy.vla_config.model_class: missing; it must be given",
    ),
    (
        {"policy": {"name": "vla", "vla_config": {"model_clas": "a.B"}}},
        "policy.vla_config.model_clas: unknown setting; did you mean 'model_class'? (and 1 more)",
    ),
    ({"seed": -1, "threads": 0, "device": 3}, "seed: -1 is out of range; must be at least 0 (and 2 more)"),
    ({1: 2}, "[1]: 1 is not the name of a setting"),
    ([], "[] is not a mapping of settings"),
]


@pytest.mark.parametrize(("mapping", "line"), WRONG)
def test_a_wrong_mapping_raises_an_error_in_one_line(mapping: Any, line: str) -> None:
    with pytest.raises(InputError) as error:
        resolve(mapping)
    assert line_of(error) == line


WRONG_FILES = [
    ("c.json", "", "the file is empty"),
    ("c.yaml", "# nothing\n", "the file is empty"),
    ("c.json", "// nothing\n", "the file is empty"),
    ("c.json", "[1, 2]", "[1, 2] is not a mapping of settings"),
    ("c.yaml", "- 1\n", "[1] is not a mapping of settings"),
    ("c.json", '{\n  "seed": 1\n  "device": "cpu"\n}', "line 3: not valid JSON: Expecting ',' delimiter"),
    ("c.json", '{\n/* two\nlines */\n  "seed" 1}', "line 4: not valid JSON: Expecting ':' delimiter"),
    ("c.yaml", "seed: 1\n device: cpu\n", "line 2: not valid YAML: mapping values are not allowed here"),
    ("c.json", '{\n  "seed": 1,\n  ...\n}', "line 3: '...' is a placeholder; replace or remove it"),
    ("c.yaml", "trainer:\n  ...\n", "line 2: '...' is a placeholder; replace or remove it"),
    ("c.json", '{"seed": 1, "seed": 2}', "'seed' is given twice in one section"),
    ("c.yaml", "seed: 1\nseed: 2\n", "line 2: not valid YAML: 'seed' is given twice in one section"),
    ("c.txt", "seed: 1\n", "the ending '.txt' is not one of .json, .jsonc, .yaml, .yml"),
]


@pytest.mark.parametrize(("name", "text", "line"), WRONG_FILES)
def test_a_wrong_file_raises_an_error_in_one_line(tmp_path: Path, name: str, text: str, line: str) -> None:
    path = written(tmp_path, name, text)
    with pytest.raises(InputError) as error:
        read_mapping(path)
    assert line_of(error) in (f"{path}: {line}", f"{path}, {line}")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        load_config(tmp_path / "none.json")
    assert line_of(error) == f"{tmp_path / 'none.json'}: no such config file"
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot be read as text"):
        load_config(tmp_path / "binary.json")
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(InputError, match="cannot be read as text"):
        load_config(tmp_path / "folder.yaml")


def test_presets_are_found_by_their_bare_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "PRESETS", tmp_path)
    written(tmp_path, "cartpole-ppo.yaml", "env: CartPole-v1\n")
    assert load_config("cartpole-ppo").env.id == "CartPole-v1"
    with pytest.raises(InputError) as error:
        load_config("cartpole-pp")
    assert line_of(error) == "cartpole-pp: no such config file or recipe; did you mean 'cartpole-ppo'?"


def test_written_settings_read_back_equal(tmp_path: Path) -> None:
    kwargs = {"text": "3e-4", "yes": "yes", "small": 1e-7, "none": None, "time": "1:30", "nested": {"list": [1, "on"]}}
    settings = {
        "env.kwargs": kwargs,
        "algorithm.cfg.lr": 1e-5,
        "policy.hidden_sizes": [256, 128],
        "policy.name": "vla",
        "policy.vla_config.model_class": "a.B",
        "output_dir": "outputs/ä b",
        "trainer.iterations": 500,
    }
    config = replace(RunConfig(), **settings)
    path = tmp_path / "the run" / "config.yaml"
    path.parent.mkdir()
    write_config(config, path)
    assert load_config(path) == config
    command = f"#   deft train --config '{path}' --output-dir ANOTHER_FOLDER"
    assert path.read_text(encoding="utf-8").splitlines()[1] == command
    assert [entry.name for entry in path.parent.iterdir()] == ["config.yaml"]


def test_settings_that_cannot_be_written_raise_an_error(tmp_path: Path) -> None:
    config = replace(RunConfig(), **{"env.kwargs": {"function": print}})
    with pytest.raises(InputError, match="cannot be written"):
        write_config(config, tmp_path / "config.yaml")
    assert list(tmp_path.iterdir()) == []


def test_replace_leaves_the_original_alone() -> None:
    config = RunConfig()
    changed = replace(config, seed=3, **{"trainer.rollout_steps": 64})
    assert (changed.seed, changed.trainer.rollout_steps) == (3, 64)
    assert config == RunConfig()
    with pytest.raises(InputError, match=r"^trainer.rolout_steps: unknown setting; did you mean 'rollout_steps'\?$"):
        replace(config, **{"trainer.rolout_steps": 64})


def test_resolve_does_not_change_what_it_is_given() -> None:
    mapping = {"env": "CartPole-v1", "trainer": {"rollout_steps": 8}}
    resolve(mapping)
    assert mapping == {"env": "CartPole-v1", "trainer": {"rollout_steps": 8}}


def test_to_dict_is_what_resolve_takes() -> None:
    assert resolve(to_dict(RunConfig())) == RunConfig()
    assert to_dict(RunConfig())["policy"]["hidden_sizes"] == [64, 64]
