"""What objects that hold private values have in common."""

from __future__ import annotations

from typing import NoReturn


class PrivateValues:
    """Mixin: pickling, and with it copying and saving, is refused."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} holds private data and is not pickled; release a model instead")
