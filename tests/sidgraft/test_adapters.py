"""Adapters: exactly what trains, and that the merged model is the trained one."""

import sys

import pytest
import torch
from test_training import make, some_samples
from transformers import AutoModelForCausalLM

from sidgraft import adapters
from sidgraft.attention import Packing
from sidgraft.models import is_tied
from sidgraft.training import GraftTrainer, Samples, arguments, pack_step, supervise
from sidgraft.validation import save_best

FLOAT32 = {"rank": 4, "alpha": 16.0, "dropout": 0.0, "dtype": torch.float32, "seed": 0}


def train(tmp_path, mode, *, tied=True, dtype=torch.float32):
    """A model before and after three steps: its state by name, and itself."""
    model, vocabulary, _ = make(tied=tied)
    model = model.float()
    if mode != "full":
        adapters.adapt(model, mode, **(FLOAT32 | {"dtype": dtype}))
    supervise(model)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    options = {"max_steps": 3, "learning_rate": 1e-2, "bf16": dtype == torch.bfloat16}
    settings = arguments(tmp_path / "run", checkpoints=False, batch_size=2, seed=0, **options)
    samples = Samples(some_samples(vocabulary))
    GraftTrainer(model=model, args=settings, train_dataset=samples, data_collator=pack_step).train()
    return before, model.eval(), vocabulary


def logits(model, **packing):
    with torch.no_grad():
        return model(input_ids=torch.arange(20)[None], **packing).logits


@pytest.mark.parametrize("mode", ["full", "lora", "qlora"])
@pytest.mark.parametrize("tied", [True, False])
def test_exactly_the_intended_parameters_move(tmp_path, mode, tied):
    if mode == "qlora":
        pytest.importorskip("bitsandbytes")
    before, model, _ = train(tmp_path, mode, tied=tied)
    moved = {name for name, tensor in model.named_parameters() if not torch.equal(tensor, before[name])}
    if mode == "full":
        assert moved == set(before)
        return
    ends = {"model.embed_tokens.weight"} if tied else {"model.embed_tokens.weight", "lm_head.weight"}
    attention = [f"self_attn.{p}_proj" for p in "qkvo"]
    projections = [*attention, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    matrices = {f"model.layers.{i}.{p}.lora_{m}.default.weight" for i in (0, 1) for p in projections for m in "AB"}
    assert moved == ends | matrices
    assert is_tied(model) == tied


@pytest.mark.parametrize("mode", ["full", "lora", "qlora"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_merged_model_reloads_anywhere_with_the_trained_logits(tmp_path, mode, tied):
    if mode == "qlora":
        pytest.importorskip("bitsandbytes")
    before, model, _ = train(tmp_path, mode, tied=tied)
    save_best(model, tmp_path / "best")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "best")
    assert is_tied(loaded) == tied
    assert not [name for name, _ in loaded.named_parameters() if "lora" in name or "base_layer" in name]
    packing = Packing.of([20])
    trained = logits(model, position_ids=packing.positions_1U, packing=packing)
    assert trained.std() > 0.1
    torch.testing.assert_close(logits(loaded), trained, rtol=1e-4, atol=1e-5)
    if mode == "lora":  # by the formula, in float64
        name = "model.layers.1.mlp.down_proj"
        factors = [model.get_parameter(f"{name}.lora_{m}.default.weight").double() for m in "AB"]
        expected = before[f"{name}.base_layer.weight"].double() + 16 / 4 * factors[1] @ factors[0]
        torch.testing.assert_close(loaded.get_parameter(f"{name}.weight").double(), expected, rtol=1e-5, atol=1e-6)


def test_frozen_projections_are_kept_in_the_given_precision_and_what_trains_in_float32(tmp_path):
    _, model, _ = train(tmp_path, "lora", dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.bfloat16 if ".base_layer." in name else torch.float32), name


def test_a_model_without_the_projections_is_refused():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"no q_proj, k_proj.*use mode=full"):
        adapters.adapt(model, "lora", **FLOAT32)


def no_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    return "import of bitsandbytes"


def no_kernel_that_quantizes(monkeypatch):
    functional = pytest.importorskip("bitsandbytes.functional")
    monkeypatch.setattr(functional, "quantize_4bit", refuse("no kernel here.\nIts second line."))
    return "no kernel here)"


def no_kernel_that_computes(monkeypatch):
    nn = pytest.importorskip("bitsandbytes.nn")
    monkeypatch.setattr(nn.Linear4bit, "forward", refuse("cannot multiply"))
    return "cannot multiply"


def no_kernel_for_gradients(monkeypatch):
    functions = pytest.importorskip("bitsandbytes.autograd._functions")
    monkeypatch.setattr(functions.MatMul4Bit, "backward", staticmethod(refuse("no way back")))
    return "no way back"


def refuse(text):
    def fail(*_, **__):
        raise NotImplementedError(text)

    return fail


WITHOUT = [no_package, no_kernel_that_quantizes, no_kernel_that_computes, no_kernel_for_gradients]


@pytest.mark.parametrize("missing", WITHOUT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_four_bit_layers_qlora_becomes_lora_and_says_why(monkeypatch, missing, dtype):
    cause = missing(monkeypatch)
    adapters.check("qlora", "none")
    mode, why = adapters.possible("qlora", dtype, torch.device("cpu"))
    assert mode == "lora"
    for text in ("mode=qlora cannot train here", "for cpu", cause, "mode=lora", str(dtype)[6:], "sidgraft[qlora]"):
        assert text in why


@pytest.mark.parametrize("mode", adapters.MODES)
def test_a_bitsandbytes_that_cannot_be_imported_is_refused_in_every_mode_that_imports_it(monkeypatch, tmp_path, mode):
    for name in [name for name in sys.modules if name.partition(".")[0] == "bitsandbytes"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "bitsandbytes").mkdir()
    (tmp_path / "bitsandbytes" / "__init__.py").write_text("raise OSError('libcudart.so: no such file.\\nMore.')")
    monkeypatch.syspath_prepend(tmp_path)
    if mode == "full":
        assert adapters.possible(mode, torch.float32, torch.device("cpu")) == (mode, "")
        return
    wanted = r"cannot be imported \(libcudart.so: no such file\): repair it, or run `pip uninstall bitsandbytes`"
    with pytest.raises(ValueError, match=wanted):
        adapters.possible(mode, torch.float32, torch.device("cpu"))


def test_with_four_bit_layers_every_mode_stays_what_it_is():
    pytest.importorskip("bitsandbytes")
    for mode in adapters.MODES:
        assert adapters.possible(mode, torch.bfloat16, torch.device("cpu")) == (mode, "")


def test_a_full_memory_says_nothing_of_the_kernels(monkeypatch):
    functional = pytest.importorskip("bitsandbytes.functional")

    def full(*_, **__):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(functional, "quantize_4bit", full)
    with pytest.raises(torch.OutOfMemoryError):
        adapters.possible("qlora", torch.float32, torch.device("cpu"))


def test_without_peft_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"mode=lora needs peft.*sidgraft\[lora\]"):
        adapters.check("lora", "none")
    adapters.check("full", "none")


def test_four_bit_weights_cannot_be_sharded():
    with pytest.raises(ValueError, match="do not go together"):
        adapters.check("qlora", "zero3")
