"""What the host knows of a layer whose operands are folded, so that operators launch only what is needed.

An operator gets tensors alone, in compiled graphs too. The address of a layer's record says which layer it is. What is
noted never changes a bit of an operand: without a note, an operator has the device find out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from torch import Tensor

from ...numerics.formats import NumberFormat
from ...numerics.gemms import GEMMS, OPERANDS
from .folding import fold_of

# Blocks outside the range are counted in one of so many optimizer steps; each takes a launch per operand.
LOOK_EVERY = 16


@dataclass(eq=False)
class Note:
    """What is known of one layer."""

    folded: list[bool] = field(default_factory=lambda: [False] * len(GEMMS))
    """Of each GEMM, whether its format is folded."""
    known: list[bool] = field(default_factory=lambda: [False] * len(OPERANDS))
    """Of each operand, whether an exponent is in force. Once it is, there is one until `records.load`."""
    steps: int = 0
    """Optimizer steps of this process."""
    address: int = 0
    """Of the record that `note_of` finds it by; 0: of none."""
    rows: tuple[Tensor, ...] = ()
    """Of that record, by operand: making them anew takes the host a microsecond each."""

    def take(self, formats: Sequence[NumberFormat]) -> None:
        """Takes notice of the formats of the three GEMMs."""
        self.folded = [fold_of(format) is not None for format in formats]

    def is_settled(self, operand: int, gemms: tuple[int, int]) -> bool:
        """Returns True if the exponent in force and the formats alone give the scales of an operand for these GEMMs."""
        (row_gemm, column_gemm), folded = gemms, self.folded
        return self.known[operand] and (row_gemm < 0 or folded[row_gemm]) and (column_gemm < 0 or folded[column_gemm])

    @property
    def looks(self) -> bool:
        """Whether blocks outside the range are counted in this step."""
        return self.steps % LOOK_EVERY == 1

    def copy(self) -> Note:
        """Returns the same note for another record."""
        return Note(list(self.folded), list(self.known), self.steps)


# A note lives as long as its records do, and a record that comes to lie at an address has its own note put there.
_NOTES: WeakValueDictionary[int, Note] = WeakValueDictionary()


def put(note: Note, record: Tensor) -> None:
    """Lets `note_of` find the note of a record."""
    if note.address and _NOTES.get(note.address) is note:
        del _NOTES[note.address]
    note.address, note.rows = record.data_ptr(), record.unbind()
    _NOTES[note.address] = note


def note_of(record: Tensor) -> Note | None:
    """Returns the note of a layer's record, None if there is none."""
    return _NOTES.get(record.data_ptr())
