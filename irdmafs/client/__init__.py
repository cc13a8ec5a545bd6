"""Arrays on a mount, by name: a client that uses nothing but the mount's files.

>>> from irdmafs import client
>>> store = client.open("/mnt/params")
>>> store.publish("layer0/weight", weight)          # a new version of layer0/weight.npy
>>> store["layer0/weight"]                          # mapped: no copy, read-only
>>> store.publish_state_dict(model.state_dict(), "model.safetensors")
>>> store["model.safetensors/encoder.layer.0.weight"]
>>> store.state_dict("model.safetensors")           # all its tensors, in one mapping
>>> store.state_dict("model.safetensors", device="cuda")    # torch tensors, copied to the device

**Names.** A name is components joined by "/". It means the array in the file ``NAME.npy``; or, if
a component before the last ends in ``.safetensors``, the tensor of that file whose name is the
rest. A file that is empty has nothing published in it yet and counts as missing.

**Versions.** Each lookup opens the version that is current then: there is nothing to refresh. An
array keeps the version it was taken from for as long as it lives, whatever happens to the name.

**Any directory works**, not only a mount. Publishing is then writing a file of another name and
renaming it over the old one, so that readers keep what they have; files that other programs
overwrite in place have no such protection there, as always with mapped files.

**Devices.** to_device() and state_dict(device=...) give torch tensors in the memory of a device, which
are copies and outlive the version. For CUDA they go through pinned memory. They need torch
(the extra ``irdmafs[torch]``), which nothing else here imports.

**Buffers.** A Buffer is memory that files are read into one after the other, a device's if you like:

>>> buffer = client.Buffer(2 << 30)                         # or Buffer(2 << 30, device="cuda")
>>> weights = store.state_dict("model.safetensors", into=buffer)    # shows the buffer's memory

It is for the only reader of a file on its host; what several processes read is better read from the cache.

**Waiting.** wait() returns when a path leads to something new, whichever host published it:

>>> seen = client.wait("/mnt/params/model.safetensors")             # waits until there is one
>>> seen = client.wait("/mnt/params/model.safetensors", seen)       # waits for the next

**Drafts.** A directory appears whole when its block ends, and replaces the one that was there:

>>> with client.draft("/mnt/params/checkpoint") as directory:
...     model.save_pretrained(directory)

**Clones.** A copy of a file or directory that takes no room:

>>> client.clone("/mnt/params/checkpoint", "/mnt/params/experiment")

**Versions of directories.** Each is whole, and stays while somebody holds it:

>>> run = client.Versions("/mnt/params/run", keep=3)
>>> with run.draft() as directory:                          # trainer: the next version at the end
...     model.save_pretrained(directory)
>>> with run.hold(newer_than=seen) as version:              # worker: waits for a newer one
...     model, seen = load(version.path), version.number

**bfloat16 and 8-bit floats** are arrays of the package ml_dtypes. torch tensors of these types are
published as what they are.
"""

from __future__ import annotations

import os

from ._buffer import Buffer
from ._drafts import Cloned, clone, draft
from ._files import FormatError
from ._store import Store
from ._versions import Version, Versions
from ._waiting import Seen, wait, watch

__all__ = [
    "Buffer", "Cloned", "FormatError", "Seen", "Store", "Version", "Versions", "clone", "draft", "open",
    "wait", "watch",
]  # fmt: skip


def open(path: str | os.PathLike[str]) -> Store:
    """Return the store in a directory. Raises FileNotFoundError and NotADirectoryError."""
    return Store(path)
