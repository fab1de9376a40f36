"""The recurrent layers of the fused pass: short convolutions, the gated delta rule, and Mamba 2.

Each reads the parameters of transformers' module and computes the same, over the states of `KVCache`. A decode step updates the
states of its rows where they lie. A prefill computes sequences of different lengths together: linear layers run on the tokens
of all sequences, one after the other, convolutions take for each token the columns before it, and a scan gets padded sequences
whose padding changes no state, because there its decay is 1 and its update 0. The scans themselves are transformers' functions,
which use kernels where these are installed.

Knows states and layers. Does not know attention, requests, or which sequence lies in which row.

Axes: N sequences, T tokens of the longest of them, M tokens of all sequences (in a decode step, one for each row), K taps of a
convolution, C its channels, H heads, Q heads of queries and keys, D and P numbers of a head, S numbers of a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import mamba2_chunk_scan
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from turnwise.engines.local.cache import StateShape
from turnwise.engines.local.linears import FusedLinear, FusedLinears, LayerSource, RMSNorm

_CHUNK, _SHORTEST_CHUNK = 64, 16
"""Tokens of a chunk of a scan: it pads sequences to whole chunks, and computes all pairs of tokens in a chunk."""


# The tokens of a pass


class StateRows:
    """The rows of a pass, in whose states it reads and writes."""

    def __init__(self, rows_N: np.ndarray, device: torch.device) -> None:
        first = int(rows_N[0])
        contiguous = np.array_equal(rows_N, np.arange(first, first + len(rows_N)))
        self._slice = slice(first, first + len(rows_N)) if contiguous else None
        self._rows = torch.from_numpy(rows_N).to(device)

    def read(self, states: torch.Tensor) -> torch.Tensor:
        """The current states [N, ...] of the rows: the cache's own memory, if the rows are contiguous."""
        return states[0].index_select(0, self._rows) if self._slice is None else states[0, self._slice]

    def write(self, states: torch.Tensor, values: torch.Tensor) -> None:
        """Store the states of the rows; nothing is copied if `values` were changed in the cache's own memory."""
        if self._slice is None:
            states[0].index_copy_(0, self._rows, values.to(states.dtype))
        elif values.data_ptr() != states[0, self._slice].data_ptr():
            states[0, self._slice] = values


class OneToken(StateRows):
    """One token of each row: M = N."""

    def convolve(self, new_MC: torch.Tensor, states: torch.Tensor, weight_KC: torch.Tensor) -> torch.Tensor:
        """The convolution at the new tokens, in float32. The window in `states` moves on by them."""
        columns_MKC = torch.cat((self.read(states)[:, 1:], new_MC.unsqueeze(1)), dim=1)
        self.write(states, columns_MKC)
        return (columns_MKC * weight_KC).sum(dim=1)


