"""Delayed exponents of a layer's operands: their values, their updates between steps, and losses outside their range.

A layer's record is a row of int64 per operand (`OPERANDS`: activation, gradient, weight), on its device. Kernels read
the exponent s in force and record the largest magnitude of passes that are trained on. `follow` derives the next s from
it between optimizer steps. So all micro-batches of a step use the same s, and so does the recomputation of activation
checkpointing. While no s is in force, each pass uses the exponent of its own tensor.

`HostView` is the host's knowledge of a layer, so that operators launch only the kernels that are needed. An operator
receives only tensors, in compiled graphs too: the address of the record identifies the layer. The view never changes a
bit of an operand: without one, the device reads the same facts itself.

A CUDA graph of torch.compile replays the launches of the facts at its capture. torch.compile captures another one if a
layer's tensor has another address, so a packed record never changes its facts where it is: `pack` gives the records of
each set of facts a memory of their own, and `Records.set_formats` leaves it.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ...numerics.formats import NumberFormat
from ...numerics.gemms import GEMMS, OPERANDS
from ..launching import kept_on_device
from .encoding import TOP, encoding_of, exponents_of, is_delayed, table_on

# Fields of a record: the exponent in force; the largest magnitude since it was set (FP32 bits); the numbers of counted
# blocks, of saturated ones and of those that lost bits; the amax of the current pass and its finished programs; the
# number of steps in which anything saturated.
EXPONENT, LARGEST, BLOCKS, SATURATED, SMALL, AMAX, ARRIVED, CLIPPED = range(8)
FIELDS = 8
UNSET = 1000
# Exponents stay within +-60, so that 2**s and the product of two are normal FP32 numbers.
LIMIT = 60
# Binades above the largest magnitude seen, by which the next step's may grow without saturating: of activations and
# weights, and of gradients. Gradients grew by more than 2 binades in 1 to 2% of the steps of a small model, by 6 at
# most, and the two more binades that this takes at the lower end hold next to no energy (docs/log/2026-11.md).
HEADROOM, GRADIENT_HEADROOM = 2, 4
# Most binades by which s falls in a step. Not more than the headroom: after one step of unusually small numbers,
# numbers of the usual size still fit.
FALL = 2
# Blocks outside the range are counted once in this many optimizer steps, since a count takes a launch per operand.
COUNT_EVERY = 16
_INFINITY = 0x7F800000


@dataclass(eq=False)
class HostView:
    """The host's knowledge of one layer."""

    follows: tuple[bool, ...] = (False,) * len(GEMMS)
    """GEMM -> True if its format's scale is the exponent in force."""
    in_blocks: tuple[bool, ...] = (False,) * len(GEMMS)
    """GEMM -> True if its format is a block format."""
    known: tuple[bool, ...] = (False,) * len(OPERANDS)
    """Operand -> True if an exponent is in force. It then stays in force until `load`."""
    steps: int = 0
    """Optimizer steps of this process."""
    address: int = 0
    """Address of the record, by which `view_of` finds the view; 0: none."""
    rows: tuple[Tensor, ...] = ()
    """The record by operand: creating such a view takes the host a microsecond."""
    packed: Hashable = None
    """The facts with which the record was packed; None: it is not packed."""

    @property
    def facts(self) -> Hashable:
        """The facts that determine the layer's captured launches (`operators.facts_of`).

        They are the same in MXFP4 and `fp8-delayed`, so a plan that changes between these captures nothing.
        """
        return self.follows, self.known

    def set_formats(self, formats: Sequence[NumberFormat]) -> None:
        """Updates the formats of the three GEMMs."""
        self.in_blocks = tuple(encoding_of(format) is not None for format in formats)
        self.follows = tuple(own or is_delayed(format) for own, format in zip(self.in_blocks, formats, strict=True))

    def is_settled(self, operand: int, gemms: tuple[int, int]) -> bool:
        """Returns True if the exponent in force and the formats determine an operand's scales for these GEMMs."""
        return self.known[operand] and _all_of(self.follows, gemms)

    def are_in_blocks(self, gemms: tuple[int, int]) -> bool:
        """Returns True if these GEMMs have block formats."""
        return _all_of(self.in_blocks, gemms)

    @property
    def counts_now(self) -> bool:
        """True if blocks outside the range are counted in this step."""
        return self.steps % COUNT_EVERY == 1

    def copy(self) -> HostView:
        """Returns the same view for another record."""
        return HostView(self.follows, self.in_blocks, self.known, self.steps)


def _all_of(flags: Sequence[bool], gemms: tuple[int, int]) -> bool:
    row_gemm, column_gemm = gemms
    return (row_gemm < 0 or flags[row_gemm]) and (column_gemm < 0 or flags[column_gemm])


