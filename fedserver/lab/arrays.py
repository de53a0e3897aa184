"""A blob's tensors as NumPy arrays, for views: importing torch would take seconds."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from attune.common.wire.header import Opened
from attune.common.wire.malformed import Malformed

Array = npt.NDArray[Any]

DTYPES = {
    "F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1", "U64": "u8", "U32": "u4",
    "U16": "u2", "U8": "u1", "BOOL": "u1", "BF16": "u2",
}  # fmt: skip


class ArrayFile(Opened[Array]):
    """A blob of tensors. Each access reads one anew. bfloat16, which NumPy lacks, is returned as float32."""

    def __getitem__(self, name: str) -> Array:
        """Return a new array.

        Raises:
            KeyError: There is no tensor of that name.
            Truncated: The source ends too early.
            Malformed: not-boolean.
        """
        spec = self.manifest[name]
        array = np.empty(spec.shape, dtype="<" + DTYPES[spec.dtype])
        if array.size:
            self._source.read_into(array.reshape(-1).view(np.uint8).data, self._layout.spans[name][0])
        if spec.dtype == "BF16":
            return np.asarray(array.astype("<u4") << 16).view("<f4")
        if spec.dtype == "BOOL":
            if array.size and array.max() > 1:
                raise Malformed("not-boolean", f"{self._name}: {name!r} is BOOL and has bytes other than 0 and 1")
            return array.astype(bool)
        return array
