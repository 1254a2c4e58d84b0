"""Tests of the KV cache's memory: it is zero, and its first part is allocated in advance."""

import ctypes
import mmap
import sys

import numpy as np
import pytest
import torch

from infer.kernels.loader import POPULATE_WRITE, advise
from infer.models.model_config import ModelConfig
from infer.runner import kv_storage
from infer.runner.kv_storage import KVStorage

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=64, hidden_size=64, intermediate_size=64,
    num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, max_seq_len=64, norm_eps=1e-5,
    tie_embeddings=True, dtype="float32",
)  # fmt: skip


def resident_share(tensor: torch.Tensor) -> float:
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = (tensor.data_ptr() + tensor.nbytes - first) // mmap.PAGESIZE
    found = (ctypes.c_ubyte * pages)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first), pages * mmap.PAGESIZE, found) == 0
    return sum(byte & 1 for byte in found) / pages


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_that_are_given_back_take_no_memory_and_are_zeros(dtype: torch.dtype) -> None:
    pages = 4096
    made = KVStorage(CONFIG, pages, 16, dtype=dtype, device=torch.device("cpu"))
    tensors = (*made.keys, *made.values)
    assert made.page_bytes == sum(tensor[0].nbytes for tensor in tensors)
    assert made.num_tensors == len(tensors)
    assert made.preparing is not None
    made.preparing.join()
    for tensor in tensors:
        tensor.fill_(7)
    made.release([(8, 1000), (2048, 1)])
    for tensor in tensors:
        assert resident_share(tensor[16:1000]) == 0.0
        assert not tensor[16:1000].any()
        for kept in (tensor[:8], tensor[1008:2048], tensor[2049:]):
            assert (kept == 7).all()


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_the_first_pages_are_there_before_anybody_needs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probe = torch.from_numpy(np.zeros(1 << 20, dtype=np.uint8))
    if not advise(probe, POPULATE_WRITE):
        pytest.skip("a Linux before 5.14")
    monkeypatch.setattr(kv_storage, "PREPARED_BYTES", 16 << 20)
    pages = (256 << 20) // (16 * CONFIG.num_kv_heads * CONFIG.head_dim * 4)  # 256 MiB per tensor
    made = KVStorage(CONFIG, pages, 16, dtype=torch.float32, device=torch.device("cpu"))
    assert made.preparing is not None
    made.preparing.join()
    each = (16 << 20) // (2 * CONFIG.num_layers)
    for tensor in (*made.keys, *made.values):
        cells = tensor.flatten()
        assert resident_share(cells[: each // 4]) == 1.0
        assert resident_share(cells[-(8 << 20) // 4 :]) == 0.0  # unused memory is not resident
        assert not cells[: each // 4].any()