# A view lives as long as its records. `_register` overwrites the entry when an address is reused.
_VIEWS: WeakValueDictionary[int, HostView] = WeakValueDictionary()
# The memory of all packed records, some 40 KB per model and set of facts. It is never freed: CUDA graphs outlive runs
# and layers, and would be replayed for other records at their addresses.
_HOMES: list[Tensor] = []


def _register(view: HostView, record: Tensor) -> None:
    """Makes `view_of` find the view of a record."""
    if view.address and _VIEWS.get(view.address) is view:
        del _VIEWS[view.address]
    view.address, view.rows = record.data_ptr(), record.unbind()
    _VIEWS[view.address] = view


def view_of(record: Tensor) -> HostView | None:
    """Returns the host's view of a layer's record, None if there is none."""
    return _VIEWS.get(record.data_ptr())


@dataclass
class Records:
    """A layer's record with its table and its host view."""

    record: Tensor
    """(operands, FIELDS) int64. Kernels write it without torch's knowledge."""
    table: Tensor
    """`encoding.table_on` its device."""
    everything: Tensor | None = None
    """The tensor of all layers' records that contains `record` as a row; None: there is none."""
    homes: dict[Hashable, Tensor] = field(default_factory=dict)
    """Device and facts of the layers packed together -> the memory of their records; empty: never packed."""
    view: HostView = field(default_factory=HostView)

    def __post_init__(self) -> None:
        _register(self.view, self.record)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a deep copy."""
        self.__dict__.update(state)
        _register(self.view, self.record)

    @classmethod
    def new(cls, device: torch.device) -> Records:
        record = torch.zeros(len(OPERANDS), FIELDS, dtype=torch.int64)
        record[:, EXPONENT] = UNSET
        return cls(record.to(device), table_on(device))

    def copy(self) -> Records:
        """Returns a copy that shares no tensor with other layers."""
        return Records(self.record.clone(), self.table, view=self.view.copy())

    def set_formats(self, formats: Sequence[NumberFormat]) -> None:
        """Updates the formats of the three GEMMs. If this changes a packed record's facts, it leaves its memory until
        `follow` or `load` pack it again: graphs in between serve all plans."""
        self.view.set_formats(formats)
        if self.view.packed not in (None, self.view.facts):
            self.record, self.everything, self.view.packed = self.record.data.clone(), None, None
            torch._dynamo.mark_static_address(self.record)  # graphs write to it, too
            _register(self.view, self.record)

    def on(self, device: torch.device) -> Records:
        """Moves the records to a device if they are elsewhere, and returns them."""
        if self.record.device != device:
            self.record, self.table, self.everything = self.record.to(device), table_on(device), None
            self.view.packed = None
            if torch.compiler.is_compiling():
                self.view.address = 0  # `follow` registers it: traced code may not
            else:
                _register(self.view, self.record)
        return self


def pack(records: Sequence[Records]) -> None:
    """Makes the records on each device rows of one tensor, so that `follow` needs few launches.

    Each set of facts has its own tensor, which is kept: a CUDA graph of other facts must not find its addresses again.
    """
    devices: dict[torch.device, list[Records]] = {}
    for one in records:
        devices.setdefault(one.record.device, []).append(one)
    for device, members in devices.items():
        facts, homes = (device, *(one.view.facts for one in members)), members[0].homes
        values = torch.stack([one.record.data for one in members])
        if facts not in homes:
            homes[facts] = torch.empty_like(values)
            _HOMES.append(homes[facts])
        everything = homes[facts].copy_(values)
        for one, row in zip(members, everything.unbind(), strict=True):
            torch._dynamo.mark_static_address(row)  # so that CUDA graphs write to the same place
            one.record, one.everything, one.homes = row, everything, homes
            one.view.packed = one.view.facts
            _register(one.view, row)


def _repack(records: Sequence[Records]) -> None:
    """Packs records again if they were packed, and some have left their memory or know other exponents since."""
    packed = [one for one in records if one.homes]
    if any(one.view.facts != one.view.packed for one in packed):
        pack(packed)


def follow(records: Sequence[Records]) -> None:
    """Sets the next step's exponents from the largest magnitudes since the last call, if there were any."""
    for tensor in _tensors_of(records):
        _follow(tensor)
    _update_views(records)
    _repack(records)


def _tensors_of(records: Iterable[Records]) -> list[Tensor]:
    """Returns the tensors that contain the records, each once, unseen by compiled graphs and autograd."""
    tensors = [one.record if one.everything is None else one.everything for one in records]
    return [tensor.data for tensor in {id(tensor): tensor for tensor in tensors}.values()]


