import pytest
import torch
from torch import nn

from training import checkpoint
from training.checkpoint import load_weights, read_checkpoint, save_checkpoint
from training.config import ConfigError

CPU = torch.device("cpu")


def state(model):
    return {**dict.fromkeys(checkpoint.KEYS), "model": model.state_dict(), "step": 3}


def test_a_checkpoint_is_read_from_its_file_or_from_its_runs_folder(tmp_path):
    model = nn.Linear(2, 3)
    file = tmp_path / "checkpoints" / "last.pt"
    save_checkpoint(file, state(model))
    for resume in (file, file.parent, tmp_path):
        path, loaded = read_checkpoint(str(resume), CPU)
        assert path == file and loaded["step"] == 3
        assert torch.equal(loaded["model"]["weight"], model.weight)
    assert [path.name for path in file.parent.iterdir()] == ["last.pt"]


def test_a_crash_while_saving_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    file = tmp_path / "last.pt"
    save_checkpoint(file, state(nn.Linear(2, 3)))

    def crash(state, file):
        file.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(checkpoint.torch, "save", crash)
    with pytest.raises(OSError):
        save_checkpoint(file, {})
    assert read_checkpoint(str(file), CPU)[1]["step"] == 3


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 half a zip"])
def test_a_damaged_file_is_refused_with_its_name(tmp_path, content):
    (tmp_path / "last.pt").write_bytes(content)
    with pytest.raises(ConfigError, match=r"last\.pt cannot be read as a checkpoint"):
        read_checkpoint(str(tmp_path), CPU)


def test_a_file_with_weights_alone_is_refused(tmp_path):
    torch.save(nn.Linear(1, 1).state_dict(), tmp_path / "weights.pt")
    with pytest.raises(ConfigError, match="has no training state"):
        read_checkpoint(str(tmp_path / "weights.pt"), CPU)


def test_a_missing_checkpoint_is_refused_with_the_key(tmp_path):
    with pytest.raises(ConfigError, match=r"^train\.resume=.*nowhere does not exist"):
        read_checkpoint(str(tmp_path / "nowhere"), CPU)
    with pytest.raises(ConfigError, match=r"has no checkpoints/last\.pt"):
        read_checkpoint(str(tmp_path), CPU)


@pytest.mark.parametrize("other", [nn.Linear(2, 4), nn.Sequential(nn.Linear(2, 3))])
def test_weights_of_another_model_are_refused_with_the_first_difference(tmp_path, other):
    with pytest.raises(
        ConfigError, match=r"does not fit this run's Linear: \S+ is .* in the checkpoint and .* in the model"
    ):
        load_weights(nn.Linear(2, 3), other.state_dict(), tmp_path)
