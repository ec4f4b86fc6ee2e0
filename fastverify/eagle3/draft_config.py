"""What a draft checkpoint's config.json means, resolved: every field knows where its value came from.

Formats: EAGLE / SpecForge / AngelSlim (flat keys), ModelOpt (nested `eagle_config`), speculators (nested
`transformer_layer_config`). Norm flags that add a tensor are decided by the tensor; the others by the config's key.
"""

from dataclasses import dataclass, field
from typing import Optional

from ..models.config import LoadError, Rope
from ..models.hf import parse_rope

# ModelOpt's switches, at the values that make the layer of draft.py.
_STANDARD_LAYER = {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
                   "next_layer_regular": True, "eh_proj_before_attn": False, "parallel_draft_step": 1}
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")


def error(must: str, got: str, fix: str) -> LoadError:
    """`load_draft: X must be Y; got Z. Fix: W`"""
    return LoadError(f"load_draft: {must}; got {got}. Fix: {fix}")


@dataclass
class DraftConfig:
    """Resolved shape and wiring of one draft. `aux_layers` is in the INPUT convention: "before target layer i"."""

    vocab_size: int                # V: ids of the target (its own table may be padded further)
    draft_vocab_size: int          # Vd: rows of the draft's head
    hidden_size: int               # H
    target_hidden_size: int        # Ht
    intermediate_size: int
    num_layers: int                # counted from tensor names: num_hidden_layers is often the target's
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    rope: Rope                     # of the draft's own config
    max_position: int              # rows of the RoPE table
    aux_layers: tuple              # residual stream BEFORE these target layers, in the order of fc's chunks
    norm_before_residual: bool     # residual = hidden_norm(h) instead of h
    norm_before_fc: bool           # one RMSNorm over all chunks before fc
    fc_norm: bool                  # one RMSNorm per chunk before fc
    norm_output: bool              # norm(h2) is fed back instead of h2
    sources: dict = field(default_factory=dict)  # field name -> where its value came from
    notes: list = field(default_factory=list)    # what the loader found worth saying
    trained_for: str = "not recorded"            # the target that the checkpoint names
    fingerprint: str = ""                        # tells sibling drafts apart that agree in every shape

    @property
    def aux_layers_output(self) -> tuple:
        """The same layers in the OUTPUT convention: "output of target layer i"; -1 is the embedding."""
        return tuple(i - 1 for i in self.aux_layers)


def flatten_config(raw: dict) -> tuple:
    """config.json -> (flat keys, where the nested ones came from). Keys of the outer level win over nested ones."""
    flat, origin = {}, {}
    for group in ("transformer_layer_config", "eagle_config"):
        for key, value in (raw[group] if isinstance(raw.get(group), dict) else {}).items():
            flat[key], origin[key] = value, f"config {group}.{key}"
    for key, value in raw.items():
        if key not in ("transformer_layer_config", "eagle_config") and not (value is None and key in flat):
            flat[key], origin[key] = value, f"config {key}"
    return flat, origin


