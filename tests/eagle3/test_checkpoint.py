"""Loading drafts: formats that must work, and every wrong file with its one sentence."""

import json
import re
import warnings
import shutil
from types import SimpleNamespace

import pytest
import torch
from draft_oracle import DATA, GOLDEN, target_config
from safetensors.torch import load_file, save_file

from fastverify.eagle3.checkpoint import load_draft, vocabulary_map
from fastverify.eagle3.draft_config import default_aux_layers, resolve_aux_layers
from fastverify.models.config import LoadError
from fastverify.models.load import load_target


@pytest.fixture
def tensors() -> dict:
    return load_file(GOLDEN / "draft/model.safetensors")


@pytest.fixture
def config() -> dict:
    return json.loads((GOLDEN / "draft/config.json").read_text())


def write(folder, config: dict, tensors: dict):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


def weights_of(draft) -> list:
    layer = draft.layers[0]
    return [draft.fc, draft.norm, draft.head, draft.d2t, layer.qkv, layer.o, layer.gate_up, layer.down, layer.input_norm,
            layer.hidden_norm, layer.post_norm]


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(weights_of(a), weights_of(b)))


def refused(text: str, *args, **kw):
    """load_draft must raise LoadError with exactly this sentence."""
    with pytest.raises(LoadError) as error:
        load_draft(*args, **kw)
    assert str(error.value) == text


# ---- what must load -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", [True, False])
def test_the_default_device_does_not_matter(tmp_path, head):
    """With the draft's own head, or the target's rows by the map."""
    pair = GOLDEN.parent / "golden"
    tensors, config = load_file(pair / "draft/model.safetensors"), json.loads((pair / "draft/config.json").read_text())
    folder = write(tmp_path / "draft", config, {k: v for k, v in tensors.items() if head or k != "lm_head.weight"})
    want = load_draft(folder, load_target(pair / "target"))
    with torch.device("meta"):
        got = load_draft(folder, load_target(pair / "target"))
    assert same(want, got) and torch.equal(want.cos_sin, got.cos_sin) and got.head.device.type == "cpu"


def test_weights_land_where_they_belong(tensors):
    draft = load_draft(GOLDEN / "draft", target_config())
    t = {k: v.float() for k, v in tensors.items()}
    qkv = [t[f"midlayer.self_attn.{x}_proj.weight"] for x in "qkv"]
    assert torch.equal(draft.layers[0].qkv, torch.cat(qkv)) and draft.layers[0].qkv.dtype == torch.float32
    assert torch.equal(draft.layers[0].gate_up, torch.cat([t["midlayer.mlp.gate_proj.weight"], t["midlayer.mlp.up_proj.weight"]]))
    assert torch.equal(draft.d2t, tensors["d2t"]) and draft.d2t.dtype == torch.int64
    assert torch.equal((torch.arange(480) + draft.d2t).sort().values, tensors["t2d"].nonzero()[:, 0])


PREFIXES = {"layers.0": ("midlayer.", "layers.0."), "model.": ("", "model."), "model.model.": ("", "model.model."),
            "draft_model.": ("", "draft_model."), "eagle.": ("", "eagle."), "model.layers.0": ("midlayer.", "model.layers.0.")}


@pytest.mark.parametrize("name", PREFIXES)
def test_name_variants(tmp_path, tensors, config, name):
    old, new = PREFIXES[name]
    renamed = {new + k[len(old):] if k.startswith(old) else k: v for k, v in tensors.items()}
    renamed["draft_id_to_target_id"] = renamed.pop(next(k for k in renamed if k.endswith("d2t")))
    assert same(load_draft(write(tmp_path / "d", config, renamed), target_config()), load_draft(GOLDEN / "draft", target_config()))


