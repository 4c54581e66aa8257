"""A GGUF file as a checkpoint: names and row order become Hugging Face's, quantized rows fp32."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoint.checkpoint import RawTensor
from checkpoint.digest import file_digest
from checkpoint.gguf_config import ROPE_FACTORS, config_from_gguf
from checkpoint.gguf_file import GGML_TYPES, GGUFFile, TensorInfo
from checkpoint.gguf_tokenizer import gguf_tokenizer_digest, tokenizer_from_gguf
from checkpoint.parameters import EMBEDDING, FINAL_NORM, LM_HEAD, expected_tensors, verify_tensors
from checkpoint.tokenizer import Tokenizer
from core.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

_GLOBAL = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": LM_HEAD}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_QUANTIZATION = re.compile(r"[.-](I?Q\d\w*|B?F16|F32|MXFP4)$", re.IGNORECASE)


class GGUFCheckpoint:
    """One GGUF file. Raises ConfigError for unusable files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = _QUANTIZATION.sub("", path.stem)
        self._file = GGUFFile(path)
        self.config = config_from_gguf(self._file)
        self._stored: dict[str, TensorInfo] = {}
        for tensor in self._file.tensors:
            name = _hf_name(tensor.name)
            if name in self._stored:
                raise ConfigError(f"{path} holds {tensor.name} twice; convert the model again")
            if name != ROPE_FACTORS:  # read into the config already
                self._stored[name] = tensor
        verify_tensors(self.config, {name: t.shape for name, t in self._stored.items()}, path)

    def weights_digest(self) -> str:
        return file_digest(self.path)

    @property
    def tokenizer_digest(self) -> str:
        return gguf_tokenizer_digest(self._file.metadata)

    def load_tokenizer(self) -> Tokenizer:
        return tokenizer_from_gguf(self._file.metadata, self.path)

    def tensors(self) -> Iterator[RawTensor]:
        """As promised by `Checkpoint`. Quantized tensors come dequantized to fp32, one at a time."""
        permuted: dict[str, int] = {}
        if self.config.architecture == "llama":
            permuted = {"q_proj.weight": self.config.num_heads, "k_proj.weight": self.config.num_kv_heads}
        for name in expected_tensors(self.config):
            dtype, array = self._load(self._stored[name])
            for projection, num_heads in permuted.items():
                if name.endswith(projection):
                    array = unpermute(array, num_heads)
            yield RawTensor(name, dtype, array.shape, array.data.cast("B").toreadonly())

    def _load(self, tensor: TensorInfo) -> tuple[str, np.ndarray]:
        """(dtype, array of the tensor's shape). bf16 has no numpy type and is carried as uint16."""
        import numpy as np  # here, not above: the router opens checkpoints but needs no numbers

        raw = np.frombuffer(self._file.tensor_bytes(tensor), dtype=np.uint8)
        kind = GGML_TYPES[tensor.ggml_type][0]
        plain = {"F32": ("fp32", np.float32), "F16": ("fp16", np.float16), "BF16": ("bf16", np.uint16)}
        if kind in plain:
            dtype, numpy_type = plain[kind]
            return dtype, raw.view(numpy_type).reshape(tensor.shape)

        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        rows = raw.reshape(*tensor.shape[:-1], -1)
        numbers = dequantize(rows, GGMLQuantizationType(tensor.ggml_type))
        return "fp32", np.ascontiguousarray(numbers, dtype=np.float32)


def unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo the row order that GGUF has for q and k of the llama architecture alone: [num_heads * d, in].

    There the two numbers that rotary turns together are neighbours (0, 1), (2, 3), ...; Hugging Face
    pairs each row of a head's first half with the one d/2 below it.
    """
    import numpy as np

    heads = rows.reshape(num_heads, -1, 2, rows.shape[-1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows.shape)


def _hf_name(name: str) -> str:
    """The Hugging Face name; one that has none stays as it is and is reported as extra."""
    block = _BLOCK.fullmatch(name)
    if block and block[2] in _LAYER:
        return f"model.layers.{block[1]}.{_LAYER[block[2]]}.{block[3]}"
    return _GLOBAL.get(name, name)
