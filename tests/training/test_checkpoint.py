import errno
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch

from deft.errors import InputError, RunError
from deft.training import checkpoint
from deft.training.checkpoint import (
    clean_temporary,
    find_checkpoint,
    latest_whole_checkpoint,
    list_checkpoints,
    load_part,
    load_training_state,
    load_weights,
    mark_best,
    prune_checkpoints,
    save_checkpoint,
)


def save(run_dir, step, **state):
    return save_checkpoint(run_dir, step, {"w": torch.full((3,), float(step))}, state, {"loss": 1.0})


def test_layout_and_content(tmp_path):
    folder = save(tmp_path, 500, counter=7)
    assert folder == tmp_path / "checkpoint-500"
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.pt", "model.pt", "training_state.pt"]
    assert load_training_state(folder)["counter"] == 7
    assert load_part(folder, "model.pt")["w"].tolist() == [500.0] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-500"]  # nothing temporary stays


def test_latest_is_by_number_not_by_name(tmp_path):
    for step in (900, 1000, 20):
        save(tmp_path, step)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-20", "checkpoint-900", "checkpoint-1000"]
    assert find_checkpoint(tmp_path).name == "checkpoint-1000"


def test_saving_again_at_a_step_replaces(tmp_path):
    save(tmp_path, 5, counter=1)
    folder = save(tmp_path, 5, counter=2)
    assert load_training_state(folder)["counter"] == 2
    assert len(list(tmp_path.iterdir())) == 1


def test_last_k_and_best_are_kept(tmp_path):
    for step in range(1, 6):
        folder = save(tmp_path, step)
        if step == 2:
            mark_best(tmp_path, folder)
    prune_checkpoints(tmp_path, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]
    assert find_checkpoint(tmp_path / "best").name == "checkpoint-2"


def test_half_written_checkpoints_are_never_picked_up(tmp_path):
    save(tmp_path, 1)
    (tmp_path / ".tmp-checkpoint-2-123").mkdir()
    (tmp_path / ".tmp-checkpoint-2-123" / "model.pt").write_bytes(b"half")
    assert find_checkpoint(tmp_path).name == "checkpoint-1"
    clean_temporary(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def test_killed_between_the_two_renames(tmp_path):
    """A checkpoint that stepped aside for its successor is put back when the successor never came."""
    folder = save(tmp_path, 5, counter=1)
    os.replace(folder, tmp_path / ".tmp-replaced-checkpoint-5-999")
    clean_temporary(tmp_path)
    assert load_training_state(tmp_path / "checkpoint-5")["counter"] == 1


def test_a_process_killed_while_writing_leaves_the_last_whole_one(tmp_path):
    script = textwrap.dedent(f"""
        import os, signal, torch
        from pathlib import Path
        from deft.training import checkpoint
        run = Path({str(tmp_path)!r})
        checkpoint.save_checkpoint(run, 1, {{"w": torch.zeros(3)}}, {{}}, {{}})
        real = torch.save
        def save(content, file):
            real(content, file)
            if "format" in content:                      # in the middle: two of three files are there
                os.kill(os.getpid(), signal.SIGKILL)
        torch.save = save
        checkpoint.save_checkpoint(run, 2, {{"w": torch.zeros(3)}}, {{}}, {{}})
    """)
    assert subprocess.run([sys.executable, "-c", script]).returncode == -signal.SIGKILL
    path, problems = latest_whole_checkpoint(tmp_path)
    assert path is not None
    assert path.name == "checkpoint-1"
    assert problems == []


def test_a_full_disk_is_said_and_loses_nothing(tmp_path, monkeypatch):
    save(tmp_path, 1, counter=1)

    def no_space(content, file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint.torch, "save", no_space)
    with pytest.raises(RunError, match=r"checkpoint-2 could not be written .*no space left on the disk"):
        save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def test_truncated_files_are_named_and_passed_over(tmp_path):
    save(tmp_path, 1)
    folder = save(tmp_path, 2)
    model = folder / "model.pt"
    model.write_bytes(model.read_bytes()[:200])
    with pytest.raises(InputError, match=r"model\.pt: damaged"):
        load_part(folder, "model.pt")
    path, problems = latest_whole_checkpoint(tmp_path)
    assert path is not None
    assert path.name == "checkpoint-1"
    assert len(problems) == 1
    (folder / "model.pt").unlink()
    with pytest.raises(InputError, match="missing"):
        load_part(folder, "model.pt")


class Evil:
    def __reduce__(self):
        return (os.system, ("echo evil",))


def test_foreign_files_are_refused(tmp_path):
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    torch.save({"state_dict": {}}, folder / "training_state.pt")
    with pytest.raises(InputError, match="not a Deft checkpoint"):
        load_training_state(folder)
    torch.save(Evil(), folder / "training_state.pt")
    with pytest.raises(InputError, match="Python objects"):
        load_training_state(folder)
    (folder / "training_state.pt").write_text("hello")
    with pytest.raises(InputError, match="damaged, cut short, or not a file"):
        load_training_state(folder)


def test_weights_that_do_not_fit_are_named():
    module = torch.nn.Linear(3, 2)
    with pytest.raises(InputError, match=r"missing bias; unexpected extra; weight is \(5, 5\), expected \(2, 3\)"):
        load_weights(module, {"weight": torch.zeros(5, 5), "extra": torch.zeros(1)}, "file.pt")
    with pytest.raises(InputError, match="state dict"):
        load_weights(module, {"weight": 3}, "file.pt")  # type: ignore[dict-item]


def test_paths_that_are_no_checkpoint(tmp_path):
    with pytest.raises(InputError, match="no such checkpoint"):
        find_checkpoint(tmp_path / "nothing")
    with pytest.raises(InputError, match="neither a checkpoint"):
        find_checkpoint(tmp_path)
    (tmp_path / "model.pth").write_text("x")
    with pytest.raises(InputError, match="is a folder"):
        find_checkpoint(tmp_path / "model.pth")


def test_only_a_checkpoint_is_replaced(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "notes.txt").write_text("hi")
    with pytest.raises(InputError, match="is not a checkpoint; it is not replaced"):
        save_checkpoint(tmp_path, 1, {}, {}, {}, name="precious")
    assert (tmp_path / "precious" / "notes.txt").read_text() == "hi"
    save_checkpoint(tmp_path, 1, {"w": torch.zeros(1)}, {}, {}, name="mine")
    save_checkpoint(tmp_path, 2, {"w": torch.ones(1)}, {}, {}, name="mine")
    assert load_part(tmp_path / "mine", "model.pt")["w"].item() == 1.0


def test_one_process_a_folder(tmp_path):
    script = (
        "import sys; from pathlib import Path; from deft.errors import InputError\n"
        "from deft.training.checkpoint import folder_lock\n"
        f"with folder_lock(Path({str(tmp_path)!r})): pass\n"
    )
    with checkpoint.folder_lock(tmp_path):
        refused = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert "another process is training" in refused.stderr
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
