"""Tiny random models for real vLLM engines: made here in a second, the same bytes every time, nothing fetched.

Each model is a folder that `LLM(model=folder)` loads: random float32 weights from a fixed seed and a byte-level
tokenizer (one token a byte, 256 of them, and two special ones). Folders are cached under the system's temporary
folder by a digest of everything that went in, and moved into place whole, so that processes may ask at the same time.

Imports torch and transformers only when a model is really made.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
"""Raised whenever the code below makes other bytes from the same settings."""

BOS_ID, EOS_ID, VOCABULARY = 256, 257, 258
WEIGHT_SCALE = 0.2
"""Standard deviation of the weights: large enough that greedy tokens depend on the whole prompt."""


@dataclass(frozen=True, slots=True)
class TinyModel:
    """What a model is made of; equal settings give equal bytes."""

    kind: str
    """"llama": every layer attends to everything. "hybrid": Gemma 3, two kinds of KV cache group."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Overrides of the configuration, for example (("num_hidden_layers", 4),)."""
    seed: int = 0

    def digest(self) -> str:
        text = json.dumps([FORMAT, self.kind, sorted(self.settings), self.seed], default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def folder(self) -> Path:
        """The model's folder, made on the first call."""
        target = _cache_folder() / f"{self.kind}-{self.digest()}"
        if target.exists():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        working = Path(tempfile.mkdtemp(prefix=".making-", dir=target.parent))
        try:
            _write_tokenizer(working)
            _MAKERS[self.kind](working, dict(self.settings), self.seed)
            working.rename(target)
        except OSError:  # another process was first: its bytes are these
            if not target.exists():
                raise
        finally:
            shutil.rmtree(working, ignore_errors=True)
        return target


def llama(seed: int = 0, **settings: Any) -> TinyModel:
    """2 layers, 4 heads of 32, 2 KV heads: 2 KiB of float32 KV a token (half of it a rank at TP=2)."""
    return TinyModel("llama", tuple(sorted(settings.items())), seed)


def hybrid(seed: int = 0, **settings: Any) -> TinyModel:
    """Gemma 3 with 4 layers, alternately a sliding window of 64 tokens and full attention: two KV cache groups."""
    return TinyModel("hybrid", tuple(sorted(settings.items())), seed)


def change_one_byte(model: Path, copy: Path) -> Path:
    """A copy of `model` at `copy` whose weights differ in one byte: another checkpoint of exactly equal shapes.

    The bit flipped is the highest of the last float32's mantissa: the value stays finite.
    """
    shutil.copytree(model, copy)
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-2] ^= 0x40
    weights.write_bytes(data)
    return copy


def prompt_token_ids(length: int, seed: int = 0) -> list[int]:
    """`length` token ids of plain bytes, the same for the same seed; a shorter one is a prefix of a longer one."""
    ids: list[int] = []
    block = 0
    while len(ids) < length:
        ids.extend(hashlib.sha256(f"{seed}/{block}".encode()).digest())
        block += 1
    return ids[:length]


def _cache_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"kvstore-tiny-models-{os.getuid()}"


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)} | {"<bos>": BOS_ID, "<eos>": EOS_ID}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _make_llama(folder: Path, settings: dict[str, Any], seed: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    defaults: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "initializer_range": WEIGHT_SCALE,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    }
    _save(folder, LlamaForCausalLM, LlamaConfig(**(defaults | settings)), seed)


def _make_hybrid(folder: Path, settings: dict[str, Any], seed: int) -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    defaults: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "query_pre_attn_scalar": 2,  # sharp attention: with 32 a token 300 back would hardly be seen
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "max_position_embeddings": 8192,
        "initializer_range": WEIGHT_SCALE,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": EOS_ID,
    }
    _save(folder, Gemma3ForCausalLM, Gemma3TextConfig(**(defaults | settings)), seed)


def _save(folder: Path, model_class: Any, configuration: Any, seed: int) -> None:
    """Weights drawn from a generator of our own, tensor by tensor in order of name: no library default decides them."""
    import torch

    model = model_class(configuration).to(torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.dim() == 1:
                weight.fill_(0.0 if configuration.model_type.startswith("gemma") else 1.0)
            else:
                weight.copy_(torch.randn(weight.shape, generator=generator) * WEIGHT_SCALE)
            assert torch.isfinite(weight).all(), name
    model.save_pretrained(folder, safe_serialization=True)


_MAKERS: dict[str, Callable[[Path, dict[str, Any], int], None]] = {"llama": _make_llama, "hybrid": _make_hybrid}