def test_containers(tmp_path, tensors, config):
    """Single and sharded safetensors, single and sharded .bin, another file name: the same weights."""
    want = load_draft(GOLDEN / "draft", target_config())
    names = sorted(tensors)
    parts = {f"{i}": {n: tensors[n] for n in names[i::2]} for i in range(2)}
    for ext, save, index in (("safetensors", save_file, "model.safetensors"), ("bin", torch.save, "pytorch_model.bin")):
        folder = tmp_path / f"sharded-{ext}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        for i, part in parts.items():
            save(part, folder / f"part-{i}.{ext}")
        (folder / f"{index}.index.json").write_text(json.dumps({"weight_map": {n: f"part-{i}.{ext}" for i, p in parts.items() for n in p}}))
        assert same(load_draft(folder, target_config()), want)
        single = tmp_path / f"single-{ext}"
        single.mkdir()
        (single / "config.json").write_text(json.dumps(config))
        save(tensors, single / (index if ext == "bin" else "weights.safetensors"))
        assert same(load_draft(single, target_config()), want)


def test_speculators_form(tmp_path, tensors, config):
    """Nested transformer_layer_config, null ids, the verifier's name, norm_before_residual True when absent."""
    outer = ("draft_vocab_size", "architectures")
    nested = {"speculators_model_type": "eagle3", "eagle_aux_hidden_state_layer_ids": None,
              "transformer_layer_config": {k: v for k, v in config.items() if k not in outer}, **{k: config[k] for k in outer},
              "speculators_config": {"verifier": {"name_or_path": "some/target"}}}
    renamed = {k.replace("midlayer.", "layers.0."): v for k, v in tensors.items()}
    draft = load_draft(write(tmp_path / "d", nested, renamed), target_config())
    assert same(draft, load_draft(GOLDEN / "draft", target_config()))
    c = draft.config
    assert (c.aux_layers, c.norm_before_residual, c.trained_for) == ((2, 4, 5), True, "some/target")
    assert c.sources["norm_before_residual"] == "default of the speculators format"
    nested["norm_before_residual"] = False
    assert load_draft(write(tmp_path / "e", nested, renamed), target_config()).config.norm_before_residual is False


