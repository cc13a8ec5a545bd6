"""What it takes to have a model's tensors registered: one region for their file, or one for each."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from irdmafs.backend.transport.verbs.library import Library, load

# Llama 3.1 405B: 126 blocks of nine tensors, and three more; bfloat16. Its widths are divided by `SCALE`.
SCALE = 64
_HIDDEN, _FEED_FORWARD, _KEY_VALUE, _VOCABULARY, _BLOCKS = 16384, 53248, 1024, 128256, 126
_ELEMENT_BYTES = 2
_ACCESS = ("LOCAL_WRITE", "REMOTE_READ")


class Tensor(NamedTuple):
    """In the order of a safetensors file; `offset` and `size` are in bytes."""

    name: str
    shape: tuple[int, ...]
    offset: int
    size: int


class Registered(NamedTuple):
    """How many regions, how long it took to have all of them, and to give them up again."""

    regions: int
    seconds: float
    closing_seconds: float


def tensors(count: int) -> list[Tensor]:
    """The first `count` tensors of the model, scaled down, one behind the other."""
    found = []
    offset = 0
    for name, shape in islice(_shapes(), count):
        size = _ELEMENT_BYTES
        for length in shape:
            size *= length
        found.append(Tensor(name, shape, offset, size))
        offset += size
    return found


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, feed_forward, key_value = (
        width // SCALE for width in (_HIDDEN, _FEED_FORWARD, _KEY_VALUE)
    )
    yield "model.embed_tokens.weight", (_VOCABULARY // SCALE, hidden)
    for block in range(_BLOCKS):
        prefix = f"model.layers.{block}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, feed_forward)
        yield f"{prefix}.mlp.gate_proj.weight", (feed_forward, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (feed_forward, hidden)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.k_proj.weight", (key_value, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, hidden)
        yield f"{prefix}.self_attn.q_proj.weight", (hidden, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (key_value, hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (_VOCABULARY // SCALE, hidden)


class Registrar:
    """The file of these tensors, in a tmpfs. Within `opened` it is mapped, and the device open."""

    def __init__(self, device: str, place: Path, wanted: list[Tensor]) -> None:
        self._tensors = wanted
        self.size = wanted[-1].offset + wanted[-1].size
        self._device = device
        self._path = place / "model"

    @contextmanager
    def opened(self) -> Iterator[None]:
        library: Library = load()
        self._library = library
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(fd, 0, self.size)
            memory = mmap.mmap(fd, self.size)
        finally:
            os.close(fd)
        # Neither kind is to pay for pages that the other finds there.
        for offset in range(0, self.size, mmap.PAGESIZE):
            memory[offset] = 1
        anchor = ctypes.c_char.from_buffer(memory)
        self._address = ctypes.addressof(anchor)
        context, _ = library.open(self._device)
        try:
            self._domain = library.PD(context)
            yield
        finally:
            context.close()
            del anchor
            memory.close()
            self._path.unlink()

    def whole(self) -> Registered:
        return self._register([(0, self.size)])

    def each(self) -> Registered:
        return self._register([(tensor.offset, tensor.size) for tensor in self._tensors])

    def _register(self, ranges: list[tuple[int, int]]) -> Registered:
        access = sum(self._library.enum(f"ACCESS_{right}") for right in _ACCESS)
        regions: list[Any] = []
        with self._library.errors:
            began = time.perf_counter()
            for offset, size in ranges:
                regions.append(
                    self._library.MR(self._domain, size, access, address=self._address + offset)
                )
            done = time.perf_counter()
            for region in regions:
                region.close()
        return Registered(len(regions), done - began, time.perf_counter() - done)
