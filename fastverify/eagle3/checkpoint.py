"""Loader of EAGLE-3 drafts: files -> normalised tensors -> checks -> Eagle3Draft. Nothing is skipped in silence.

Read: a folder with config.json and model.safetensors (single or sharded) or pytorch_model.bin (single or sharded; opened
with weights_only=True, so that no pickled code runs). Names: `midlayer.*` or `layers.N.*`, with any of the prefixes below.
The checks come from public reports of wrong drafts: they ran with exact output and a poor accept length.
"""

import hashlib
import re
import warnings
from pathlib import Path
from typing import Any, Optional

import torch

from ..models.hf import read_json
from .draft import Eagle3Draft
from .draft_config import DraftConfig, error, flatten_config, resolve_config
from .mla_draft import describe_mla, is_mla

_PREFIXES = ("model.", "module.", "draft_model.", "eagle_module.", "eagle.")
_RENAMED = {"draft_id_to_target_id": "d2t", "target_id_to_draft_id": "t2d", "aux_norm_low.weight": "fc_norm.0.weight",
            "aux_norm_mid.weight": "fc_norm.1.weight", "aux_norm_high.weight": "fc_norm.2.weight"}
FEW_IDS = 16
SIDECAR = "speculative_token_map.pt"
D2T_FORMATS = ("offset", "absolute", "identity")


def load_draft(path: "str | Path", target: Any, *, dtype: torch.dtype = torch.float32, device: "torch.device | str" = "cpu",
               aux_convention: Optional[str] = None, d2t_format: str = "offset",
               max_position: Optional[int] = None) -> Eagle3Draft:
    """Loads an EAGLE-3 draft for one target.

    path            folder with config.json and weights
    target          the target model, or its config (hidden_size, vocab_size, num_layers). With a model, the draft uses the
                    model's own embedding table when it brings none (or an equal one): shared, not copied
    dtype, device   of the weights and of everything the draft computes
    aux_convention  "input" | "output": how the config's aux layer ids are read; None: see draft_config.resolve_aux_layers
    d2t_format      "offset": target id = i + d2t[i]; "absolute": target id = d2t[i]; "identity": the first Vd ids
    max_position    rows the RoPE table must have at least; the table is extended past the draft's own limit and says so

    Returns Eagle3Draft; its report() lists every resolved value with its source.
    Errors: LoadError (a ValueError), one sentence each: missing or truncated files, missing and unexpected tensors (both
    listed), shapes, another hidden size or vocabulary, aux layers out of range, a vocabulary map that cannot be right.
    """
    if d2t_format not in D2T_FORMATS:
        raise error(f"d2t_format must be one of {', '.join(D2T_FORMATS)}", f"{d2t_format!r}", "leave it out")
    facts, target_embed, target_head = _target_facts(target)
    raw, tensors = read_files(Path(path))
    tensors, ignored = normalise_names(tensors)
    _refuse_other_kinds(tensors, flatten_config(raw)[0])
    config = resolve_config(raw, {k: tuple(v.shape) for k, v in tensors.items()}, *facts, aux_convention, max_position)
    config.notes += [f"ignored buffer {name}" for name in ignored]
    check_tensors(config, tensors)
    d2t = vocabulary_map(config, tensors.pop("d2t", None), tensors.pop("t2d", None), d2t_format)
    embed = _embedding(config, tensors.pop("embed_tokens.weight", None), target_embed, dtype, device)
    head = tensors.pop("lm_head.weight", None)
    if head is None:
        head = _shared_head(config, target_head, d2t)
    else:
        config.sources["head"] = "tensor lm_head.weight"
    config.fingerprint, config.trained_for = _fingerprint(d2t, tensors["fc.weight"]), _recorded_target(raw)
    weights = {k: _aligned(v.to(device=device, dtype=dtype)) for k, v in tensors.items()}
    head = head.to(device=device, dtype=dtype)
    head = _aligned(head)
    return Eagle3Draft(config, weights, head, embed, None if d2t is None else d2t.to(device))


