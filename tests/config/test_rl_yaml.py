"""The documents' `rl_config.yaml`: every key is read; files, flags and what is wrong with them."""

import subprocess
from pathlib import Path

import pytest
import yaml

import deft
from deft.config.aliases import ALIASES
from deft.config.rl_yaml import (
    get_environment_config,
    get_training_config,
    load_rl_config,
    parse_phase,
    phase_config,
    phase_of_file,
    read_phase_config,
    write_phase_config,
)
from deft.envs.f1 import read_task_config
from deft.errors import InputError

ROOT = Path(__file__).parents[2]
DOCUMENT = """
model:
  config_file: tiny
  lora: {r: 8, lora_alpha: 32, target_modules: ["q_proj", "v_proj"]}
training:
  num_episodes: 10000
  steps_per_episode: 50
  batch_size: 8
  learning_rate: 1e-4
  action_dim: 32
  state_dim: 32
  n_pred_img_steps: 1
  save_every: 200
  log_every: 10
  video_save_every: 1
  sample_save_every: 1
  sequential_training: true
  bptt_length: 8
  memory_backprop: true
environment:
  task_name: "random_exploration"
  control_mode: "delta_qpos"
  single_arm: true
  scene_reset_interval: 50
  embodiment: ["franka-panda"]
  domain_randomization: {random_appearance: false, random_background: true, random_light: true, cluttered_table: true}
logging: {console_level: "INFO", file_level: "CRITICAL", enable_file_logging: true}
teacher: {output_dir: "./outputs/teacher_rl"}
student:
  output_dir: "./outputs/student_rl"
  rewards: {memory_divergence_weight: 0.5, wm_uncertainty_weight: 0.5}
adversarial: {output_dir: "./outputs/adversarial_rl", total_iterations: 100000}
"""


@pytest.fixture
def document(tmp_path) -> Path:
    (tmp_path / "rl_config.yaml").write_text(DOCUMENT)
    return tmp_path / "rl_config.yaml"


def test_every_key_of_the_document_is_read(document):
    config = load_rl_config(document)

    def check(given, read):
        for name, value in given.items():
            if isinstance(value, dict) and name not in ("lora", "domain_randomization"):
                check(value, read[name])
            else:
                assert read[name] == (1e-4 if value == "1e-4" else value), name

    check(yaml.safe_load(DOCUMENT), config)
    assert config.model.config_file == "tiny"  # as an attribute too
    assert config.student.rewards.wm_uncertainty_weight == 0.5
    config.training.num_episodes = 5  # what is set stays set, in sections too
    assert get_training_config(config).num_episodes == config["training"]["num_episodes"] == 5
    with pytest.raises(AttributeError, match="no 'models'"):
        config.models  # noqa: B018
    training = get_training_config(config)
    assert (training.bptt_length, training.learning_rate, training.video_freq) == (8, 1e-4, 1)
    assert isinstance(training, deft.TrainingConfig)
    environment = get_environment_config(config)
    task = read_task_config(environment, {})
    assert (task.scene_reset_interval, task.max_steps) == (50, 50)
    assert read_task_config(config, {}).domain_randomization["cluttered_table"]  # a whole config does as well


def test_the_preset_has_every_key_of_the_document():
    shipped = yaml.safe_load((ROOT / "deft/config/presets/rl_config.yaml").read_text())
    for section, values in yaml.safe_load(DOCUMENT).items():
        assert {ALIASES.get(name, name) for name in values.keys() - {"lora"}} <= shipped[section].keys()
    assert get_training_config(load_rl_config()) == read_phase_config("rl_config").training


