"""The EAGLE-3 trainer against slow, independent recomputations. CPU only, well under a minute."""

import json
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fastverify.eagle3.train import TrainConfig, Trainer, training_rows
from fastverify.eagle3.train_data import Prompts, Ragged, Replies, batch_rows, choose_vocab, pack, repeat_rate
from fastverify.eagle3.train_eval import evaluate, held_out, match_table, replay
from fastverify.eagle3.train_generate import Generator, conversations, join
from fastverify.eagle3.train_loss import SoftCrossEntropy
from fastverify.eagle3.train_net import DraftConfig, Eagle3Draft, load_draft, save_draft
from fastverify.eagle3.train_target import LlamaConfig, TargetLlama, load_target, packed_mask

GOLDEN = os.path.join(os.path.dirname(__file__), "..", "data", "golden")
SMALL = LlamaConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rope_theta=5000.0,
)


@pytest.fixture(autouse=True)
def _threads():
    n = torch.get_num_threads()
    torch.set_num_threads(min(n, 2))
    yield
    torch.set_num_threads(n)


def small_pair(seed: int = 0) -> tuple[TargetLlama, Eagle3Draft]:
    torch.manual_seed(seed)
    target = TargetLlama(SMALL).requires_grad_(False)
    torch.nn.init.normal_(target.embed_tokens.weight)
    draft = Eagle3Draft(DraftConfig.for_target(SMALL, 80))
    draft.set_vocab(torch.from_numpy(np.sort(np.random.default_rng(seed).permutation(96)[:80])))
    for p in draft.parameters():  # random norm weights: leaving one out must show
        if p.dim() == 1:
            torch.nn.init.normal_(p, 1.0, 0.3)
    return target, draft


def texts(target: TargetLlama, n: int = 40, length: int = 24, greedy: bool = False, seed: int = 0) -> Replies:
    rng = np.random.default_rng(seed)
    gen = Generator(target, eos=[-1], rows=n, min_p=1e-6, seed=seed)
    firsts = [rng.integers(3, target.config.vocab_size, 1).astype(np.int32) for _ in range(n)]
    got = gen.many(firsts, length - 1, None if greedy else np.full(n, 0.7, np.float32), log=lambda *a, **k: None)
    ids = [np.concatenate([a, b]) for a, b in zip(firsts, got)]
    asst = [np.concatenate([np.zeros(1), np.ones(len(b))]).astype(np.uint8) for b in got]
    return Replies(
        Ragged.of(ids),
        Ragged.of(asst, np.uint8),
        np.zeros(n, np.int16),
        np.arange(n) % 5 == 0,
        np.full(n, greedy),
        ["t"],
    )


