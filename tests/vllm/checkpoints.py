"""Models with weights on disk, for what a start-up does with them: shards, a FIFO, a slow disk."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_CHUNK = 1 << 20
_BLKIO = Path("/sys/fs/cgroup/blkio")


def with_weights(tiny: Path, made: Path, *, hidden: int = 256, layers: int = 2, shards: int = 2) -> Path:
    """A copy of a tiny Llama with weights in `shards` files. Returns `made`."""
    shutil.copytree(tiny, made)
    config = json.loads((tiny / "config.json").read_text())
    config |= {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers}
    (made / "config.json").write_text(json.dumps(config))
    tensors = _llama(config["vocab_size"], hidden, 4 * hidden, layers)
    names = sorted(tensors)
    index: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[number::shards]
        _write(made / file, {name: tensors[name] for name in mine})
        index |= dict.fromkeys(mine, file)
    (made / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return made


def with_fifo(tiny: Path, made: Path) -> Path:
    """The same, with a FIFO where its last file should be: whoever opens it waits. Returns the FIFO."""
    with_weights(tiny, made)
    fifo = made / "model-00002-of-00002.safetensors"
    fifo.unlink()
    os.mkfifo(fifo)
    return fifo


def _llama(vocab: int, hidden: int, inner: int, layers: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        shapes |= {f"{at}.self_attn.{part}_proj.weight": (hidden, hidden) for part in "qkvo"}
        shapes |= {f"{at}.mlp.{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (hidden, inner)
    return shapes


def _write(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file of bfloat16 zeros. Format: length of the header, header in JSON, data."""
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for begin in range(0, at, _CHUNK):
            file.write(bytes(min(_CHUNK, at - begin)))


def throttling_works() -> bool:
    """This machine can slow down the reads of a group of processes (cgroup v1, as root)."""
    return os.access(_BLKIO / "blkio.throttle.read_bps_device", os.W_OK)


@contextmanager
def slow_disk(files: list[Path], bytes_per_s: int, name: str) -> Iterator[Path]:
    """A group (yields its cgroup.procs) that reads the disk so slowly; the files leave the page cache."""
    group = _BLKIO / name
    group.mkdir()
    try:
        device = os.stat(files[0]).st_dev
        limit = f"{os.major(device)}:{os.minor(device)} {bytes_per_s}"
        (group / "blkio.throttle.read_bps_device").write_text(limit)
        for file in files:
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        yield group / "cgroup.procs"
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError, OSError):
                (_BLKIO / "cgroup.procs").write_text(pid)
        group.rmdir()