def test_rope_is_the_drafts_own(tmp_path, tensors, config):
    """theta absent -> 10000; transformers 5 form; scaling; the table reaches what was asked and says so."""
    plain = load_draft(GOLDEN / "draft", target_config())
    assert plain.config.rope.theta == 10000.0 and plain.cos_sin.shape == (2048, 16) and not plain.config.notes
    assert plain.config.sources["rope_theta"] == "absent in the config: 10000"
    config["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    draft = load_draft(write(tmp_path / "d", config, tensors), target_config(), max_position=3000)
    angle = 7 / 2 * 500.0 ** (-torch.arange(8) / 8)
    assert torch.allclose(draft.cos_sin[7], torch.cat([angle.cos(), angle.sin()]), atol=1e-6)
    assert draft.cos_sin.shape == (3000, 16) and draft.config.max_position == 3000
    assert draft.config.notes == ["RoPE table extended from 2048 to 3000 positions, as asked: acceptance may fall past 2048"]
    assert load_draft(GOLDEN / "draft", target_config(), max_position=100).config.max_position == 2048


def test_embedding_is_shared_or_own(tmp_path, tensors, config):
    """Absent: the target's tensor itself. Equal: shared too. Another one: kept, with a warning that it is not the target's."""
    g = torch.Generator().manual_seed(0)
    table = torch.randn(512, 64, generator=g)
    target = SimpleNamespace(config=SimpleNamespace(**target_config()), embed_weight=table, lm_head_weight=table)
    assert load_draft(GOLDEN / "draft", target).embed is table
    tensors["embed_tokens.weight"] = table.clone()
    assert load_draft(write(tmp_path / "d", config, tensors), target).embed is table
    tensors["embed_tokens.weight"] = other = torch.randn(512, 64, generator=g)
    with pytest.warns(UserWarning, match="the draft's embedding is not this target's"):
        draft = load_draft(write(tmp_path / "e", config, tensors), target)
    assert torch.equal(draft.embed, other) and "is it the draft of another model?" in draft.config.notes[0]


def test_head_of_the_target(tmp_path, tensors, config):
    """lm_head absent: the target's rows of the draft vocabulary; with a target config only, refused."""
    g = torch.Generator().manual_seed(0)
    head = torch.randn(512, 64, generator=g)
    target = SimpleNamespace(config=SimpleNamespace(**target_config()), embed_weight=head, lm_head_weight=head)
    del tensors["lm_head.weight"]
    folder = write(tmp_path / "d", config, tensors)
    draft = load_draft(folder, target)
    assert torch.equal(draft.head, head[tensors["t2d"]])
    refused("load_draft: the draft must bring lm_head.weight or share the target's; got neither (it needs the target model, not its "
            "config, of equal hidden size). Fix: pass the target model, or use the complete checkpoint", folder, target_config())
    del tensors["d2t"], tensors["t2d"]
    draft = load_draft(write(tmp_path / "e", {**config, "draft_vocab_size": None}, tensors), target)
    assert draft.head.data_ptr() == head.data_ptr() and draft.d2t is None and draft.config.draft_vocab_size == 512


def test_the_trained_golden_pair():
    target = load_target(DATA / "golden/target")
    draft = load_draft(DATA / "golden/draft", target, max_position=target.config.max_position)
    c = draft.config
    assert (c.aux_layers, c.aux_layers_output, c.draft_vocab_size, c.rope.theta) == ((2, 4, 5), (1, 3, 4), 480, 100000.0)
    assert draft.embed is target.embed_weight and c.trained_for == "name=golden-random-llama, seed=0"
    assert c.sources["aux_layers"].endswith("read as inputs (config aux_convention)")


def test_report():
    """Every row is text; both forms of the aux layers are there with their source."""
    rows = load_draft(DATA / "golden/draft", target_config()).report()
    assert all(len(row) == 3 and all(type(x) is str and x for x in row) for row in rows)
    table = {key: (value, source) for key, value, source in rows}
    assert table["aux layers, inputs"][0] == "before 2, 4, 5" and table["aux layers, outputs"][0] == "after 1, 3, 4"
    assert "eagle_config.eagle_aux_hidden_state_layer_ids" in table["aux layers, inputs"][1]
    assert table["rope theta"] == ("100000", "config rope_theta") and table["norm output"] == ("no", "default")
    assert table["vocabulary"] == ("480 of 512 ids", "tensor d2t, offset")


def test_fingerprint_tells_siblings_apart(tmp_path, tensors, config):
    a = load_draft(GOLDEN / "draft", target_config()).config.fingerprint
    tensors["d2t"] = tensors["d2t"].clone()
    free = int((~tensors["t2d"]).nonzero()[-1])
    last = int(tensors["t2d"].nonzero()[-1])
    tensors["d2t"][-1] += free - last
    tensors["t2d"][last], tensors["t2d"][free] = False, True
    b = load_draft(write(tmp_path / "d", config, tensors), target_config()).config.fingerprint
    assert len(a) == len(b) == 16 and a != b


def test_padded_target_vocabulary(tmp_path, tensors, config):
    draft = load_draft(GOLDEN / "draft", target_config(vocab_size=640))
    assert draft.config.vocab_size == 512 and draft.config.notes == ["the target's vocabulary is padded: 640 rows for 512 ids"]


# ---- aux layers ---------------------------------------------------------------------------------------------------------


AUX = [
    # ids, L, stated, argument, speculators -> layers (input), convention, source
    (None, 7, None, None, False, (2, 3, 4), "input", "default ids are inputs"),
    (None, 61, None, None, True, (2, 30, 58), "input", "default ids are inputs"),
    ([2, 30, 58], 61, None, None, False, (2, 30, 58), "input", "ids equal (2, L//2, L-3) for L=61"),
    ([1, 29, 57], 61, None, None, False, (2, 30, 58), "output", "ids equal (1, L//2-1, L-4) for L=61"),
    ([1, 46, 90], 94, None, None, False, (2, 47, 91), "output", "ids equal (1, L//2-1, L-4) for L=94"),
    ([1, 17, 33], 36, None, None, False, (2, 18, 34), "output", "ids start at 1"),
    ([2, 18, 33], 36, None, None, True, (2, 18, 33), "input", "ids equal (2, L//2, L-3) for L=36"),
    ([3, 18, 33], 36, None, None, True, (3, 18, 33), "input", "speculators format"),
    ([2, 30, 58], 61, "output", None, False, (3, 31, 59), "output", "config aux_convention"),
    ([2, 30, 58], 61, "output", "input", False, (2, 30, 58), "input", "argument aux_convention"),
    ([4, 20, 40], 45, None, "output", False, (5, 21, 41), "output", "argument aux_convention"),
    ([1, 2, 3], 5, None, "output", False, (2, 3, 4), "output", "argument aux_convention"),
    ([0, 2, 5], 6, "input", None, False, (0, 2, 5), "input", "config aux_convention"),
]


@pytest.mark.parametrize("case", AUX, ids=lambda c: f"{c[0]}-L{c[1]}-{c[2]}-{c[3]}-{c[4]}")
def test_aux_convention(case):
    ids, n, stated, argument, speculators, layers, convention, source = case
    got = resolve_aux_layers(ids, n, stated, argument, speculators)
    assert (got[0], got[2], got[3]) == (layers, convention, source)


@pytest.mark.parametrize("n, layers", [(7, (2, 3, 4)), (8, (2, 4, 5)), (30, (2, 15, 27))])
def test_default_aux_layers(n, layers):
    assert default_aux_layers(n) == layers


@pytest.mark.parametrize("n, got", [(1, "(2, 0, -2)"), (4, "(2, 2, 1)"), (5, "(2, 2, 2)"), (6, "(2, 3, 3)")])
def test_default_aux_layers_of_small_targets(n, got):
    with pytest.raises(LoadError, match=re.escape(
            f"load_draft: the default aux layers (2, L//2, L-3) must be three increasing layers; got {got} for a target of L={n} "
            "layers. Fix: state eagle_aux_hidden_state_layer_ids in the draft's config.json")):
        default_aux_layers(n)


BAD_AUX = [
    ([4, 20, 40], 45, None, None, "the convention of aux layer ids [4, 20, 40] must be known; got ids that fit neither (2, L//2, L-3) as "
     "inputs nor (1, L//2-1, L-4) as outputs for L=45. Fix: pass aux_convention='input' (before layer i) or 'output' (after layer i)"),
    ([2, 30, 61], 61, "input", None, "aux layers must be increasing and in [0, 61) as inputs; got [2, 30, 61] (ids [2, 30, 61] read as inputs: "
     "config aux_convention). Fix: check that the draft belongs to this target, or pass the other aux_convention"),
    ([1, 29, 57], 40, None, None, "aux layers must be increasing and in [0, 40) as inputs; got [2, 30, 58] (ids [1, 29, 57] read as outputs: "
     "ids start at 1). Fix: check that the draft belongs to this target, or pass the other aux_convention"),
    ([5, 4, 2], 8, "input", None, "aux layers must be increasing and in [0, 8) as inputs; got [5, 4, 2] (ids [5, 4, 2] read as inputs: config "
     "aux_convention). Fix: check that the draft belongs to this target, or pass the other aux_convention"),
    ([2, 3, 3], 6, None, "input", "aux layers must be increasing and in [0, 6) as inputs; got [2, 3, 3] (ids [2, 3, 3] read as inputs: argument "
     "aux_convention). Fix: check that the draft belongs to this target, or pass the other aux_convention"),
    ("2,4,5", 8, None, None, "aux layer ids must be a list of integers; got '2,4,5'. Fix: eagle_aux_hidden_state_layer_ids, e.g. [2, 15, 27]"),
    ([], 8, None, None, "aux layer ids must be a list of integers; got []. Fix: eagle_aux_hidden_state_layer_ids, e.g. [2, 15, 27]"),
    ([2, 4, 5], 8, None, "inputs", "aux_convention must be 'input' or 'output'; got 'inputs'. Fix: 'input' means before layer i, 'output' means "
     "after layer i"),
]


@pytest.mark.parametrize("ids, n, stated, argument, text", BAD_AUX, ids=lambda x: str(x)[:20])
def test_bad_aux_layers(ids, n, stated, argument, text):
    with pytest.raises(LoadError, match="^" + re.escape("load_draft: " + text) + "$"):
        resolve_aux_layers(ids, n, stated, argument, False)


def test_aux_ids_flat_or_nested_and_extra_keys(tmp_path, tensors, config):
    """Ids at the top or inside eagle_config, with their convention beside them; `target` and unknown keys do not disturb."""
    flat = {**config, "eagle_aux_hidden_state_layer_ids": [1, 3, 4], "aux_convention": "output", "target": "x", "something": 1}
    nested = {**config, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "aux_convention": "output"}}
    for i, c in enumerate((flat, nested)):
        draft = load_draft(write(tmp_path / str(i), c, tensors), target_config())
        assert draft.config.aux_layers == (2, 4, 5) and draft.config.aux_layers_output == (1, 3, 4)
    forced = load_draft(tmp_path / "0", target_config(), aux_convention="input")
    assert forced.config.aux_layers == (1, 3, 4)


