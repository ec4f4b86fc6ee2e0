"""The Python blocks of docs run as they are written, but for device, model and paths. Those of README: tests/test_readme.py."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "docs/integrations.md").exists():
    pytest.skip("docs/ is not beside these tests", allow_module_level=True)


def blocks(page: str) -> list:
    """Fenced Python, and indented code that begins with an import, of one page."""
    text = (ROOT / "docs" / page).read_text()
    indented = [re.sub(r"^    ", "", b, flags=re.M) for b in re.findall(r"\n\n((?:    .*\n|\n(?=    ))+)", text) if b.startswith("    import")]
    return re.findall(r"```python\n(.*?)```", text, re.S) + indented


def test_all_blocks_are_known():
    """A page that gets another example gets a test of it."""
    assert {p.name: len(b) for p in sorted((ROOT / "docs").glob("*.md")) if (b := blocks(p.name))} == {"communication.md": 1, "integrations.md": 3}


@pytest.fixture
def model():
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=97, hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=256,
        eos_token_id=2, bos_token_id=1, pad_token_id=0)).eval()


def test_sglang():
    code = blocks("integrations.md")[0]
    try:
        import sgl_kernel  # noqa: F401
    except ImportError:
        with pytest.raises(RuntimeError, match="sgl_kernel must be importable"):
            exec(code, {})
        return
    exec(code.replace("install()", "install(dry_run=True)"), {})


def test_generate(model):
    inputs = dict(input_ids=torch.tensor([[5, 6, 7, 5, 6]]))
    want = model.generate(**inputs, max_new_tokens=128, do_sample=False)
    space = dict(model=model, inputs=inputs)
    code = blocks("integrations.md")[1].replace('"path/of/an/eagle3/draft"', '"ngram"').replace("max_new_tokens=128", "max_new_tokens=128, do_sample=False")
    assert code.count("ngram") == 2
    exec(code, space)
    assert torch.equal(space["out"], want) and space["fast"].stats.tau >= 1


def test_attention(model):
    ids = torch.tensor([[5, 6, 7, 5, 6]])
    want = model(ids).logits
    exec(blocks("integrations.md")[2], dict(model=model))
    assert torch.allclose(model(ids).logits, want, atol=1e-4)
    assert model.config._attn_implementation == "fastverify"


def test_communicator():
    """With gloo ranks of one process on the CPU."""
    import torch.distributed as dist
    code = blocks("communication.md")[0]
    assert 'device="cuda:0"' in code and 'init_process_group("gloo")' in code
    code = code.replace('device="cuda:0"', 'device="cpu"').replace('("gloo")', '("gloo", store=dist.HashStore(), rank=0, world_size=1)')
    x, residual, weight = torch.randn(4, 7168), torch.randn(4, 7168), torch.ones(7168)
    try:
        space = dict(x=x, residual=residual.clone(), weight=weight)
        exec(code, space)
        assert torch.equal(space["y"], x) and torch.allclose(space["residual"], residual + x)
        assert torch.allclose(space["out"], torch.nn.functional.rms_norm(residual + x, (7168,), weight, 1e-6), atol=1e-4)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
