import errno
import os
import random
import signal
import subprocess
import sys
import textwrap

import pytest
import torch

from deft import ownership
from deft.errors import InputError, RunError
from deft.models.vla.loading import read_weights
from deft.ownership import MANIFEST, relative_files, verify_folder
from deft.runs import checkpoint
from deft.runs.checkpoint import (
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
    assert sorted(path.name for path in folder.iterdir()) == [
        "deft_manifest.json",
        "metrics.pt",
        "model.pt",
        "training_state.pt",
    ]
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
    prune_checkpoints(tmp_path, keep=2, step=5)
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
        from deft.runs import checkpoint
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


def test_foreign_files_are_rejected(tmp_path):
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
        "from deft.runs.checkpoint import folder_lock\n"
        f"with folder_lock(Path({str(tmp_path)!r})): pass\n"
    )
    with checkpoint.folder_lock(tmp_path):
        second = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert "another process is training" in second.stderr
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


# -- checksums ---------------------------------------------------------------------------------------------------------


def flip(path, bit):
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def earlier(folder):
    """Make a checkpoint one of the versions that wrote no manifest."""
    (folder / MANIFEST).unlink()
    return folder


def test_every_flipped_bit_is_detected(tmp_path):
    """20 single-bit flips in each of the files, the manifest included: 120 of 120 are an error that names a file."""

    def write_more(folder):
        (folder / "peft_adapter").mkdir()
        (folder / "peft_adapter" / "adapter_config.json").write_text("{}" * 50)
        torch.save({"noise": torch.arange(50)}, folder / "process-1.pt")

    weights = {"w": torch.arange(300.0)}
    folder = save_checkpoint(tmp_path, 1, weights, {"counter": 7}, {"loss": 1.0}, write_more=write_more)
    names = relative_files(folder)
    assert len(names) == 6
    generator = random.Random(0)
    for name in names:
        path = folder / name
        whole = path.read_bytes()
        for bit in generator.sample(range(8 * len(whole)), 20):
            flip(path, bit)
            with pytest.raises(InputError, match=r"damaged.*use another checkpoint"):
                verify_folder(folder)
            if name.endswith(".pt"):
                with pytest.raises(InputError, match=rf"{name}: damaged"):
                    load_part(folder, name)
            path.write_bytes(whole)
    assert verify_folder(folder)


def test_a_file_is_hashed_once_and_again_when_it_changes(tmp_path, monkeypatch):
    folder = save(tmp_path, 1)
    hashed = []
    entry_of = ownership._entry_of
    monkeypatch.setattr(ownership, "_entry_of", lambda path: hashed.append(path.name) or entry_of(path))
    assert latest_whole_checkpoint(tmp_path) == (folder, [])
    load_part(folder, "model.pt")
    load_training_state(folder)
    assert sorted(hashed) == ["metrics.pt", "model.pt", "training_state.pt"]  # each once, by the first line
    flip(folder / "model.pt", 4000)
    with pytest.raises(InputError, match="hash differs"):
        load_part(folder, "model.pt")


def test_weights_read_by_a_model_are_verified_too(tmp_path):
    """`checkpoint_path` of an F1 policy and `model_path` of a VLA model read files of a checkpoint themselves."""

    def write_more(folder):
        (folder / "explorer").mkdir()
        torch.save({"w": torch.zeros(40)}, folder / "explorer" / "model.pt")

    folder = save_checkpoint(tmp_path, 1, {"w": torch.zeros(40)}, {}, {}, write_more=write_more)
    for path in (folder / "model.pt", folder / "explorer" / "model.pt"):
        assert read_weights(path)["w"].shape == (40,)
        flip(path, 8 * path.read_bytes().index(b"\x00" * 160) + 80)  # in the middle of the zeros
        with pytest.raises(InputError, match=r"model\.pt: damaged: its hash differs"):
            read_weights(path)


def test_auto_resume_uses_the_last_good_checkpoint_and_pruning_keeps_it(tmp_path):
    """With keep=1, counting the damaged checkpoint-3 as the latest would delete the good ones."""
    for step in (1, 2, 3):
        save(tmp_path, step)
    flip(tmp_path / "checkpoint-3" / "training_state.pt", 5000)
    path, problems = latest_whole_checkpoint(tmp_path)
    assert path == tmp_path / "checkpoint-2"
    assert len(problems) == 1
    assert "checkpoint-3/training_state.pt: damaged" in problems[0]
    prune_checkpoints(tmp_path, keep=1, step=2)
    assert latest_whole_checkpoint(tmp_path)[0] == path
    save(tmp_path, 3)
    prune_checkpoints(tmp_path, keep=1, step=3)
    assert latest_whole_checkpoint(tmp_path) == (tmp_path / "checkpoint-3", [])
    assert not path.exists()


def test_checkpoints_of_earlier_versions_load_and_their_own_crcs_are_checked(tmp_path):
    save(tmp_path, 1)
    folder = earlier(save(tmp_path, 2, counter=7))
    assert latest_whole_checkpoint(tmp_path) == (folder, [])
    assert load_training_state(folder)["counter"] == 7
    model = folder / "model.pt"
    flip(model, 8 * model.read_bytes().index(torch.full((3,), 2.0).numpy().tobytes()) + 3)  # a bit of a weight
    with pytest.raises(InputError, match=r"model\.pt: damaged: its content differs from its checksums"):
        load_part(folder, "model.pt")
    assert latest_whole_checkpoint(tmp_path)[0] == tmp_path / "checkpoint-1"