def _aligned(t: torch.Tensor) -> torch.Tensor:
    """`t`, copied if it starts inside a cache line (in a mapped file it may): products then do not depend on the file's layout."""
    return t.contiguous() if t.data_ptr() % 64 == 0 else t.clone(memory_format=torch.contiguous_format)


# ---- files ---------------------------------------------------------------------------------------------------------------


def read_files(path: Path) -> tuple:
    """(config dict, {stored name: tensor}) of a draft folder."""
    if not path.is_dir():
        raise error("path must be a folder with config.json and weights",
                    f"{path}, {'a file' if path.exists() else 'which does not exist'}",
                    "give the draft's folder")
    config = read_json(path / "config.json")
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (path / index).exists():
            names = read_json(path / index).get("weight_map")
            if not isinstance(names, dict) or not all(isinstance(f, str) for f in names.values()):
                raise error(f"{index} must hold a weight_map of file names", "another content", "download the file again")
            files = sorted(set(names.values()))
            break
    else:
        found = [n for n in ("model.safetensors", "pytorch_model.bin") if (path / n).exists()]
        files = found[:1] or [p.name for p in sorted(path.glob("*.safetensors"))]
    if not files:
        raise error(f"{path} must hold model.safetensors or pytorch_model.bin",
                    f"{sorted(p.name for p in path.iterdir())}",
                    "download the weights too")
    tensors: dict = {}
    for name in files:
        tensors.update(_read_weights(path / name))
    if not any(re.search(r"(^|\.)(d2t|draft_id_to_target_id)$", n) for n in tensors) and (path / SIDECAR).exists():
        tensors["d2t"] = _sidecar_map(path / SIDECAR)
    return config, tensors


def _read_weights(path: Path) -> dict:
    if not path.exists():
        raise error(f"the shard {path.name} must exist", f"none in {path.parent}", "download it")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file
            return load_file(str(path))
        data = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as exc:  # each library has its own error types; all mean the same here
        reason = str(exc).strip().splitlines() or [type(exc).__name__]
        raise error(f"{path} must be a whole weight file",
                    f"{path.stat().st_size} bytes that cannot be read ({reason[0][:120]})",
                    "download it again") from exc
    if not isinstance(data, dict) or not all(isinstance(v, torch.Tensor) for v in data.values()):
        raise error(f"{path} must hold a dict of tensors", f"{type(data).__name__}", "save the state dict alone")
    return data


def _sidecar_map(path: Path) -> torch.Tensor:
    """Offsets of speculative_token_map.pt, the list of target ids that NeMo writes beside a draft without d2t."""
    try:
        ids = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as exc:
        raise error(f"{path} must be a tensor of target ids", f"{type(exc).__name__}", "download it again") from exc
    if not isinstance(ids, torch.Tensor) or ids.dim() != 1 or ids.dtype not in (torch.int64, torch.int32):
        raise error(f"{path} must be a tensor of target ids", f"{type(ids).__name__}", "use the file as published")
    return ids.long() - torch.arange(ids.numel(), device="cpu")


# ---- names and shapes ----------------------------------------------------------------------------------------------------


def normalise_names(tensors: dict) -> tuple:
    """({name without prefixes, `midlayer.` as `layers.0.`: tensor}, ignored RoPE buffers)."""
    out, ignored, origin = {}, [], {}
    for stored, tensor in tensors.items():
        name = stored
        while name.startswith(_PREFIXES):
            name = name[name.index(".") + 1:]
        if "rotary_emb." in name:
            ignored.append(stored)
            continue
        name = re.sub(r"^midlayer\.", "layers.0.", name)
        name = _RENAMED.get(name, name)
        if name in out:
            raise error("tensor names must be unique after their prefixes are removed",
                        f"{origin[name]} and {stored} for {name}",
                        "remove one from the file")
        out[name], origin[name] = tensor, stored
    return out, ignored