# ---- files --------------------------------------------------------------------------------------------------------------


def test_missing_files(tmp_path, config, tensors):
    refused(f"load_draft: path must be a folder with config.json and weights; got {tmp_path}/no, which does not exist. Fix: give the "
            "draft's folder", tmp_path / "no", target_config())
    file = GOLDEN / "draft/config.json"
    refused(f"load_draft: path must be a folder with config.json and weights; got {file}, a file. Fix: give the draft's folder", file,
            target_config())
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(LoadError, match="config.json must be in .*empty; got no such file"):
        load_draft(empty, target_config())
    shutil.copy(GOLDEN / "draft/config.json", empty)
    refused(f"load_draft: {empty} must hold model.safetensors or pytorch_model.bin; got ['config.json']. Fix: download the weights too",
            empty, target_config())
    (empty / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": "a.safetensors"}}))
    refused(f"load_draft: the shard a.safetensors must exist; got none in {empty}. Fix: download it", empty, target_config())


@pytest.mark.parametrize("keep", [0, 7, 100, 5000, -1])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_truncated_weights(tmp_path, tensors, config, name, keep):
    folder = write(tmp_path / "d", config, tensors)
    if name.endswith(".bin"):
        (folder / "model.safetensors").unlink()
        torch.save(tensors, folder / name)
    data = (folder / name).read_bytes()[:keep]
    (folder / name).write_bytes(data)
    with pytest.raises(LoadError, match=rf"load_draft: .*{name} must be a whole weight file; got {len(data)} bytes that cannot be read "
                                        r"\(.*\)\. Fix: download it again"):
        load_draft(folder, target_config())


def test_pickled_code_does_not_run(tmp_path, config):
    """A .bin that is not plain tensors is refused; nothing in it is executed."""
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "boom"), "w"))
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    torch.save({"fc.weight": Bomb()}, folder / "pytorch_model.bin")
    with pytest.raises(LoadError, match="must be a whole weight file"):
        load_draft(folder, target_config())
    assert not (tmp_path / "boom").exists()
    torch.save([torch.zeros(1)], folder / "pytorch_model.bin")
    refused(f"load_draft: {folder}/pytorch_model.bin must hold a dict of tensors; got list. Fix: save the state dict alone", folder,
            target_config())


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_broken_config(tmp_path, tensors, text):
    folder = write(tmp_path / "d", {}, tensors)
    (folder / "config.json").write_text(text)
    with pytest.raises(LoadError, match=r"load: .*config.json must .*Fix: download the file again\."):
        load_draft(folder, target_config())


