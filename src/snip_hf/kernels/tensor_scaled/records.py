"""The exponents of a layer's operands: which are in force, how they follow what passes have seen, and what was lost.

A layer's record is a row of int64 per operand (`OPERANDS`: activation, gradient, weight), on its device. Kernels read
the exponent s in force and note the largest magnitude of the passes that are trained on. `follow` derives the next s
from it between optimizer steps. So all micro-batches of a step use the same s, and so does the recomputation of
activation checkpointing. As long as there is no s, each pass takes that of its own tensor. `notes` has what the host
knows of it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...numerics.gemms import OPERANDS
from ..host_copy import kept_on_device
from . import notes
from .folding import TOP, exponents_of, table_on
from .notes import Note

# Places in a record: the exponent in force; the largest magnitude since it was set (FP32 bits); blocks that were looked
# at, those of them that saturated and that lost bits; the amax of a pass and its programs that are done; steps, and
# those in which something saturated.
EXPONENT, LARGEST, BLOCKS, SATURATED, SMALL, AMAX, ARRIVED, CLIPPED = range(8)
FIELDS = 8
UNSET = 1000
# Exponents stay within +-60, so that 2**s and the product of two are normal FP32 numbers.
LIMIT = 60
# Binades left above the largest magnitude seen, in which the next step's may grow without saturating: of activations
# and weights, and of gradients. Gradients grew by more than 2 binades in 1 to 2% of the steps of a small model, by 6 at
# most, and what two more binades cost at the lower end has next to no energy (docs/log.md).
HEADROOM, GRADIENT_HEADROOM = 2, 4
# Binades that s falls by at most in a step. Not more than the headroom: after one step of unusually small numbers,
# those of usual size still fit.
FALL = 2
_INFINITY = 0x7F800000


@dataclass
class Records:
    """What the backend keeps of one layer."""

    record: Tensor
    """(operands, FIELDS) int64. Written by kernels without torch's knowledge."""
    table: Tensor
    """`folding.table_on` its device."""
    everything: Tensor | None = None
    """The tensor whose row `record` is, with the records of all layers; None: it stands alone."""
    note: Note = field(default_factory=Note)

    def __post_init__(self) -> None:
        notes.put(self.note, self.record)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a deep copy."""
        self.__dict__.update(state)
        notes.put(self.note, self.record)

    @classmethod
    def new(cls, device: torch.device) -> Records:
        record = torch.zeros(len(OPERANDS), FIELDS, dtype=torch.int64)
        record[:, EXPONENT] = UNSET
        return cls(record.to(device), table_on(device))

    def copy(self) -> Records:
        """Returns these records apart from those of other layers."""
        return Records(self.record.clone(), self.table, note=self.note.copy())

    def on(self, device: torch.device) -> Records:
        """Moves the records to a device, where they are not there, and returns them."""
        if self.record.device != device:
            self.record, self.table, self.everything = self.record.to(device), table_on(device), None
            if torch.compiler.is_compiling():
                self.note.address = 0  # `follow` puts the note there: code that is traced may not
            else:
                notes.put(self.note, self.record)
        return self


def pack(records: Sequence[Records]) -> None:
    """Makes the records on each device rows of one tensor, so that `follow` takes few launches."""
    devices: dict[torch.device, list[Records]] = {}
    for one in records:
        devices.setdefault(one.record.device, []).append(one)
    for members in devices.values():
        everything = torch.stack([one.record for one in members])
        for one, row in zip(members, everything.unbind(), strict=True):
            torch._dynamo.mark_static_address(row)  # so that CUDA graphs write where it is
            one.record, one.everything = row, everything
            notes.put(one.note, row)


def follow(records: Sequence[Records]) -> None:
    """Sets the next step's exponents: from the largest magnitudes seen since the last call, where there were any."""
    tensors = [one.record if one.everything is None else one.everything for one in records]
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        _follow(tensor.data)  # compiled graphs and autograd must not take notice
    _learn(records)


def _learn(records: Sequence[Records]) -> None:
    """Notes which operands have an exponent, after steps 1, 2, 4, 8, ... as long as some have none: it waits for the
    device."""
    waiting: dict[torch.device, list[Records]] = {}
    for one in records:
        one.note.steps += 1
        if not one.note.address:
            notes.put(one.note, one.record)
        if not all(one.note.known) and one.note.steps & (one.note.steps - 1) == 0:
            waiting.setdefault(one.record.device, []).append(one)
    for members in waiting.values():
        exponents = torch.stack([one.record.data[:, EXPONENT] for one in members]).tolist()
        for one, values in zip(members, exponents, strict=True):
            one.note.known = [value != UNSET for value in values]