def default_aux_layers(num_target_layers: int) -> tuple:
    """EAGLE's choice, input convention: before {2, L//2, L-3}. Raises when they are not three layers (L < 7)."""
    layers = (2, num_target_layers // 2, num_target_layers - 3)
    if not layers[0] < layers[1] < layers[2]:
        raise error("the default aux layers (2, L//2, L-3) must be three increasing layers",
                    f"{layers} for a target of L={num_target_layers} layers",
                    "state eagle_aux_hidden_state_layer_ids in the draft's config.json")
    return layers


def resolve_aux_layers(ids, num_target_layers: int, stated: Optional[str], argument: Optional[str],
                       speculators: bool) -> tuple:
    """Aux layer ids of a config -> (input-convention tuple, source of the ids, convention, source of the convention).

    ids       list of the config, or None
    stated    the config's own key `aux_convention`
    argument  the caller's aux_convention: wins over the config
    Without either: the ids are compared with EAGLE's default for this target in both conventions; then the format's rule
    (speculators and vLLM: input), then SGLang's rule (ids that start at 1 are outputs); otherwise refused.
    """
    n = num_target_layers
    for name, value in (("aux_convention", argument), ("the config's aux_convention", stated)):
        if value not in (None, "input", "output"):
            raise error(f"{name} must be 'input' or 'output'",
                        f"{value!r}",
                        "'input' means before layer i, 'output' means after layer i")
    if ids is None:
        return default_aux_layers(n), "default (2, L//2, L-3)", "input", "default ids are inputs"
    if not isinstance(ids, (list, tuple)) or not ids or not all(type(i) is int for i in ids):
        raise error("aux layer ids must be a list of integers",
                    f"{ids!r}",
                    "eagle_aux_hidden_state_layer_ids, e.g. [2, 15, 27]")
    ids = tuple(ids)
    if argument:
        convention, source = argument, "argument aux_convention"
    elif stated:
        convention, source = stated, "config aux_convention"
    elif ids == (2, n // 2, n - 3):
        convention, source = "input", f"ids equal (2, L//2, L-3) for L={n}"
    elif ids == (1, n // 2 - 1, n - 4):
        convention, source = "output", f"ids equal (1, L//2-1, L-4) for L={n}"
    elif speculators:
        convention, source = "input", "speculators format"
    elif ids[0] == 1:
        convention, source = "output", "ids start at 1"
    else:
        raise error(f"the convention of aux layer ids {list(ids)} must be known",
                    f"ids that fit neither (2, L//2, L-3) as inputs nor (1, L//2-1, L-4) as outputs for L={n}",
                    "pass aux_convention='input' (before layer i) or 'output' (after layer i)")
    layers = ids if convention == "input" else tuple(i + 1 for i in ids)
    if any(not 0 <= i < n for i in layers) or any(a >= b for a, b in zip(layers, layers[1:])):
        raise error(f"aux layers must be increasing and in [0, {n}) as inputs",
                    f"{list(layers)} (ids {list(ids)} read as {convention}s: {source})",
                    "check that the draft belongs to this target, or pass the other aux_convention")
    return layers, "", convention, source


def _rope(flat: dict, origin: dict) -> tuple:
    """-> (Rope, source of theta, source of scaling): from the DRAFT's own keys, never the target's; theta absent: 10000."""
    try:
        rope = parse_rope({"max_position_embeddings": 2048, **flat})
    except LoadError as exc:
        got, _, fix = str(exc).partition("; got ")[2].partition(". Fix: ")
        raise error("the draft's RoPE must be one that targets have too", got, fix.rstrip(".")) from exc
    except (TypeError, ValueError) as exc:
        raise error("rope_scaling and rope_theta in config.json must be an object and a number",
                    f"{flat.get('rope_scaling')!r} and {flat.get('rope_theta')!r}",
                    "use the config.json that came with the weights") from exc
    nested = flat.get("rope_parameters") or {}
    if "rope_theta" in nested:
        theta = "config rope_parameters.rope_theta"
    else:
        theta = origin.get("rope_theta", "absent in the config: 10000")
    scaling = "none in the config" if rope.kind == "none" else f"config {'rope_parameters' if nested else 'rope_scaling'}"
    return rope, theta, scaling


def _flag(name: str, flat: dict, origin: dict, default: bool, why: str, *aliases: str) -> tuple:
    for key in (name, *aliases):
        if flat.get(key) is not None:
            return bool(flat[key]), origin[key]
    return default, why


def _norm_flags(flat: dict, origin: dict, shapes: dict, speculators: bool, src: dict) -> dict:
    """The four wiring flags by field name; writes their sources to src."""
    flags = {}
    flags["norm_before_residual"], src["norm_before_residual"] = _flag(
        "norm_before_residual", flat, origin, speculators, "default of the speculators format" if speculators else "default")
    flags["norm_output"], src["norm_output"] = _flag("norm_output", flat, origin, False, "default", "return_hidden_post_norm")
    for name, tensor in (("norm_before_fc", "input_norm.weight"), ("fc_norm", "fc_norm.0.weight")):
        flags[name] = tensor in shapes
        src[name] = f"tensor {tensor} {'present' if flags[name] else 'absent'}"
        stated = flat.get(name, flat.get("use_aux_norm") if name == "fc_norm" else None)
        if stated is not None and bool(stated) != flags[name]:
            raise error(f"{tensor} must be {'present' if stated else 'absent'} when the config says {name}={bool(stated)}",
                        f"a file {'with' if flags[name] else 'without'} it", "use the config.json that came with the weights")
    return flags


def resolve_config(raw: dict, shapes: dict, target_hidden_size: int, target_vocab_size: int, num_target_layers: int,
                   aux_convention: Optional[str] = None, max_position: Optional[int] = None) -> DraftConfig:
    """config.json and {normalised tensor name: shape} -> DraftConfig; LoadError in one sentence for what cannot be used."""
    flat, origin = flatten_config(raw)
    speculators = "speculators_model_type" in raw or "transformer_layer_config" in raw
    src: dict = {}
    notes: list = []

    def integer(key: str, default: Optional[int] = None, why: str = "") -> int:
        value = flat.get(key)
        if value is None and default is not None:
            src[key] = why
            return default
        if type(value) is not int or value < 1:
            raise error(f"{key} in config.json must be a positive integer",
                        f"{value!r}",
                        "use the config.json that came with the weights")
        src[key] = origin[key]
        return value

    if flat.get("use_aux_hidden_state") is False:
        raise error("the draft must read aux hidden states",
                    "use_aux_hidden_state=false (a head on the target's final hidden state)",
                    "use an EAGLE-3 draft")
    for key, wanted in _STANDARD_LAYER.items():
        if flat.get(key) is not None and flat[key] != wanted:
            raise error(f"{key} must be {wanted}", f"{flat[key]!r}", "use a draft with the standard EAGLE-3 layer")

    heads, hidden = integer("num_attention_heads"), integer("hidden_size")
    act = flat.get("hidden_act") or "silu"
    if act not in ACTIVATIONS:
        raise error(f"hidden_act must be one of {', '.join(ACTIVATIONS)}", f"{act!r}", "use a draft with one of these")
    vocab = integer("vocab_size", target_vocab_size, "absent in the config: the target's")
    if not vocab <= target_vocab_size < vocab + 1024:
        raise error(f"the draft's vocab_size must be the target's {target_vocab_size}",
                    f"{vocab}",
                    "use the draft that was trained for this target")
    if vocab != target_vocab_size:
        notes.append(f"the target's vocabulary is padded: {target_vocab_size} rows for {vocab} ids")
    if flat.get("target_hidden_size") not in (None, target_hidden_size):
        raise error(f"the draft's target_hidden_size must be this target's {target_hidden_size}",
                    f"{flat['target_hidden_size']}",
                    "use the draft that was trained for this target")
    ids = flat.get("eagle_aux_hidden_state_layer_ids")
    layers, ids_source, convention, convention_source = resolve_aux_layers(
        ids, num_target_layers, flat.get("aux_convention"), aux_convention, speculators)
    ids_source = ids_source or origin["eagle_aux_hidden_state_layer_ids"]
    src["aux_layers"] = f"{ids_source} read as {convention}s ({convention_source})"

    trained = integer("max_position_embeddings", 2048, "absent in the config: 2048")
    src["max_position"] = src["max_position_embeddings"]
    positions = max(trained, max_position or 0)
    if positions > trained:
        src["max_position"] = f"extended from the draft's max_position_embeddings {trained}"
        notes.append(f"RoPE table extended from {trained} to {positions} positions, as asked: acceptance may fall past "
                     f"{trained}")
    rope, src["rope_theta"], src["rope_scaling"] = _rope(flat, origin)

    flags = _norm_flags(flat, origin, shapes, speculators, src)
    kv_heads = integer("num_key_value_heads", heads, "absent in the config: num_attention_heads")
    head_dim = integer("head_dim", max(hidden // heads, 1), "absent in the config: hidden_size / num_attention_heads")
    if heads % kv_heads or head_dim % 2:
        raise error("the key/value heads must divide the query heads and head_dim must be even",
                    f"{heads}, {kv_heads} and {head_dim}", "use the config.json that came with the weights")
    eps = flat.get("rms_norm_eps", 1e-6)
    if not isinstance(eps, float) or not 0 < eps < 1:
        raise error("rms_norm_eps in config.json must be between 0 and 1", f"{eps!r}",
                    "use the config.json that came with the weights")
    src["num_layers"] = "counted from tensor names"
    return DraftConfig(
        vocab_size=vocab, draft_vocab_size=integer("draft_vocab_size", vocab, "absent in the config: vocab_size"),
        hidden_size=hidden, target_hidden_size=target_hidden_size, intermediate_size=integer("intermediate_size"),
        num_layers=len({k.split(".")[1] for k in shapes if k.startswith("layers.")}),
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, rms_norm_eps=eps, hidden_act=act, rope=rope,
        max_position=positions, aux_layers=layers, sources=src, notes=notes, **flags)