def naive_layer(net: Eagle3Draft, e: torch.Tensor, h: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    """Draft layer over one causal list of entries, written out: e, h [n, H]; pos [n] -> h2 [n, H]."""
    m, c = net.midlayer, net.config
    norm = lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + c.rms_norm_eps) * w
    x = torch.cat([norm(e, m.input_layernorm.weight), norm(h, m.hidden_norm.weight)], -1)

    def rope(t):  # t [n, heads, d], complex form of the half-split rotation
        half = c.head_dim // 2
        ang = pos[:, None].double() * c.rope_theta ** (-torch.arange(half).double() * 2 / c.head_dim)
        z = (
            torch.complex(t[..., :half].double(), t[..., half:].double())
            * torch.polar(torch.ones_like(ang), ang)[:, None]
        )
        return torch.cat([z.real, z.imag], -1).to(t.dtype)

    n, a = len(pos), m.self_attn
    q = rope(F.linear(x, a.q_proj.weight).view(n, -1, c.head_dim))
    k = rope(F.linear(x, a.k_proj.weight).view(n, -1, c.head_dim))
    v = F.linear(x, a.v_proj.weight).view(n, -1, c.head_dim)
    out, group = torch.zeros_like(q), q.shape[1] // k.shape[1]
    for i in range(n):
        for j in range(q.shape[1]):
            w = (k[: i + 1, j // group] @ q[i, j] / c.head_dim**0.5).softmax(0)
            out[i, j] = w @ v[: i + 1, j // group]
    h1 = h + F.linear(out.flatten(1), a.o_proj.weight)
    z = norm(h1, m.post_attention_layernorm.weight)
    return h1 + F.linear(
        F.silu(F.linear(z, m.mlp.gate_proj.weight)) * F.linear(z, m.mlp.up_proj.weight), m.mlp.down_proj.weight
    )


def unrolled(target, draft, ids, steps):
    t = ids.numel()
    pos, doc = torch.arange(t)[None], torch.zeros(1, t, dtype=torch.int16)
    _, aux = target(ids[None], pos, None, draft.config.aux_layers)
    return aux[0], [x[0] for x in draft.unroll(target.embed_tokens, ids[None], aux, pos, packed_mask(doc), steps)]


@torch.no_grad()
def test_step_0_is_a_plain_causal_forward():
    target, draft = small_pair()
    ids = torch.randint(0, 96, (14,))
    aux, steps = unrolled(target, draft, ids, 1)
    want = naive_layer(draft, target.embed_tokens(ids[1:]), draft.fc(aux[:-1]), torch.arange(13))
    torch.testing.assert_close(steps[0][:-1], want, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_unrolled_states_are_those_of_a_free_running_draft():
    target, draft = small_pair(1)
    ids = torch.randint(0, 96, (14,))
    aux, steps = unrolled(target, draft, ids, 4)
    for k in (0, 3, 8):
        e, h, pos = target.embed_tokens(ids[1 : k + 2]), draft.fc(aux[: k + 1]), torch.arange(k + 1)
        for j in range(4):  # every step recomputes the whole list: no cache to get wrong
            h2 = naive_layer(draft, e, h, pos)[-1]
            torch.testing.assert_close(steps[j][k], h2, rtol=1e-5, atol=1e-5)
            e = torch.cat([e, target.embed_tokens(ids[k + 2 + j : k + 3 + j])])
            h, pos = torch.cat([h, h2[None]]), torch.cat([pos, pos[-1:] + 1])


@torch.no_grad()
def test_packed_documents_do_not_see_each_other():
    target, draft = small_pair(2)
    a, b = torch.randint(0, 96, (9,)), torch.randint(0, 96, (12,))
    r = Replies(
        Ragged.of([a.numpy(), b.numpy()]),
        Ragged.of([np.ones(9), np.ones(12)], np.uint8),
        np.zeros(2, np.int16),
        np.zeros(2, bool),
        np.ones(2, bool),
        ["t"],
    )
    rows = pack(r, [0, 1], 24)
    assert len(rows) == 1 and int((rows.doc >= 0).sum()) == 21
    mask = packed_mask(rows.doc)
    _, aux = target(rows.ids.long(), rows.pos.long(), mask, draft.config.aux_layers)
    got = list(draft.unroll(target.embed_tokens, rows.ids.long(), aux, rows.pos.long(), mask, 3))
    at = 0
    for d in range(2):
        n = int((rows.doc == d).sum())
        alone, steps = unrolled(target, draft, rows.ids[0, at : at + n].long(), 3)
        torch.testing.assert_close(aux[0, at : at + n], alone, rtol=1e-4, atol=1e-4)
        for j in range(3):
            torch.testing.assert_close(got[j][0, at : at + n - 1 - j], steps[j][: n - 1 - j], rtol=1e-4, atol=1e-4)
        at += n


@pytest.mark.parametrize("accept", [0.0, 0.7])
def test_soft_cross_entropy_gradient(accept):
    """Against autograd through the formula, the acceptance term included."""
    torch.manual_seed(0)
    x, p, w = (
        torch.randn(7, 11, dtype=torch.float64, requires_grad=True),
        torch.rand(7, 11).double().softmax(-1),
        torch.rand(7).double(),
    )
    cross = -(p * x.log_softmax(-1)).sum(-1)
    rate = torch.minimum(p, x.softmax(-1)).sum(-1)
    want = ((cross - accept * rate.log()) * w).sum()
    (g,) = torch.autograd.grad(want, x, retain_graph=True)
    got, alone = SoftCrossEntropy.apply(x, p, w, accept)
    (h,) = torch.autograd.grad(got, x)
    torch.testing.assert_close(alone.double(), (cross * w).sum(), rtol=1e-5, atol=1e-6)
    assert not alone.requires_grad
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(h, g, rtol=1e-5, atol=1e-6)


def trainer_for(target: TargetLlama, data: Replies, steps: int, **kw) -> tuple[Trainer, tuple]:
    c = TrainConfig(
        steps=steps,
        batch=4,
        row=48,
        ttt=3,
        ttt_late=4,
        ttt_switch=0.5,
        lr=3e-3,
        head_lr=3e-3,
        warmup=5,
        ema=0.9,
        eval_every=1000,
        log_every=5,
        **kw,
    )
    vocab, _ = choose_vocab(data, 80, 96, [0, 1, 2])
    return Trainer(target, DraftConfig.for_target(SMALL, 80), vocab, c), training_rows(data, c, "cpu")


def test_loss_goes_down():
    target, _ = small_pair(3)
    trainer, (rows, _) = trainer_for(target, texts(target), 30)
    losses = [float(trainer.train_step(rows)["ce"][0]) for _ in range(30)]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.1, losses


def test_resume_is_bit_equal(tmp_path):
    target, _ = small_pair(4)
    data = texts(target)
    one, (rows, _) = trainer_for(target, data, 12)
    one.run(rows, None)
    two, _ = trainer_for(target, data, 12)
    for _ in range(5):
        two.train_step(rows)
    two.save(str(tmp_path / "checkpoint.pt"))
    three, _ = trainer_for(target, data, 12)
    three.load(str(tmp_path / "checkpoint.pt"))
    three.run(rows, None)
    for key in ("net", "ema"):
        for (n, a), b in zip(one.state()[key].items(), three.state()[key].values()):
            assert torch.equal(a, b), (key, n)


def test_export_round_trip_and_d2t(tmp_path):
    from safetensors.torch import load_file

    target, draft = small_pair(5)
    save_draft(draft, str(tmp_path), dict(name="t"), torch.float32)
    back, state = load_draft(str(tmp_path)), load_file(tmp_path / "model.safetensors")
    for k, v in draft.state_dict().items():
        assert torch.equal(v, back.state_dict()[k]), k
    assert set(state) == {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"} | {
        f"midlayer.{x}.weight"
        for x in (
            "input_layernorm",
            "hidden_norm",
            "post_attention_layernorm",
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
        )
    }
    ids = torch.arange(80) + state["d2t"]
    assert state["d2t"].dtype == torch.int64 and state["t2d"].dtype == torch.bool and bool((ids.diff() > 0).all())
    assert bool(state["t2d"][ids].all()) and int(state["t2d"].sum()) == 80 and int(ids[-1]) < 96
    config = json.load(open(tmp_path / "config.json"))
    assert config["eagle_config"] == {
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "use_aux_hidden_state": True,
        "aux_convention": "input",
    }
    assert config["rope_theta"] == 5000.0 and config["draft_vocab_size"] == 80


@torch.no_grad()
def test_generator_is_the_greedy_target():
    target, _ = small_pair(6)
    gen = Generator(target, eos=[-1], rows=2, step=16)
    prompts = [np.arange(n) % 96 for n in (3, 9, 5, 9)]
    assert gen.rows < len(prompts)  # several batches share the buffers
    for p, reply in zip(prompts, gen.many(prompts, 7, None, log=lambda *a, **k: None)):
        ids = list(p)
        for _ in range(7):
            h, _ = target(torch.tensor([ids]), torch.arange(len(ids))[None], None)
            ids.append(int(target.logits(h[0, -1:]).argmax()))
        assert reply.tolist() == ids[len(p) :]


@torch.no_grad()
def free_running_rounds(target, draft, ids, first, end, depth):
    """Greedy chain speculation, everything recomputed each time: accepted drafts of every round of reply [first,
    end)."""
    vocab, n, accepted = draft.vocab_ids, first, []
    _, aux = target(ids[None], torch.arange(len(ids))[None], None, draft.config.aux_layers)
    while n < end - 1:  # root = token n, last pair n - 1
        e, h, pos, a = target.embed_tokens(ids[1 : n + 1]), draft.fc(aux[0, :n]), torch.arange(n), 0
        drafts = []
        for _ in range(depth):
            h2 = naive_layer(draft, e, h, pos)[-1:]
            drafts.append(int(vocab[draft.logits(h2).argmax()]))
            e, h, pos = (
                torch.cat([e, target.embed_tokens(torch.tensor(drafts[-1:]))]),
                torch.cat([h, h2]),
                torch.cat([pos, pos[-1:] + 1]),
            )
        while a < depth and n + 1 + a < end and drafts[a] == int(ids[n + 1 + a]):
            a += 1
        accepted.append(a)
        n += a + 1
    return accepted


@torch.no_grad()
@pytest.mark.parametrize("temperature, min_p", [(0.8, 0.0), (0.8, 0.3), (1.4, 0.0)])
def test_sampled_replies_follow_their_temperature_and_cut(temperature, min_p):
    """First tokens of 20,000 replies to one prompt against softmax(logits / T), without what min-p cuts."""
    target, _ = small_pair()
    prompt, n = np.array([5, 9, 40], np.int32), 20_000
    gen = Generator(target, eos=[-1], rows=n, min_p=min_p, seed=4)
    got = gen.many([prompt] * n, 1, np.full(n, temperature, np.float32), log=lambda text: None)
    hidden, _ = target(torch.from_numpy(prompt).long()[None], torch.arange(3)[None], None)
    p = torch.softmax(target.logits(hidden[0, -1:])[0] / temperature, -1).double().numpy()
    p[p < min_p * p.max()] = 0
    p /= p.sum()
    count = np.bincount([int(r[0]) for r in got], minlength=len(p))
    assert count[p == 0].sum() == 0 and (p == 0).any() == (min_p > 0)
    kept = p > 0
    chi = ((count[kept] - n * p[kept]) ** 2 / (n * p[kept])).sum()
    assert chi < kept.sum() + 5 * (2 * kept.sum()) ** 0.5


@torch.no_grad()
def test_golden_pair_replay_equals_a_free_running_loop():
    target, draft = load_target(os.path.join(GOLDEN, "target")), load_draft(os.path.join(GOLDEN, "draft"))
    rng = np.random.default_rng(3)
    gen = Generator(target, eos=[-1], rows=2, min_p=1e-6)
    firsts = [rng.integers(3, 512, 4).astype(np.int32) for _ in range(2)]
    ids = [np.concatenate([a, b]) for a, b in zip(firsts, gen.many(firsts, 28, None, log=lambda *a, **k: None))]
    asst = [np.concatenate([np.zeros(4), np.ones(28)]).astype(np.uint8) for _ in ids]
    r = Replies(
        Ragged.of(ids), Ragged.of(asst, np.uint8), np.zeros(2, np.int16), np.zeros(2, bool), np.ones(2, bool), ["t"]
    )
    loop = [a for x in ids for a in free_running_rounds(target, draft, torch.from_numpy(x).long(), 4, 32, 3)]
    out = evaluate(target, draft, r, depths=(3,))["t"]
    assert out["text_is_greedy"] == 1.0 and out["chain3"]["rounds"] == len(loop)
    assert out["chain3"]["tau"] == pytest.approx(1 + np.mean(loop), abs=1e-4)


@torch.no_grad()
def test_golden_reference_tensors():
    from safetensors.torch import load_file

    target, draft = load_target(os.path.join(GOLDEN, "target")), load_draft(os.path.join(GOLDEN, "draft"))
    ref = load_file(os.path.join(GOLDEN, "reference.safetensors"))
    pos, doc = torch.arange(25).expand(2, 25), torch.zeros(2, 25, dtype=torch.int16)
    hidden, aux = target(ref["ids"], pos, None, draft.config.aux_layers)
    torch.testing.assert_close(aux, ref["aux"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(target.logits(hidden), ref["target_logits"], rtol=1e-4, atol=1e-3)
    for j, h2 in enumerate(draft.unroll(target.embed_tokens, ref["ids"], aux, pos, packed_mask(doc), 4)):
        torch.testing.assert_close(h2, ref[f"h2.{j}"], rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(draft.logits(h2), ref[f"draft_logits.{j}"], rtol=1e-4, atol=1e-3)
    record = json.load(open(os.path.join(GOLDEN, "record.json")))
    assert record["held_out"]["agreement"][0] > 0.4


def test_golden_target_is_hugging_face_llama():
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file

    model = transformers.AutoModelForCausalLM.from_pretrained(
        os.path.join(GOLDEN, "target"), dtype=torch.float32
    ).eval()
    ref = load_file(os.path.join(GOLDEN, "reference.safetensors"))
    with torch.no_grad():
        out = model(ref["ids"], output_hidden_states=True)
    torch.testing.assert_close(out.logits, ref["target_logits"], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(
        torch.cat([out.hidden_states[i] for i in (2, 4, 5)], -1), ref["aux"], rtol=1e-4, atol=1e-4
    )


def test_replay_counts():
    #      prompt | reply: root is index 2, pairs 1.. ; run[k] = leading matches of the chain at pair k
    run, asst = np.array([0, 3, 0, 0, 0, 0, 9, 0]), np.array([0, 0, 1, 1, 1, 1, 1, 1])
    assert replay(run, asst, 3) == [3, 0] and replay(run, asst, 2) == [2, 0, 0]
    assert replay(np.zeros(4, int), np.array([0, 1, 1, 0]), 3) == [0]


def test_data_helpers(tmp_path):
    assert repeat_rate(np.arange(50)) == 0.0 and repeat_rate(np.tile(np.arange(5), 20)) > 0.9
    seen = np.concatenate([batch_rows(10, 2, s, 7) for s in range(5)])
    assert sorted(seen) == list(range(10)) and not np.array_equal(
        seen, np.concatenate([batch_rows(10, 2, s, 7) for s in range(5, 10)])
    )
    target, _ = small_pair(7)
    r = texts(target, 10)
    ids, cover = choose_vocab(r, 40, 96, [0, 1, 2])
    assert len(ids) == 40 and bool((np.diff(ids) > 0).all()) and {0, 1, 2} <= set(ids.tolist()) and 0 < cover <= 1
    r.save(str(tmp_path / "r.npz"))
    s = Replies.load(str(tmp_path / "r.npz"))
    assert np.array_equal(s.ids.flat, r.ids.flat) and np.array_equal(s.held, r.held) and s.names == r.names
    assert len(join([r, s]).ids) == 20


def test_two_turn_conversations_mark_only_the_replies():
    target, _ = small_pair(8)
    p = Prompts(
        Ragged.of([[5, 6], [7, 8, 9]]), Ragged.of([[3, 4], []]), np.zeros(2, np.int16), np.zeros(2, bool), ["t"]
    )
    eos = list(range(40))  # many stop ids: replies end early, so that turn 2 happens
    r = conversations(Generator(target, eos, rows=2), p, 60, True, 0, max_repeat=2.0, log=lambda *a, **k: None)
    for i in range(len(r.ids)):
        ids, asst = r.ids[i], r.asst[i]
        spans = np.flatnonzero(np.diff(np.concatenate([[0], asst.astype(int), [0]])))
        assert asst[0] == 0 and len(spans) in (2, 4)
        if len(spans) == 4:
            assert ids[spans[1] : spans[2]].tolist() == [3, 4] and ids[spans[1] - 1] in eos


def test_evaluation_prompts_are_recognised():
    from fastverify.eagle3.train_prompts import shingles

    question = "A robe takes some number of bolts of blue fiber and half that much white fiber in total"
    assert shingles("Please answer. " + question) & shingles(question)
    assert not shingles("Anna has 12 apples. Ben gives Anna 3 more apples. How many apples does Anna have?") & shingles(
        question
    )


@torch.no_grad()
def test_match_table_and_held_out_agree():
    target, draft = small_pair(9)
    r = texts(target, 6, greedy=True)
    rows = pack(r, range(6), 48)
    part = (rows.ids, rows.doc, rows.pos, rows.want)
    m = match_table(target, draft, part, 3)
    h = held_out(target, draft, rows, 8, 3)
    for j in range(3):
        assert h["agreement"][j] == pytest.approx(
            float((m["match"][j] & m["ok"][j]).sum() / m["ok"][j].sum()), abs=1e-3
        )
    assert bool(m["greedy"].all())