class ManyTokens(StateRows):
    """New tokens of sequences of different lengths."""

    def __init__(self, rows_N: np.ndarray, lengths_N: np.ndarray, device: torch.device) -> None:
        super().__init__(rows_N, device)
        self.longest = int(lengths_N.max())
        self._lengths_N, self._device = lengths_N, device
        self._starts_N = lengths_N.cumsum() - lengths_N
        self._sequence_M = np.repeat(np.arange(len(lengths_N)), lengths_N)
        self._offset_M = np.arange(len(self._sequence_M)) - self._starts_N[self._sequence_M]
        self._even = bool((lengths_N == self.longest).all())
        self._place_M = torch.from_numpy(self._sequence_M * self.longest + self._offset_M).to(device)
        self._taps: dict[int, tuple[Sequence[torch.Tensor], torch.Tensor]] = {}

    def convolve(self, new_MC: torch.Tensor, states: torch.Tensor, weight_KC: torch.Tensor) -> torch.Tensor:
        """The convolution at the new tokens, in float32. The window in `states` has the last tokens afterwards."""
        taps = len(weight_KC)
        if taps not in self._taps:
            self._taps[taps] = self._indices(taps)
        before, window = self._taps[taps]
        window_NKC = self.read(states)
        columns_XC = torch.cat((window_NKC.flatten(0, 1), new_MC))
        result_MC = new_MC * weight_KC[-1]
        for index_M, weight_C in zip(before, weight_KC, strict=False):
            result_MC.addcmul_(columns_XC.index_select(0, index_M).to(weight_C.dtype), weight_C)
        self.write(states, columns_XC.index_select(0, window).view_as(window_NKC))
        return result_MC

    def _indices(self, taps: int) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        """Where the columns before each token, and those of the next windows, are among the windows [N * K] and the tokens."""

        def index(sequence: np.ndarray, time: np.ndarray) -> torch.Tensor:
            in_window = sequence * taps + taps + time
            new = len(self._lengths_N) * taps + self._starts_N[sequence] + time
            return torch.from_numpy(np.where(time < 0, in_window, new)).to(self._device)

        before = [index(self._sequence_M, self._offset_M - back) for back in range(taps - 1, 0, -1)]
        ends_NK = self._lengths_N[:, None] + np.arange(-taps, 0)
        sequence_NK = np.arange(len(self._lengths_N))[:, None].repeat(taps, axis=1)
        return before, index(sequence_NK.reshape(-1), ends_NK.reshape(-1))

    def padded(self, values_MX: torch.Tensor) -> torch.Tensor:
        """The values as [N, T, X], with zeros after the end of a sequence."""
        shape = len(self._lengths_N), self.longest, values_MX.shape[-1]
        if self._even:
            return values_MX.reshape(shape)
        zeros = values_MX.new_zeros(shape[0] * shape[1], shape[2])
        return zeros.index_copy_(0, self._place_M, values_MX).view(shape)

    def flat(self, values_NTX: torch.Tensor) -> torch.Tensor:
        """The values as [M, X], without padding."""
        values = values_NTX.flatten(0, 1)
        return values if self._even else values.index_select(0, self._place_M)

    def chunk(self, longest: int) -> int:
        """Tokens of a chunk, at most `longest`, so that sequences are padded little."""
        chunks = -(-self.longest // longest)
        return min(longest, -(-self.longest // (chunks * _SHORTEST_CHUNK)) * _SHORTEST_CHUNK)


Tokens = OneToken | ManyTokens


class Recurrent(Protocol):
    """A layer that keeps states."""

    @property
    def state_shapes(self) -> Sequence[StateShape]:
        """The states that it keeps for each row."""
        ...

    def __call__(self, normed_MD: torch.Tensor, states: Sequence[torch.Tensor], tokens: Tokens) -> torch.Tensor:
        """The result [M, D] for the new tokens. The states of their rows move on by them."""
        ...


def _taps(convolution: nn.Conv1d) -> torch.Tensor:
    """The weight [K, C] of a convolution of single channels, the oldest column first. A copy in float32."""
    return convolution.weight.detach().squeeze(1).t().float().contiguous()


# The layers


class ShortConvolution:
    """The gated short convolution of LFM2 (Liquid AI, 2025)."""

    def __init__(self, module: Any, source: LayerSource, dtype: torch.dtype) -> None:
        self._in, self._out = FusedLinear.of(module.in_proj, source), FusedLinear.of(module.out_proj, source)
        self._weight_KC, self._bias = _taps(module.conv), module.conv.bias
        self.state_shapes = [StateShape(tuple(self._weight_KC.shape), dtype)]

    def __call__(self, normed_MD: torch.Tensor, states: Sequence[torch.Tensor], tokens: Tokens) -> torch.Tensor:
        before_MC, after_MC, values_MC = self._in(normed_MD).chunk(3, dim=1)
        result_MC = tokens.convolve(before_MC * values_MC, states[0], self._weight_KC)
        if self._bias is not None:
            result_MC += self._bias
        return self._out(result_MC.to(after_MC.dtype) * after_MC)


class GatedDeltaRule:
    """Linear attention with the gated delta rule (Yang et al., 2024), as in Qwen3.5 and Qwen3-Next."""

    def __init__(self, module: Any, source: LayerSource, dtype: torch.dtype) -> None:
        names = dict(module.named_children())
        wanted = ("qkv", "z", "b", "a") if "in_proj_qkv" in names else ("qkvz", "ba")
        self._in = FusedLinears.of([names[f"in_proj_{name}"] for name in wanted], source)
        self._out = FusedLinear.of(module.out_proj, source)
        self._module, self._weight_KC = module, _taps(module.conv1d)
        self._heads, self._sizes = (module.num_k_heads, module.num_v_heads), (module.head_k_dim, module.head_v_dim)
        self._rate_H = -module.A_log.detach().float().exp()
        self._norm = RMSNorm(module.norm.variance_epsilon, [module.head_v_dim], self._rate_H.device)
        # of the 1e-6 that are added to the squares of queries and keys
        self._root = torch.full((), 1e-3, device=self._rate_H.device)
        state = StateShape((module.num_v_heads, *self._sizes), torch.float32)
        self.state_shapes = [StateShape(tuple(self._weight_KC.shape), dtype), state]

    def __call__(self, normed_MD: torch.Tensor, states: Sequence[torch.Tensor], tokens: Tokens) -> torch.Tensor:
        projected = self._in(normed_MD)
        mixed_MC, gate_MX, beta_MH, decay_MH = self._by_key_head(projected) if len(projected) == 2 else projected
        mixed_MC = F.silu(tokens.convolve(mixed_MC, states[0], self._weight_KC))
        beta_MH = beta_MH.float().sigmoid()
        decay_MH = F.softplus(decay_MH.float() + self._module.dt_bias).mul_(self._rate_H)
        rule = self._step if isinstance(tokens, OneToken) else self._scan
        result_MHP = rule(mixed_MC, beta_MH, decay_MH, states[1], tokens)
        normed_MHP = self._norm(result_MHP, self._module.norm.weight)
        normed_MHP.mul_(F.silu(gate_MX.float()).view_as(normed_MHP))
        return self._out(normed_MHP.flatten(1).to(gate_MX.dtype))

    def _by_key_head(self, projected: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Queries, keys and values [M, C], gates, betas and decays from the two projections of Qwen3-Next, which have one key
        head after the other: its query, its key, values and gates of the heads that it serves; their betas and decays."""
        (key_heads, heads), (key_size, size) = self._heads, self._sizes
        each = heads // key_heads
        of_head_MQX, rates_MQY = (values.unflatten(1, (key_heads, -1)) for values in projected)
        *qkv, gate = of_head_MQX.split([key_size, key_size, each * size, each * size], dim=2)
        beta, decay = rates_MQY.split(each, dim=2)
        mixed_MC = torch.cat([part.flatten(1) for part in qkv], dim=1)
        return mixed_MC, gate.flatten(1), beta.flatten(1), decay.flatten(1)

    def _step(
        self, mixed_MC: torch.Tensor, beta_MH: torch.Tensor, decay_MH: torch.Tensor, states: torch.Tensor, tokens: Any
    ) -> torch.Tensor:
        (_, heads), (key_size, size) = self._heads, self._sizes
        qk_MQD, value_MHP = self._normalized(mixed_MC)
        query_E1D, key_E1D = (part.reshape(-1, 1, key_size) for part in qk_MQD.split(heads, dim=1))
        value_E1P = value_MHP.reshape(-1, 1, size)
        state_MHDP = tokens.read(states)
        state_EDP = state_MHDP.flatten(0, 1)  # E: rows and heads; a view, as what is read is contiguous
        state_EDP.mul_(decay_MH.exp_().view(-1, 1, 1))
        delta_E1P = (value_E1P - torch.bmm(key_E1D, state_EDP)).mul_(beta_MH.view(-1, 1, 1))
        state_EDP.baddbmm_(key_E1D.transpose(1, 2), delta_E1P)
        tokens.write(states, state_MHDP)
        result_E1P = torch.bmm(query_E1D, state_EDP).mul_(key_size**-0.5)
        return result_E1P.view(-1, heads, size)

    def _normalized(self, mixed_MC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries, then keys, of all heads [M, 2H, D], with length 1; and values [M, H, P]."""
        (key_heads, heads), (key_size, size) = self._heads, self._sizes
        width = 2 * key_heads * key_size
        qk_MQD = mixed_MC[:, :width].view(-1, 2 * key_heads, key_size)
        # x / sqrt(sum(x^2) + 1e-6), and that root is hypot(|x|, 1e-3)
        qk_MQD = qk_MQD / torch.linalg.vector_norm(qk_MQD, dim=-1, keepdim=True).hypot_(self._root)
        if heads > key_heads:  # each head of keys serves several heads of values
            qk_MQD = qk_MQD.repeat_interleave(heads // key_heads, dim=1)
        return qk_MQD, mixed_MC[:, width:].unflatten(1, (heads, size))

    def _scan(
        self, mixed_MC: torch.Tensor, beta_MH: torch.Tensor, decay_MH: torch.Tensor, states: torch.Tensor, tokens: Any
    ) -> torch.Tensor:
        heads, size = self._heads[1], self._sizes[1]
        qk_MQD, value_MHP = self._normalized(mixed_MC)
        query_MHD, key_MHD = qk_MQD.split(heads, dim=1)
        scan = _chunked_delta_rule if mixed_MC.device.type == "cpu" else _delta_rule_of_transformers
        # padding: a decay of exp(0) = 1, and an update with a factor beta of 0
        query, key, value, decay, beta = (
            tokens.padded(part.flatten(1)).unflatten(-1, (heads, -1))
            for part in (query_MHD, key_MHD, value_MHP, decay_MH, beta_MH)
        )
        state_NHDP = tokens.read(states)
        result_NTHP, state_NHDP = scan(query, key, value, decay[..., 0], beta[..., 0], state_NHDP, tokens.chunk(_CHUNK))
        tokens.write(states, state_NHDP)
        return tokens.flat(result_NTHP.flatten(2)).view(-1, heads, size)


def _delta_rule_of_transformers(
    query_NTHD: torch.Tensor,
    key_NTHD: torch.Tensor,
    value_NTHP: torch.Tensor,
    decay_NTH: torch.Tensor,
    beta_NTH: torch.Tensor,
    state_NHDP: torch.Tensor,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_chunked_delta_rule`, by the kernel of flash-linear-attention where it is installed."""
    return torch_chunk_gated_delta_rule(
        query_NTHD,
        key_NTHD,
        value_NTHP,
        g=decay_NTH,
        beta=beta_NTH,
        chunk_size=chunk,
        initial_state=state_NHDP,
        output_final_state=True,
    )


@torch.autocast("cpu", enabled=False)  # the system is solved in float32
def _chunked_delta_rule(
    query_NTHD: torch.Tensor,
    key_NTHD: torch.Tensor,
    value_NTHP: torch.Tensor,
    decay_NTH: torch.Tensor,
    beta_NTH: torch.Tensor,
    state_NHDP: torch.Tensor,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule in chunks of `chunk` tokens (Yang et al., 2024): outputs [N, T, H, P], and states afterwards.

    In a chunk that begins with the state S, and whose decays have the products d_i, token i writes along its key the value u_i:

        u_i = beta_i (v_i - d_i k_i S - sum over j < i of (d_i / d_j) (k_i . k_j) u_j)

    which is one triangular system for all tokens of a chunk. As transformers' function, with half of its operations: the system
    is solved once, after S is known. Axes: E sequences and heads, X chunks, L tokens of a chunk.
    """
    (sequences, length, heads, _), size = query_NTHD.shape, value_NTHP.shape[-1]
    chunks, missing = -(-length // chunk), -length % chunk

    def by_chunk(values: torch.Tensor) -> torch.Tensor:
        if missing:
            values = F.pad(values, (0,) * (2 * (values.dim() - 2)) + (0, missing))
        return values.transpose(1, 2).reshape(sequences * heads, chunks, chunk, *values.shape[3:])

    query_EXLD, key_EXLD, value_EXLP = by_chunk(query_NTHD), by_chunk(key_NTHD), by_chunk(value_NTHP)
    beta_EXL1, log_decay_EXL = by_chunk(beta_NTH).unsqueeze(-1), by_chunk(decay_NTH).cumsum(-1)
    future_LL = torch.full((chunk, chunk), -torch.inf, device=query_NTHD.device).triu_(1)
    between_EXLL = (log_decay_EXL.unsqueeze(-1) - log_decay_EXL.unsqueeze(-2)).add_(future_LL).exp_()
    decay_EXL1 = log_decay_EXL.exp().unsqueeze(-1)
    written_EXLD = key_EXLD * beta_EXL1
    system_EXLL = torch.matmul(written_EXLD, key_EXLD.mT).mul_(between_EXLL)
    attention_EXLL = torch.matmul(query_EXLD, key_EXLD.mT).mul_(between_EXLL)
    value_EXLP = value_EXLP * beta_EXL1
    read_EXLD = written_EXLD.mul_(decay_EXL1)
    query_EXLD = query_EXLD * decay_EXL1
    key_EXLD = key_EXLD * (log_decay_EXL[..., -1:] - log_decay_EXL).exp_().unsqueeze(-1)
    state_EDP, results = state_NHDP.flatten(0, 1).float(), []
    for index in range(chunks):
        update_ELP = torch.baddbmm(value_EXLP[:, index], read_EXLD[:, index], state_EDP, alpha=-1)
        update_ELP = torch.linalg.solve_triangular(system_EXLL[:, index], update_ELP, upper=False, unitriangular=True)
        result_ELP = torch.bmm(attention_EXLL[:, index], update_ELP)
        results.append(result_ELP.baddbmm_(query_EXLD[:, index], state_EDP))
        state_EDP = state_EDP * decay_EXL1[:, index, -1:]
        state_EDP.baddbmm_(key_EXLD[:, index].mT, update_ELP)
    result_ETP = torch.cat(results, dim=1)[:, :length].mul_(query_NTHD.shape[-1] ** -0.5)
    result_NTHP = result_ETP.view(sequences, heads, length, size).transpose(1, 2)
    return result_NTHP, state_EDP.view_as(state_NHDP)


class Mamba2:
    """Mamba 2 (Dao and Gu, 2024), as in Granite 4 hybrid, Bamba, Nemotron-H and, with factors of its own, Falcon-H1."""

    def __init__(self, module: Any, source: LayerSource, dtype: torch.dtype) -> None:
        self._in, self._out = FusedLinear.of(module.in_proj, source), FusedLinear.of(module.out_proj, source)
        self._module, self._weight_KC = module, _taps(module.conv1d)
        self._widths = [module.intermediate_size, self._weight_KC.shape[1], module.num_heads]
        self._rate_H = -module.A_log.detach().float().exp()
        self._input_scale: float = getattr(module, "ssm_in_multiplier", 1.0)
        factors = getattr(module, "mup_vector", None)
        self._factors_X = None if factors is None or bool((factors == 1).all()) else factors.view(-1)
        self._norm = _GatedNorm(module.norm, module.intermediate_size, self._rate_H.device)
        state = StateShape((module.num_heads, module.head_dim, module.ssm_state_size), torch.float32)
        self.state_shapes = [StateShape(tuple(self._weight_KC.shape), dtype), state]

    def __call__(self, normed_MD: torch.Tensor, states: Sequence[torch.Tensor], tokens: Tokens) -> torch.Tensor:
        module = self._module
        projected_MX = self._in(normed_MD if self._input_scale == 1.0 else normed_MD * self._input_scale)
        if self._factors_X is not None:
            projected_MX = projected_MX * self._factors_X.to(projected_MX.dtype)
        gate_MX, mixed_MC, step_MH = projected_MX.split(self._widths, dim=1)
        mixed_MC = tokens.convolve(mixed_MC, states[0], self._weight_KC)
        mixed_MC = F.silu(mixed_MC if module.conv1d.bias is None else mixed_MC + module.conv1d.bias)
        step_MH = F.softplus(step_MH.float() + module.dt_bias).clamp_(*module.time_step_limit)
        state_width = module.n_groups * module.ssm_state_size
        values_MX, in_MX, out_MX = mixed_MC.split([self._widths[0], state_width, state_width], dim=1)
        rule = self._step if isinstance(tokens, OneToken) else self._scan
        result_MX = rule(values_MX, step_MH, in_MX, out_MX, states[1], tokens)
        return self._out(self._norm(result_MX, gate_MX).to(gate_MX.dtype))

    def _step(
        self,
        values_MX: torch.Tensor,
        step_MH: torch.Tensor,
        in_MX: torch.Tensor,
        out_MX: torch.Tensor,
        states: torch.Tensor,
        tokens: Any,
    ) -> torch.Tensor:
        values_MHP = values_MX.reshape(-1, self._module.num_heads, self._module.head_dim)
        in_E1S, out_E1S = (self._of_heads(part) for part in (in_MX, out_MX))
        state_MHPS = tokens.read(states)
        state_EPS = state_MHPS.flatten(0, 1)  # E: rows and heads
        update_EP1 = (values_MHP * step_MH.unsqueeze(-1)).view(-1, self._module.head_dim, 1)
        state_EPS.mul_((step_MH * self._rate_H).exp_().view(-1, 1, 1)).baddbmm_(update_EP1, in_E1S)
        tokens.write(states, state_MHPS)
        result_MHP = torch.bmm(state_EPS, out_E1S.transpose(1, 2)).view_as(values_MHP)
        return result_MHP.addcmul_(values_MHP, self._module.D.unsqueeze(-1)).flatten(1)

    def _of_heads(self, values_MX: torch.Tensor) -> torch.Tensor:
        """[M * H, 1, S]: each group serves several heads."""
        module = self._module
        values_MG1S = values_MX.reshape(-1, module.n_groups, 1, module.ssm_state_size)
        repeats = module.num_heads // module.n_groups
        return values_MG1S.expand(-1, -1, repeats, -1).reshape(-1, 1, module.ssm_state_size)

    def _scan(
        self,
        values_MX: torch.Tensor,
        step_MH: torch.Tensor,
        in_MX: torch.Tensor,
        out_MX: torch.Tensor,
        states: torch.Tensor,
        tokens: Any,
    ) -> torch.Tensor:
        module = self._module
        values_NTHP = tokens.padded(values_MX).unflatten(-1, (module.num_heads, module.head_dim))
        groups = (module.n_groups, module.ssm_state_size)
        result_NTHP, state = mamba2_chunk_scan(
            values_NTHP,
            tokens.padded(step_MH),  # padding: a step of 0, so a decay of exp(0) = 1 and an update of 0
            self._rate_H,
            tokens.padded(in_MX).unflatten(-1, groups),
            tokens.padded(out_MX).unflatten(-1, groups),
            chunk_size=tokens.chunk(module.chunk_size),
            D=module.D,
            initial_states=tokens.read(states),
            return_final_states=True,
        )
        tokens.write(states, state)
        return tokens.flat(result_NTHP.flatten(2))


class _GatedNorm:
    """The norm after Mamba 2, of all numbers or of each group of them, and its gate: before the norm, after it, or without it."""

    def __init__(self, module: Any, width: int, device: torch.device) -> None:
        self._module, self._norm = module, None
        if isinstance(module, nn.Identity):
            return
        groups = getattr(module, "n_groups", None) or width // getattr(module, "group_size", width)
        self._shape, self._gate_last = (groups, width // groups), getattr(module, "norm_before_gate", False)
        self._norm = RMSNorm(module.variance_epsilon, [width // groups], device)

    def __call__(self, result_MX: torch.Tensor, gate_MX: torch.Tensor) -> torch.Tensor:
        gate_MX = F.silu(gate_MX.float())
        if self._norm is None:
            return result_MX * gate_MX
        if not self._gate_last:
            result_MX = result_MX * gate_MX
        normed_MX = self._norm(result_MX.unflatten(1, self._shape), self._module.weight.view(self._shape)).flatten(1)
        return normed_MX.mul_(gate_MX) if self._gate_last else normed_MX
