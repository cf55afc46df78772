"""A mean removed before coding: fixed, or turning with position as RoPE turns keys.

Keys of a head have a mean mu before RoPE, so after it they have the mean R_m mu at position m. Encoding takes R_m mu
off and a logit becomes ``q . R_m (k - mu)' + q . R_m mu``. The second term costs no memory a token. With q's block i as
``(q0, q1)`` and mu's as ``(mu0, mu1)``, ``A_i = q0 mu0 + q1 mu1`` and ``B_i = q1 mu0 - q0 mu1``,

    q . R_m mu = sum_i A_i cos(m t_i) + B_i sin(m t_i)

and for a tile of tokens ``m = m0 + j`` the angle splits: A and B are rotated once by ``m0 t_i``, and what is left is a
product with a table ``[cos(j t_i), sin(j t_i)]`` that is the same for every tile. Dims outside the rotary part add a
constant. Angles are float64: at m = 500 000 a float32 angle is off by 0.03.
"""

import torch
from torch import Tensor

from kvbench.kernels.formats import Centre


class CentreTerm:
    """The arithmetic of one :class:`Centre` on one device; vectors are stored as float32."""

    def __init__(self, centre: Centre, device: torch.device) -> None:
        self.vectors = torch.tensor(centre.vectors, dtype=torch.float32, device=device)
        self._frequencies = torch.tensor(centre.frequencies, dtype=torch.float64, device=device)
        blocks = torch.tensor(centre.blocks, dtype=torch.long, device=device).reshape(-1, 2)
        self._first, self._second = blocks[:, 0], blocks[:, 1]
        turning = set(blocks.flatten().tolist())
        fixed = [dim for dim in range(self.vectors.shape[-1]) if dim not in turning]
        self._fixed = torch.tensor(fixed, dtype=torch.long, device=device)
        self._table: tuple[Tensor, Tensor] | None = None

    @property
    def nbytes(self) -> int:
        return self.vectors.numel() * self.vectors.element_size()

    def fixed_vectors(self) -> Tensor:
        """The centre ``[kv_heads, head_dim]`` of values, which do not turn. Raises ValueError where it turns."""
        if len(self._first):
            raise ValueError("values cannot have a centre that turns with position")
        return self.vectors

    def at(self, positions: Tensor) -> Tensor:
        """The centre at ``positions [...]``, float32 ``[..., kv_heads, head_dim]``."""
        angles = positions[..., None, None].double() * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        first, second = (self.vectors[:, dims].double() for dims in (self._first, self._second))
        out = self.vectors.expand(*positions.shape, *self.vectors.shape).clone()
        out[..., self._first] = (first * cos - second * sin).float()
        out[..., self._second] = (second * cos + first * sin).float()
        return out

    def logits(self, queries: Tensor, first: Tensor, count: int) -> Tensor:
        """``queries [batch, queries, kv_heads, group, head_dim]`` with the centre at ``first[b] + 0 .. count - 1``.

        Returns float32 ``[batch, queries, kv_heads, group, count]``.
        """
        q, mu = queries.double(), self.vectors.double()[:, None, :]
        q0, q1, mu0, mu1 = q[..., self._first], q[..., self._second], mu[..., self._first], mu[..., self._second]
        along, across = q0 * mu0 + q1 * mu1, q1 * mu0 - q0 * mu1
        angles = (first[:, None].double() * self._frequencies)[:, None, None, None]
        cos, sin = angles.cos(), angles.sin()
        turned_along = (along * cos + across * sin).float()
        turned_across = (across * cos - along * sin).float()
        table_cos, table_sin = self._tile_table(count)
        constant = (q[..., self._fixed] * mu[..., self._fixed]).sum(-1, keepdim=True).float()
        return turned_along @ table_cos + turned_across @ table_sin + constant

    def _tile_table(self, count: int) -> tuple[Tensor, Tensor]:
        """``cos(j t_i)`` and ``sin(j t_i)`` for j below ``count``, ``[blocks, count]``, kept for the longest tile."""
        if self._table is None or self._table[0].shape[1] < count:
            offsets = torch.arange(count, dtype=torch.float64, device=self._frequencies.device)
            angles = self._frequencies[:, None] * offsets
            self._table = (angles.cos().float(), angles.sin().float())
        cos, sin = self._table
        return cos[:, :count], sin[:, :count]
