"""The key-value cache of the target: one storage for layers alike, a length per row, commit in place.

Shapes: B rows, H key-value heads, S slots of a row, W slots in use, N new tokens, K nodes of a path, E width of a key
or of a value.
A tree pass writes node n of row b at slot lengths[b] + n; `commit` moves the accepted ones to the front of the free
part. Slots and position ids are different things: a node's position is its row's length plus its depth.

Of layers that see a window a row keeps the newest tokens alone, in a ring: the token at place p is in slot p modulo the
slots. A pass overwrites tokens that none of its own sees. What it commits are its first tokens: nothing is moved."""

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import CacheLayerMixin

from .recurrent.recurrent_passes import RecurrentCache, RecurrentStates

FIRST_SLOTS = 256  # Slots of a row that are allocated at once; rows that need more grow
MANY_SLOTS = 8_192
"""Slots of all rows from which the layers on a device are in several blocks, of which one is in memory twice while the
cache grows. A smaller cache is one block: every pass moves the accepted slots of each."""
PARTS, FEWEST_LAYERS = 8, 4  # Most blocks on a device, and fewest layers of one if it has them: smaller save little


@dataclass
class Window:
    """The rows and slots that the running pass writes."""

    rows: slice | Tensor  # Rows of the storage: a slice (read through a view) or an index tensor (through a copy)
    rows_B1: Tensor  # The same rows as a column of indices
    host_rows: list[int]  # The same rows on the host
    places_BN: Tensor  # Place of every new token in its row, the tokens before it counted
    slots_BN: Tensor  # Its slot: its place, or in a ring where that comes round to
    width: int  # Slots up to the last one in use
    start: int | None  # First slot of the new tokens where it is that of all rows, neighbours: one block is copied
    virtual_BN: Tensor | None  # True at new tokens that are virtual nodes; None where none is

    _elsewhere: dict[torch.device, "Window"] = field(default_factory=dict)

    def on(self, device: torch.device) -> "Window":
        """The same with its indices on another device, copied there once a pass."""
        if self.slots_BN.device == device:
            return self
        if device not in self._elsewhere:
            rows = self.rows if isinstance(self.rows, slice) else self.rows.to(device)
            virtual_BN = None if self.virtual_BN is None else self.virtual_BN.to(device)
            self._elsewhere[device] = replace(self, rows=rows, rows_B1=self.rows_B1.to(device),
                                              slots_BN=self.slots_BN.to(device), virtual_BN=virtual_BN)
        return self._elsewhere[device]


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of the cache for transformers, which asks it for lengths; keys and values go to the owner."""

    is_sliding = False

    def __init__(self, owner: "RowCache", index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # The owner holds its layers: if they held it too, its memory would stay until the garbage collector came by.
        self.owner: RowCache = weakref.proxy(owner)
        self.index = index

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("a layer is written through its cache")

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the owner allocates at the first write."""

    def get_seq_length(self) -> int:
        return self.owner.width

    def get_max_length(self) -> int:
        return self.owner.capacity

    get_max_cache_shape = get_max_length  # Earlier versions of transformers ask by this name

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        return self.owner.width, 0


@dataclass
class Block:
    """Layers on one device whose keys are of one shape, and whose values are."""

    layers: list[int]  # These layers, ascending
    kind: Hashable  # Their device and their group
    storage: Tensor | None = None
    """Keys and values of layer layers[n] in entries 2n and 2n + 1, [2 * layers, B, H, S, E]; None before the first keys
    are written. Keys alone in entries n, where the values have another shape."""
    values: Tensor | None = None  # These other values, [layers, B, H, S, E]; None where they are next to the keys

    @property
    def parts(self) -> list[tuple[Tensor, int]]:
        """Its tensors, and how many entries of each are one layer's; empty before the first keys are written."""
        if self.storage is None:
            return []
        return [(self.storage, 2)] if self.values is None else [(self.storage, 1), (self.values, 1)]

    def entries(self, place: int) -> tuple[Tensor, Tensor]:
        """Keys and values of layer layers[place], [B, H, S, E] each; there must be memory."""
        (keys, each), (values, _) = self.parts[0], self.parts[-1]
        return keys[each * place], values[each * place + each - 1]


