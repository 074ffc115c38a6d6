"""Keys and values of single tokens, by slot, as the model knows them: one call for every kind of model.

    kv = model_kv(rows)
    key, value = kv.get(slots)        # [T, L, H, D] each
    latent, rope = kv.get(slots)      # [T, L, R] and [T, L, P], of a model with latent attention (MLA)
    kv.put(slots, key, value)         # the inverse

Under tensor parallelism H are the heads of this rank, in the order of its cache; a latent is whole on
every rank.
"""

from collections.abc import Sequence
from typing import Literal

import torch

from kvferry.kernels.budget import MAX_SMS
from kvferry.kernels.rows import PartName, RowLayout

from .ops_rows import gather_slots, scatter_slots
from .registered_rows import register_rows

ROPE_DIM = 64
"""Numbers of the rotary part of a latent, in every DeepSeek model so far."""

PACKED_ROPE_BYTES = {656: 128}
"""Bytes of it in a row of packed bytes, by the bytes of the row: vLLM's ``fp8_ds_mla``."""

Slots = torch.Tensor | Sequence[int]
"""``block * block_size + offset`` of each token, or -1."""


class ModelKV:
    """Gets and puts the keys and values, or latents, of tokens in the paged cache of one group.

    Threads:
        Any number at once, as long as no two touch the same bytes.

    Ownership:
        Keeps the layout, and so the cache, alive.

    Attributes:
        rows: where the bytes of a token are.
        kind: ``"heads"`` for keys and values, ``"latent"`` for latents.
        num_layers: L.
        dtype: of the numbers, as the cache has it.
        names: of the two tensors, for error messages.
        shapes: of one token and layer: ``(H, D)`` twice, or ``(R,)`` and ``(P,)``.
    """

    __slots__ = ("_layout", "dtype", "kind", "names", "num_layers", "rows", "shapes")

    kind: Literal["heads", "latent"]
    names: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]

    def __init__(self, rows: RowLayout, rope_dim: int | None = None) -> None:
        """Read the model's shape off *rows*; :func:`model_kv` says what the arguments mean."""
        if not isinstance(rows, RowLayout):
            raise ValueError(f"rows must be a RowLayout; got {type(rows).__name__}")
        names: list[PartName] = [part.name for part in rows.parts]
        self.kind = "latent" if names[0] == "latent" else "heads"
        per_layer = 1 if self.kind == "latent" else 2
        alike = {(part.name, part.shape, part.dtype) for part in rows.parts}
        if len(alike) != per_layer:
            kinds = ", ".join(sorted(f"{name} {list(shape)}" for name, shape, _ in alike))
            raise ValueError(
                f"rows must be of layers that are alike: build them of some layers only; got {kinds}"
            )
        self.rows = rows
        self.num_layers = len(rows.parts) // per_layer
        self.dtype = rows.parts[0].dtype
        if self.kind == "latent":
            width = rows.parts[0].shape[0]
            packed = PACKED_ROPE_BYTES if self.dtype is torch.uint8 else {}
            rope = packed.get(width, ROPE_DIM) if rope_dim is None else rope_dim
            if not 0 <= rope <= width:
                raise ValueError(f"rope_dim must be in 0..{width}; got {rope}")
            self.names, self.shapes = ("latent", "rope"), ((width - rope,), (rope,))
        else:
            if rope_dim is not None:
                raise ValueError(f"rope_dim must be left out of a model with heads; got {rope_dim}")
            self.names, self.shapes = ("key", "value"), (rows.parts[0].shape, rows.parts[1].shape)
        self._layout = register_rows(rows)

    def get(
        self, slots: Slots, *, out: torch.Tensor | None = None, max_sms: int = MAX_SMS
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy tokens out of the paged cache.

        On a device this is one launch, enqueued on the current stream; on the host it is done when the
        call returns.

        Args:
            slots: ``[T]``, repeats allowed. The token of a slot of -1 is zero, or, in *out*, what it was.
            out: ``[T, rows.row_bytes]`` uint8 to copy into, on the device or in pinned host memory; new
                memory on the device if None.
            max_sms: most streaming multiprocessors to take; a host ignores it.

        Returns:
            Key and value, or latent and rotary part, of all layers: ``[T, L, *shapes[i]]``, views of the
            same rows. The numbers of a layer's head, or of its latent, are adjacent.

        Raises:
            ValueError: a slot does not exist (checked on the host only), or *out* differs from the above.

        Units:
            Moves ``2 * T * rows.row_bytes`` bytes.

        Source:
            ``torch.ops.kvferry.gather_slots``.
        """
        mapping = self._mapping(slots)
        if out is None:
            # memory of others must not show through the holes; looking for one would wait on a device,
            # and break a compiled graph in two
            may_look = mapping.device.type == "cpu" and not torch.compiler.is_compiling()
            is_full = may_look and not bool((mapping < 0).any())
            make = torch.empty if is_full else torch.zeros
            shape = len(mapping), self.rows.row_bytes
            out = make(shape, dtype=torch.uint8, device=self.rows.device)
        elif (out.data_ptr() | out.stride(0)) % self.dtype.itemsize:
            raise ValueError(
                f"out must have rows at multiples of {self.dtype.itemsize} bytes, for {self.dtype}; "
                f"got a stride of {out.stride(0)} from address {out.data_ptr()}"
            )
        gather_slots(self._layout, mapping, out, max_sms=max_sms)
        return self._views(out)

    def put(
        self, slots: Slots, first: torch.Tensor, second: torch.Tensor, *, max_sms: int = MAX_SMS
    ) -> None:
        """Copy tokens into the paged cache: the inverse of :meth:`get`.

        What :meth:`get` returned is put as it is; other tensors are copied into rows first.

        Args:
            slots: ``[T]``, none twice. A slot of -1 moves nothing.
            first: key or latent, ``[T, L, *shapes[0]]``, on the rows' device, any strides.
            second: value or rotary part, ``[T, L, *shapes[1]]``, likewise.
            max_sms: most streaming multiprocessors to take; a host ignores it.

        Raises:
            ValueError: a tensor has another shape, type or device, or a slot does not exist or comes
                twice (checked on the host only). No byte has moved.

        Units:
            Moves ``2 * T * rows.row_bytes`` bytes, twice that if rows are made first.

        Source:
            ``torch.ops.kvferry.scatter_slots``.
        """
        mapping = self._mapping(slots)
        for name, shape, given in zip(self.names, self.shapes, (first, second), strict=True):
            wanted = (len(mapping), self.num_layers, *shape)
            if given.shape != wanted or given.dtype != self.dtype:
                raise ValueError(
                    f"{name} must be {self.dtype} {list(wanted)}; "
                    f"got {given.dtype} {list(given.shape)}"
                )
        rows = self._rows_behind(first, second)
        if rows is None:
            shape = len(mapping), self.rows.row_bytes
            rows = torch.empty(shape, dtype=torch.uint8, device=self.rows.device)
            for view, given in zip(self._views(rows), (first, second), strict=True):
                view.copy_(given.detach())
        scatter_slots(self._layout, mapping, rows, max_sms=max_sms)

    def _mapping(self, slots: Slots) -> torch.Tensor:
        """Return *slots* as ``[T]`` int64 on the rows' device."""
        given = torch.as_tensor(slots)
        if given.ndim != 1 or (given.numel() and given.dtype.is_floating_point):
            raise ValueError(f"slots must be integers [T]; got {given.dtype} {list(given.shape)}")
        return given.to(self.rows.device, torch.int64).contiguous()

    def _views(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """View rows, ``[T, row_bytes]`` uint8, as the two tensors."""
        first, second = self.shapes
        sizes = torch.Size(first).numel(), torch.Size(second).numel()
        numbers = rows.view(self.dtype).view(-1, self.num_layers, sum(sizes))
        one, two = numbers[..., : sizes[0]], numbers[..., sizes[0] :]
        return one.view(*one.shape[:2], *first), two.view(*two.shape[:2], *second)

    def _rows_behind(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor | None:
        """Return the rows that the two tensors are views of, as :meth:`get` makes them, if they are."""
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        width, per_layer = self.dtype.itemsize, sum(sizes)
        row, stride = self.num_layers * per_layer, first.stride(0)
        if (
            not (first.numel() and second.numel())
            or first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
            or second.data_ptr() - first.data_ptr() != sizes[0] * width
            or stride < row
        ):
            return None
        for given, shape in ((first, self.shapes[0]), (second, self.shapes[1])):
            inner = (shape[1], 1) if len(shape) == 2 else (1,)
            if given.stride() != (stride, per_layer, *inner):
                return None
        # the last number of the second is the last of the last row: nothing beyond is reached
        return first.as_strided((len(first), row), (stride, 1)).view(torch.uint8)


def model_kv(rows: RowLayout, *, rope_dim: int | None = None) -> ModelKV:
    """Return what gets and puts the keys and values, or latents, of tokens in a paged cache.

    Args:
        rows: where the bytes of a token are; all layers of one shape and type. Of a group that mixes
            them (latents and an indexer's keys), build one for each shape.
        rope_dim: of a latent, how many of its numbers are the rotary part, which comes last. Of a
            packed row of bytes, count bytes. If None: 128 of uint8 rows of 656 (``fp8_ds_mla``), else 64.

    Raises:
        ValueError: *rows* is no ``RowLayout``, its layers differ, or *rope_dim* is given for a model with
            heads or is out of range.

    Example:
        >>> caches = [torch.zeros(8, 2, 16, 2 * 64) for _ in range(4)]
        >>> kv = model_kv(RowLayout.from_views(caches, "bhnc"))
        >>> key, value = kv.get([17, 3])
        >>> key.shape
        torch.Size([2, 4, 2, 64])
        >>> kv.put([5, 6], key, value)
    """
    return ModelKV(rows, rope_dim)
