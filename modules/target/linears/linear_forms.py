"""Forms of a target's linear layers: plain, packed for oneDNN, or both, chosen by the number of tokens of a pass.

The choice is measured at load (`linear_times`), and timing never repeats exactly: the forms differ in the last bits, so
a run that is measured twice could write other bytes. Design:

* Whatever leaves bytes that must come out the same (distilled text, stored states, trained weights, the searched tree)
  runs inside `LinearForms.reproducible`: there the form does not depend on a measurement. It is the packed one wherever
  the build has it, or the one that the user has set. A killed run that is resumed, and a second run, thus have the same
  bytes without a record of any choice. Those passes have many rows, for which packing pays first.
* Everything else (decoding with an artifact, its evaluation, timed steps) runs in the measured form. `Packing` keeps
  it with the times, in tuning.json and in the header of an evaluation.
* Within one target the choice depends on the number of tokens alone, so equal passes are rounded alike. Passes of
  different sizes never were: the products sum in another order for each size. A drafted answer and a plain one can
  therefore differ at near-ties as before, and the bound on their gap is the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from .linear_times import LinearTimes, measure_linears, worth_measuring
from .packed_linear import PackedLinears, can_pack

Pack = int | Literal["auto"]  # Fewest tokens of a pass that runs packed, 0 for no pass; auto measures


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Forms that the passes of a target run in, with the measurement that chose them."""

    packed_from: int  # Fewest tokens of a pass whose linear layers run packed: 1 for all passes, 0 for none
    times: LinearTimes | None = None  # The measurement; None where the form was set, or there was nothing to choose

    def __post_init__(self) -> None:
        if self.packed_from < 0:
            raise ValueError(f"packed_from must be at least 0, got {self.packed_from}")

    @property
    def in_words(self) -> str:
        """The forms for people."""
        forms = {0: "linear layers plain", 1: "linear layers packed for oneDNN"}
        both = f"linear layers packed for oneDNN in passes of {self.packed_from} tokens or more, plain in smaller ones"
        measured = "" if self.times is None else ", which was measured to be fastest here"
        return forms.get(self.packed_from, both) + measured


class LinearForms:
    """The linear layers of a target, in the forms that its passes run. Packed layers are copies next to the plain ones,
    which the model is saved, hashed and run natively with. `shared` are the forms of a target of which this model is a
    copy; packed layers with the very same weight are shared."""

    def __init__(self, model: nn.Module, pack: Pack | Packing, shared: "LinearForms | None" = None) -> None:
        self.model, self._shared = model, None if shared is None else shared.packed
        self.packed: PackedLinears | None = None
        self.packing = Packing(packed_from=0)
        if not can_pack(model):
            self.use(self.packing)
        elif isinstance(pack, Packing):
            self.use(pack)
        elif pack != "auto":
            self.use(Packing(packed_from=pack))
        elif not worth_measuring(model):
            self.use(Packing(packed_from=1))
        else:
            dtype = next(model.parameters()).dtype
            times = measure_linears(model, [dtype])[dtype]
            self.use(Packing(packed_from=times.fastest(), times=times))
        # The other target may go while this one stays: held here, its packed layers would stay with it.
        self._shared = None

    def __deepcopy__(self, _memo: dict[int, Any]) -> "LinearForms":
        # A drafter that keeps its target's forms is copied in training; the copy drafts for the same target.
        return self

    def use(self, packing: Packing) -> None:
        """Run these forms from now on; without a packed pass the packed layers' memory is given back."""
        self.packing = packing
        if self.packed is not None:
            self.packed.remove()
        if not packing.packed_from:
            self.packed = None
            return
        if self.packed is None:
            self.packed = PackedLinears(self.model, self._shared)
        self.packed.packed_from = packing.packed_from
        self.packed.install()

    @contextmanager
    def reproducible(self) -> Iterator[None]:
        """A block whose passes are the same in every process of this machine: no measurement decides their form."""
        before = self.packing
        # Where there are times, they decided. Packed for all passes is what comes out without them.
        self.use(before if before.times is None else replace(before, packed_from=1))
        try:
            yield
        finally:
            self.use(before)

    @contextmanager
    def plain(self) -> Iterator[None]:
        """A block in which the plain layers run: as transformers made them, and with gradients."""
        if self.packed is not None:
            self.packed.remove()
        try:
            yield
        finally:
            if self.packed is not None:
                self.packed.install()