def test_files_saved_without_crcs_are_loaded(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.ones(3)}, tmp_path / "mine.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert checkpoint.load_tensors(tmp_path / "mine.pt")["w"].tolist() == [1.0] * 3


# -- only what Deft wrote is deleted -----------------------------------------------------------------------------------


def test_folders_that_deft_did_not_write_are_neither_listed_nor_deleted(tmp_path):
    foreign = {"checkpoint-1/thesis.txt": "mine", "checkpoint-4/model.safetensors": "x", "checkpoint-3/model.pt": "x"}
    for name, text in foreign.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    (tmp_path / "elsewhere").mkdir()
    save(tmp_path / "elsewhere", 2)
    (tmp_path / "checkpoint-2").symlink_to("elsewhere/checkpoint-2")
    for step in (10, 20):
        save(tmp_path, step)
    prune_checkpoints(tmp_path, keep=1, step=20)
    assert not (tmp_path / "checkpoint-10").exists()
    assert {name: (tmp_path / name).read_text() for name in foreign} == foreign
    assert (tmp_path / "checkpoint-2" / "model.pt").is_file()
    listed = [path.name for path in list_checkpoints(tmp_path)]
    assert "checkpoint-1" not in listed
    assert "checkpoint-4" not in listed


@pytest.mark.parametrize("is_earlier", [False, True])
def test_a_foreign_file_in_a_checkpoint_survives_pruning(tmp_path, is_earlier, caplog):
    folder = save(tmp_path, 1)
    if is_earlier:
        earlier(folder)
    (folder / "plots").mkdir()
    (folder / "plots" / "mine.png").write_text("mine")
    save(tmp_path, 2)
    prune_checkpoints(tmp_path, keep=1, step=2)
    assert relative_files(folder) == ["plots/mine.png"]
    assert "checkpoint-1: kept plots/mine.png, which Deft did not write" in caplog.text
    assert list_checkpoints(tmp_path) == [tmp_path / "checkpoint-2"]


def test_a_checkpoint_of_an_earlier_version_is_pruned_by_its_format(tmp_path):
    """Without a manifest the names alone are not enough: the training state must be one of Deft's."""
    for step in (1, 2, 3):
        earlier(save(tmp_path, step))
    torch.save({"format": "another"}, tmp_path / "checkpoint-1" / "training_state.pt")
    prune_checkpoints(tmp_path, keep=1, step=3)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-3"]


def test_a_deletion_that_was_interrupted_is_finished(tmp_path):
    folder = save(tmp_path, 5)
    (folder / "mine.txt").write_text("mine")
    doomed = tmp_path / ".tmp-deleted-checkpoint-5"
    os.replace(folder, doomed)
    (doomed / "model.pt").unlink()
    clean_temporary(tmp_path)
    assert relative_files(tmp_path) == ["checkpoint-5/mine.txt"]


def test_temporary_files_of_others_are_not_cleaned_away(tmp_path):
    (tmp_path / ".tmp-mine").mkdir()
    (tmp_path / ".tmp-mine" / "a").write_text("a")
    (tmp_path / ".tmp-b").write_text("b")
    (tmp_path / ".tmp-best-12").symlink_to("checkpoint-1")
    clean_temporary(tmp_path)
    assert relative_files(tmp_path) == [".tmp-b", ".tmp-mine/a"]


def test_what_stands_in_a_checkpoints_place_is_renamed(tmp_path, caplog):
    """Ending the run there would lose it, and replacing the folder would delete what is not Deft's."""
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5" / "thesis.txt").write_text("mine")
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "photo.jpg").write_text("mine")
    mark_best(tmp_path, save(tmp_path, 5))
    assert find_checkpoint(tmp_path / "best") == tmp_path / "checkpoint-5"
    assert (tmp_path / "checkpoint-5.kept" / "thesis.txt").read_text() == "mine"
    assert (tmp_path / "best.kept" / "photo.jpg").read_text() == "mine"
    assert "renamed to checkpoint-5.kept" in caplog.text
    (tmp_path / "checkpoint-5" / "notes.txt").write_text("mine")
    save(tmp_path, 5)  # again: the one with the notes is replaced
    assert (tmp_path / "checkpoint-5.kept1" / "notes.txt").read_text() == "mine"
    assert verify_folder(tmp_path / "checkpoint-5")


def test_an_unfinished_checkpoint_with_other_files_in_it_is_kept(tmp_path):
    for name in (".tmp-checkpoint-9-9/a.txt", ".tmp-checkpoint-8-8/model.pt", ".tmp-checkpoint-8-8/spaces.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    clean_temporary(tmp_path)
    assert relative_files(tmp_path) == [".tmp-checkpoint-9-9/a.txt"]
    assert [path.name for path in tmp_path.iterdir()] == [".tmp-checkpoint-9-9"]