def _follow(records: Tensor) -> None:
    exponent, largest = records[..., EXPONENT], records[..., LARGEST]
    records[..., CLIPPED] += saturates(exponent, largest)
    headrooms = tuple(GRADIENT_HEADROOM if name == "gradient" else HEADROOM for name in OPERANDS)
    exponent.copy_(next_exponents(exponent, largest, kept_on_device(headrooms, records.device)))
    largest.zero_()


def saturates(exponent: Tensor, largest: Tensor) -> Tensor:
    """Returns where the largest magnitude (FP32 bits, int64) of a step did not fit under the exponent in force."""
    return (exponent != UNSET) & (largest < _INFINITY) & (exponents_of(largest) > exponent)


def next_exponents(exponent: Tensor, largest: Tensor, headroom: Tensor | int) -> Tensor:
    """Returns the exponents after a step, from those in force in it and the largest magnitudes (FP32 bits, int64)."""
    wanted = exponents_of(largest) + headroom
    wanted = torch.where(exponent == UNSET, wanted, torch.maximum(wanted, exponent - FALL)).clamp_(-LIMIT, LIMIT)
    # A step that is not finite says nothing of the next one, nor does one without numbers.
    return torch.where((largest > 0) & (largest < _INFINITY), wanted, exponent)


def saved(records: Mapping[str, Records]) -> dict[str, Any]:
    """Returns the exponents in force as JSON data: layer -> those of its operands, None where there is none yet."""
    found = {name: one.record[:, EXPONENT].tolist() for name, one in records.items()}
    return {name: [None if value == UNSET else value for value in values] for name, values in found.items()}


def load(records: Mapping[str, Records], given: Mapping[str, Any]) -> None:
    """Puts the exponents of `saved` in force; layers that it does not name have none.

    Raises:
        ValueError: an entry is not a list of three exponents; the message names the layer.
    """
    for name, one in records.items():
        values = given.get(name, [None] * len(OPERANDS))
        if not isinstance(values, list) or len(values) != len(OPERANDS) or not all(map(_is_exponent, values)):
            raise ValueError(
                f"The state's exponents of layer {name!r} are {values!r}; expected {len(OPERANDS)} whole numbers from "
                f"{-LIMIT} to {LIMIT}, or null. Restore the file from another checkpoint."
            )
        row = one.record.data
        row.zero_()
        row[:, EXPONENT] = torch.tensor([UNSET if value is None else value for value in values], device=row.device)
        one.note.known = [value is not None for value in values]
        one.note.steps = 0


def _is_exponent(value: object) -> bool:
    return value is None or (type(value) is int and -LIMIT <= value <= LIMIT)


@dataclass(frozen=True)
class Losses:
    """What of a layer's operand did not fit since the last look."""

    layer: str
    operand: str
    saturated: float
    """Share of the blocks that are not zero, of those that were looked at; 0..1."""
    small: float
    clipped_steps: int
    """Optimizer steps in which any block saturated."""

    def __str__(self) -> str:
        return (
            f"{self.layer} {self.operand}: {self.saturated:.2%} saturated, {self.small:.2%} lost bits, something "
            f"saturated in {self.clipped_steps} steps"
        )


def losses(records: Mapping[str, Records], resets: bool = True) -> list[Losses]:
    """Returns the operands of which blocks did not fit since the last call that resets, the worst first.

    Waits for the device.
    """
    found = []
    for name, rows in _read(records).items():
        for operand, row in zip(OPERANDS, rows, strict=True):
            if row[SATURATED] or row[SMALL] or row[CLIPPED]:
                blocks = max(row[BLOCKS], 1)
                found.append(Losses(name, operand, row[SATURATED] / blocks, row[SMALL] / blocks, row[CLIPPED]))
    for one in records.values() if resets else ():
        columns = kept_on_device((BLOCKS, SATURATED, SMALL, CLIPPED), one.record.device)
        one.record.data.index_fill_(1, columns, 0)
    return sorted(found, key=lambda one: (-one.saturated, -one.clipped_steps, -one.small))


def _read(records: Mapping[str, Records]) -> dict[str, list[list[int]]]:
    """Returns the rows of all records; each device is waited for once."""
    places: dict[torch.device, list[str]] = {}
    for name, one in records.items():
        places.setdefault(one.record.device, []).append(name)
    rows: dict[str, list[list[int]]] = {}
    for names in places.values():
        rows |= zip(names, torch.stack([records[name].record.data for name in names]).tolist(), strict=True)
    return {name: rows[name] for name in records}


def bits_of(number: float) -> int:
    """Returns the bits of an FP32 number."""
    return int(struct.unpack("<i", struct.pack("<f", number))[0])


assert exponents_of(torch.tensor(bits_of(TOP))) == 0