# ---- tensors and config that do not fit ---------------------------------------------------------------------------------


def rename(old, new):
    return lambda c, t: t.__setitem__(new, t.pop(old))


def put(name, value):
    return lambda c, t: t.__setitem__(name, value(t) if callable(value) else value)


def drop(*names):
    return lambda c, t: [t.pop(n) for n in names]


def key(name, value):
    return lambda c, t: c.__setitem__(name, value)


ONE = "Fix: use weights and config.json of one draft"
EXACTLY = "the draft's tensors must be exactly those of its config; got missing "
BAD = {
    "missing": (drop("norm.weight"), EXACTLY + f"['norm.weight'], unexpected []. {ONE}"),
    "unexpected": (put("verifier_lm_head.weight", torch.zeros(1)), EXACTLY + f"[], unexpected ['verifier_lm_head.weight']. {ONE}"),
    "misnamed": (rename("midlayer.hidden_norm.weight", "midlayer.hiddn_norm.weight"), EXACTLY + "['layers.0.hidden_norm.weight'], "
                 f"unexpected ['layers.0.hiddn_norm.weight']. {ONE}"),
    "half a bias": (put("midlayer.self_attn.q_proj.bias", torch.zeros(64)), EXACTLY + "['layers.0.self_attn.k_proj.bias', "
                    f"'layers.0.self_attn.v_proj.bias'], unexpected []. {ONE}"),
    "name twice": (put("layers.0.mlp.up_proj.weight", torch.zeros(160, 64)), "tensor names must be unique after their prefixes are removed; "
                   "got layers.0.mlp.up_proj.weight and midlayer.mlp.up_proj.weight for layers.0.mlp.up_proj.weight. Fix: remove one from "
                   "the file"),
    "q without the embedding half": (put("midlayer.self_attn.q_proj.weight", torch.zeros(64, 64)),
                                     f"layers.0.self_attn.q_proj.weight must be [64, 128]; got [64, 64]. {ONE}"),
    "head rows": (put("lm_head.weight", torch.zeros(512, 64)), f"lm_head.weight must be [480, 64]; got [512, 64]. {ONE}"),
    "embedding rows": (put("embed_tokens.weight", torch.zeros(500, 64)), f"embed_tokens.weight must be [512, 64]; got [500, 64]. {ONE}"),
    "fc of a wider target": (put("fc.weight", torch.zeros(64, 240)), "fc.weight must read 3 aux layers of hidden size 64 (192 columns); got 240 "
                             "columns (3.75 x 64). Fix: use the draft that was trained for this target"),
    "fc of one layer": (put("fc.weight", torch.zeros(64, 64)), "fc.weight must read 3 aux layers of hidden size 64 (192 columns); got 64 "
                        "columns (1 x 64). Fix: use the draft that was trained for this target"),
    "quantised": (put("fc.weight", torch.zeros(64, 192, dtype=torch.int8)), "fc.weight must be a floating-point tensor of 16 bits or more; got "
                  "torch.int8. Fix: use the unquantised checkpoint"),
    "MLA": (put("midlayer.self_attn.kv_a_proj_with_mqa.weight", torch.zeros(1)), "the draft must use q/k/v projections; got an MLA draft "
            "whose config.json lacks kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim. Fix: use a draft with grouped-query attention"),
    "EAGLE-1": (drop("midlayer.hidden_norm.weight", "norm.weight"), "the draft must be an EAGLE-3 head; got an EAGLE-1/2 head (no hidden_norm, no "
                "final norm). Fix: use an EAGLE-3 draft"),
    "vocabulary": (key("vocab_size", 600), "the draft's vocab_size must be the target's 512; got 600. Fix: use the draft that was trained for "
                   "this target"),
    "target width": (key("target_hidden_size", 80), "the draft's target_hidden_size must be this target's 64; got 80. Fix: use the draft that "
                     "was trained for this target"),
    "heads": (key("num_attention_heads", None), "num_attention_heads in config.json must be a positive integer; got None. Fix: use the "
              "config.json that came with the weights"),
    "activation": (key("hidden_act", "relu"), "hidden_act must be one of silu, gelu, gelu_pytorch_tanh; got 'relu'. Fix: use a draft with one of "
                   "these"),
    "rope": (key("rope_scaling", {"type": "dynamic", "factor": 2.0}), "the draft's RoPE must be one that targets have too; got rope type "
             "'dynamic'. Fix: use a model with rope type default, linear, llama3 or yarn"),
    "rope is text": (key("rope_scaling", "linear"), "rope_scaling and rope_theta in config.json must be an object and a number; got "
                     "'linear' and None. Fix: use the config.json that came with the weights"),
    "head counts": (key("num_key_value_heads", 3), "the key/value heads must divide the query heads and head_dim must be even; got 4, 3 and "
                    "16. Fix: use the config.json that came with the weights"),
    "eps": (key("rms_norm_eps", "1e-5"), "rms_norm_eps in config.json must be between 0 and 1; got '1e-5'. Fix: use the config.json that came "
            "with the weights"),
    "final hidden": (key("eagle_config", {"use_aux_hidden_state": False}), "the draft must read aux hidden states; got use_aux_hidden_state=false "
                     "(a head on the target's final hidden state). Fix: use an EAGLE-3 draft"),
    "other layer": (key("eagle_config", {"use_mtp_layernorm": True}), "use_mtp_layernorm must be False; got True. Fix: use a draft with the "
                    "standard EAGLE-3 layer"),
    "fc_norm stated": (key("fc_norm", True), "fc_norm.0.weight must be present when the config says fc_norm=True; got a file without it. Fix: use "
                       "the config.json that came with the weights"),
    "input_norm denied": (lambda c, t: (c.update(norm_before_fc=False), t.update({"input_norm.weight": torch.ones(192)})),
                          "input_norm.weight must be absent when the config says norm_before_fc=False; got a file with it. Fix: use the "
                          "config.json that came with the weights"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(tmp_path, tensors, config, name):
    change, text = BAD[name]
    change(config, tensors)
    refused("load_draft: " + text, write(tmp_path / "d", config, tensors), target_config())


def test_draft_of_another_hidden_size(tmp_path, tensors, config):
    """A draft for a 64-wide target on a target of 80; a narrow draft without its own embedding."""
    refused("load_draft: fc.weight must read 3 aux layers of hidden size 80 (240 columns); got 192 columns (2.4 x 80). Fix: use the draft that "
            "was trained for this target", GOLDEN / "draft", target_config(hidden_size=80))
    tensors["fc.weight"] = torch.zeros(64, 240)
    refused("load_draft: the draft must bring embed_tokens.weight when its hidden size 64 is not the target's 80; got none. Fix: use the "
            "complete checkpoint", write(tmp_path / "d", config, tensors), target_config(hidden_size=80))


def test_target_and_arguments():
    refused("load_draft: target must be a target model or its config (hidden_size, vocab_size, num_layers); got str. Fix: load the target first",
            GOLDEN / "draft", "path/to/target")
    refused("load_draft: d2t_format must be one of offset, absolute, identity; got 'ids'. Fix: leave it out", GOLDEN / "draft",
            target_config(), d2t_format="ids")
    refused("load_draft: the draft's vocab_size must be the target's 2000; got 512. Fix: use the draft that was trained for this target",
            GOLDEN / "draft", target_config(vocab_size=2000))


# ---- vocabulary map -----------------------------------------------------------------------------------------------------


def small(vd: int = 4, v: int = 10):
    return SimpleNamespace(vocab_size=v, draft_vocab_size=vd, sources={}, notes=[])


def marks(*ids, v: int = 10) -> torch.Tensor:
    out = torch.zeros(v, dtype=torch.bool)
    out[list(ids)] = True
    return out


def test_vocabulary_map():
    offsets = torch.tensor([1, 1, 3, 6])  # ids 1 2 5 9
    assert vocabulary_map(small(), offsets, marks(1, 2, 5, 9)).tolist() == [1, 1, 3, 6]
    assert vocabulary_map(small(), offsets.int(), None).dtype == torch.int64
    assert vocabulary_map(small(), torch.tensor([1, 2, 5, 9]), None, "absolute").tolist() == [1, 1, 3, 6]
    assert vocabulary_map(small(), None, None, "identity") is None
    assert vocabulary_map(small(4, 4), None, None) is None
    few = torch.arange(0, 100)  # ids 0 2 4 ... 198: t2d says that they are offsets
    for t2d, notes in ((marks(*range(0, 200, 2), v=512), []), (None, ["d2t rises at every entry, as absolute ids do: if they are, use "
                                                                      "d2t_format='absolute'; fastverify inspect tells"])):
        c = small(100, 512)
        with warnings.catch_warnings(record=True) as warned:
            assert torch.equal(vocabulary_map(c, few, t2d), few) and c.notes == notes == [str(w.message)[12:] for w in warned]
    assert vocabulary_map(small(4, 4), torch.zeros(4, dtype=torch.int64), None) is None
    assert vocabulary_map(small(), torch.zeros(4, dtype=torch.int64), marks(0, 1, 2, 3)) is None  # t2d confirms the first ids
    assert vocabulary_map(small(), torch.zeros(4, dtype=torch.int64), None, "identity") is None
    c = small()
    assert vocabulary_map(c, torch.tensor([5, 0, 0, 0]), None).tolist() == [5, 0, 0, 0]
    assert c.notes == ["d2t is not increasing: unusual for a map sorted by id"]


ALL_ZERO = ("d2t must map the draft's 4 ids into the target's 10; got all zeros (the first 4 ids). Fix: d2t_format='identity' if that is meant, "
            "else use the complete checkpoint")
BAD_MAPS = [
    ("absolute ids out of range", [1, 2, 5, 9], None, "offset", "d2t must hold offsets (target id = i + d2t[i]); got increasing values that look "
     "like absolute ids. Fix: d2t_format='absolute'"),
    ("negative", [-1, 0, 0, 0], None, "offset", "d2t must map into [0, 10); got id -1 for draft id 0 (1 out of range). Fix: use the d2t of this "
     "draft"),
    ("past the vocabulary", [0, 0, 7, 8], None, "offset", "d2t must map into [0, 10); got id 11 for draft id 3 (1 out of range). Fix: use the d2t "
     "of this draft"),
    ("repeated", [1, 0, 3, 3], None, "offset", "d2t must map to 4 different ids; got 3. Fix: use the d2t of this draft"),
    ("offsets read as ids", [1, 1, 3, 6], None, "absolute", "d2t must map to 4 different ids; got 3. Fix: use the d2t of this draft"),
    ("all zero", [0, 0, 0, 0], None, "offset", ALL_ZERO),
    ("all zero against t2d", [0, 0, 0, 0], (1, 2, 5, 9), "offset", ALL_ZERO),
    ("t2d of another draft", [1, 1, 3, 6], (1, 2, 5, 8), "offset", "t2d must mark exactly the 4 ids of d2t; got 4 marked, 3 of them in d2t. Fix: "
     "use d2t and t2d of one draft"),
    ("t2d with one more", [1, 1, 3, 6], (1, 2, 5, 8, 9), "offset", "t2d must mark exactly the 4 ids of d2t; got 5 marked, 4 of them in d2t. Fix: "
     "use d2t and t2d of one draft"),
    ("absent", None, None, "offset", "d2t must be present when the draft has fewer ids than the target (4 of 10); got none. Fix: use the complete "
     "checkpoint, or d2t_format='identity' if its ids are the first ones"),
    ("absolute ids by t2d", [0, 1, 2, 4], (0, 1, 2, 4), "offset", "d2t must hold offsets (target id = i + d2t[i]); got increasing values that look "
     "like absolute ids. Fix: d2t_format='absolute'"),
    ("float", [1.0, 1.0, 3.0, 6.0], None, "offset", "d2t must be int64 or int32; got torch.float32. Fix: use the checkpoint as published"),
]


@pytest.mark.parametrize("name, d2t, t2d, form, text", BAD_MAPS, ids=[c[0] for c in BAD_MAPS])
def test_bad_vocabulary_map(name, d2t, t2d, form, text):
    with pytest.raises(LoadError, match="^" + re.escape("load_draft: " + text) + "$"):
        vocabulary_map(small(), None if d2t is None else torch.tensor(d2t), None if t2d is None else marks(*t2d), form)


def test_absolute_map_through_the_loader(tmp_path, tensors, config):
    """An absolute map is named as such; with d2t_format="absolute" it loads as the same offsets."""
    offsets = tensors["d2t"]
    tensors["d2t"] = offsets + torch.arange(480)
    folder = write(tmp_path / "d", config, tensors)
    refused("load_draft: d2t must hold offsets (target id = i + d2t[i]); got increasing values that look like absolute ids. Fix: "
            "d2t_format='absolute'", folder, target_config())
    assert torch.equal(load_draft(folder, target_config(), d2t_format="absolute").d2t, offsets)
