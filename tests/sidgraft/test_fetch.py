"""Models on their way to the object store: named by their content, once, and told where they cannot be had."""

import pytest

from sidgraft import fetch, storage


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_other_weights_get_another_address_and_the_same_are_sent_once(model, tmp_path, capsys):
    place = tmp_path / "store"  # a folder stands in for the store here
    assert fetch.main([str(model), str(place)]) == 0
    address = capsys.readouterr().out.strip()
    assert address.startswith(f"{place}/small-")
    assert storage.read_text(f"{address}/model.safetensors") == "weights"
    (place / address.rsplit("/")[-1] / "mark").touch()
    assert fetch.fetch(str(model), f"{place}/") == address
    assert (place / address.rsplit("/")[-1] / "mark").exists()  # not sent again
    (model / "model.safetensors").write_bytes(b"weightt")
    assert fetch.fetch(str(model), str(place)) != address


def test_a_hubs_model_is_named_by_its_commit(model, tmp_path, monkeypatch):
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = model.rename(tmp_path / commit)
    asked = []

    def download(name, revision, allow_patterns):
        asked.append((name, revision, allow_patterns))
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    address = fetch.fetch("team/base-1b", str(tmp_path / "store"), revision="v1")
    assert address == f"{tmp_path}/store/base-1b-0123456789ab"
    assert asked[0][:2] == ("team/base-1b", "v1")
    assert not [pattern for pattern in asked[0][2] if pattern.endswith((".bin", ".pt", ".py"))]


def test_a_model_without_safetensors_is_told(model, tmp_path, capsys):
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert fetch.main([str(model), str(tmp_path / "store")]) == 1
    assert "holds no *.safetensors file" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


def test_a_hub_that_does_not_answer_is_told(tmp_path, monkeypatch, capsys):
    def download(*_, **__):
        raise OSError("no route to the hub\nmore")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert fetch.main(["team/base", str(tmp_path)]) == 1
    text = capsys.readouterr().err
    assert "'team/base' is no directory here, and the hub does not give it: no route to the hub Check the name" in text
    assert text.count("\n") == 1