def _update_views(records: Sequence[Records]) -> None:
    """Notes which operands have an exponent, after steps 1, 2, 4, 8, ... until all have one: this waits for the
    device."""
    waiting: dict[torch.device, list[Records]] = {}
    for one in records:
        one.view.steps += 1
        if not one.view.address:
            _register(one.view, one.record)
        if not all(one.view.known) and one.view.steps & (one.view.steps - 1) == 0:
            waiting.setdefault(one.record.device, []).append(one)
    for members in waiting.values():
        exponents = torch.stack([one.record.data[:, EXPONENT] for one in members]).tolist()
        for one, values in zip(members, exponents, strict=True):
            one.view.known = tuple(value != UNSET for value in values)


def _follow(records: Tensor) -> None:
    exponent, largest = records[..., EXPONENT], records[..., LARGEST]
    records[..., CLIPPED] += saturates(exponent, largest)
    headrooms = tuple(GRADIENT_HEADROOM if name == "gradient" else HEADROOM for name in OPERANDS)
    exponent.copy_(next_exponents(exponent, largest, kept_on_device(headrooms, records.device)))
    largest.zero_()


def saturates(exponent: Tensor, largest: Tensor) -> Tensor:
    """Returns True for each largest magnitude (FP32 bits, int64) of a step that exceeded the exponent in force."""
    return (exponent != UNSET) & (largest < _INFINITY) & (exponents_of(largest) > exponent)


def next_exponents(exponent: Tensor, largest: Tensor, headroom: Tensor | int) -> Tensor:
    """Returns the exponents after a step, from those in force in it and the largest magnitudes (FP32 bits, int64)."""
    wanted = exponents_of(largest) + headroom
    wanted = torch.where(exponent == UNSET, wanted, torch.maximum(wanted, exponent - FALL)).clamp_(-LIMIT, LIMIT)
    # A step without numbers, or with an infinity or NaN, changes nothing.
    return torch.where((largest > 0) & (largest < _INFINITY), wanted, exponent)


def saved(records: Mapping[str, Records]) -> dict[str, Any]:
    """Returns the exponents in force as JSON data: layer -> those of its operands, None if there is none yet."""
    found = {name: one.record[:, EXPONENT].tolist() for name, one in records.items()}
    return {name: [None if value == UNSET else value for value in values] for name, values in found.items()}


def load(records: Mapping[str, Records], given: Mapping[str, Any]) -> None:
    """Puts the exponents of `saved` in force; layers without an entry have none.

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
        one.view.known = tuple(value is not None for value in values)
        one.view.steps = 0
    _repack(list(records.values()))


def _is_exponent(value: object) -> bool:
    return value is None or (type(value) is int and -LIMIT <= value <= LIMIT)


@dataclass(frozen=True)
class Losses:
    """The losses of a layer's operand since the last reset."""

    layer: str
    operand: str
    saturated: float
    """Share of the counted blocks that are not zero; 0..1."""
    small: float
    clipped_steps: int
    """Number of optimizer steps in which any block saturated."""

    def __str__(self) -> str:
        return (
            f"{self.layer} {self.operand}: {self.saturated:.2%} saturated, {self.small:.2%} lost bits, something "
            f"saturated in {self.clipped_steps} steps"
        )


def losses(records: Mapping[str, Records], resets: bool = True) -> list[Losses]:
    """Returns the operands with blocks that did not fit since the last call that resets, the worst first.

    Waits for the device.
    """
    found = []
    for name, rows in _read(records).items():
        for operand, row in zip(OPERANDS, rows, strict=True):
            if row[SATURATED] or row[SMALL] or row[CLIPPED]:
                blocks = max(row[BLOCKS], 1)
                found.append(Losses(name, operand, row[SATURATED] / blocks, row[SMALL] / blocks, row[CLIPPED]))
    for tensor in _tensors_of(records.values()) if resets else ():
        tensor.index_fill_(-1, kept_on_device((BLOCKS, SATURATED, SMALL, CLIPPED), tensor.device), 0)
    return sorted(found, key=lambda one: (-one.saturated, -one.clipped_steps, -one.small))


def _read(records: Mapping[str, Records]) -> dict[str, list[list[int]]]:
    """Returns the rows of all records, waiting once for each device."""
    names_on: dict[torch.device, list[str]] = {}
    for name, one in records.items():
        names_on.setdefault(one.record.device, []).append(name)
    rows: dict[str, list[list[int]]] = {}
    for names in names_on.values():
        rows |= zip(names, torch.stack([records[name].record.data for name in names]).tolist(), strict=True)
    return {name: rows[name] for name in records}


def bits_of(number: float) -> int:
    """Returns the bits of an FP32 number."""
    return int(struct.unpack("<i", struct.pack("<f", number))[0])


assert exponents_of(torch.tensor(bits_of(TOP))) == 0
