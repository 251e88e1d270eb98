"""Messages made from the protos: mostly what could be meant, with values nobody means, and bytes broken."""

from __future__ import annotations

import random
import struct
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

_INTEGERS = (
    0,
    1,
    2,
    7,
    255,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**64 - 1,
    -1,
    -(2**31),
    -(2**63),
)
_REALS = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1e-45,
    1e-30,
    3e38,
    -3e38,
    float("nan"),
    float("inf"),
    -float("inf"),
    1.5,
)
_TEXTS = (
    "",
    "the fox",
    "\x00",
    "é" * 300,
    "\U0001f9ca",
    "a" * 5000,
    "{{ 1/0 }}",
    "</s><s>",
    "../../etc/passwd",
)
_PLAIN = 0.75
"""Share of fields that get a value that could be meant, where one is known."""
_MAX_DEPTH = 6

_RANGES = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_SINT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_SINT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_FIXED32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_FIXED64: (0, 2**64 - 1),
}


class Maker:
    """Makes messages; the same seed makes the same ones.

    Args:
        vocab_size: ids below it are meant.
    """

    def __init__(self, seed: int, vocab_size: int) -> None:
        self.rng = random.Random(seed)
        self._vocab_size = vocab_size

    def message(self, kind: type[Message], depth: int = 0) -> Any:
        """A message whose fields have values of their types."""
        made = kind()
        descriptor: Descriptor = made.DESCRIPTOR
        taken: set[str] = set()
        for field in descriptor.fields:
            group = field.containing_oneof
            if group is not None and group.name in taken:
                continue
            if self.rng.random() < (0.8 if depth < 2 else 0.5):
                self._set(made, field, depth)
                if group is not None:
                    taken.add(group.name)
        return made

    def data(self, kind: type[Message]) -> bytes:
        """Bytes of a message; of every fourth some are changed, cut off or added."""
        data = bytearray(self.message(kind).SerializeToString())
        if self.rng.random() < 0.75:
            return bytes(data)
        for _ in range(self.rng.randint(1, 4)):
            at = self.rng.randrange(len(data) + 1)
            match self.rng.randrange(4):
                case 0:
                    data[at:at] = self.rng.randbytes(self.rng.randint(1, 8))
                case 1:
                    del data[at : at + self.rng.randint(1, 8)]
                case 2 if at < len(data):
                    data[at] ^= 1 << self.rng.randrange(8)
                case _:
                    del data[at:]
        return bytes(data)

    def _set(self, made: Any, field: Any, depth: int) -> None:
        if field.is_repeated:
            values = getattr(made, field.name)
            for _ in range(self._count(field)):
                if field.message_type is None:
                    values.append(self._value(field))
                elif depth < _MAX_DEPTH:
                    values.add().CopyFrom(self.message(field.message_type._concrete_class, depth + 1))
        elif field.message_type is not None:
            if depth < _MAX_DEPTH:
                kind = field.message_type._concrete_class
                getattr(made, field.name).CopyFrom(self.message(kind, depth + 1))
        else:
            setattr(made, field.name, self._value(field))

    def _count(self, field: Any) -> int:
        if field.message_type is not None:
            return self.rng.choice((0, 1, 1, 2, 3))
        return self.rng.choice((0, 1, 2, 3, 5, 8, 40)) if self.rng.random() < 0.97 else 2000

    def _value(self, field: Any) -> Any:
        is_number = field.type not in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
        if is_number and self.rng.random() < _PLAIN and (plain := self._plain(field.name)) is not None:
            return plain
        match field.type:
            case FieldDescriptor.TYPE_BOOL:
                return self.rng.random() < 0.5
            case FieldDescriptor.TYPE_DOUBLE | FieldDescriptor.TYPE_FLOAT:
                return self.rng.choice(_REALS)
            case FieldDescriptor.TYPE_STRING:
                return self.rng.choice(_TEXTS)
            case FieldDescriptor.TYPE_BYTES:
                return self._packed(field.name)
            case FieldDescriptor.TYPE_ENUM:
                return self.rng.choice([*(value.number for value in field.enum_type.values), 99, -1])
        low, high = _RANGES[field.type]
        return self.rng.choice([value for value in _INTEGERS if low <= value <= high])

    def _packed(self, name: str) -> bytes:
        """Bytes; arrays of numbers where that is what they should be, mostly."""
        if name not in ("sizes", "token_ids", "probs") or self.rng.random() > _PLAIN:
            return self.rng.randbytes(self.rng.choice((0, 1, 4, 16, 300)))
        count = self.rng.randrange(5)
        if name == "probs":
            return struct.pack(f"<{count}f", *(self.rng.choice((0.5, 1.0, 0.25, 0.0)) for _ in range(count)))
        return struct.pack(f"<{count}i", *(self._plain(name) for _ in range(count)))

    def _plain(self, name: str) -> Any:
        """A value that could be meant by a field of this name, small enough that orders meet one another."""
        rng = self.rng
        match name:
            case "sequence" | "closes":
                return rng.randrange(6)
            case "token_ids" | "ids" | "drafted" | "token_id":
                return rng.randrange(self._vocab_size)
            case "num_prompt_tokens" | "committed_length" | "from_length":
                return rng.randrange(1, 12)
            case "num_tokens" | "num_draft_tokens" | "max_tokens" | "n":
                return rng.randrange(1, 9)
            case "temperature" | "top_p" | "probs":
                return rng.random()
            case "method" | "drafter":
                return rng.randrange(1, 4)
            case "sizes":
                return rng.randrange(1, 4)
        return None