def test_flags_come_before_the_file(document):
    flags = [
        "--num_episodes",
        "7",
        "--no-sequential-training",
        "--environment",
        "image_size=32",
        "--output-dir",
        "here",
    ]
    config, as_json = parse_phase("teacher", [*flags, "--auto_resume", "--json"], document)
    assert (config.training.num_episodes, config.training.sequential_training) == (7, False)
    assert config.environment["image_size"] == 32
    assert config.environment["scene_reset_interval"] == 50  # the file's
    assert config.teacher.output_dir == "here"
    assert config.run.auto_resume
    assert config.phase == "teacher"
    assert config.model.lora["r"] == 8
    assert as_json


def test_a_written_config_reads_back_equal(tmp_path, document):
    config, _ = parse_phase("teacher", ["--resume", "somewhere"], document)
    write_phase_config(config, tmp_path / "config.yaml")
    again = read_phase_config(tmp_path / "config.yaml")
    assert again.run.resume is None  # how the process came to it is not part of it
    again.run.resume = "somewhere"
    assert again == config
    assert phase_of_file(tmp_path / "config.yaml") == "teacher"
    assert phase_of_file(document) is None
    with pytest.raises(InputError, match="is of phase 'teacher'"):
        parse_phase("student", [], tmp_path / "config.yaml")


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"training": {"bptt_lenght": 8}}, "training.bptt_lenght: unknown setting; did you mean 'bptt_length'"),
        ({"training": {"action_dim": 7}}, "training.action_dim: 7 is not allowed; one of 32"),
        ({"training": {"batch_size": 0}}, "training.batch_size: 0 is out of range; must be at least 1"),
        ({"models": {}}, "models: unknown setting; did you mean 'model'"),
    ],
)
def test_a_wrong_setting_is_an_error_of_one_line(mapping, message):
    with pytest.raises(InputError, match=message):
        phase_config(mapping)


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["teacher"], "-m deft train teacher --num_envs 1"),
        (["teacher", "1", "3", "--num_episodes", "9"], "-m deft train teacher --num_envs 3 --num_episodes 9"),
        (["teacher", "--auto_resume"], "-m deft train teacher --num_envs 1 --auto_resume"),
    ],
)
def test_the_launcher_of_the_documents(words, output):
    script = [str(ROOT / "scripts" / "train.sh"), *words]
    done = subprocess.run(
        script, env={"PYTHON": "echo", "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == output


def test_the_launcher_starts_a_process_for_each_gpu():
    script = [str(ROOT / "scripts" / "train.sh"), "teacher", "4", "2", "--auto_resume"]
    environment = {"PYTHON": "echo", "PATH": "/usr/bin:/bin"}
    output = subprocess.run(script, env=environment, capture_output=True, text=True, check=True).stdout
    assert "--nproc_per_node 4 " in output
    assert output.strip().endswith("-m deft train teacher --num_envs 2 --auto_resume")
    wrong = subprocess.run([script[0], "techer"], env=environment, capture_output=True, text=True)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("usage: scripts/train.sh")


def test_output_base_stands_for_outputs(document, tmp_path, monkeypatch):
    """In the defaults and in the document's file; a directory that is named otherwise stays what it is."""
    monkeypatch.setenv("OUTPUT_BASE", str(tmp_path / "base"))
    for config in (read_phase_config("rl_config"), read_phase_config(document)):
        assert config.teacher.output_dir == str(tmp_path / "base" / "teacher_rl")
        assert config.adversarial.output_dir == str(tmp_path / "base" / "adversarial_rl")
    assert load_rl_config(document).student.output_dir == str(tmp_path / "base" / "student_rl")
    assert parse_phase("teacher", [], document)[0].teacher.output_dir == str(tmp_path / "base" / "teacher_rl")
    named = parse_phase("teacher", ["--output_dir", "outputs/mine"], document)[0]
    assert named.teacher.output_dir == "outputs/mine"
    document.write_text(DOCUMENT.replace("./outputs/teacher_rl", "/data/teacher"))
    assert read_phase_config(document).teacher.output_dir == "/data/teacher"
    monkeypatch.delenv("OUTPUT_BASE")
    assert parse_phase("student", [], document)[0].student.output_dir == "./outputs/student_rl"
