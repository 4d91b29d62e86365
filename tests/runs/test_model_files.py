"""The files of a model that an export contains, and the settings that name them."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from deft.config.loading import resolve
from deft.runs.model_files import export_files, find_files, with_absolute_paths


def config(**model_config: Any) -> Any:
    vla = {"model_class": "smolvla", "model_path": "model", "model_config": model_config}
    return resolve({"algorithm": "ppo", "policy": {"name": "vla", "vla_config": vla}})


def test_an_export_has_the_files_without_the_weights(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("model/parts", "model/.cache", "words", "bytes"):
        Path(folder).mkdir(parents=True)
    statistics = {"normalize_inputs.buffer_observation_state.mean": torch.ones(2)}  # of LeRobot before 0.4
    save_file({**statistics, "model.layer.weight": torch.zeros(4)}, "model/model.safetensors")
    save_file({"action.mean": torch.ones(2)}, "model/policy_preprocessor_step_3.safetensors")
    for file in ("config.json", "parts/metadata.json", ".cache/lock", "action_head--10_checkpoint.pt"):
        (Path("model") / file).write_text("{}")
    Path("words/tokenizer.json").write_text("{}")
    Path("statistics.json").write_text("{}")
    run = config(vlm_folder="words", tokenizer="bytes", statistics="statistics.json", prompt_length=8)

    absolute = with_absolute_paths(run).policy.vla_config
    assert absolute.model_path == str(tmp_path / "model")
    assert absolute.model_config == {
        "vlm_folder": str(tmp_path / "words"),
        "tokenizer": "bytes",  # a mode, not the folder of this name
        "statistics": str(tmp_path / "statistics.json"),
        "prompt_length": 8,
    }
    out = tmp_path / "exported"
    written = export_files(with_absolute_paths(run), out)
    assert written.policy.vla_config.model_config["statistics"] == "model_files/statistics/statistics.json"
    files = {str(file.relative_to(out / "model_files")): file for file in out.rglob("*") if file.is_file()}
    assert sorted(files) == [
        "model_path/action_head--10_checkpoint.pt",
        "model_path/config.json",
        "model_path/model.safetensors",
        "model_path/parts/metadata.json",
        "model_path/policy_preprocessor_step_3.safetensors",
        "statistics/statistics.json",
        "vlm_folder/tokenizer.json",
    ]
    assert files["model_path/action_head--10_checkpoint.pt"].stat().st_size == 0
    assert load_file(files["model_path/model.safetensors"]).keys() == statistics.keys()
    assert load_file(files["model_path/policy_preprocessor_step_3.safetensors"]).keys() == {"action.mean"}

    out.rename(tmp_path / "moved")
    found = find_files(written, Path("moved")).policy.vla_config
    assert found.model_path == str(tmp_path / "moved/model_files/model_path")
    assert found.model_config["vlm_folder"] == str(tmp_path / "moved/model_files/vlm_folder")
    assert found.model_config["tokenizer"] == "bytes"


def test_a_policy_from_scratch_has_no_files(tmp_path: Path) -> None:
    run = resolve({"algorithm": "ppo"})
    assert export_files(run, tmp_path) == find_files(run, tmp_path) == with_absolute_paths(run) == run
    assert not list(tmp_path.iterdir())