def _refuse_other_kinds(tensors: dict, flat: dict) -> None:
    if is_mla(tensors):
        raise error("the draft must use q/k/v projections", describe_mla(flat, tensors), "use a draft with grouped-query attention")
    if "fc.weight" in tensors and "layers.0.hidden_norm.weight" not in tensors and "norm.weight" not in tensors:
        raise error("the draft must be an EAGLE-3 head",
                    "an EAGLE-1/2 head (no hidden_norm, no final norm)",
                    "use an EAGLE-3 draft")


def expected_shapes(c: DraftConfig, tensors: dict) -> tuple:
    """(required, optional): {normalised name: tuple of allowed shapes}."""
    h, q, kv, a = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, len(c.aux_layers)
    need = {"fc.weight": (h, a * c.target_hidden_size), "norm.weight": (h,)}
    may = {"lm_head.weight": (c.draft_vocab_size, h), "embed_tokens.weight": (c.vocab_size, h), "d2t": (c.draft_vocab_size,),
           "t2d": (c.vocab_size,)}
    if c.norm_before_fc:
        need["input_norm.weight"] = (a * c.target_hidden_size,)
    if c.fc_norm:
        need.update({f"fc_norm.{i}.weight": (c.target_hidden_size,) for i in range(a)})
    for i in range(c.num_layers):
        width = 2 * h if i == 0 else h
        layer = {"input_layernorm": (h,), "post_attention_layernorm": (h,), "self_attn.q_proj": (q, width),
                 "self_attn.k_proj": (kv, width), "self_attn.v_proj": (kv, width), "self_attn.o_proj": (h, q),
                 "mlp.gate_proj": (c.intermediate_size, h), "mlp.up_proj": (c.intermediate_size, h),
                 "mlp.down_proj": (h, c.intermediate_size)}
        if i == 0:
            layer["hidden_norm"] = (h,)
        need.update({f"layers.{i}.{k}.weight": s for k, s in layer.items()})
        groups = ({"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)},
                  {"self_attn.o_proj.bias": (h,)},
                  {"self_attn.q_norm.weight": (c.head_dim,), "self_attn.k_norm.weight": (c.head_dim,)})
        for group in groups:  # all tensors of a group or none
            group = {f"layers.{i}.{k}": s for k, s in group.items()}
            (need if group.keys() & tensors.keys() else may).update(group)
    return need, may


def check_tensors(c: DraftConfig, tensors: dict) -> None:
    """Raises unless names and shapes are exactly those of the config; both differing sets are listed."""
    fc = tensors.get("fc.weight")
    if fc is not None and fc.dim() == 2 and fc.size(1) != len(c.aux_layers) * c.target_hidden_size:
        chunks = fc.size(1) / c.target_hidden_size
        raise error(f"fc.weight must read {len(c.aux_layers)} aux layers of hidden size {c.target_hidden_size} "
                    f"({len(c.aux_layers) * c.target_hidden_size} columns)",
                    f"{fc.size(1)} columns ({chunks:g} x {c.target_hidden_size})",
                    "use the draft that was trained for this target")
    need, may = expected_shapes(c, tensors)
    missing, unexpected = sorted(need.keys() - tensors.keys()), sorted(tensors.keys() - need.keys() - may.keys())
    if missing or unexpected:
        raise error("the draft's tensors must be exactly those of its config",
                    f"missing {missing}, unexpected {unexpected}",
                    "use weights and config.json of one draft")
    allowed = {**need, **may}
    for name, tensor in sorted(tensors.items()):
        if name not in ("d2t", "t2d") and tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise error(f"{name} must be a floating-point tensor of 16 bits or more",
                        f"{tensor.dtype}",
                        "use the unquantised checkpoint")
        if tuple(tensor.shape) != allowed[name]:
            raise error(f"{name} must be {list(allowed[name])}",
                        f"{list(tensor.shape)}",
                        "use weights and config.json of one draft")


# ---- vocabulary and embedding --------------------------------------------------------------------------------------------


def vocabulary_map(c: DraftConfig, d2t: Optional[torch.Tensor], t2d: Optional[torch.Tensor],
                   d2t_format: str = "offset") -> Optional[torch.Tensor]:
    """Checked int64 [Vd] offsets (target id = i + d2t[i]), or None when draft ids are target ids.

    d2t  int64 or int32 [Vd] or None; t2d bool or int [V] or None: the marks must be exactly the mapped ids."""
    v, vd = c.vocab_size, c.draft_vocab_size
    if vd > v:
        raise error(f"draft_vocab_size must be at most vocab_size {v}", f"{vd}", "check config.json")
    index = torch.arange(vd, device="cpu")
    if d2t_format == "identity":
        ids, c.sources["d2t"] = index, "argument d2t_format: the first ids"
    elif d2t is not None:
        ids, c.sources["d2t"] = _mapped_ids(d2t, t2d, v, d2t_format, c.notes), f"tensor d2t, {d2t_format}"
    elif vd == v:
        ids, c.sources["d2t"] = index, "absent: draft ids are target ids"
    else:
        raise error(f"d2t must be present when the draft has fewer ids than the target ({vd} of {v})", "none",
                    "use the complete checkpoint, or d2t_format='identity' if its ids are the first ones")
    if not bool((ids[1:] > ids[:-1]).all()):
        c.notes.append("d2t is not increasing: unusual for a map sorted by id")
    if t2d is not None:
        t2d = t2d.cpu().bool()
        if int(t2d.sum()) != vd or not bool(t2d[ids].all()):
            raise error(f"t2d must mark exactly the {vd} ids of d2t",
                        f"{int(t2d.sum())} marked, {int(t2d[ids].sum())} of them in d2t", "use d2t and t2d of one draft")
    offsets = ids - index
    return offsets if offsets.any() else None


def _mapped_ids(d2t: torch.Tensor, t2d: Optional[torch.Tensor], v: int, d2t_format: str, notes: list) -> torch.Tensor:
    """Target ids int64 [Vd] of a d2t tensor: in range, all different, and meant as the stated format."""
    vd = d2t.numel()
    if d2t.dtype not in (torch.int64, torch.int32):
        raise error("d2t must be int64 or int32", f"{d2t.dtype}", "use the checkpoint as published")
    d2t = d2t.cpu().long()
    ids = d2t if d2t_format == "absolute" else torch.arange(vd, device="cpu") + d2t
    if d2t_format == "offset" and vd < v and not d2t.any() and not (t2d is not None and bool(t2d[:vd].all())):
        raise error(f"d2t must map the draft's {vd} ids into the target's {v}", f"all zeros (the first {vd} ids)",
                    "d2t_format='identity' if that is meant, else use the complete checkpoint")
    bad, distinct = (ids < 0) | (ids >= v), ids.unique().numel()
    sound = not bad.any() and distinct == vd
    rising = d2t_format == "offset" and bool((d2t[1:] > d2t[:-1]).all()) and 0 <= int(d2t[0]) and int(d2t[-1]) < v
    absolute = rising and sound and t2d is not None and bool(t2d[d2t].all()) and not bool(t2d[ids].all())
    if rising and sound and t2d is None and vd > FEW_IDS:  # among many ids, no two are neighbours in the target's vocabulary
        notes.append("d2t rises at every entry, as absolute ids do: if they are, use d2t_format='absolute'; fastverify inspect tells")
        warnings.warn(f"load_draft: {notes[-1]}", stacklevel=4)
    if sound and not absolute:
        return ids
    if rising:
        raise error("d2t must hold offsets (target id = i + d2t[i])", "increasing values that look like absolute ids",
                    "d2t_format='absolute'")
    if bad.any():
        first = int(bad.nonzero()[0])
        raise error(f"d2t must map into [0, {v})",
                    f"id {int(ids[first])} for draft id {first} ({int(bad.sum())} out of range)", "use the d2t of this draft")
    raise error(f"d2t must map to {vd} different ids", f"{distinct}", "use the d2t of this draft")


def _shared_head(c: DraftConfig, target_head: Optional[torch.Tensor], d2t: Optional[torch.Tensor]) -> torch.Tensor:
    """The target head's rows of the draft vocabulary: the tensor itself for the whole vocabulary, else a copy."""
    if target_head is None or c.hidden_size != c.target_hidden_size:
        raise error("the draft must bring lm_head.weight or share the target's",
                    "neither (it needs the target model, not its config, of equal hidden size)",
                    "pass the target model, or use the complete checkpoint")
    c.sources["head"] = "lm_head.weight absent: the target's rows"
    if d2t is None:
        return target_head[: c.draft_vocab_size]
    return target_head[(torch.arange(c.draft_vocab_size, device="cpu") + d2t).to(target_head.device)]


def _embedding(c: DraftConfig, own: Optional[torch.Tensor], target: Optional[torch.Tensor], dtype: torch.dtype,
               device: "torch.device | str") -> Optional[torch.Tensor]:
    """The draft's own table, or the target's tensor itself; None when only a target config was given."""
    if own is None:
        if c.hidden_size != c.target_hidden_size:
            raise error(f"the draft must bring embed_tokens.weight when its hidden size {c.hidden_size} is not the "
                        f"target's {c.target_hidden_size}",
                        "none",
                        "use the complete checkpoint")
        c.sources["embedding"] = "embed_tokens.weight absent: the target's"
        if target is not None and target.device.type != torch.device(device).type:
            raise error(f"device must be the target's {target.device.type}, whose embedding the draft shares",
                        f"{device}",
                        "load both on one device")
        return target
    own = own.to(device=device, dtype=dtype)
    c.sources["embedding"] = "tensor embed_tokens.weight"
    if target is None or target.size(1) != own.size(1):
        return own
    if target.device == own.device and torch.equal(own, target[: own.size(0)].to(dtype)):
        c.sources["embedding"] = "tensor embed_tokens.weight, equal to the target's"
        return target
    rows = torch.arange(0, min(own.size(0), target.size(0)), max(1, own.size(0) // 256), device="cpu")
    a, b = own[rows.to(own.device)].float(), target[rows.to(target.device)].to(own.device).float()
    cosine = float(torch.nn.functional.cosine_similarity(a, b, dim=-1).mean())
    if cosine < 0.999:
        text = f"the draft's embedding is not this target's (mean cosine {cosine:.3f}): is it the draft of another model?"
        c.notes.append(text)
        warnings.warn(f"load_draft: {text}", stacklevel=3)
    return own


# ---- target and provenance -----------------------------------------------------------------------------------------------


def _target_facts(target: Any) -> tuple:
    """((hidden_size, vocab_size, num_layers), embedding or None, head or None) of a model or a config (object or dict)."""
    config = getattr(target, "config", target)
    get = config.get if isinstance(config, dict) else lambda key, default=None: getattr(config, key, default)
    layers = get("num_layers") or get("num_hidden_layers")
    facts = (get("hidden_size"), get("vocab_size"), layers)
    if not all(type(f) is int for f in facts):
        raise error("target must be a target model or its config (hidden_size, vocab_size, num_layers)",
                    f"{type(target).__name__}",
                    "load the target first")
    return facts, getattr(target, "embed_weight", None), getattr(target, "lm_head_weight", None)


def _fingerprint(d2t: Optional[torch.Tensor], fc: torch.Tensor) -> str:
    """sha256 of d2t and the first KB of fc: tells sibling drafts apart that agree in every shape."""
    digest = hashlib.sha256(b"" if d2t is None else d2t.cpu().numpy().tobytes())
    digest.update(fc.flatten()[:1024].cpu().contiguous().view(torch.uint8)[:1024].numpy().tobytes())
    return digest.hexdigest()[:16]


def _recorded_target(raw: dict) -> str:
    outer = raw.get("speculators_config")
    verifier = outer.get("verifier") if isinstance(outer, dict) else None
    name = raw.get("target") or (verifier.get("name_or_path") if isinstance(verifier, dict) else None)
    if isinstance(name, dict):
        name = ", ".join(f"{k}={v}" for k, v in name.items())
    return str(name) if name else "not recorded"