class RowCache(RecurrentCache):
    """Keys and values of a batch of rows that grow and finish at their own pace. Memory is taken as the rows grow:
    answers seldom reach the length that they may have, `capacity`: the longest sequence plus the largest tree, in
    tokens; with `newest` so many of its last tokens, and the largest pass. `device` holds the lengths. Where
    `layer_devices` differ, each layer's keys and values stay where the first ones are written. `groups` tells of each
    layer what those with keys and values of equal shapes share, None where it holds none."""

    def __init__(self, num_layers: int, rows: int, capacity: int, device: torch.device,
                 layer_devices: Sequence[torch.device] = (), groups: Sequence[Hashable] = (),
                 recurrent: bool = False, newest: int | None = None) -> None:
        super().__init__(layers=[_Layer(self, index) for index in range(num_layers)])
        self.num_layers, self.rows, self.newest = num_layers, rows, newest
        self.capacity = capacity if newest is None else min(capacity, newest)
        self.blocks: list[Block] = []
        parts = PARTS if rows * capacity >= MANY_SLOTS else 1
        kinds: dict[Hashable, list[int]] = {}
        for layer in range(num_layers):
            group = groups[layer] if groups else 0
            if group is not None:
                kinds.setdefault((layer_devices[layer] if layer_devices else None, group), []).append(layer)
        for kind, layers in kinds.items():
            size = max(FEWEST_LAYERS, -(-len(layers) // parts))
            self.blocks += [Block(layers[first : first + size], kind) for first in range(0, len(layers), size)]
        self._block_of = {layer: block for block in self.blocks for layer in block.layers}
        self.states = RecurrentStates(rows) if recurrent else None
        self.lengths_B = torch.zeros(rows, dtype=torch.long, device=device)
        self._order_B = torch.arange(rows, device=device)
        self.host_lengths = [0] * rows
        self.window: Window | None = None
        # Slots that every pass reads, so that it can be replayed; the host then counts what is committed by `advance`.
        self.bound: int | None = None
        self.extent = 0  # Most slots after a row's tokens that a pass has taken
        self._grows = True

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any,
               **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store what a layer of transformers has computed, see `write`; several may share a layer of the cache."""
        layer: Any = self.layers[layer_idx]
        return self.write(layer.index, key_states, value_states)

    @property
    def storage(self) -> Tensor | None:
        """The keys and values of the first block; None before the first are written."""
        return self.blocks[0].storage

    @property
    def _written(self) -> list[Tensor]:
        """The tensors of all blocks."""
        return [part for block in self.blocks for part, _ in block.parts]

    @property
    def shapes(self) -> list[Hashable]:
        """Heads and widths of the keys and values of each layer; None where none were written."""
        parts = [self._block_of[layer].parts if layer in self._block_of else [] for layer in range(self.num_layers)]
        return [tuple((part.shape[2], part.shape[4]) for part, _ in own) or None for own in parts]

    @property
    def width(self) -> int:
        """Slots in use in the running pass."""
        return self.window.width if self.window is not None else max(self.host_lengths)

    def open(self, rows: slice | list[int], size: int, *, gap: int = 0, virtual_BN: Tensor | None = None) -> Window:
        """Announce a pass of `size` tokens in `rows`; ValueError if a row has no room for them. `gap` slots between a
        row's last token and the new ones are taken by nodes that will not be committed."""
        index = list(range(self.rows))[rows] if isinstance(rows, slice) else rows
        self.extent = max(self.extent, gap + size)
        width = max(self.host_lengths[row] for row in index) + gap + size
        most = self.capacity if self.bound is None else self.bound
        if width > most:
            if self.newest is None or most < self.capacity or self.newest - 1 + gap + size > most:
                raise ValueError(f"a row would need {width} cache slots, it has {most}; ask for a larger capacity")
            width = 0  # The ring is full, and read whole.
        rows_B = self.row_numbers(index)
        places_BN = self.lengths_B[rows_B][:, None] + torch.arange(gap, gap + size, device=self.lengths_B.device)
        level = isinstance(rows, slice) and len({self.host_lengths[row] for row in index}) == 1 and self.bound is None
        self.window = Window(rows=rows if isinstance(rows, slice) else rows_B, rows_B1=rows_B[:, None], host_rows=index,
                             places_BN=places_BN, slots_BN=places_BN if self.newest is None else
                             places_BN % self.capacity, width=width if width and self.bound is None else most,
                             start=width - size if level and width else None, virtual_BN=virtual_BN)
        return self.window

    def held(self) -> Tensor:
        """Place in its row of what each slot in use holds after the running pass, [B, W]; negative in a ring where that
        is nothing. Raises ValueError if no pass is running."""
        if (window := self.window) is None:
            raise ValueError("there is no pass; announce one with open first")
        slots_W = torch.arange(window.width, device=window.slots_BN.device)
        if self.newest is None:
            return slots_W.expand(len(window.host_rows), -1)
        last_B1 = window.places_BN[:, -1:]
        return last_B1 - (last_B1 - slots_W) % self.capacity

    def row_numbers(self, rows: list[int]) -> Tensor:
        """These rows on the device, [R]. The first ones in order are there already; the host waits to copy others."""
        if rows == list(range(len(rows))):
            return self._order_B[: len(rows)]
        return torch.tensor(rows, device=self._order_B.device)

    def reserve(self, tokens: int, room: int) -> None:
        """Make room in every row for so many tokens, as far as they are kept, and for `room` more of a pass; where
        there is less, what is there is copied once."""
        needed = room + (tokens if self.newest is None else min(tokens, self.newest - 1))
        if needed <= (former := self.capacity):
            return
        # A quarter more than asked for: a draft that outgrows the rows does so level by level.
        self.capacity = needed + needed // 4
        if self.newest is None:
            return
        # A ring may have come round: what it holds, nodes of a tree too, goes to its slots in the larger one.
        last_B1 = self.lengths_B[:, None] + room - 1
        from_BS = (last_B1 - (last_B1 - torch.arange(self.capacity, device=last_B1.device)) % self.capacity) % former

        def moved(part: Tensor) -> Tensor:
            rows = zip(part.unbind(1), from_BS.to(part.device).clamp(max=part.shape[3] - 1), strict=True)
            return torch.stack([row.index_select(2, from_S) for row, from_S in rows], 1)

        for block in self.blocks:
            block.storage = None if block.storage is None else moved(block.storage)
            block.values = None if block.values is None else moved(block.values)

    def take_all(self) -> None:
        """Take the memory of all slots, now or at the first pass, after which nothing is moved."""
        for block in self.blocks:
            self._make_room(block, self.capacity)
        self._grows = False

    def write(self, layer: int, keys_BHNE: Tensor, values_BHNE: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new keys and values of a layer and return all those in use, [B, H, W, E] each; ValueError outside a
        pass."""
        if self.window is None:
            raise ValueError("the cache was written outside a pass; call open first")
        block, window = self._block_of[layer], self.window.on(keys_BHNE.device)
        if block.storage is None:
            # All blocks of a kind get their memory with the first keys there: which layers a drafter has run before
            # must not matter to records of passes.
            (_, heads, _, width), alike = keys_BHNE.shape, keys_BHNE.shape == values_BHNE.shape
            for other in (one for one in self.blocks if one.kind == block.kind):
                each = len(other.layers)
                other.storage = keys_BHNE.new_zeros(2 * each if alike else each, self.rows, heads, 0, width)
                if not alike:
                    other.values = values_BHNE.new_zeros(each, self.rows, values_BHNE.shape[1], 0, values_BHNE.shape[3])
                self._make_room(other, self.width)
        self._make_room(block, self.width)
        answer, place = [], block.layers.index(layer)
        for held, new in zip(block.entries(place), (keys_BHNE, values_BHNE), strict=True):
            if window.virtual_BN is not None:
                # Through a mask, a NaN or an infinity of a virtual node would reach every node of the row, though it is
                # a drafter's and no virtual node is accepted.
                new = new.masked_fill(window.virtual_BN[:, None, :, None] & ~new.isfinite(), 0.0)
            if window.start is None:
                held[window.rows_B1, :, window.slots_BN] = new.transpose(1, 2)
            else:
                held[window.rows, :, window.start : window.width] = new
            answer.append(held[window.rows, :, : window.width])
        return answer[0], answer[1]

    def _make_room(self, block: Block, width: int) -> None:
        """Let a block that has memory have at least `width` slots of a row."""
        if block.storage is None or width <= (held := block.storage.shape[3]):
            return
        # Half as many again: each time the cache grows, all that it holds is copied.
        slots = min(self.capacity, max(width, held + held // 2, FIRST_SLOTS)) if self._grows else self.capacity
        # Zeros, not empty: a NaN in a masked slot leaks through the attention kernel.
        block.storage = pad(block.storage, (0, 0, 0, slots - held))
        if block.values is not None:
            block.values = pad(block.values, (0, 0, 0, slots - held))

    def arrange(self, layers: int, columns_BN: Tensor) -> None:
        """Let slot lengths[b] + n of the first `layers` layers hold what is in slot lengths[b] + columns_BN[b, n];
        ValueError if nothing has been written."""
        if not self._written:
            raise ValueError("there are no keys to arrange")
        # A verified tree may have more nodes than were read while it grew.
        width = max(self.host_lengths[: len(columns_BN)]) + columns_BN.shape[1]
        for block in self.blocks:
            self._make_room(block, width)
        rows_B1 = torch.arange(len(columns_BN), device=columns_BN.device)[:, None]
        base_B1 = self.lengths_B[: len(columns_BN), None]
        target_BN = base_B1 + torch.arange(columns_BN.shape[1], device=columns_BN.device)
        for block in self.blocks:
            count = sum(layer < layers for layer in block.layers)
            for part, each in block.parts:
                _move(part[: each * count], rows_B1, target_BN, base_B1 + columns_BN)

    def commit(self, path_BK: Tensor, counts_B: Tensor, host_counts: list[int], *, moved: bool = True) -> None:
        """Keep the path of each row of the last pass: its nodes become the row's next tokens, the rest is forgotten. Of
        the ascending node indices `path_BK` the first `counts_B` are real; a padding column holds its own index.
        `host_counts` are any where `bound` is set. Nothing is copied unless `moved`: every path is then the first nodes
        in order."""
        window = self.window
        if window is None or not (self._written or self.states):
            raise ValueError("there is no pass to commit")
        if self.states is not None:
            self.states.commit(window.rows, path_BK, counts_B)
        if moved:
            base_B1 = self.lengths_B[window.rows_B1]
            target_BK = base_B1 + torch.arange(path_BK.shape[1], device=path_BK.device)
            for block in self.blocks:
                # Layers that this pass left out have not grown with the others.
                self._make_room(block, window.width)
            for part in self._written:
                _move(part, window.rows_B1, target_BK, base_B1 + path_BK)
        self.lengths_B.index_add_(0, window.rows_B1[:, 0], counts_B)
        if self.bound is None:
            for row, count in zip(window.host_rows, host_counts, strict=True):
                self.host_lengths[row] += count
        self.window = None

    def advance(self, counts: Sequence[int]) -> None:
        """Count on the host what passes have committed with `bound`: counts[r] tokens of row r."""
        for row, count in enumerate(counts):
            self.host_lengths[row] += count

    def assume(self, length: int) -> None:
        """Let every row start with `length` blank tokens that nothing computed: for measuring the cost of a pass."""
        self.lengths_B.fill_(length)
        self.host_lengths = [length] * self.rows

    def forget(self, row: int) -> None:
        """Forget a row; another sequence may start there."""
        if self.states is not None:
            self.states.clear(row)
        self.lengths_B[row] = 0
        self.host_lengths[row] = 0

    def drop_after(self, rows: int, until: int | None = None) -> None:
        """Forget the rows from number `rows` to `until`, by default all: passes of one shape read rows that have left
        too, whose slots must stay within the cache."""
        until = self.rows if until is None else until
        if self.states is not None:
            self.states.clear(slice(rows, until))
        self.lengths_B[rows:until] = 0
        self.host_lengths[rows:until] = [0] * max(0, until - rows)

    @torch.no_grad()
    def wipe(self, row: int) -> None:
        """Forget a row and zero its slots: a NaN in a masked slot leaks through the attention kernel."""
        self.forget(row)
        for part in self._written:
            part[:, row] = 0

    def copy(self, source: int, destination: int, length: int) -> None:
        """Let a row start with the first `length` tokens of another; with all of them, if layers are recurrent."""
        if self.states is not None:
            self.states.copy(source, destination)
        for part in self._written:
            part[:, destination, :, :length] = part[:, source, :, :length]
        self.lengths_B[destination] = length
        self.host_lengths[destination] = length

    def move(self, source: int, destination: int) -> None:
        """Copy the used slots of one row over another; the source is then cleared."""
        self.copy(source, destination, self.host_lengths[source])
        self.forget(source)

    def clear(self, rows_R: Tensor) -> None:
        """Make these rows blank."""
        for row in rows_R.tolist():
            self.wipe(row)

    def keep(self, rows_R: Tensor) -> None:
        """Let row r be the former row rows_R[r], which never moves a row back; the rows after these become blank."""
        for destination, source in enumerate(rows_R.tolist()):
            if source != destination:
                # The replaced row may have been longer and may hold NaN after the part that is overwritten.
                self.wipe(destination)
                self.move(source, destination)
        self.drop_after(len(rows_R))


def _move(storage: Tensor, rows_B1: Tensor, to_BK: Tensor, from_BK: Tensor) -> None:
    """Copy slots of some rows to others in all layers of a block, wherever the indices are."""
    rows_B1, to_BK, from_BK = (index.to(storage.device) for index in (rows_B1, to_BK, from_BK))
    # The gather on the right completes before the scatter on the left, so overlapping moves are safe.
    storage[:, rows_B1, :, to_BK] = storage[:, rows_B1, :, from_BK]
