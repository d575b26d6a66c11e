"""Train low-rank adapters in place of all weights (LoRA, QLoRA), and merge them into plain weights.

Adapters sit on the seven projections of each layer; the input embedding and the output head are trained whole,
because the new tokens live there. Tied, the two stay one tensor throughout: nothing wraps them.
Sources: Hu et al., LoRA, 2021; Dettmers et al., QLoRA, 2023.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

MODES = ("full", "lora", "qlora")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def check(mode: str, strategy: str) -> None:
    """Raise ValueError where the package that makes adapters is missing, or a mode cannot train by this strategy."""
    if mode != "full":
        try:
            import peft  # noqa: F401
        except ImportError as error:
            raise ValueError(
                f"mode={mode} needs peft, which cannot be imported here ({error}): run `pip install 'sidgraft[lora]'`."
            ) from error
    if mode == "qlora" and strategy.startswith("zero"):
        raise ValueError(
            f"mode=qlora and strategy={strategy} do not go together: DeepSpeed cannot shard 4-bit weights. Use"
            " strategy=ddp, or mode=lora."
        )


def possible(mode: str, dtype: torch.dtype, device: torch.device) -> tuple[str, str]:
    """The mode that this machine can train in, and why it is not the given one (empty where it is).

    qlora becomes lora, the same adapters over frozen weights in ``dtype``, where a small 4-bit layer of bitsandbytes
    does not compute on ``device`` or pass a gradient: a build may import and have no kernels for the machine. Raises
    ValueError where bitsandbytes is installed but cannot be imported, with which peft makes no adapters of any kind.
    """
    if mode != "full":
        _check_import()
    if mode != "qlora":
        return mode, ""
    inputs = torch.ones(2, 64, dtype=dtype, device=device, requires_grad=True)
    try:
        small = _in_four_bits(torch.nn.Linear(64, 64, device=device), dtype)
        small(inputs).sum().backward()
    except torch.OutOfMemoryError:  # says nothing of the kernels
        raise
    except Exception as error:  # of many kinds: the package is missing, or its binary does not fit the machine
        precision = str(dtype).removeprefix("torch.")
        return "lora", (
            f"mode=qlora cannot train here, because bitsandbytes has no 4-bit layers for {device.type}"
            f" ({_first_line(error)}): training the same adapters by mode=lora, over frozen weights in {precision},"
            " which take more memory. For 4 bits: `pip install 'sidgraft[qlora]'`, on a machine that it supports."
        )
    return mode, ""


def adapt(model: Any, mode: str, *, rank: int, alpha: float, dropout: float, dtype: torch.dtype, seed: int) -> None:
    """Freeze a model in place but for its embedding and head, and put adapters on its projections.

    ``mode`` lora keeps the frozen projections in ``dtype``, qlora in 4 bits (NF4, double quantization, products
    in ``dtype``). What is trained is float32. The projections' update starts at zero and is scaled by
    ``alpha / rank``. Raises ValueError when the model has other projections.
    """
    from peft import LoraConfig, inject_adapter_in_model

    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    missing = [end for end in PROJECTIONS if not any(name.endswith(f".{end}") for name in names)]
    if missing:
        raise ValueError(
            f"mode={mode} puts adapters on the projections {', '.join(PROJECTIONS)}, but the base model has no"
            f" {', '.join(missing)}: use mode=full."
        )
    model.requires_grad_(False)
    for name in names:
        if name.endswith(PROJECTIONS):
            _shrink(model, name, mode, dtype)
    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, bias="none", target_modules=list(PROJECTIONS))  # pyright: ignore[reportArgumentType]
    model.is_loaded_in_4bit = mode == "qlora"  # peft asks; without it its layers take 4-bit weights for plain ones
    inject_adapter_in_model(config, model)
    del model.is_loaded_in_4bit
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.float()
    for matrix in (model.get_input_embeddings(), model.get_output_embeddings()):
        matrix.weight.requires_grad_(True)


def merged_weights(model: Any) -> dict[str, torch.Tensor]:
    """The state dict of the model without adapters that gives the same logits; W + alpha / rank * B A."""
    weights = model.state_dict()
    if not any(".lora_" in name for name in weights):
        return weights
    from peft.tuners.lora import LoraLayer
    from peft.utils.integrations import dequantize_module_weight

    adapted: dict[str, Any] = {n: m for n, m in model.named_modules() if isinstance(m, LoraLayer)}
    merged = {n: w for n, w in weights.items() if not any(n.startswith(f"{layer}.") for layer in adapted)}
    for name, layer in adapted.items():
        base = dequantize_module_weight(layer.base_layer).detach().float()
        merged[f"{name}.weight"] = base + layer.get_delta_weight("default").detach()
        if layer.base_layer.bias is not None:
            merged[f"{name}.bias"] = layer.base_layer.bias.detach().float()
    return merged


def _shrink(model: Any, name: str, mode: str, dtype: torch.dtype) -> None:
    """Store one frozen projection in fewer bits."""
    linear = model.get_submodule(name)
    if mode == "lora":
        linear.to(dtype)
    else:
        model.set_submodule(name, _in_four_bits(linear, dtype))


def _in_four_bits(linear: torch.nn.Linear, dtype: torch.dtype) -> torch.nn.Module:
    """A frozen layer of the same weights in 4 bits, its products in ``dtype``."""
    import bitsandbytes.nn

    nn: Any = bitsandbytes.nn
    small = nn.Linear4bit(
        linear.in_features, linear.out_features, bias=linear.bias is not None, compute_dtype=dtype, quant_type="nf4"
    )
    small.weight = nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
    if linear.bias is not None:
        small.bias = linear.bias
    # On CPUs it would repack the weights in place for a bfloat16 kernel when it first decodes.
    small.support_avx512bf16_for_cpu = False
    return small.to(linear.weight.device)  # moving quantizes


def _check_import() -> None:
    """Raise ValueError where bitsandbytes is there but broken: peft imports it wherever it finds the package."""
    try:
        import bitsandbytes  # noqa: F401
    except Exception as error:  # of many kinds: its binary, or what that needs, does not load
        if importlib.util.find_spec("bitsandbytes") is not None:
            raise ValueError(
                f"bitsandbytes is installed but cannot be imported ({_first_line(error)}): repair it, or run `pip"
                " uninstall bitsandbytes` and train by mode=lora; peft imports it in every mode but full."
            ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".:")
