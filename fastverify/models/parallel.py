"""Tensor parallelism of a loaded target: column- and row-parallel linears, vocabulary-parallel head (Shoeybi et al. 2019)."""

from dataclasses import replace

import torch

from ..comm.all_reduce_rms_norm import prefetch_table
from .llama import Layer, LlamaModel

_VOCAB_STEP = 32  # shards start at whole words of a bitmask


def split_evenly(n: int, world: int, rank: int, step: int = 1) -> tuple:
    """(begin, end) of this rank's part of n, in units of `step`; the first ranks take what does not divide."""
    units = -(-n // step)
    small, extra = divmod(units, world)
    begin = rank * small + min(rank, extra)
    end = begin + small + (rank < extra)
    return min(begin * step, n), min(end * step, n)


def heads_of(num_heads: int, num_kv_heads: int, world: int, rank: int):
    """((first q head, end), (first kv head, end)) of this rank, or None where heads do not divide: then all are replicated."""
    if num_heads % world:
        return None
    q = num_heads // world
    if num_kv_heads % world == 0:
        kv = num_kv_heads // world
        return (rank * q, rank * q + q), (rank * kv, rank * kv + kv)
    if world % num_kv_heads:
        return None
    kv = rank // (world // num_kv_heads)  # several ranks share one kv head and keep a copy of it each
    return (rank * q, rank * q + q), (kv, kv + 1)


def shard(model: LlamaModel, comm) -> LlamaModel:
    """This rank's part of a target that every rank has loaded whole; the full weights can be freed afterwards.

    Attention heads and MLP columns are split, norms and embedding replicated; the LM head is split by vocabulary, so that
    logits(hidden) gives [R, shard] (model.vocab_range) and verification goes through verify_tree_sharded. Heads that do
    not divide by the number of ranks are replicated: every rank computes them, without a sum. All ranks must call forward
    with the same batches in the same order. comm: fastverify.Communicator of the ranks, on the model's device.
    """
    c, world, rank = model.config, comm.world, comm.rank
    heads = heads_of(c.num_heads, c.num_kv_heads, world, rank)
    columns = split_evenly(c.intermediate_size, world, rank)
    vocab = split_evenly(c.vocab_size, world, rank, _VOCAB_STEP)
    if vocab[0] == vocab[1] or columns[0] == columns[1]:
        raise ValueError(f"shard: the model must be large enough for {world} ranks; got a vocabulary of {c.vocab_size} and "
                         f"{c.intermediate_size} columns. Fix: use fewer ranks.")
    layers = [shard_layer(w, c, heads, columns) for w in model.layers]
    local = replace(c, intermediate_size=columns[1] - columns[0])
    if heads:
        local = replace(local, num_heads=heads[0][1] - heads[0][0], num_kv_heads=heads[1][1] - heads[1][0])
    part = LlamaModel(local, model.embed_weight, layers, model.norm, model.lm_head_weight[vocab[0]:vocab[1]].clone())
    part.comm, part.vocab_range, part.split_heads = comm, vocab, heads is not None
    prepare(part)
    return part


def prepare(part: LlamaModel) -> None:
    """On a GPU: the tables of what each sum pulls into L2 meanwhile (the next weights, half an L2 at most), and, under
    backend="auto", the cuts of the row-parallel linears, measured once per shape. Collective; at load time."""
    if part.device.type != "cuda":
        return
    limit = torch.cuda.get_device_properties(part.device).L2_cache_size // 2
    following = [w.qkv for w in part.layers[1:]] + [part.lm_head_weight]
    part.prefetch = [(prefetch_table([w.gate_up], limit), prefetch_table([after], limit)) for w, after in zip(part.layers, following)]
    if getattr(part.comm, "plan", None) is not None:
        from ..comm.tuner import tune_linear
        for weight in ([part.layers[0].o] if part.split_heads else []) + [part.layers[0].down]:
            tune_linear(part.comm, weight.shape[0], weight.shape[1], part.dtype)


def shard_layer(w: Layer, c, heads, columns) -> Layer:
    """One layer's part: heads as of heads_of (None: whole attention), columns (begin, end) of the MLP."""
    d, inter = c.head_dim, c.intermediate_size
    qkv, qkv_bias, o = w.qkv, w.qkv_bias, w.o
    if heads:
        (q0, q1), (k0, k1) = heads
        v = c.num_heads + c.num_kv_heads
        picked = [(q0, q1), (c.num_heads + k0, c.num_heads + k1), (v + k0, v + k1)]
        qkv = torch.cat([w.qkv[a * d:b * d] for a, b in picked])
        qkv_bias = None if w.qkv_bias is None else torch.cat([w.qkv_bias[a * d:b * d] for a, b in picked])
        o = w.o[:, q0 * d:q1 * d].clone()
    a, b = columns
    halves = ((a, b), (inter + a, inter + b))
    return replace(w, qkv=qkv, qkv_bias=qkv_bias, o=o, gate_up=torch.cat([w.gate_up[i:j] for i, j in halves]),
                   gate_up_bias=None if w.gate_up_bias is None else torch.cat([w.gate_up_bias[i:j] for i, j in halves]),
                   down=w.down[:, a:b].clone())
